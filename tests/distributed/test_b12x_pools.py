# SPDX-License-Identifier: Apache-2.0
"""What b12x's own pools promise, and what they do not: a change is noticed here.

The pools' real code names, agrees on, captures, rolls back and closes channels;
only the channels are fakes, which need no GPU. Alone, a pool gets them from its
factory. With a group, two ranks agree over gloo, which b12x refuses elsewhere.
"""

import gc
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist
from b12x.comm.pcie import pcie_dcp_a2a, pcie_oneshot
from b12x.comm.pcie.pcie_dcp_a2a import PCIeDCPA2APool
from b12x.comm.pcie.pcie_oneshot import PCIeOneshotAllReducePool

from tests import ranks
from vllm.distributed.graph_channels.identity import (
    ChannelId,
    EagerLane,
    Owner,
    Phase,
)

TARGET, DRAFT, ENCODER = (
    str(ChannelId(owner, Phase.PRODUCTION))
    for owner in (Owner.TARGET, Owner.DRAFT, Owner.ENCODER)
)
EAGER = str(EagerLane.ALLREDUCE)
DEADLINE = 60


class FakeChannel:
    """What a pool needs of a channel; it counts what is done to it."""

    _stream_affine = True

    def __init__(self):
        self.unmapped = self.freed = 0
        self.unmap_fails = False

    def _bind_stream_key(self, key):
        self.stream = key

    def _close_ipc_imports_strict(self):
        if self.unmap_fails:
            raise OSError("unmap failed")
        self.unmapped += 1

    def _free_ipc_exports_strict(self):
        self.freed += 1

    @contextmanager
    def capture(self, stream=None):
        yield


def oneshot(rank=0):
    return PCIeOneshotAllReducePool(
        rank=rank,
        world_size=2,
        device="cpu",
        channel_factory=lambda stream: FakeChannel(),
    )


def dcp(rank=0):
    return PCIeDCPA2APool(
        rank=rank,
        world_size=2,
        device="cpu",
        max_batch_size=8,
        total_heads=4,
        head_dim=64,
        channel_factory=lambda stream: FakeChannel(),
    )


both_pools = pytest.mark.parametrize("make", [oneshot, dcp])


def names(pool):
    return sorted(pool._logical_channels)


# One process ----------------------------------------------------------------


@both_pools
def test_a_scope_serves_what_asks_for_another_name(make):  # R-B2 # C03
    pool = make()
    with pool.capture(channel_id=TARGET) as channel:
        assert pool.for_stream(channel_id=EAGER) is channel
        with pool.capture(channel_id=DRAFT) as inner:
            assert inner is not channel
            assert pool.for_stream(channel_id=EAGER) is inner
        assert pool.for_stream(channel_id=EAGER) is channel
    assert pool.for_stream(channel_id=EAGER) not in (channel, inner)


