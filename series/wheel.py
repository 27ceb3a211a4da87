# SPDX-License-Identifier: Apache-2.0
"""Write the wheel: the base's files with the landing in their place.

Files are streamed from archive to archive, so that a wheel of libraries of some
hundred megabytes each needs little memory and nothing on disk but itself.
"""

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from packaging.utils import parse_wheel_filename

from series.errors import SeriesError
from series.landing import Landing
from series.metadata import derive, version_module, wheel_file
from series.upstream import RELEASE, Base

_VERSION = "vllm/_version.py"
_CHUNK = 1 << 20
# Nearly all of a wheel is libraries, which a higher level hardly shrinks.
_LEVEL = 1
_PLAIN_FILE = 0o100644 << 16

Line = tuple[str, str, int | str]


def wheel_name(base: Base) -> str:
    """The file name of the wheel that is built on a base."""
    return f"vllm-{base.label}-{_tag(base)}.whl"


def dist_info(base: Base) -> str:
    """The name of its metadata folder."""
    return f"vllm-{base.label}.dist-info"


def metadata_files(base: Base, archive: zipfile.ZipFile) -> dict[str, bytes]:
    """What goes into the metadata folder, RECORD apart, by path below it."""
    old = f"{base.distribution.replace('-', '_')}-{RELEASE}.dist-info/"
    files = {
        name.removeprefix(old): archive.read(name)
        for name in archive.namelist()
        if name.startswith(old)
    }
    del files["RECORD"]
    files["METADATA"] = derive(base, files["METADATA"].decode()).encode()
    files["WHEEL"] = wheel_file(_tag(base)).encode()
    return files


def write(base: Base, pristine: Path, landing: Landing, target: Path) -> None:
    """Write the whole wheel.

    Args:
        base: What it is built on.
        pristine: The base's wheel, verified.
        landing: The files that the series edits and adds.
        target: The wheel to write.

    Raises:
        SeriesError: A file to be edited is missing in the base, or one to be
            added is there.
    """
    edited = {**landing.changed, _VERSION: version_module(base).encode()}
    with (
        zipfile.ZipFile(pristine) as source,
        zipfile.ZipFile(
            target, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL
        ) as archive,
    ):
        _demand_places(source, edited, landing.added)
        record = [
            _put(archive, name, content, mode)
            for name, content, mode in _files(base, source, edited, landing.added)
        ]
        name = f"{dist_info(base)}/RECORD"
        lines = _csv([*record, (name, "", "")])
        _put(archive, name, io.BytesIO(lines), _PLAIN_FILE)


def _tag(base: Base) -> str:
    (tag,) = parse_wheel_filename(base.filename)[3]
    return str(tag)


def _demand_places(
    source: zipfile.ZipFile, edited: Mapping[str, bytes], added: Mapping[str, bytes]
) -> None:
    there = set(source.namelist())
    wrong = sorted((edited.keys() - there) | (added.keys() & there))
    if wrong:
        raise SeriesError(
            "every edited file in the base wheel, and no added one",
            found=f"the other way about: {', '.join(wrong)}",
            do="correct the paths in series/patches",
        )


def _files(
    base: Base,
    source: zipfile.ZipFile,
    edited: Mapping[str, bytes],
    added: Mapping[str, bytes],
) -> Iterator[tuple[str, IO[bytes], int]]:
    """Every file of the wheel but RECORD: its path, content and permissions."""
    for member in source.infolist():
        name = member.filename
        if name in edited:
            yield name, io.BytesIO(edited[name]), member.external_attr
        elif name.startswith("vllm/"):
            with source.open(member) as content:
                yield name, content, member.external_attr
    for name, data in sorted(added.items()):
        yield name, io.BytesIO(data), _PLAIN_FILE
    for name, data in sorted(metadata_files(base, source).items()):
        yield f"{dist_info(base)}/{name}", io.BytesIO(data), _PLAIN_FILE


def _put(archive: zipfile.ZipFile, name: str, content: IO[bytes], mode: int) -> Line:
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
    coded = base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
    return name, f"sha256={coded}", size


def _csv(lines: list[Line]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().encode()
