# SPDX-License-Identifier: Apache-2.0
"""What the series makes of a release, worked out in memory.

Files are read from the pristine wheel, never from an edited tree. All edits of
all patches are tried and all errors collected before anything is reported.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import libcst as cst

from series.edit import Edit
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


@dataclass(frozen=True)
class Attempt:
    """Every edit of some patches tried on a release.

    Attributes:
        pristine: The touched files as the release has them, by path.
        edited: The same files after each edit that found its place.
        errors: What the others said, by the name of their patch.
    """

    pristine: Mapping[str, bytes]
    edited: Mapping[str, bytes]
    errors: Mapping[str, Sequence[SeriesError]]


def attempt(read: Reader, patches: Sequence[Patch]) -> Attempt:
    """Try every edit of the patches, in order, whatever the others come to.

    Args:
        read: Gives an upstream file's content by its path in the wheel.
        patches: The series, or the first few of it.
    """
    pristine: dict[str, bytes] = {}
    edited: dict[str, bytes] = {}
    errors: dict[str, list[SeriesError]] = {patch.name: [] for patch in patches}
    for path in dict.fromkeys(path for patch in patches for path in patch.edits):
        owners = {e: patch.name for patch in patches for e in patch.edits.get(path, ())}
        try:
            pristine[path] = read(path)
        except SeriesError as error:
            for name in dict.fromkeys(owners.values()):
                errors[name].append(_placed(error, name, path))
            continue
        module, failed = _edit(pristine[path], tuple(owners))
        edited[path] = _content(module)
        for edit, reason in failed:
            errors[owners[edit]].append(_placed(reason, owners[edit], path))
    return Attempt(pristine, edited, errors)


def compute(read: Reader, patches: Sequence[Patch]) -> Landing:
    """What patches make of a release.

    Args:
        read: Gives an upstream file's content by its path in the wheel.
        patches: The series, or the first few of it.

    Raises:
        SeriesErrors: Edits found no place, or more than one.
        SeriesError: A new file is missing, or ruff would lay out lines that no
            edit touched.
    """
    tried = attempt(read, patches)
    errors = [error for found in tried.errors.values() for error in found]
    if errors:
        raise SeriesErrors(errors)
    _demand_laid_out(tried.pristine)
    changed = formatted(tried.edited)
    added = {path: _new_file(path) for patch in patches for path in patch.adds}
    added[RECEIPT] = _receipt(patches, tried.pristine, changed, sorted(added))
    return Landing(tried.pristine, changed, added)


def digest(content: bytes) -> str:
    """The sha256 of a file's content, in hex."""
    return hashlib.sha256(content).hexdigest()


Failed = tuple[tuple[Edit, SeriesError], ...]


# Remembered for each run of edits from the first on: both bases hold the same
# files, and a series exported patch by patch has each patch's edits before it.
@cache
def _edit(content: bytes, edits: tuple[Edit, ...]) -> tuple[cst.Module, Failed]:
    if not edits:
        return cst.parse_module(content), ()
    module, failed = _edit(content, edits[:-1])
    try:
        return edits[-1].apply(module), failed
    except SeriesError as error:
        return module, (*failed, (edits[-1], error))


@cache
def _content(module: cst.Module) -> bytes:
    return module.bytes


def _placed(error: SeriesError, patch: str, path: str) -> SeriesError:
    asked = f"{patch}, {path}: {error.asked}"
    return SeriesError(asked, found=error.found, do=error.do)


def _demand_laid_out(pristine: Mapping[str, bytes]) -> None:
    unlike = [p for p, content in formatted(pristine).items() if content != pristine[p]]
    if unlike:
        raise SeriesError(
            "touched files in which ruff changes nothing but the series' lines",
            found=f"it would change others in {', '.join(unlike)}",
            do="pin the ruff that this release of vLLM is formatted with",
        )


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
