# SPDX-License-Identifier: Apache-2.0
"""The series for reading and for other people's repositories."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from series.errors import SeriesError
from series.git import commit, git
from series.landing import Landing, Reader, compute
from series.patch import Patch


def diff(landing: Landing, path: str) -> str:
    """The unified diff of one file that the series changes or adds.

    Raises:
        SeriesError: The series does not touch that file.
    """
    after = {**landing.changed, **landing.added}
    if path not in after:
        raise SeriesError(
            f"the diff of {path}",
            found=f"the series touches {len(after)} files, not this one:\n    "
            + "\n    ".join(sorted(after)),
            do="name one of these",
        )
    before = landing.pristine.get(path)
    lines = difflib.unified_diff(
        (before or b"").decode().splitlines(keepends=True),
        after[path].decode().splitlines(keepends=True),
        "/dev/null" if before is None else f"a/{path}",
        f"b/{path}",
    )
    return "".join(lines)


def export(read: Reader, patches: Sequence[Patch], folder: Path) -> list[Path]:
    """Write one mailbox file a patch, for ``git am``.

    Args:
        read: Gives the pristine files.
        patches: The series.
        folder: Where to write; made if it is missing.

    Returns:
        The files, in the order in which they apply.

    Raises:
        SeriesError: The folder has something in it, or an edit has no place.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SeriesError(
            f"the patches exported to {folder}",
            found="something there already",
            do="name a folder that is new or empty",
        )
    steps = [compute(read, patches[: n + 1]) for n in range(len(patches))]
    with TemporaryDirectory() as scratch:
        repository = Path(scratch)
        git(repository, "init", "--quiet")
        commit(repository, steps[-1].pristine, "pristine")
        for patch, step in zip(patches, steps, strict=True):
            commit(repository, {**step.changed, **step.added}, str(patch.message))
        folder.mkdir(parents=True, exist_ok=True)
        written = git(
            repository,
            "format-patch",
            "--zero-commit",
            "--no-signature",
            # `git am -3` looks the pristine files up by these.
            "--full-index",
            f"--output-directory={folder.absolute()}",
            f"-{len(patches)}",
        )
    return [Path(line) for line in written.splitlines()]
