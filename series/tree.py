# SPDX-License-Identifier: Apache-2.0
"""A vLLM tree on disk: what state it is in, and landing on it whole or not at all.

New content is staged beside the tree's files first; then each file is exchanged
by a rename, with the originals kept until the last one is done. A failure or an
interrupt puts them back. So does the next run, if this one was killed.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from series.errors import SeriesError
from series.landing import RECEIPT, Landing

_STAGE = ".series-landing"
_JOURNAL = "journal.json"


class State(Enum):
    """What a tree is to the series."""

    PRISTINE = "pristine"
    LANDED = "landed"
    OTHER = "other"


@dataclass(frozen=True)
class Survey:
    """A tree compared with what the series expects and what it produces.

    Attributes:
        state: PRISTINE or LANDED if every file is so, else OTHER.
        version: The release that the tree says it is.
        series: The series that its receipt names; None without a receipt.
        unlike: Of an OTHER tree, what each file that is not pristine is.
    """

    state: State
    version: str
    series: str | None
    unlike: Mapping[str, str]


def survey(tree: Path, landing: Landing) -> Survey:
    """Compare a tree with a landing; reads only.

    Args:
        tree: The folder that holds ``vllm/``.
        landing: The series on the release that the tree should be.

    Raises:
        SeriesError: It holds no vLLM, or a landing on it was cut off.
    """
    version = _version(tree)
    if (tree / _STAGE / _JOURNAL).exists():
        raise SeriesError(
            f"the state of {tree}",
            found="a landing that was cut off half way",
            do="run `python -m series land` on it: it is put back first",
        )
    now = {path: _content(tree / path) for path in (*landing.changed, *landing.added)}
    landed = {**landing.changed, **landing.added}
    unlike = {
        path: _what(content, landing, path)
        for path, content in now.items()
        if content != landing.pristine.get(path)
    }
    state = State.OTHER
    if not unlike:
        state = State.PRISTINE
    elif all(now[path] == landed[path] for path in landed):
        state = State.LANDED
    return Survey(state, version, _series(now[RECEIPT]), unlike)


def land(tree: Path, landing: Landing) -> bool:
    """Land on a pristine tree, whole or not at all.

    Args:
        tree: The folder that holds ``vllm/``.
        landing: What to write.

    Returns:
        False if the tree was landed already and nothing was written.

    Raises:
        SeriesError: The tree is neither pristine nor landed, or cannot be
            written to; it is as it was.
    """
    try:
        put_back(tree)
        found = survey(tree, landing)
        if found.state is State.LANDED:
            return False
        if found.state is State.OTHER:
            raise _refusal(tree, found, landing)
        _demand_writable(tree, landing.changed)
        _exchange(tree, landing)
    except OSError as error:
        raise SeriesError(
            f"the series landed on {tree}",
            found=f"{error.strerror}: {error.filename or tree}; the tree is as it was",
            do="make room or mend the permission, then land again",
        ) from error
    return True


def put_back(tree: Path) -> None:
    """Undo a landing that was cut off, if there is one.

    Raises:
        OSError: A file could not be put back; calling it again goes on.
    """
    stage = tree / _STAGE
    journal = stage / _JOURNAL
    if journal.exists():
        said = json.loads(journal.read_text())
        for path in said["added"]:
            (tree / path).unlink(missing_ok=True)
        for path in said["changed"]:
            if (stage / "old" / path).exists():
                os.replace(stage / "old" / path, tree / path)
        for folder in said["folders"]:
            if (tree / folder).is_dir():
                (tree / folder).rmdir()
        journal.unlink()
    shutil.rmtree(stage, ignore_errors=True)


def _exchange(tree: Path, landing: Landing) -> None:
    stage = tree / _STAGE
    folders = _missing_folders(tree, landing.added)
    try:
        for path in landing.changed:
            _copy(tree / path, stage / "old" / path)
            _copy(tree / path, stage / "new" / path)
            _write(stage / "new" / path, landing.changed[path])
        for path, content in landing.added.items():
            (stage / "new" / path).parent.mkdir(parents=True, exist_ok=True)
            _write(stage / "new" / path, content)
        _begin(stage, landing, folders)
        for folder in reversed(folders):
            (tree / folder).mkdir()
        for path in (*landing.changed, *landing.added):
            os.replace(stage / "new" / path, tree / path)
        # From here on it counts as landed: without a journal nothing is put back.
        (stage / _JOURNAL).unlink()
    finally:
        put_back(tree)


def _begin(stage: Path, landing: Landing, folders: list[str]) -> None:
    """From here on, an end before the journal is gone means: put back."""
    said = {
        "changed": list(landing.changed),
        "added": list(landing.added),
        "folders": folders,
    }
    _write(stage / "journal", json.dumps(said).encode())
    os.replace(stage / "journal", stage / _JOURNAL)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _missing_folders(tree: Path, paths: Iterable[str]) -> list[str]:
    """Folders to be made for new files, the innermost first."""
    folders = {
        str(folder)
        for path in paths
        for folder in Path(path).parents
        if not (tree / folder).exists()
    }
    return sorted(folders, key=len, reverse=True)


def _demand_writable(tree: Path, paths: Iterable[str]) -> None:
    # The mode and not os.access: root may write to a file that its owner
    # protected, and a landing must not.
    locked = [p for p in paths if not (tree / p).stat().st_mode & 0o200]
    locked += sorted(
        {
            str(Path(path).parent)
            for path in paths
            if not os.access((tree / path).parent, os.W_OK)
        }
    )
    if locked:
        raise SeriesError(
            f"the series landed on {tree}",
            found=f"read-only: {', '.join(locked)}",
            do="make them writable (chmod u+w) and land again; nothing was written",
        )


def _refusal(tree: Path, found: Survey, landing: Landing) -> SeriesError:
    listed = "".join(f"\n    {path}: {what}" for path, what in found.unlike.items())
    release = json.loads(landing.added[RECEIPT])["release"]
    if found.series is not None:
        seen = f"a tree on which the series {found.series} landed, and not this one"
    elif found.version != release:
        seen = f"vLLM {found.version}, not {release}"
    else:
        seen = "touched files that are not the release's"
    return SeriesError(
        f"the series landed on {tree}",
        found=f"{seen}:{listed}",
        do=f"land on a pristine tree of vLLM {release}, such as `python -m "
        "series.upstream DIR` unpacks; nothing was written",
    )


def _version(tree: Path) -> str:
    text = _content(tree / "vllm" / "_version.py")
    match = re.search(rb"""__version__ = .*?['"]([^'"]+)['"]""", text or b"")
    if match is None:
        raise SeriesError(
            f"a vLLM tree at {tree}",
            found="no vllm/_version.py in it that names a version",
            do="give the folder that holds vllm/, such as an unpacked wheel",
        )
    return match[1].decode()


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _what(content: bytes | None, landing: Landing, path: str) -> str:
    if content is None:
        return "missing"
    if content == {**landing.changed, **landing.added}[path]:
        return "landed already"
    return "differs" if path in landing.changed else "there already, and differs"


def _series(receipt: bytes | None) -> str | None:
    if receipt is None:
        return None
    try:
        return str(json.loads(receipt)["series"])
    except (ValueError, KeyError, TypeError):
        return "of an unreadable receipt"
