# SPDX-License-Identifier: Apache-2.0
"""Host channels come to all ranks of a group, or to none, and to nobody else."""

import os
import socket

import pytest

from tests import ranks
from tests.host import PROFILE, TARGET, host_channels, mapped_segments
from vllm.distributed.device_communicators.host_exchange import Exchange
from vllm.distributed.device_communicators.host_records import Record
from vllm.distributed.device_communicators.host_segments import HostChannelError
from vllm.distributed.graph_channels.identity import EagerLane


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_that_does_not_prepare_is_named_and_nothing_stays_mapped(missing):
    def body(rank, store):
        if rank == missing:
            return "away"
        transport = host_channels(rank, 3, store, deadline=0.5)
        with pytest.raises(HostChannelError) as failure:
            transport.prepare([*EagerLane])
        assert (transport.inventory(), mapped_segments()) == ({}, 0)
        return str(failure.value)

    messages = ranks.values(3, body, deadline=30)
    witness = messages[0 if missing else 1]
    assert f"waited 0.5 s for rank {missing};" in witness


def test_ranks_that_prepare_different_channels_are_told():  # R-G2
    def body(rank, store):
        transport = host_channels(rank, 2, store)
        with pytest.raises(HostChannelError) as failure:
            transport.prepare([PROFILE if rank else TARGET])
        assert mapped_segments() == 0
        return str(failure.value)

    first, second = ranks.values(2, body, deadline=30)
    assert "rank 1 prepares other channels" in first
    assert "rank 0 gave up" in second


def test_a_rank_that_cannot_map_takes_the_others_with_it(monkeypatch):
    def body(rank, store):
        transport = host_channels(rank, 3, store)
        if rank == 2:
            attach = Exchange._attach

            def fail_on_the_second(exchange, name, fd):
                if name.endswith("dcp"):
                    raise OSError("no memory")
                return attach(exchange, name, fd)

            monkeypatch.setattr(Exchange, "_attach", fail_on_the_second)
        with pytest.raises(HostChannelError) as failure:
            transport.prepare([*EagerLane])
        assert (transport.inventory(), mapped_segments()) == ({}, 0)
        return str(failure.value)

    first, second, third = ranks.values(3, body, deadline=30)
    assert "rank 2 gave up" in first
    assert "rank 0 gave up" in second
    assert "no memory" in third


class StrangerAtTheDoor:
    """A store that lets others call before any rank can know the address."""

    def __init__(self, store, hellos):
        self._store, self._hellos = store, hellos
        self.callers = []

    def set(self, key, value):
        address, _ = Record.ADDRESS.unpack(value)
        for hello in self._hellos:
            caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            caller.connect(b"\0" + address)
            caller.send(hello)
            self.callers.append(caller)
        self._store.set(key, value)


def test_strangers_get_no_segment_and_do_no_harm():  # R-G1
    guess = Record.HELLO.pack(bytes(16), 1, bytes(32))
    hellos = [b"", b"x", guess, guess + b"x", Record.READY.pack()]

    def body(rank, store):
        if rank == 0:
            store = StrangerAtTheDoor(store, hellos)
        exchange = Exchange(rank, 2, 4096, ["vllm:eager:dcp"], deadline=5)
        (channel,) = exchange.run(store, "key")
        if rank == 0:
            assert [caller.recv(99) for caller in store.callers] == [b""] * 5

    ranks.values(2, body, deadline=30)


@pytest.mark.parametrize(
    ("here", "reason"), [(0, "rank 0 gave up"), (1, "another user answers for rank 0")]
)
def test_another_users_process_gets_no_segment(here, reason, monkeypatch):  # R-G1
    def body(rank, store):
        if rank == here:  # as seen from here, the other rank is of another user
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(HostChannelError) as failure:
            host_channels(rank, 2, store, deadline=0.5).prepare([TARGET])
        return str(failure.value)

    first, second = ranks.values(2, body, deadline=30)
    assert "waited 0.5 s for rank 1" in first
    assert reason in second
