# SPDX-License-Identifier: Apache-2.0
"""RECORD: the list by which installers know a distribution's files."""

import base64
import csv
import hashlib
import io
from collections.abc import Iterable, Mapping

Line = tuple[str, str, int | str]


def line(path: str, digest: bytes, size: int) -> Line:
    """The line of a file, by the sha256 of its content."""
    coded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    return path, f"sha256={coded}", size


def own_line(path: str) -> Line:
    """The line of RECORD itself, which cannot hold its own digest."""
    return path, "", ""


def text(lines: Iterable[Iterable[str | int]]) -> bytes:
    """The content of the file."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(lines)
    return file.getvalue().encode()


def revise(content: bytes, change: Mapping[str, bytes | None], own: str) -> bytes:
    """A RECORD after some of the files in it changed.

    Args:
        content: The file as it was.
        change: New content by path; None for a file that is gone.
        own: The path of RECORD itself from now on.
    """
    new = {
        path: line(path, hashlib.sha256(data).digest(), len(data))
        for path, data in change.items()
        if data is not None
    }
    kept: list[Iterable[str | int]] = [
        new.pop(row[0], row)
        for row in csv.reader(io.StringIO(content.decode()))
        if row and (row[0] in new or row[0] not in change)
    ]
    return text([*kept, *(new[path] for path in sorted(new)), own_line(own)])
