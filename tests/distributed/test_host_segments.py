# SPDX-License-Identifier: Apache-2.0
"""What host channels hold, when they give it back, and that nothing is left."""

import fcntl
import gc
import os
import signal
import threading
import time

import pytest
import torch
from torch.distributed import HashStore

from tests import ranks
from tests.host import (
    ENCODER,
    PROFILE,
    TARGET,
    descriptors,
    host_channels,
    mapped_segments,
)
from vllm.distributed.device_communicators import host_library
from vllm.distributed.device_communicators.host_channels import HostChannels
from vllm.distributed.device_communicators.host_graphs import RecordedGraph
from vllm.distributed.device_communicators.host_segments import (
    HostChannel,
    HostChannelError,
    HostChannelTimeout,
    create_segment,
)
from vllm.distributed.graph_channels.identity import EagerLane
from vllm.distributed.graph_channels.transport import CheckpointError

SLOT = 4096


@pytest.fixture(autouse=True)
def nothing_is_left():  # R-G1
    before = descriptors()
    yield
    gc.collect()
    assert (descriptors(), mapped_segments()) == (before, 0)


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
        transport = host_channels(rank, 2, store)
        transport.prepare([*EagerLane])
        transport.deadline = 0.3
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
        transport = host_channels(rank, 2, store)
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
        transport = host_channels(rank, world, store)
        with transport.capture(TARGET):
            assert torch.all(transport.all_reduce(torch.ones(4)) == world)
            assert mapped_segments() == 1
            transport.deadline = 0.5
            if rank == last:
                store.set("gone", str(os.getpid()))
                os.kill(os.getpid(), ending)
            gone = int(store.get("gone"))
            start = time.monotonic()
            with pytest.raises(HostChannelTimeout) as failure:
                transport.all_reduce(torch.ones(4))
            assert 0.5 <= time.monotonic() - start < 2
        if rank == 0:
            os.kill(gone, signal.SIGKILL)  # a stalled one, so as not to wait for it
        return str(failure.value)

    *others, end = ranks.run(world, body, deadline=30)
    assert end.status == -signal.SIGKILL and not end.late
    for rank, outcome in enumerate(others):
        assert outcome.error is None, outcome.error
        assert outcome.value.startswith(
            f"rank {rank} waited 0.5 s for rank {last} on vllm:target:production "
            "(generation 2), in all-reduce of 4 float32"
        )


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


def test_another_users_segment_is_not_used(monkeypatch):  # R-G1
    fd = create_segment("vllm:test", 2, SLOT)
    owner = os.fstat(fd).st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    try:
        with pytest.raises(HostChannelError, match="owner, bytes and seals"):
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
