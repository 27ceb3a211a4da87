# SPDX-License-Identifier: Apache-2.0
"""Files of a tree exchanged for others, all of them or none.

New content is staged beside the tree's files first; then each file is exchanged
by a rename, with the originals kept until the last one is done. A failure or an
interrupt puts them back. So does the next run, if this one was killed.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from series.errors import SeriesError

STAGE = ".series-landing"
JOURNAL = "journal.json"

# By path in the tree: what a file is to hold, what it is to be a link to, or None
# for a file that is to go.
Content = bytes | Path | None
Change = Mapping[str, Content]


def cut_off(tree: Path) -> bool:
    """Whether an exchange in this tree was stopped half way and not put back."""
    return (tree / STAGE / JOURNAL).exists()


def exchange(tree: Path, change: Change, modes: Mapping[str, int]) -> None:
    """Make every change, or none.

    Args:
        tree: The folder that paths are relative to.
        change: What is to become of each file.
        modes: Permissions of files that are new to the tree, where it matters. A
            file that is replaced keeps its own.

    Raises:
        SeriesError: A file or its folder is protected; nothing was written.
        OSError: Something else failed; what was written is put back.
    """
    gone = [p for p, new in change.items() if new is None and _there(tree / p)]
    put = {p: new for p, new in change.items() if new is not None}
    replaced = [p for p in put if _there(tree / p)]
    added = [p for p in put if p not in set(replaced)]
    if not put and not gone:
        return
    _demand_writable(tree, [*replaced, *gone], added)
    folders = _missing_folders(tree, added)
    stage = tree / STAGE
    try:
        for path in (*replaced, *gone):
            _copy(tree / path, stage / "old" / path)
        for path, new in put.items():
            _prepare(tree / path, stage / "new" / path, new, modes.get(path))
        _drop_byte_code(tree, (*replaced, *gone))
        _begin(
            stage, {"changed": [*replaced, *gone], "added": added, "folders": folders}
        )
        for folder in reversed(folders):
            (tree / folder).mkdir()
        for path in put:
            os.replace(stage / "new" / path, tree / path)
        for path in gone:
            os.unlink(tree / path)
        _remove_emptied(tree, gone)
        # From here on it counts as done: without a journal nothing is put back.
        os.unlink(stage / JOURNAL)
    finally:
        put_back(tree)


def put_back(tree: Path) -> None:
    """Undo an exchange that was cut off, if there is one.

    Raises:
        OSError: A file could not be put back; calling it again goes on.
    """
    stage = tree / STAGE
    journal = stage / JOURNAL
    if journal.exists():
        said = json.loads(journal.read_text())
        for path in said["added"]:
            (tree / path).unlink(missing_ok=True)
        _drop_byte_code(tree, said["added"])
        for path in said["changed"]:
            if _there(stage / "old" / path):
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                os.replace(stage / "old" / path, tree / path)
        for folder in said["folders"]:
            if (tree / folder).is_dir():
                (tree / folder).rmdir()
        journal.unlink()
    shutil.rmtree(stage, ignore_errors=True)


def _begin(stage: Path, said: Mapping[str, list[str]]) -> None:
    """From here on, an end before the journal is gone means: put back."""
    write(stage / "journal", json.dumps(said).encode())
    os.replace(stage / "journal", stage / JOURNAL)


def _prepare(current: Path, staged: Path, new: bytes | Path, mode: int | None) -> None:
    staged.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(new, Path):
        staged.symlink_to(new)
        return
    write(staged, new)
    if current.exists():
        # Of what it links to: a link into some installer's cache becomes a file.
        shutil.copymode(current, staged)
    elif mode is not None:
        staged.chmod(mode)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target, follow_symlinks=False)


def write(path: Path, content: bytes) -> None:
    """Write a file that outlasts a crash of the machine."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _there(path: Path) -> bool:
    """Whether something has that name, be it a link to nothing."""
    return os.path.lexists(path)


def _missing_folders(tree: Path, paths: Iterable[str]) -> list[str]:
    """Folders to be made for new files, the innermost first."""
    folders = {
        str(folder)
        for path in paths
        for folder in Path(path).parents
        if not (tree / folder).exists()
    }
    return sorted(folders, key=len, reverse=True)


def _remove_emptied(tree: Path, paths: Iterable[str]) -> None:
    """Remove the folders that hold nothing any more, and byte code with them."""
    _drop_byte_code(tree, paths)
    folders = {folder for path in paths for folder in Path(path).parents}
    for folder in sorted(
        folders - {Path(".")}, key=lambda f: len(f.parts), reverse=True
    ):
        if not any((tree / folder).iterdir()):
            (tree / folder).rmdir()


def _drop_byte_code(tree: Path, paths: Iterable[str]) -> None:
    """Remove what Python compiled of these files.

    It tells a changed source by its time and size, and byte code that was made
    not to look at its source (as some images do) would hide the change for good.
    """
    for path in map(Path, paths):
        if path.suffix != ".py":
            continue
        cache = tree / path.parent / "__pycache__"
        for compiled in cache.glob(f"{path.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)
        if cache.is_dir() and not any(cache.iterdir()):
            cache.rmdir()


def _demand_writable(tree: Path, there: Iterable[str], added: Iterable[str]) -> None:
    # The mode and not os.access: root may write to a file that its owner
    # protected, and a landing must not.
    locked = [p for p in there if not (tree / p).lstat().st_mode & 0o200]
    folders = {(tree / path).parent for path in (*there, *added)}
    locked += sorted(
        str(folder.relative_to(tree))
        for folder in folders
        if folder.exists() and not os.access(folder, os.W_OK)
    )
    if locked:
        raise SeriesError(
            f"files of {tree} exchanged",
            found=f"read-only: {', '.join(locked)}",
            do="make them writable (chmod u+w) and try again; nothing was written",
        )
