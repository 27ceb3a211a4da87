# SPDX-License-Identifier: Apache-2.0
"""What stood in a tree before a landing, kept so that there is a way back.

The files that a landing replaces or removes go into one archive with a manifest
of what every file was and became. It lies in the distribution's metadata folder,
where uninstalling takes it along; of a tree without one, in the folder that
``--backup`` names, in the git directory, or beside ``vllm/``. The way back needs
neither the network nor the series that landed.
"""

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from series.errors import SeriesError
from series.git import git_folder
from series.landing import Source, digest
from series.upstream import SERIES

ARCHIVE = "originals.zip"
_BESIDE = f".series-{ARCHIVE}"
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Originals:
    """An archive of originals, read.

    Attributes:
        path: Where it lies.
        series: The series whose landing it undoes.
        modified: Whether that landed on files that were not the release's.
        undo: What each file was; None for one that was not there.
        modes: The permissions of those that were.
        after: The sha256 of what the landing made of each; None for a file that it
            removed. RECORD and the archive are not among them: they name each other.
    """

    path: Path
    series: str
    modified: bool
    undo: Mapping[str, bytes | None]
    modes: Mapping[str, int]
    after: Mapping[str, str | None]

    def unlike(self, tree: Path) -> list[str]:
        """The files that are no longer what the landing made of them."""
        return [
            path
            for path, after in self.after.items()
            if after != _digest(content_of(tree / path))
        ]

    def undone(self, tree: Path) -> bool:
        """Whether every file is what it was before the landing."""
        return all(content_of(tree / path) == self.undo[path] for path in self.after)


def content_of(path: Path) -> bytes | None:
    """A file's content; None if there is no such file."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def pack(
    before: Source,
    mode: Callable[[str], int | None],
    change: Mapping[str, bytes | None],
    unsealed: list[str],
    modified: bool,
) -> bytes:
    """The archive of what a change is about to replace.

    Args:
        before: Gives the content of a file before the landing.
        mode: Gives its permissions.
        change: What is to become of each file.
        unsealed: Files that come too, and are not compared on the way back.
        modified: Whether the series lands on files that are not the release's.
    """
    was = {path: before(path) for path in (*change, *unsealed)}
    manifest = {
        "series": SERIES,
        "modified": modified,
        "unsealed": unsealed,
        "files": {
            path: {
                "before": _digest(was[path]),
                "after": _digest(change[path]) if path in change else None,
                "mode": mode(path),
            }
            for path in was
        },
    }
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        # Named by ZipInfo, members get no date but 1980's: equal input, equal bytes.
        _member(archive, _MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
        for path, content in was.items():
            if content is not None:
                _member(archive, path, content)
    return file.getvalue()


def place(tree: Path, backup: Path | None) -> Path:
    """Where the originals of a tree without metadata are to be kept.

    Args:
        tree: The folder that holds ``vllm/``.
        backup: A folder that the user named.
    """
    return _outside(tree, backup)[0]


def find(tree: Path, backup: Path | None = None) -> Originals | None:
    """The originals of the landing on a tree, if they were kept.

    Args:
        tree: The folder that holds ``vllm/``.
        backup: A folder that the user named.

    Raises:
        SeriesError: There is an archive and it is damaged.
    """
    places = sorted(tree.glob(f"vllm-*.dist-info/{ARCHIVE}"))
    places += _outside(tree, backup)
    found = [_read(path) for path in places if path.exists()]
    for path in map(next_to, places):
        # Whole, and never put into place; half, if its writing was cut off.
        with suppress(SeriesError):
            found += [_read(path)] if path.exists() else []
    fitting = [each for each in found if not each.unlike(tree)]
    return next(iter(fitting or found), None)


def forget(tree: Path, backup: Path | None) -> None:
    """Remove the archives outside a metadata folder, as far as possible."""
    for path in _outside(tree, backup):
        for archive in (path, next_to(path)):
            with suppress(OSError):
                archive.unlink(missing_ok=True)


def next_to(path: Path) -> Path:
    """Where an archive waits until the landing that it is for is done."""
    return path.with_name(f"{path.name}.next")


def _outside(tree: Path, backup: Path | None) -> list[Path]:
    """The places outside a metadata folder, the preferred first."""
    folder = git_folder(tree)
    own = tree / _BESIDE if folder is None else folder / _BESIDE.removeprefix(".")
    return [own] if backup is None else [backup / ARCHIVE, own]


def _read(path: Path) -> Originals:
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = json.loads(archive.read(_MANIFEST))
            files = manifest["files"]
            undo = {
                name: None if said["before"] is None else archive.read(name)
                for name, said in files.items()
            }
            unsealed = set(manifest["unsealed"])
            found = Originals(
                path=path,
                series=str(manifest["series"]),
                modified=bool(manifest["modified"]),
                undo=undo,
                modes={n: s["mode"] for n, s in files.items() if s["mode"] is not None},
                after={n: s["after"] for n, s in files.items() if n not in unsealed},
            )
        wrong = [n for n, said in files.items() if _digest(undo[n]) != said["before"]]
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if wrong:
        raise _damaged(path, f"other content for {', '.join(wrong)}")
    return found


def _damaged(path: Path, found: str) -> SeriesError:
    return SeriesError(
        f"the originals kept in {path}",
        found=f"a damaged archive: {found}",
        do="install plain vLLM anew, or take the tree from where it came from",
    )


def _digest(content: bytes | None) -> str | None:
    return None if content is None else digest(content)


def _member(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