@both_pools
def test_a_capture_that_has_begun_needs_an_open_scope(make, monkeypatch):
    # R-B7 # C09
    pool = make()
    module = pcie_oneshot if make is oneshot else pcie_dcp_a2a
    monkeypatch.setattr(module, "_is_current_stream_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match=r"requires an active pool\.capture\(\)"):
        pool.for_stream(channel_id=EAGER)
    with (
        pytest.raises(RuntimeError, match="must be entered before CUDA graph"),
        pool.capture(channel_id=TARGET),
    ):
        pytest.fail("entered")


@both_pools
def test_a_rollback_frees_what_came_since_and_no_more(make):  # R-C2 # C13
    pool = make()
    pool.prepare_channels([EAGER, TARGET])
    before = names(pool), list(pool._all_channels)
    checkpoint = pool.checkpoint_channels()
    pool.prepare_channels([DRAFT])
    with pool.capture(channel_id=ENCODER):
        pass
    since = pool._all_channels[2:]
    pool.rollback_channels(checkpoint)
    assert (names(pool), pool._all_channels) == before
    assert [channel.freed for channel in since] == [1, 1]
    assert [channel.freed for channel in pool._all_channels] == [0, 0]


@both_pools
def test_another_pools_checkpoint_is_accepted_and_wipes_the_pool(make):
    # R-C4 # C17: not what is wanted, so what calls the pool has to refuse it.
    # If this fails, b12x refuses it too by now.
    pool, other = make(), make()
    pool.prepare_channels([EAGER, TARGET])
    channels = list(pool._all_channels)
    pool.rollback_channels(other.checkpoint_channels())
    assert names(pool) == [] and pool._all_channels == []
    assert [channel.freed for channel in channels] == [1, 1]


@both_pools
def test_a_used_checkpoint_is_accepted_again(make):  # R-C4 # C17: as above
    pool = make()
    checkpoint = pool.checkpoint_channels()
    pool.rollback_channels(checkpoint)
    pool.prepare_channels([TARGET])
    (channel,) = pool._all_channels
    pool.rollback_channels(checkpoint)
    assert channel.freed == 1


@both_pools
def test_only_a_longer_pools_checkpoint_is_refused(make):  # R-C4 # C17: as above
    pool, longer = make(), make()
    longer.prepare_channels([TARGET])
    with pytest.raises(ValueError, match="does not belong to this pool"):
        pool.rollback_channels(longer.checkpoint_channels())


@both_pools
def test_inside_a_scope_neither_is_possible(make):  # R-C4 # C17
    pool = make()
    checkpoint = pool.checkpoint_channels()
    with pool.capture(channel_id=TARGET):
        with pytest.raises(RuntimeError, match="cannot checkpoint channels during"):
            pool.checkpoint_channels()
        with pytest.raises(RuntimeError, match="cannot roll back channels during"):
            pool.rollback_channels(checkpoint)
    pool.rollback_channels(checkpoint)


@both_pools
def test_a_failed_unmap_frees_nothing_and_can_be_tried_again(make):  # R-D1 # C38
    pool = make()
    pool.prepare_channels([TARGET])
    (channel,) = pool._all_channels
    channel.unmap_fails = True
    with pytest.raises(RuntimeError, match="close failed during IPC unmap.*not freed"):
        pool.close()
    assert pool._all_channels == [channel] and channel.freed == 0
    channel.unmap_fails = False
    pool.close()
    pool.close()
    assert channel.freed == 1


@both_pools
def test_a_dropped_pool_is_parked_and_makes_no_call(make):  # R-D3 # C24
    pool = make()
    pool.prepare_channels([TARGET])
    (channel,) = pool._all_channels
    parked = pcie_oneshot._ABANDONED_PCIE_RUNTIME_QUARANTINE
    key = id(pool)
    del pool
    gc.collect()
    assert (channel.unmapped, channel.freed) == (0, 0)
    parked.pop(key).close()  # it is whole, and can still be closed
    assert (channel.unmapped, channel.freed) == (1, 1)


# Two processes --------------------------------------------------------------


def on_two_ranks(make, body):
    """What ``body(rank, pool)`` gives on each of two ranks that share a pool."""

    def rank_body(rank, store):
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=20),
        )
        pcie_oneshot._object_broadcast_device = lambda group: "cpu"
        pool = make(rank)
        pool._channel_factory = None
        pool.exchange_group = dist.group.WORLD
        pool._new_channel = lambda stream: _fake_of(pool)
        return body(rank, pool)

    return ranks.values(2, rank_body, deadline=DEADLINE)


def _fake_of(pool):
    pool._all_channels.append(FakeChannel())
    return pool._all_channels[-1]


@both_pools
def test_ranks_may_prepare_and_capture_in_any_order(make):  # R-A2 # C06
    def body(rank, pool):
        order = [TARGET, DRAFT] if rank == 0 else [DRAFT, TARGET]
        pool.prepare_channels(order)
        for name in order:
            with pool.capture(channel_id=name) as channel:
                assert channel is pool._logical_channels[name]
        # each name has the same place in the order of allocation
        return [
            pool._all_channels.index(pool._logical_channels[n]) for n in names(pool)
        ]

    assert on_two_ranks(make, body) == [[0, 1]] * 2


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (([TARGET, DRAFT], [TARGET]), "preparation differs across ranks"),
        (([TARGET], [" "]), "must not be empty"),
        (([TARGET], [None]), "must be a string"),
    ],
)
@both_pools
def test_a_different_catalogue_is_refused_on_both(make, wanted, reason):  # C06
    def body(rank, pool):
        with pytest.raises(RuntimeError, match=reason):
            pool.prepare_channels(wanted[rank])
        pool.prepare_channels([ENCODER])  # nothing was allocated, they are in step
        return names(pool), len(pool._all_channels)

    assert on_two_ranks(make, body) == [([ENCODER], 1)] * 2


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ((TARGET, DRAFT), "unprepared logical channels in differing rank order"),
        ((TARGET, None), "requires a stable semantic channel_id"),  # C05
        ((TARGET, ENCODER), "was already captured"),
    ],
)
@both_pools
def test_a_different_capture_is_refused_on_both(make, wanted, reason):  # R-A5 # C06
    def body(rank, pool):
        with pool.capture(channel_id=ENCODER):
            pass
        with (
            pytest.raises(RuntimeError, match=reason),
            pool.capture(channel_id=wanted[rank]),
        ):
            pytest.fail("entered")
        return names(pool)

    assert on_two_ranks(make, body) == [[ENCODER]] * 2


