# SPDX-License-Identifier: Apache-2.0
"""The host transport's library, as Python calls it.

csrc/host_channels.h says what each function does; the structures and numbers
here repeat it. Calls release the interpreter's lock, so threads that wait on
different channels do not hold each other up; a signal's Python handler runs when
the call ends, at the latest at its deadline.
"""

import ctypes
import functools
from ctypes import c_double, c_uint16, c_uint32, c_uint64, c_void_p
from enum import IntEnum, unique
from pathlib import Path

MIN_WORLD = 2
MAX_WORLD = 8
MAX_SLOT_BYTES = 1 << 30

LIBRARY = Path(__file__).with_name("libvllm_host_channels.so.1")


@unique
class Kind(IntEnum):
    """What a rank does on a channel."""

    ALL_REDUCE = 1
    LSE_REDUCE_SCATTER = 2
    GATHER_HEADS = 3


@unique
class Status(IntEnum):
    """What a call returns."""

    OK = 0
    INVALID = 1
    TOO_LARGE = 2
    LATE = 3
    MISMATCH = 4
    BUSY = 5
    POISONED = 6
    CLOSED = 7
    BAD_MAGIC = 8
    BAD_VERSION = 9
    BAD_SHAPE = 10


class OperationRecord(ctypes.Structure):
    """What a rank says it is doing: ``hc_operation``."""

    _fields_ = [
        ("kind", c_uint16),
        ("dtype", c_uint16),
        ("flags", c_uint32),
        ("extents", c_uint64 * 3),
    ]


class ChannelRecord(ctypes.Structure):
    """A rank's end of a channel: ``hc_channel``. Only the library reads it."""

    _fields_ = [
        ("segment", c_void_p),
        ("slot_bytes", c_uint64),
        ("world", c_uint32),
        ("rank", c_uint32),
        ("busy", c_uint32),
        ("state", c_uint32),
    ]


class FaultRecord(ctypes.Structure):
    """What is known of a failure: ``hc_fault``."""

    _fields_ = [
        ("generation", c_uint64),
        ("peers", c_uint32),
        ("reserved", c_uint32),
        ("theirs", OperationRecord),
    ]


_CHANNEL = ctypes.POINTER(ChannelRecord)
_END = [c_double, ctypes.POINTER(FaultRecord)]
_HEADS = [c_uint64, c_uint64, c_uint64, c_uint16]

_ARGUMENTS = {
    "hc_segment_bytes": [c_uint32, c_uint64],
    "hc_format": [c_void_p, c_uint32, c_uint64],
    "hc_attach": [_CHANNEL, c_void_p, c_uint32, c_uint32, c_uint64],
    "hc_close": [_CHANNEL, c_double],
    "hc_all_reduce": [_CHANNEL, c_void_p, c_void_p, c_uint64, c_uint16, *_END],
    "hc_lse_reduce_bytes": _HEADS,
    "hc_lse_reduce_scatter": [_CHANNEL, *[c_void_p] * 4, *_HEADS, c_uint32, *_END],
    "hc_gather_heads": [_CHANNEL, c_void_p, c_void_p, *_HEADS, *_END],
}
_RETURN_BYTES = {"hc_segment_bytes", "hc_lse_reduce_bytes"}


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        RuntimeError: It is not there, or is no such library.
    """
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
        for name, arguments in _ARGUMENTS.items():
            function = getattr(loaded, name)
            function.argtypes = arguments
            function.restype = c_uint64 if name in _RETURN_BYTES else ctypes.c_int
    except (OSError, AttributeError) as error:
        raise RuntimeError(
            f"the host transport needs the library {LIBRARY}, which cannot be "
            f"loaded ({error}); install a C++17 compiler and build this package "
            "again, or set VLLM_PCIE_ALLREDUCE_BACKEND to another backend"
        ) from error
    return loaded


@functools.cache
def function_of(kind: Kind) -> "ctypes._FuncPointer":
    """The function that does what a kind says."""
    function: ctypes._FuncPointer = getattr(library(), f"hc_{kind.name.lower()}")
    return function
