# SPDX-License-Identifier: Apache-2.0
"""Landing on a vLLM tree on disk, and the way back.

Either happens whole or not at all (``exchange``).
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from series import distribution, originals
from series.distribution import Distribution
from series.errors import SeriesError
from series.exchange import exchange, put_back, write
from series.landing import RECEIPT, Landing
from series.native import LIBRARY
from series.originals import content_of
from series.survey import UNKNOWN, Before, State, Survey, survey, version_of


def recover(tree: Path) -> None:
    """Put back what a landing or a revert that was cut off left behind.

    Raises:
        SeriesError: A file could not be put back.
    """
    with _words_for_the_system(f"{tree} put back after a landing that was cut off"):
        put_back(tree)


def land(
    tree: Path,
    landing: Landing,
    *,
    modified: bool = False,
    backup: Path | None = None,
    library: Callable[[], bytes | None] = lambda: None,
) -> bool:
    """Land on a pristine tree, whole or not at all; what landed before comes off.

    Args:
        tree: The folder that holds ``vllm/``.
        landing: What to write.
        modified: Whether the tree's files were not the release's.
        backup: A folder for the originals of a tree without metadata.
        library: Gives the host transport's library, which an installed vLLM gets.

    Returns:
        False if the tree was landed already and nothing was written.

    Raises:
        SeriesError: The tree is neither pristine nor landed, or cannot be
            written to; it is as it was.
    """
    with _words_for_the_system(f"the series landed on {tree}"):
        put_back(tree)
        found = survey(tree, landing, backup)
        if found.state is State.LANDED:
            return False
        if found.state is State.OTHER:
            raise _refusal(tree, found, landing)
        before = Before(tree, backup)
        files: dict[str, bytes | None] = {**landing.changed, **landing.added}
        installed = before.distribution
        if installed is None:
            _land_bare(before, files, modified, backup)
        else:
            compiled = library()
            if compiled is not None:
                files[LIBRARY] = compiled
            _land_installed(before, installed, files, modified, backup)
    return True


def revert(tree: Path, backup: Path | None = None) -> bool:
    """Put a tree back to what it was before the landing, whole or not at all.

    Args:
        tree: The folder that holds ``vllm/``.
        backup: The folder that holds its originals, if a landing was given one.

    Returns:
        False if nothing had landed on it.

    Raises:
        SeriesError: Files are not what the landing made of them, or there are no
            originals; nothing was written.
    """
    asked = f"{tree} put back to what it was"
    with _words_for_the_system(asked):
        put_back(tree)
        version_of(tree)
        kept = originals.find(tree, backup)
        if kept is None:
            if content_of(tree / RECEIPT) is None:
                return False
            raise _no_way_back(asked)
        if kept.undone(tree):
            return False
        unlike = kept.unlike(tree)
        if unlike:
            raise SeriesError(
                asked,
                found="changed since the landing: " + ", ".join(unlike),
                do="put these files back to what landed, or take the originals from "
                f"{kept.path}; nothing was written",
            )
        exchange(tree, kept.undo, kept.modes)
        originals.forget(tree, backup)
    return True


def _land_bare(
    before: Before, files: dict[str, bytes | None], modified: bool, backup: Path | None
) -> None:
    """Land on a tree without metadata; its originals go beside it."""
    place = originals.place(before.tree, backup)
    if backup is not None and before.kept is None and place.exists():
        raise _backup_in_use(place)
    packed = originals.pack(before.read, before.mode, files, [], modified)
    waiting = originals.next_to(place)
    with _kept_if_done(waiting, packed):
        _exchange(before, files)
    # If this fails the archive is found where it is.
    with suppress(OSError):
        os.replace(waiting, place)


def _land_installed(
    before: Before,
    installed: Distribution,
    files: dict[str, bytes | None],
    modified: bool,
    backup: Path | None,
) -> None:
    """Land on a tree with metadata, which is to say so and keeps the originals."""
    files |= distribution.relabelled(installed)
    folder = installed.landed_folder
    archive, record = f"{folder}/{originals.ARCHIVE}", f"{folder}/RECORD"
    packed = originals.pack(
        before.read, before.mode, files, [archive, record], modified
    )
    files[archive] = packed
    listed = distribution.new_record(installed, files)
    if listed is not None:
        files[record] = listed
    if backup is None:
        _exchange(before, files)
        return
    second = backup / originals.ARCHIVE
    if second.exists():
        raise _backup_in_use(second)
    with _kept_if_done(second, packed):
        _exchange(before, files)


@contextmanager
def _kept_if_done(path: Path, content: bytes) -> Iterator[None]:
    """Write a file that is to stay only if the body succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write(path, content)
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _exchange(before: Before, files: Mapping[str, bytes | None]) -> None:
    undo = {} if before.kept is None else before.kept.undo
    modes = {} if before.kept is None else before.kept.modes
    exchange(before.tree, {**undo, **files}, modes)


@contextmanager
def _words_for_the_system(asked: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SeriesError(
            asked,
            found=f"{error.strerror}: {error.filename or 'the tree'}; it is as it was",
            do="make room or mend the permission, then try again",
        ) from error


def _backup_in_use(place: Path) -> SeriesError:
    return SeriesError(
        "the originals kept where --backup says",
        found=f"{place} there already, of another landing",
        do="name a new folder; nothing was written",
    )


def _no_way_back(asked: str) -> SeriesError:
    return SeriesError(
        asked,
        found="a landing without originals, such as a wheel of this project or "
        "patches that git applied",
        do="for a wheel, `pip uninstall vllm` and install plain vLLM; in a git "
        "repository, revert the commits; after `land --backup DIR`, give DIR",
    )


def _refusal(tree: Path, found: Survey, landing: Landing) -> SeriesError:
    listed = "".join(f"\n    {path}: {what}" for path, what in found.unlike.items())
    release = json.loads(landing.added[RECEIPT])["release"]
    if found.series is not None:
        seen = f"a tree on which the series {found.series} landed, and not this one"
    elif found.version.partition("+")[0] not in (release, UNKNOWN):
        seen = f"vLLM {found.version}, not {release}"
    else:
        seen = "touched files that are not the release's"
    return SeriesError(
        f"the series landed on {tree}",
        found=f"{seen}:{listed}",
        do=f"land on a pristine tree of vLLM {release}, such as `python -m "
        "series.upstream DIR` unpacks, or with --modified on a fork's; nothing was "
        "written",
    )