@both_pools
def test_a_name_is_captured_once_until_it_is_rolled_back(make):  # R-B4
    def body(rank, pool):
        checkpoint = pool.checkpoint_channels()
        with pool.capture(channel_id=TARGET):
            pass
        with (
            pytest.raises(RuntimeError, match="was already captured"),
            pool.capture(channel_id=TARGET),
        ):
            pytest.fail("entered")
        pool.rollback_channels(checkpoint)
        with pool.capture(channel_id=TARGET):
            return names(pool)

    assert on_two_ranks(make, body) == [[TARGET]] * 2


@both_pools
def test_one_rank_raises_in_the_body_and_both_roll_back(make):  # R-C1 # C18 # C40
    def body(rank, pool):
        pool.prepare_channels([EAGER])
        checkpoint = pool.checkpoint_channels()
        try:
            with pool.capture(channel_id=TARGET):
                if rank == 1:
                    raise MemoryError("of rank 1")
        except MemoryError:
            pass
        assert not pool._capture_channel_stack  # left without its peer
        pool.rollback_channels(checkpoint)
        assert names(pool) == [EAGER]
        with pool.capture(channel_id=TARGET):
            return names(pool)

    assert on_two_ranks(make, body) == [[EAGER, TARGET]] * 2


@both_pools
def test_one_rank_cannot_unmap_and_nothing_is_freed_on_either(make):  # R-D1 # C38
    def body(rank, pool):
        checkpoint = pool.checkpoint_channels()
        pool.prepare_channels([TARGET])
        (channel,) = pool._all_channels
        channel.unmap_fails = rank == 1
        with pytest.raises(RuntimeError, match="group rank 1: channel 0: OSError"):
            pool.rollback_channels(checkpoint)
        assert names(pool) == [TARGET] and channel.freed == 0
        channel.unmap_fails = False
        pool.rollback_channels(checkpoint)
        return names(pool), channel.freed

    assert on_two_ranks(make, body) == [([], 1)] * 2


def test_after_a_failed_set_up_a_group_is_refused_on_both():  # C38
    def body(rank, pool):
        group = pool.exchange_group
        if rank == 1:
            pcie_oneshot._retain_failed_ipc_setup(
                ipc=object(),
                local_ptr=1,
                exchange_group=group,
                owner="a set-up that failed",
                phase="rollback",
            )
        with pytest.raises(RuntimeError, match="retained CUDA IPC setup gate") as error:
            pcie_oneshot._require_no_retained_ipc_setup(group)
        return "rank 1" in str(error.value)

    assert on_two_ranks(oneshot, body) == [True, True]


@both_pools
def test_channels_are_closed_before_their_group_and_not_after(make):  # R-D1 # C20
    def body(rank, pool):
        pool.prepare_channels([TARGET])
        (channel,) = pool._all_channels
        dist.destroy_process_group()
        with pytest.raises(RuntimeError, match="exchange peer IPC unmap.*not freed"):
            pool.close()
        # its own mappings are gone by then, what it exports is not
        assert (channel.unmapped, channel.freed) == (1, 0)
        return pool._all_channels == [channel]

    def in_order(rank, pool):
        pool.prepare_channels([TARGET])
        (channel,) = pool._all_channels
        pool.close()
        dist.destroy_process_group()
        return channel.freed, pool._all_channels

    assert on_two_ranks(make, body) == [True, True]
    assert on_two_ranks(make, in_order) == [(1, [])] * 2
