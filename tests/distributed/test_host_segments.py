# SPDX-License-Identifier: Apache-2.0
"""Host channels come to all ranks or to none, and leave nothing behind."""

import fcntl
import gc
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from tests import ranks
from tests.host import ENCODER, PROFILE, TARGET, host_channels
from vllm.distributed.device_communicators import host_library
from vllm.distributed.device_communicators.host_channels import HostChannels
from vllm.distributed.device_communicators.host_exchange import Exchange
from vllm.distributed.device_communicators.host_graphs import RecordedGraph
from vllm.distributed.device_communicators.host_records import Record
from vllm.distributed.device_communicators.host_segments import (
    HostChannel,
    HostChannelError,
    HostChannelTimeout,
    create_segment,
)
from vllm.distributed.graph_channels.identity import EagerLane
from vllm.distributed.graph_channels.transport import CheckpointError

SLOT = 4096


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped_segments() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:vllm:")


@pytest.fixture(autouse=True)
def nothing_is_left():  # R-G1
    before = sorted(os.listdir("/dev/shm")), descriptors()
    yield
    gc.collect()
    assert (sorted(os.listdir("/dev/shm")), descriptors()) == before
    assert mapped_segments() == 0


@pytest.mark.parametrize("world", [2, 4])
def test_a_hundred_profiles_leave_names_bytes_and_descriptors_as_they_were(world):
    # R-C2
    def body(rank, store):
        transport = host_channels(rank, world, store)
        transport.prepare([*EagerLane, TARGET])
        before = dict(transport.inventory()), descriptors(), mapped_segments()
        for _ in range(100):
            checkpoint = transport.checkpoint()
            transport.prepare([PROFILE, ENCODER])
            with transport.capture(PROFILE):
                assert torch.all(transport.all_reduce(torch.ones(9)) == world)
            transport.rollback(checkpoint)
        gc.collect()
        after = dict(transport.inventory()), descriptors(), mapped_segments()
        assert after == before
        assert torch.all(transport.all_reduce(torch.ones(9)) == world)
        transport.close()
        transport.close()
        assert (transport.inventory(), mapped_segments()) == ({}, 0)

    ranks.values(world, body, deadline=30)


def test_a_channel_takes_what_the_inventory_says():
    def body(rank, store):
        transport = host_channels(rank, 3, store, max_bytes=1000)
        transport.prepare([TARGET, TARGET])
        transport.prepare([TARGET])
        (entry,) = transport.inventory().items()
        assert entry == (TARGET, 4096 + 2 * 3 * 1024)

    ranks.values(3, body, deadline=30)


def test_dropping_a_transport_frees_its_memory_and_tells_nobody():  # R-D3
    def body(rank, store):
        transport = host_channels(rank, 2, store, deadline=0.3)
        transport.prepare([*EagerLane])
        before = descriptors()
        if rank == 1:
            del transport
            gc.collect()
            assert mapped_segments() == 0 and descriptors() == before - 2
            return
        with pytest.raises(HostChannelTimeout):
            transport.all_reduce(torch.ones(1))

    ranks.values(2, body, deadline=30)


def test_a_checkpoint_is_good_once_and_where_it_was_made():  # R-C4
    def body(rank, store):
        transport = host_channels(rank, 2, store)
        checkpoint = transport.checkpoint()
        transport.prepare([PROFILE])
        with transport.capture(PROFILE):
            with pytest.raises(RuntimeError, match="inside the capture scope of vllm"):
                transport.rollback(checkpoint)
            with pytest.raises(RuntimeError, match="inside the capture scope of vllm"):
                transport.checkpoint()
        with pytest.raises(CheckpointError):
            transport.rollback(host_channels(rank, 2, None).checkpoint())
        assert list(transport.inventory()) == [PROFILE]
        transport.rollback(checkpoint)
        with pytest.raises(CheckpointError):
            transport.rollback(checkpoint)
        assert transport.inventory() == {}

    ranks.values(2, body, deadline=30)


