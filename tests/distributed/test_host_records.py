# SPDX-License-Identifier: Apache-2.0
"""Whatever arrives in a record or stands in a header, it is refused in words."""

import ctypes
import mmap
import os
import struct
from ctypes import c_uint64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.device_communicators.host_library import (
    Kind,
    OperationRecord,
    Status,
)
from vllm.distributed.device_communicators.host_operations import described
from vllm.distributed.device_communicators.host_records import (
    Record,
    RecordError,
    digest,
)
from vllm.distributed.device_communicators.host_segments import (
    HostChannel,
    HostChannelError,
    create_segment,
)

TOKENS = st.binary(min_size=16, max_size=16)
RANKS = st.integers(0, 2**32 - 1)
FIELDS = {
    Record.ADDRESS: st.tuples(TOKENS, TOKENS),
    Record.HELLO: st.tuples(TOKENS, RANKS, st.binary(min_size=32, max_size=32)),
    Record.SEGMENT: st.tuples(RANKS),
    Record.READY: st.just(()),
}
RECORDS = st.sampled_from(Record)


@given(st.data(), RECORDS)
def test_unpacking_inverts_packing(data, kind):  # R-G2
    fields = data.draw(FIELDS[kind])
    packed = kind.pack(*fields)
    assert len(packed) == kind.length
    assert kind.unpack(packed) == fields


@given(RECORDS, st.binary(max_size=100))
def test_other_bytes_are_refused(kind, data):  # R-G2
    with pytest.raises(RecordError):
        kind.unpack(data)


@given(st.data(), RECORDS, st.integers(0, 11), st.integers(1, 255))
def test_a_record_of_another_version_or_kind_is_refused(data, kind, place, change):
    packed = bytearray(kind.pack(*data.draw(FIELDS[kind])))
    packed[place] ^= change
    with pytest.raises(RecordError):
        kind.unpack(bytes(packed))


@given(RECORDS, RECORDS, st.data())
def test_a_record_is_taken_for_its_own_kind_only(kind, other, data):
    packed = kind.pack(*data.draw(FIELDS[kind]))
    if other is not kind:
        with pytest.raises(RecordError):
            other.unpack(packed)


def test_what_ranks_want_alike_has_one_digest():
    names = ["vllm:eager:dcp", "vllm:eager:allreduce"]
    wanted = digest(names, 2, 64)
    assert wanted == digest(tuple(names), 2, 64)
    others = [(names[::-1], 2, 64), (names[:1], 2, 64), (names, 3, 64), (names, 2, 65)]
    assert wanted not in [digest(*other) for other in others]


HEADER = struct.Struct("=8sIIQ")
GOOD = (b"HOSTCHNL", 1, 2, 128)


@given(
    st.one_of(
        st.binary(min_size=HEADER.size, max_size=HEADER.size),
        st.tuples(
            st.sampled_from([b"HOSTCHNL", b"HOSTCHNM"]),
            st.integers(0, 2),
            st.integers(0, 9),
            st.sampled_from([0, 127, 128, 2**64 - 1]),
        ).map(lambda fields: HEADER.pack(*fields)),
    )
)
def test_a_header_is_believed_only_if_it_is_as_expected(header):  # R-G1
    fd = create_segment("vllm:test", 2, 128)
    try:
        with mmap.mmap(fd, 0) as memory:
            assert HEADER.unpack_from(memory) == GOOD
            memory[: HEADER.size] = header
        if header == HEADER.pack(*GOOD):
            HostChannel("vllm:test", fd, 0, 2, 128).release()
        else:
            with pytest.raises(HostChannelError, match="cannot use .*BAD_"):
                HostChannel("vllm:test", fd, 0, 2, 128)
    finally:
        os.close(fd)


@given(st.binary(min_size=32, max_size=32))
def test_whatever_a_peer_says_it_is_doing_can_be_told(data):
    assert described(OperationRecord.from_buffer_copy(data))


def test_the_structures_are_as_long_as_in_the_library():
    assert ctypes.sizeof(OperationRecord) == 32
    assert described(OperationRecord(Kind.ALL_REDUCE, 0, 0, (c_uint64 * 3)(7))) == (
        "all-reduce of 7 float32"
    )
    assert len(Status) == 11
