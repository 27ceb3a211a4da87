# SPDX-License-Identifier: Apache-2.0
"""The tree behind ``pip install -e .``: upstream's files, edited, and links to ours.

It lies in the git-ignored ``build/editable``, one folder a base. The files that the
series adds are links into this repository, so editing one takes effect as it is;
after a change of a patch, ``python -m series editable`` makes the edits anew.
"""

import os
from collections.abc import Callable
from pathlib import Path

from series import native, upstream
from series.errors import SeriesError
from series.exchange import Change, exchange, put_back
from series.landing import RECEIPT, ROOT, Landing, compute
from series.metadata import VERSION_MODULE, version_module
from series.originals import content_of
from series.patch import load_series
from series.survey import touched
from series.upstream import BASES, Base

FOLDER = ROOT / "build" / "editable"

Reader = Callable[[str], bytes]


def make(base: Base) -> Path:
    """Make the tree of a base, or bring it up to date; return its folder.

    Raises:
        SeriesError: An edit has no place; the tree is as it was.
    """
    tree = FOLDER / base.key
    wheel = upstream.locate(base)
    read = upstream.reader(wheel)
    landing = compute(read, load_series())
    if not tree.exists():
        upstream.unpack(wheel, tree, below="vllm/")
    library = native.build()
    change = _change(tree, read, landing, library)
    change[VERSION_MODULE] = version_module(base.label)
    _apply(tree, change)
    return tree


def refresh() -> list[Path]:
    """Make the edits anew in every tree that is there; return their folders.

    Raises:
        SeriesError: There is none, one was made for another version, or an edit
            has no place.
    """
    bases = [base for base in BASES.values() if (FOLDER / base.key).exists()]
    if not bases:
        raise _unmade("no tree there")
    for base in bases:
        said = content_of(FOLDER / base.key / VERSION_MODULE)
        if said != version_module(base.label):
            raise _unmade(f"a tree of another version than {base.label}")
    return [make(base) for base in bases]


def _change(
    tree: Path, read: Reader, landing: Landing, library: bytes | None
) -> dict[str, bytes | Path | None]:
    """What is to become of the tree's files, from whatever landing it had."""
    edited, added = touched(tree)
    change: dict[str, bytes | Path | None] = {path: read(path) for path in edited}
    change |= dict.fromkeys(added)
    change |= landing.changed
    change |= {path: ROOT / path for path in landing.added}
    # The receipt of what is in the tree, which the committed one may be behind.
    change[RECEIPT] = landing.added[RECEIPT]
    change[native.LIBRARY] = library
    return change


def _apply(tree: Path, change: Change) -> None:
    try:
        put_back(tree)
        exchange(tree, {p: c for p, c in change.items() if not _is(tree / p, c)}, {})
    except OSError as error:
        raise SeriesError(
            f"the editable tree {tree} brought up to date",
            found=f"{error.strerror}: {error.filename}; the tree is as it was",
            do="make room or mend the permission, then try again",
        ) from error


def _is(path: Path, content: bytes | Path | None) -> bool:
    """Whether a file need not be written."""
    if isinstance(content, Path):
        return path.is_symlink() and Path(os.readlink(path)) == content
    return not path.is_symlink() and content_of(path) == content


def _unmade(found: str) -> SeriesError:
    return SeriesError(
        f"the editable trees in {FOLDER} brought up to date",
        found=found,
        do="run `pip install -e .` in the environment that is to use it",
    )
