# SPDX-License-Identifier: Apache-2.0
"""What a vLLM tree on disk is to the series; reads only."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path

from series import distribution, originals
from series.distribution import Distribution
from series.environment import old_python
from series.errors import SeriesError
from series.exchange import cut_off
from series.landing import RECEIPT, Landing
from series.originals import content_of

UNKNOWN = "of no stated version"


class State(Enum):
    """What a tree is to the series."""

    PRISTINE = "pristine"
    LANDED = "landed"
    OLDER = "landed by another state of the series, which can be taken off"
    OTHER = "other"


@dataclass(frozen=True)
class Survey:
    """A tree compared with what the series expects and what it produces.

    Attributes:
        state: PRISTINE or LANDED if every file is so; OLDER if it is what its
            originals say that a landing made of it; else OTHER.
        version: The release that the tree says it is.
        series: The series that its receipt names; None without a receipt.
        unlike: Of an OTHER tree, what each file that is not pristine is.
    """

    state: State
    version: str
    series: str | None
    unlike: Mapping[str, str]


class Before:
    """A tree as it was before the landing on it, if its originals were kept.

    Args:
        tree: The folder that holds ``vllm/``.
        backup: A folder that may hold its originals.
    """

    def __init__(self, tree: Path, backup: Path | None = None) -> None:
        kept = originals.find(tree, backup)
        self.tree = tree
        self.kept = None if kept is None or kept.unlike(tree) else kept

    @property
    def modified(self) -> bool:
        """Whether the landing was on files that were not the release's."""
        return self.kept is not None and self.kept.modified

    def read(self, path: str) -> bytes | None:
        """What a file was; None if it was not there."""
        if self.kept is not None and path in self.kept.undo:
            return self.kept.undo[path]
        return content_of(self.tree / path)

    def demand(self, path: str) -> bytes:
        """What a file was.

        Raises:
            SeriesError: It was not there.
        """
        content = self.read(path)
        if content is None:
            raise SeriesError(
                f"{path} in {self.tree}",
                found="no such file",
                do="see what the fork did to it; the series edits it",
            )
        return content

    def mode(self, path: str) -> int | None:
        """What permissions a file had; None if it was not there."""
        if self.kept is not None and path in self.kept.undo:
            return self.kept.modes.get(path)
        file = self.tree / path
        return file.stat().st_mode & 0o777 if file.exists() else None

    @cached_property
    def distribution(self) -> Distribution | None:
        """What the tree was installed as; None for a tree without metadata."""
        paths = {*distribution.metadata_paths(self.tree)}
        if self.kept is not None:
            paths |= {path for path in self.kept.undo if ".dist-info/" in path}
        found = {path: self.read(path) for path in sorted(paths)}
        return distribution.find({p: c for p, c in found.items() if c is not None})


def survey(tree: Path, landing: Landing, backup: Path | None = None) -> Survey:
    """Compare a tree with a landing; reads only.

    Args:
        tree: The folder that holds ``vllm/``.
        landing: The series on what the tree was before any landing.
        backup: A folder that may hold its originals.

    Raises:
        SeriesError: It holds no vLLM, or a landing on it was cut off.
    """
    version = version_of(tree)
    if cut_off(tree):
        raise SeriesError(
            f"the state of {tree}",
            found="a landing that was cut off half way",
            do="run `python -m series land` or `revert` on it: it is put back first",
        )
    landed = {**landing.changed, **landing.added}
    now = {path: content_of(tree / path) for path in landed}
    unlike = {
        path: _what(content, landing, path)
        for path, content in now.items()
        if content != landing.pristine.get(path)
    }
    if not unlike:
        state = State.PRISTINE
    elif now == landed:
        state = State.LANDED
    elif Before(tree, backup).kept is not None:
        state = State.OLDER
    else:
        state = State.OTHER
    return Survey(state, version, _series(now[RECEIPT]), unlike)


def demand_python(tree: Path) -> None:
    """Demand that the Python of a tree can import what the series adds.

    Raises:
        SeriesError: It is too old.
    """
    for fault in old_python(tree):
        raise SeriesError(fault.expected, found=fault.found, do=fault.do)


def touched(tree: Path) -> tuple[list[str], list[str]]:
    """The files that a tree's receipt says were edited, and those added."""
    try:
        receipt = json.loads(content_of(tree / RECEIPT) or b"{}")
        return list(receipt.get("files", {})), list(receipt.get("added", []))
    except (ValueError, AttributeError, TypeError):
        return [], []


def version_of(tree: Path) -> str:
    """The release that a tree says it is.

    Raises:
        SeriesError: It holds no vLLM.
    """
    text = content_of(tree / "vllm" / "_version.py")
    match = re.search(rb"""version = .*?['"]([^'"]+)['"]""", text or b"")
    # A checkout of the sources has none until it is built.
    if match is None and (tree / "vllm" / "__init__.py").exists():
        return UNKNOWN
    if match is None:
        raise SeriesError(
            f"a vLLM tree at {tree}",
            found="no vllm/_version.py in it that names a version",
            do="give the folder that holds vllm/, such as an unpacked wheel",
        )
    return match[1].decode()


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
