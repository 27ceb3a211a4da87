# SPDX-License-Identifier: Apache-2.0
"""The series as commits, and trees that git keeps."""

import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from series.errors import SeriesError
from series.git import commit, git, git_folder
from series.landing import compute
from series.metadata import VERSION_MODULE
from series.patch import Patch
from series.upstream import RELEASE, reader

# What a build makes, and no repository of sources holds.
_BUILT = re.compile(r"(\.so(\.\d+)*|/vllm-rs)$")


@dataclass(frozen=True)
class Commit:
    """One commit of a branch.

    Attributes:
        subject: The first line of its message.
        tree: The hash of git's tree object.
    """

    subject: str
    tree: str


def branch(wheel: Path, patches: Sequence[Patch], folder: Path) -> Iterator[Commit]:
    """Make a git repository: the pristine sources, then one commit a patch.

    Compiled libraries are left out, and ``_version.py``, which a build writes.

    Args:
        wheel: The base's wheel, verified.
        patches: The series.
        folder: Where to make it; new or empty.

    Yields:
        Each commit when it is made.

    Raises:
        SeriesError: The folder has something in it, or an edit has no place.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SeriesError(
            f"a repository of the series made in {folder}",
            found="something there already",
            do="name a folder that is new or empty",
        )
    read = reader(wheel)
    steps = [compute(read, patches[: n + 1]) for n in range(len(patches))]
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet", "--initial-branch=graph-channels")
    # Line ends stay as they are, whatever the system's rules are.
    git(folder, "config", "core.autocrlf", "false")
    commit(folder, _sources(wheel), f"vLLM {RELEASE}\n")
    yield _head(folder)
    for patch, step in zip(patches, steps, strict=True):
        commit(folder, {**step.changed, **step.added}, str(patch.message))
        yield _head(folder)


def demand_way_back(tree: Path, backup: Path | None) -> None:
    """Demand a clean git work tree, or a folder for the originals.

    Raises:
        SeriesError: There is neither.
    """
    if backup is not None:
        return
    asked = f"a way back for {tree}, whose files are nobody's release"
    if git_folder(tree) is None:
        raise SeriesError(
            asked,
            found="no git work tree with its root there, and no --backup",
            do="add --backup DIR, a new folder for the originals; nothing was written",
        )
    changed = git(tree, "status", "--porcelain").splitlines()
    if changed:
        raise SeriesError(
            asked,
            found="uncommitted in git:\n    " + "\n    ".join(changed[:20]),
            do="commit or stash it, or add --backup DIR; nothing was written",
        )


def _sources(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: archive.read(name)
            for name in archive.namelist()
            if name.startswith("vllm/")
            and not name.endswith("/")
            and name != VERSION_MODULE
            and not _BUILT.search(name)
        }


def _head(repository: Path) -> Commit:
    subject, tree = git(repository, "log", "-1", "--format=%s%n%T").splitlines()
    return Commit(subject, tree)
