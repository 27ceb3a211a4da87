# SPDX-License-Identifier: Apache-2.0
"""Write the wheel: the base's files with the landing in their place.

Files are streamed from archive to archive, so that a wheel of libraries of some
hundred megabytes each needs little memory and nothing on disk but itself.
"""

import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import IO

from packaging.utils import parse_wheel_filename

from series import record
from series.errors import SeriesError
from series.landing import Landing
from series.metadata import VERSION_MODULE, derive, version_module, wheel_file
from series.native import LIBRARY
from series.upstream import RELEASE, Base

_CHUNK = 1 << 20
# Nearly all of a wheel is libraries, which a higher level hardly shrinks.
_LEVEL = 1
_PLAIN_FILE = 0o100644 << 16
_PROGRAM_FILE = 0o100755 << 16


def wheel_name(base: Base, library: bytes | None) -> str:
    """The file name of the wheel that is built on a base."""
    return f"vllm-{base.label}-{_tag(base, library)}.whl"


def dist_info(base: Base) -> str:
    """The name of its metadata folder."""
    return f"vllm-{base.label}.dist-info"


def metadata_files(
    base: Base, archive: zipfile.ZipFile, library: bytes | None
) -> dict[str, bytes]:
    """What goes into the metadata folder, RECORD apart, by path below it."""
    old = f"{base.distribution.replace('-', '_')}-{RELEASE}.dist-info/"
    files = {
        name.removeprefix(old): archive.read(name)
        for name in archive.namelist()
        if name.startswith(old)
    }
    del files["RECORD"]
    files["METADATA"] = derive(base, files["METADATA"].decode()).encode()
    files["WHEEL"] = wheel_file(_tag(base, library)).encode()
    return files


def write(
    base: Base,
    pristine: Path,
    landing: Landing,
    library: bytes | None,
    target: Path,
) -> None:
    """Write the whole wheel.

    Args:
        base: What it is built on.
        pristine: The base's wheel, verified.
        landing: The files that the series edits and adds.
        library: The host transport's library; None to do without.
        target: The wheel to write.

    Raises:
        SeriesError: A file to be edited is missing in the base, or one to be
            added is there.
    """
    edited = {**landing.changed, VERSION_MODULE: version_module(base.label)}
    new = [(path, data, _PLAIN_FILE) for path, data in landing.added.items()]
    if library is not None:
        new.append((LIBRARY, library, _PROGRAM_FILE))
    with (
        zipfile.ZipFile(pristine) as source,
        zipfile.ZipFile(
            target, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL
        ) as archive,
    ):
        _demand_places(source, edited, {path for path, _, _ in new})
        lines = [
            _put(archive, name, content, mode)
            for name, content, mode in _files(source, edited)
        ]
        metadata = metadata_files(base, source, library)
        new += [
            (f"{dist_info(base)}/{name}", data, _PLAIN_FILE)
            for name, data in metadata.items()
        ]
        lines += [
            _put(archive, name, io.BytesIO(data), mode)
            for name, data, mode in sorted(new)
        ]
        _put_record(archive, base, lines)


def write_editable(base: Base, pristine: Path, tree: Path, target: Path) -> None:
    """Write a wheel that holds no vLLM, but leads Python to a tree of it.

    Args:
        base: What the tree is made from.
        pristine: The base's wheel, verified; its metadata is taken.
        tree: The folder that holds ``vllm/``.
        target: The wheel to write.
    """
    with (
        zipfile.ZipFile(pristine) as source,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        files = {
            f"{dist_info(base)}/{name}": data
            for name, data in metadata_files(base, source, b"").items()
        }
        # The name that pip's users know from others' editable installs.
        files[f"__editable__.vllm-{base.label}.pth"] = f"{tree}\n".encode()
        lines = [
            _put(archive, name, io.BytesIO(data), _PLAIN_FILE)
            for name, data in sorted(files.items())
        ]
        _put_record(archive, base, lines)


def _tag(base: Base, library: bytes | None) -> str:
    (tag,) = parse_wheel_filename(base.filename)[3]
    if library is None:
        return str(tag)
    # What was compiled here runs on machines like this one, and promises no more.
    return f"{tag.interpreter}-{tag.abi}-linux_{tag.platform.split('_', 3)[-1]}"


def _demand_places(
    source: zipfile.ZipFile, edited: Mapping[str, bytes], added: Set[str]
) -> None:
    there = set(source.namelist())
    wrong = sorted((edited.keys() - there) | (added & there))
    if wrong:
        raise SeriesError(
            "every edited file in the base wheel, and no added one",
            found=f"the other way about: {', '.join(wrong)}",
            do="correct the paths in series/patches",
        )


def _files(
    source: zipfile.ZipFile, edited: Mapping[str, bytes]
) -> Iterator[tuple[str, IO[bytes], int]]:
    """The base's files, some of them edited: path, content and permissions."""
    for member in source.infolist():
        name = member.filename
        if name in edited:
            yield name, io.BytesIO(edited[name]), member.external_attr
        elif name.startswith("vllm/"):
            with source.open(member) as content:
                yield name, content, member.external_attr


def _put(
    archive: zipfile.ZipFile, name: str, content: IO[bytes], mode: int
) -> record.Line:
    """Copy one file into the archive; return its line of RECORD."""
    digest, size = hashlib.sha256(), 0
    # Opened by name, a member gets the archive's level and no date but 1980's:
    # equal input gives an equal wheel.
    with archive.open(name, "w") as sink:
        while chunk := content.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
            sink.write(chunk)
    archive.getinfo(name).external_attr = mode
    return record.line(name, digest.digest(), size)


def _put_record(archive: zipfile.ZipFile, base: Base, lines: list[record.Line]) -> None:
    name = f"{dist_info(base)}/RECORD"
    content = record.text([*lines, record.own_line(name)])
    _put(archive, name, io.BytesIO(content), _PLAIN_FILE)
