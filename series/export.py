# SPDX-License-Identifier: Apache-2.0
"""The series for reading and for other people's repositories."""

import difflib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from series.errors import SeriesError
from series.landing import Landing, Reader, compute
from series.patch import Patch

# A patch must come out the same for everyone, so neither clock nor git's
# configuration has a say in it.
_IDENTITY = {
    "GIT_AUTHOR_NAME": "vLLM graph channels",
    "GIT_AUTHOR_EMAIL": "graph-channels@example.invalid",
    "GIT_AUTHOR_DATE": "2026-12-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "vLLM graph channels",
    "GIT_COMMITTER_EMAIL": "graph-channels@example.invalid",
    "GIT_COMMITTER_DATE": "2026-12-01T00:00:00Z",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
}


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
        _git(repository, "init", "--quiet")
        _commit(repository, steps[-1].pristine, "pristine")
        for patch, step in zip(patches, steps, strict=True):
            _commit(repository, {**step.changed, **step.added}, str(patch.message))
        folder.mkdir(parents=True, exist_ok=True)
        written = _git(
            repository,
            "format-patch",
            "--zero-commit",
            "--no-signature",
            f"--output-directory={folder.absolute()}",
            f"-{len(patches)}",
        )
    return [Path(line) for line in written.splitlines()]


def _commit(repository: Path, files: Mapping[str, bytes], message: str) -> None:
    for path, content in files.items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_bytes(content)
    _git(repository, "add", "--all")
    _git(repository, "commit", "--quiet", "--file=-", text=message)


def _git(repository: Path, *command: str, text: str = "") -> str:
    try:
        done = subprocess.run(
            ["git", *command],
            cwd=repository,
            env=os.environ | _IDENTITY,
            input=text,
            capture_output=True,
            text=True,
            check=True,
        )
    except FileNotFoundError as error:
        raise SeriesError(
            "the patches exported", found="no git on the PATH", do="install git"
        ) from error
    except subprocess.CalledProcessError as error:
        raise SeriesError(
            f"git {command[0]}", found=error.stderr.strip(), do="mend it, try again"
        ) from error
    return done.stdout
