# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a host transport send each other to share their segments.

Every record has a fixed length, and starts with a magic number, a version and a
kind. Nothing is ever unpickled.

==========  ====================  ============================================
record      from, to              says
==========  ====================  ============================================
ADDRESS     first rank, store     where it listens, and what a caller must know
HELLO       other rank, first     who it is, and what it wants to share
SEGMENT     first rank, other     which channel the descriptor beside it is of
READY       both ways             every segment is mapped; one may go on
==========  ====================  ============================================
"""

import hashlib
import struct
from collections.abc import Sequence
from enum import IntEnum, unique
from typing import Any

VERSION = 1
TOKEN_BYTES = 16
DIGEST_BYTES = 32

_MAGIC = b"VLLMHOST"
_HEAD = struct.Struct("<8sHH")


class RecordError(ValueError):
    """A record is not of the form that its place demands."""


@unique
class Record(IntEnum):
    """The kinds of records; each packs and unpacks its own fields."""

    ADDRESS = 1
    """Bytes that name the socket, and the token."""

    HELLO = 2
    """The token, the sender's rank, and the digest of what it wants."""

    SEGMENT = 3
    """The channel's place in the list of channels."""

    READY = 4
    """Nothing more; who is not ready hangs up instead."""

    @property
    def length(self) -> int:
        """The bytes of this kind of record."""
        return _HEAD.size + _FIELDS[self].size

    def pack(self, *fields: int | bytes) -> bytes:
        """A record with these fields."""
        return _HEAD.pack(_MAGIC, VERSION, self) + _FIELDS[self].pack(*fields)

    def unpack(self, data: bytes) -> tuple[Any, ...]:
        """The fields of a record that should be of this kind.

        Raises:
            RecordError: It is of another kind, length or version.
        """
        if len(data) != self.length:
            raise RecordError(
                f"a {self.name} record has {self.length} bytes, not {len(data)}"
            )
        found = _HEAD.unpack_from(data)
        if found != (_MAGIC, VERSION, self):
            raise RecordError(
                f"a {self.name} record starts with {(_MAGIC, VERSION, int(self))}, "
                f"not {found}; run the same build on all ranks"
            )
        return _FIELDS[self].unpack_from(data, _HEAD.size)


_FIELDS = {
    Record.ADDRESS: struct.Struct(f"<{TOKEN_BYTES}s{TOKEN_BYTES}s"),
    Record.HELLO: struct.Struct(f"<{TOKEN_BYTES}sI{DIGEST_BYTES}s"),
    Record.SEGMENT: struct.Struct("<I"),
    Record.READY: struct.Struct(""),
}


def digest(names: Sequence[str], world: int, slot_bytes: int) -> bytes:
    """What ranks compare to see that they want the same channels, in one order."""
    text = "\n".join([*names, f"{world} {slot_bytes}"])
    return hashlib.sha256(text.encode()).digest()
