# SPDX-License-Identifier: Apache-2.0
"""What the series makes of a release, worked out in memory.

Files are read from the pristine wheel, never from an edited tree. All edits of
all patches are tried and all errors collected before anything is reported.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import libcst as cst

from series.errors import SeriesError
from series.layout import formatted
from series.patch import Patch
from series.upstream import RELEASE, SERIES

ROOT = Path(__file__).resolve().parent.parent
RECEIPT = "vllm/distributed/graph_channels/receipt.json"

Reader = Callable[[str], bytes]


@dataclass(frozen=True)
class Landing:
    """The outcome of patches on a release, by path.

    Attributes:
        pristine: The touched upstream files as the release has them.
        changed: The same files with every edit made.
        added: New files, the receipt among them.
    """

    pristine: Mapping[str, bytes]
    changed: Mapping[str, bytes]
    added: Mapping[str, bytes]


class SeriesErrors(SeriesError):
    """Every error of an attempt to land, not the first one only."""

    def __init__(self, errors: Sequence[SeriesError]) -> None:
        super().__init__(
            "the whole series landed",
            found=f"{len(errors)} edits without exactly one place",
            do="mend each of them; nothing was written",
        )
        self.errors = tuple(errors)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.errors), super().__str__()])


class Workspace:
    """Upstream files as parsed modules, edited patch by patch."""

    def __init__(self, read: Reader) -> None:
        self._read = read
        self._modules: dict[str, cst.Module] = {}
        self.pristine: dict[str, bytes] = {}

    def apply(self, patch: Patch) -> list[SeriesError]:
        """Make a patch's edits; return an error for each that has no place."""
        errors = []
        for path, edits in patch.edits.items():
            for edit in edits:
                try:
                    self._modules[path] = edit.apply(self._module(path))
                except SeriesError as error:
                    errors.append(_placed(error, f"{patch.name}, {path}"))
        return errors

    def changed(self) -> dict[str, bytes]:
        """The edited files, laid out as upstream's are.

        Raises:
            SeriesError: ruff would also lay out lines that no edit touched.
        """
        edited = {path: module.bytes for path, module in self._modules.items()}
        before = formatted(self.pristine)
        unlike = sorted(p for p in before if before[p] != self.pristine[p])
        if unlike:
            raise SeriesError(
                "touched files in which ruff changes nothing but our lines",
                found=f"others would change in {', '.join(unlike)}",
                do="pin the ruff that this release of vLLM is formatted with",
            )
        return formatted(edited)

    def _module(self, path: str) -> cst.Module:
        if path not in self._modules:
            self.pristine[path] = self._read(path)
            self._modules[path] = _parse(self.pristine[path])
        return self._modules[path]


def compute(read: Reader, patches: Sequence[Patch]) -> Landing:
    """Apply patches in order to the files that ``read`` gives.

    Args:
        read: Gives an upstream file's content by its path in the wheel.
        patches: The series, or the first few of it.

    Raises:
        SeriesErrors: Edits found no place, or more than one.
        SeriesError: A file is missing, or cannot be laid out.
    """
    workspace = Workspace(read)
    errors = [error for patch in patches for error in workspace.apply(patch)]
    if errors:
        raise SeriesErrors(errors)
    changed = workspace.changed()
    added = {path: _new_file(path) for patch in patches for path in patch.adds}
    added[RECEIPT] = _receipt(patches, workspace.pristine, changed, sorted(added))
    return Landing(workspace.pristine, changed, added)


def digest(content: bytes) -> str:
    """The sha256 of a file's content, in hex."""
    return hashlib.sha256(content).hexdigest()


@lru_cache(maxsize=None)
def _parse(content: bytes) -> cst.Module:
    return cst.parse_module(content)


def _placed(error: SeriesError, place: str) -> SeriesError:
    return SeriesError(f"{place}: {error.asked}", found=error.found, do=error.do)


def _new_file(path: str) -> bytes:
    try:
        return (ROOT / path).read_bytes()
    except FileNotFoundError as error:
        raise SeriesError(
            f"the new file {path} that a patch adds",
            found="no such file in this repository",
            do="add it, or take it out of the patch's ADDS",
        ) from error


def _receipt(
    patches: Sequence[Patch],
    pristine: Mapping[str, bytes],
    changed: Mapping[str, bytes],
    added: Sequence[str],
) -> bytes:
    receipt = {
        "release": RELEASE,
        "series": SERIES,
        "patches": [patch.name for patch in patches],
        "files": {
            path: {"before": digest(pristine[path]), "after": digest(changed[path])}
            for path in sorted(changed)
        },
        "added": list(added),
    }
    return (json.dumps(receipt, indent=2) + "\n").encode()
