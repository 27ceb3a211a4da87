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
Source = Callable[[str], bytes | None]


@dataclass(frozen=True)
class Landing:
    """The outcome of patches on a release, by path.

    Attributes:
        pristine: The touched upstream files as the release has them.
        changed: The same files with every edit made.
        added: New files, the receipt among them.
        rough: Touched files that ruff would change anyway; our lines in them are
            not laid out either.
    """

    pristine: Mapping[str, bytes]
    changed: Mapping[str, bytes]
    added: Mapping[str, bytes]
    rough: tuple[str, ...] = ()


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
        try:
            module, failed = _edit(pristine[path], tuple(owners))
        except cst.ParserSyntaxError as error:
            for name in dict.fromkeys(owners.values()):
                errors[name].append(_no_python(error, name, path))
            continue
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
    tried = _demanded(read, patches)
    unlike = _not_laid_out(tried.pristine)
    if unlike:
        raise SeriesError(
            "touched files in which ruff changes nothing but the series' lines",
            found=f"it would change others in {', '.join(unlike)}",
            do="pin the ruff that this release of vLLM is formatted with",
        )
    changed = formatted(tried.edited)
    added = _new_files(patches)
    added[RECEIPT] = _receipt(patches, tried.pristine, changed, sorted(added))
    return Landing(tried.pristine, changed, added)


def compute_modified(read: Reader, patches: Sequence[Patch]) -> Landing:
    """What the whole series makes of files that are not the release's own.

    The receipt that comes along is the committed one: it tells what the series
    makes of the release, as it does where git applied the exported patches.

    Args:
        read: Gives a file's content by its path in the tree.
        patches: The series.

    Raises:
        SeriesErrors: Edits found no place, or more than one.
        SeriesError: A new file is missing.
    """
    tried = _demanded(read, patches)
    rough = _not_laid_out(tried.pristine)
    smooth = {p: text for p, text in tried.edited.items() if p not in rough}
    changed = {**tried.edited, **formatted(smooth)}
    added = _new_files(patches) | {RECEIPT: _new_file(RECEIPT)}
    return Landing(tried.pristine, changed, added, tuple(rough))


def pinned(sources: Sequence[Source], wheel: Callable[[], Reader]) -> Reader:
    """Read the release's touched files from wherever they are.

    What a source gives is taken if it has the digest that the receipt pins, so
    that a container needs no wheel; only for others is the wheel opened.

    Args:
        sources: Functions that give a file's content by its path, or None.
        wheel: Gives the reader of the pinned wheel.
    """
    pins = _pins()

    def read(path: str) -> bytes:
        pin = pins.get(path)
        for source in sources:
            content = source(path)
            if content is not None and digest(content) == pin:
                return content
        return wheel()(path)

    return read


def not_the_releases(landing: Landing) -> list[str]:
    """The touched files of a landing that were not as the release has them."""
    pins = _pins()
    return [p for p, text in landing.pristine.items() if digest(text) != pins.get(p)]


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


def _no_python(error: cst.ParserSyntaxError, patch: str, path: str) -> SeriesError:
    return SeriesError(
        f"{patch}, {path}: a Python file",
        found=f"{error.message}, at line {error.raw_line}",
        do="mend the file first",
    )


def _demanded(read: Reader, patches: Sequence[Patch]) -> Attempt:
    tried = attempt(read, patches)
    errors = [error for found in tried.errors.values() for error in found]
    if errors:
        raise SeriesErrors(errors)
    return tried


def _not_laid_out(files: Mapping[str, bytes]) -> list[str]:
    return [p for p, content in formatted(files).items() if content != files[p]]


def _new_files(patches: Sequence[Patch]) -> dict[str, bytes]:
    return {path: _new_file(path) for patch in patches for path in patch.adds}


def _new_file(path: str) -> bytes:
    try:
        return (ROOT / path).read_bytes()
    except FileNotFoundError as error:
        raise SeriesError(
            f"the new file {path} that a patch adds",
            found="no such file in this repository",
            do="add it, or take it out of the patch's ADDS",
        ) from error


def _pins() -> dict[str, str]:
    """The sha256 of each touched file of the release, as committed."""
    files = json.loads(_new_file(RECEIPT))["files"]
    return {path: said["before"] for path, said in files.items()}


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