def test_a_channel_that_a_thread_still_uses_is_not_freed():
    def body(rank, store):
        transport = host_channels(rank, 2, store, deadline=2)
        transport.prepare([EagerLane.DCP, EagerLane.ALLREDUCE])
        if rank == 0:
            waiting = threading.Thread(
                target=transport.all_reduce, args=(torch.ones(1),), daemon=True
            )
            waiting.start()
            time.sleep(0.2)
            transport.deadline = 0.2
            with pytest.raises(HostChannelTimeout, match="another thread still ran"):
                transport.close()
            assert len(transport.inventory()) == mapped_segments() == 2
            store.set("tried", "")
            waiting.join()
        else:
            store.get("tried")
            transport.all_reduce(torch.ones(1))
        transport.close()
        assert mapped_segments() == 0

    ranks.values(2, body, deadline=30)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stalled_peer_is_named(world, ending):
    last = world - 1

    def body(rank, store):
        transport = host_channels(rank, world, store, deadline=0.5)
        with transport.capture(TARGET):
            assert torch.all(transport.all_reduce(torch.ones(4)) == world)
            if rank == last:
                store.set("gone", "")
                os.kill(os.getpid(), ending)
            store.get("gone")
            start = time.monotonic()
            with pytest.raises(HostChannelTimeout) as failure:
                transport.all_reduce(torch.ones(4))
            assert 0.5 <= time.monotonic() - start < 2
        return str(failure.value)

    *others, end = ranks.run(world, body, deadline=3)
    assert end.status == -signal.SIGKILL  # the stalled one is killed at the end
    for rank, outcome in enumerate(others):
        assert outcome.error is None, outcome.error
        # generation 1 was the entry, 2 the reduction before
        assert outcome.value.startswith(
            f"rank {rank} waited 0.5 s for rank {last} on vllm:target:production "
            "(generation 3), in all-reduce of 4 float32"
        )


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
        exchange = Exchange(rank, 2, SLOT, ["vllm:eager:dcp"], deadline=5)
        (channel,) = exchange.run(store, "key")
        if rank == 0:
            assert [caller.recv(99) for caller in store.callers] == [b""] * 5

    ranks.values(2, body, deadline=30)


def test_another_users_process_gets_no_segment(monkeypatch):  # R-G1
    def body(rank, store):
        if rank == 1:  # as seen from here, rank 0 is of another user
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(HostChannelError) as failure:
            host_channels(rank, 2, store, deadline=0.5).prepare([TARGET])
        return str(failure.value)

    first, second = ranks.values(2, body, deadline=30)
    assert "waited 0.5 s for rank 1" in first
    assert "another user answers for rank 0" in second


def sealed(size: int, seals: int = fcntl.F_SEAL_SEAL) -> int:
    fd = os.memfd_create("vllm:test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


ALL_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
BYTES = 4096 + 2 * 2 * SLOT


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: sealed(BYTES), "owner, bytes and seals"),
        (lambda: sealed(BYTES - 1, ALL_SEALS), "owner, bytes and seals"),
        (lambda: os.open("/dev/zero", os.O_RDWR), "owner, bytes and seals"),
        (lambda: sealed(BYTES, ALL_SEALS), "BAD_MAGIC"),
        (lambda: create_segment("vllm:test", 4, SLOT), "owner, bytes and seals"),
        (lambda: create_segment("vllm:test", 4, SLOT // 2), "BAD_SHAPE"),
    ],
)
def test_a_wrong_segment_is_not_used(make, reason):  # R-G1
    fd = make()
    try:
        with pytest.raises(HostChannelError, match=reason):
            HostChannel("vllm:test", fd, 0, 2, SLOT)
    finally:
        os.close(fd)


def test_a_segment_cannot_be_resized():  # R-G1
    fd = create_segment("vllm:test", 2, SLOT)
    try:
        for size in (0, BYTES + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)


def test_a_missing_library_is_said_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(host_library, "LIBRARY", tmp_path / "absent.so")
    host_library.library.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="needs the library .*absent.so.*again"):
            host_channels(0, 2, HashStore())
    finally:
        host_library.library.cache_clear()


@pytest.mark.parametrize("kind", [HostChannels, HostChannel, RecordedGraph])
def test_nothing_is_done_when_an_object_dies(kind):  # R-D3
    assert not hasattr(kind, "__del__")
