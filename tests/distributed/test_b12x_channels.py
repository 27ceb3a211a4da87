# SPDX-License-Identifier: Apache-2.0
"""The adapter over b12x's own pools, without a GPU: alone, and between two ranks.

The pools' channels are fakes; the current stream and whether it records a graph are
told to the adapter by the tests. What it does with names, scopes, checkpoints and
streams is its own code and b12x's.
"""

import gc
import threading
from contextlib import contextmanager
from time import monotonic
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from b12x.comm.pcie import pcie_oneshot
from torch.distributed import HashStore, PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from tests.distributed.test_b12x_pools import (
    FakeChannel,
    both_pools,
    dcp,
    names,
    on_two_ranks,
    oneshot,
)
from vllm.distributed.device_communicators import b12x_channels
from vllm.distributed.device_communicators.b12x_channels import B12xChannels
from vllm.distributed.device_communicators.b12x_pcie_all_reduce import B12xAllReduce
from vllm.distributed.graph_channels.identity import (
    ChannelId,
    EagerLane,
    Owner,
    Phase,
)
from vllm.distributed.graph_channels.ledger import Ledger
from vllm.distributed.graph_channels.scope import NoScopeError, owner_scope
from vllm.distributed.graph_channels.stream_roles import auxiliary_stream
from vllm.distributed.graph_channels.together import Group, Refused
from vllm.distributed.graph_channels.transport import CheckpointError
from vllm.distributed.graph_channels.vote import Electorate, GroupClosed

TARGET, DRAFT, ENCODER = (
    ChannelId(owner, Phase.PRODUCTION)
    for owner in (Owner.TARGET, Owner.DRAFT, Owner.ENCODER)
)
PROFILE = ChannelId(Owner.TARGET, Phase.PROFILE)
LANE = EagerLane.ALLREDUCE
CPU = torch.device("cpu")
BYTES = 4096


def adapter(pool):
    """A transport over a pool, with nothing prepared."""
    return B12xChannels("b12x tp:0", pool, CPU, BYTES)


def reducer(pool, **cutoffs):
    """The transport that reduces; its pool's channels double what they are given."""
    sizes = {"all_reduce_bytes": 1 << 16, "fused_bytes": 86016} | cutoffs
    return B12xAllReduce("b12x tp:0", pool, CPU, BYTES, rank=0, world=2, **sizes)


def asked(transport):
    """Whose channel an operation would be launched on."""
    return transport.channel(LANE, "an all-reduce").name


class Now:
    """The current stream of the adapter, and whether it records a graph."""

    def __init__(self):
        self.stream, self.capturing = 7, False

    @contextmanager
    def on(self, stream):
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    @contextmanager
    def recording(self, stream=99):
        """A physical capture, which torch does on a stream of its own."""
        with self.on(stream):
            self.capturing = True
            yield
            self.capturing = False


@pytest.fixture
def now(monkeypatch):
    moment = Now()

    def capturing(device):
        return moment.capturing

    monkeypatch.setattr(b12x_channels, "is_capturing", capturing)
    monkeypatch.setattr(
        b12x_channels,
        "_current_stream",
        lambda device: SimpleNamespace(cuda_stream=moment.stream),
    )
    return moment


# One process: scopes --------------------------------------------------------


@both_pools
def test_the_innermost_scope_serves_and_each_exit_puts_back(make):
    # R-B2 # R-B4 # R-B5 # C03 # C04
    transport = adapter(make())
    transport.prepare([LANE])
    assert asked(transport) == LANE
    with transport.capture(TARGET):
        assert asked(transport) == TARGET
        with transport.capture(DRAFT):
            assert asked(transport) == DRAFT
            with transport.capture(TARGET):
                assert asked(transport) == TARGET
            assert asked(transport) == DRAFT
        assert asked(transport) == TARGET
    assert asked(transport) == LANE


@both_pools
@pytest.mark.parametrize("failure", [MemoryError, KeyboardInterrupt, SystemExit])
def test_a_body_that_raises_puts_back_all_the_same(make, failure):  # R-B5 # C40
    transport = adapter(make())
    transport.prepare([LANE])
    with transport.capture(TARGET):
        with pytest.raises(failure), transport.capture(DRAFT):
            raise failure
        assert asked(transport) == TARGET
    assert asked(transport) == LANE


@both_pools
def test_an_owner_keeps_its_channel_however_often_it_comes(make):  # R-B4 # C07
    pool = make()
    transport = adapter(pool)
    runtimes = set()
    with transport.capture(TARGET):
        for _ in range(20):
            with transport.capture(DRAFT):
                runtimes.add(id(transport.channel(LANE, "it").runtime))
    assert len(runtimes) == 1
    assert len(pool._all_channels) == 2
    assert not pool._capture_channel_stack  # none is left open in the pool


def test_entering_leaves_no_scope_of_the_pool_open():  # R-B4
    pool = oneshot()
    transport = adapter(pool)
    with transport.capture(TARGET):
        assert not pool._capture_channel_stack


@pytest.mark.parametrize("name", [None, "vllm:target:production", LANE])
def test_a_scope_needs_a_channel_id(name):  # R-A5 # C05
    pool = oneshot()
    transport = adapter(pool)
    with pytest.raises(TypeError, match="graph_capture"):
        transport.capture(name)
    assert pool._all_channels == []


def test_asking_for_a_scope_enters_nothing(now):
    pool = oneshot()
    transport = adapter(pool)
    scope = transport.capture(TARGET)
    assert transport.inventory() == {} and pool._all_channels == []
    with scope:
        assert transport.inventory() == {TARGET: BYTES}


def test_a_capture_outside_any_scope_is_refused_at_the_call(now):  # R-B7 # C09
    pool = oneshot()
    transport = reducer(pool)
    transport.prepare([LANE])
    asked(transport)
    with now.recording(), pytest.raises(NoScopeError, match="graph_capture"):
        transport.all_reduce(torch.ones(8))
    assert transport.recorded() == {}


@both_pools
def test_a_silent_owner_does_not_get_the_channel_around_it(make, now):  # R-B4 # R-A2
    transport, ledger = adapter(make()), Ledger(deadline=5, closing_deadline=5)
    ledger.register(transport, Group("tp:0", Electorate(HashStore(), 0, 1, "tp:0")))
    ledger.silence([Owner.ENCODER])
    with ledger.scope(TARGET), now.recording():
        assert asked(transport) == TARGET
        refused = pytest.raises(RuntimeError, match="encoder.* said to record no coll")
        with owner_scope(Owner.ENCODER), refused:
            asked(transport)


def test_an_eager_lane_has_to_be_prepared(now):  # R-B8
    transport = adapter(oneshot())
    with pytest.raises(RuntimeError, match="vllm:eager:allreduce is not prepared"):
        asked(transport)


# One process: streams -------------------------------------------------------


def test_another_stream_is_refused_and_both_lanes_are_named(now):  # R-B8 # C12
    transport = adapter(oneshot())
    transport.prepare([LANE])
    asked(transport)
    with now.on(0xABC), pytest.raises(RuntimeError) as caught:
        asked(transport)
    said = str(caught.value)
    assert "an all-reduce on stream 0xabc" in said
    assert "vllm:eager:allreduce serves stream 0x7" in said
    assert "auxiliary_stream" in said
    assert asked(transport) == LANE


def test_a_scope_serves_its_stream_and_whatever_records(now):  # R-B2 # C12
    transport = adapter(oneshot())
    with now.on(11), transport.capture(TARGET):
        assert asked(transport) == TARGET
        for stream in (22, 33):
            with now.recording(stream):
                assert asked(transport) == TARGET
        assert asked(transport) == TARGET
        with now.on(22), pytest.raises(RuntimeError, match="production serves stream"):
            asked(transport)


def test_a_stream_that_first_recorded_binds_nothing(now):  # R-B2
    transport = adapter(oneshot())
    with now.on(11), transport.capture(TARGET):
        with now.recording(22):
            asked(transport)
        assert asked(transport) == TARGET


def test_a_recapture_on_another_stream_needs_a_generation(now):  # R-A1 # C01
    transport = adapter(oneshot())
    with now.on(11), transport.capture(TARGET):
        pass
    again = ChannelId(Owner.TARGET, Phase.PRODUCTION, 2)
    with now.on(22):
        with (
            pytest.raises(RuntimeError, match="generation=2"),
            transport.capture(TARGET),
        ):
            pytest.fail("entered")
        with transport.capture(again):
            assert asked(transport) == again
    with now.on(11), transport.capture(TARGET):  # the same stream again
        assert asked(transport) == TARGET


def test_a_recycled_stream_does_not_make_two_owners_one(now):  # R-A2 # C01
    pool = oneshot()
    transport = adapter(pool)
    for owner in (TARGET, DRAFT, ENCODER):
        with transport.capture(owner):
            asked(transport)
    assert len(pool._all_channels) == len(set(map(id, pool._all_channels))) == 3


def test_the_stream_is_that_of_the_thread_that_asks(monkeypatch):  # R-B1 # R-B2
    here = threading.get_ident()
    monkeypatch.setattr(
        b12x_channels,
        "_current_stream",
        lambda device: SimpleNamespace(
            cuda_stream=9 if threading.get_ident() == here else 0
        ),
    )
    transport = adapter(oneshot())
    scope = transport.capture(TARGET)
    entering = threading.Thread(target=scope.__enter__)
    entering.start()
    entering.join()
    assert asked(transport) == TARGET
    assert transport.channel(LANE, "it").stream == 9
    scope.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="not prepared"):
        asked(transport)


def test_marked_work_takes_nccl_unless_it_is_recorded(now):  # R-B8 # C12
    transport = reducer(oneshot())
    tensor = torch.ones(8)
    assert transport.should_all_reduce(tensor)
    with auxiliary_stream("a test"):
        assert not transport.should_all_reduce(tensor)
        with transport.capture(TARGET):
            assert not transport.should_all_reduce(tensor)  # a warm-up
            with now.recording():
                assert transport.should_all_reduce(tensor)
    assert transport.should_all_reduce(tensor)


# One process: what was recorded ---------------------------------------------


def test_only_what_is_recorded_is_counted(now):  # R-F1
    transport = adapter(oneshot())
    transport.prepare([LANE, ENCODER])
    asked(transport)
    with transport.capture(TARGET):
        asked(transport)
        with now.recording():
            for _ in range(3):
                asked(transport)
            with transport.capture(DRAFT):
                asked(transport)
    asked(transport)
    assert transport.recorded() == {TARGET: 3, DRAFT: 1}


def test_a_rollback_forgets_what_was_recorded_on_what_it_frees(now):  # R-C2 # R-F1
    transport = adapter(oneshot())
    with transport.capture(TARGET), now.recording():
        asked(transport)
    checkpoint = transport.checkpoint()
    with transport.capture(PROFILE), now.recording():
        asked(transport)
    transport.rollback(checkpoint)
    assert transport.recorded() == {TARGET: 1}


# One process: checkpoints ---------------------------------------------------


def counted_rollbacks(pool):
    """How often a pool is asked to roll back, as a list that grows."""
    calls, real = [], pool.rollback_channels

    def rollback_channels(checkpoint):
        calls.append(checkpoint)
        real(checkpoint)

    pool.rollback_channels = rollback_channels
    return calls


@both_pools
def test_another_transports_checkpoint_does_not_reach_the_pool(make):  # R-C4 # C17
    pool = make()
    transport, other = adapter(pool), adapter(make())
    transport.prepare([LANE, TARGET])
    calls = counted_rollbacks(pool)
    with pytest.raises(CheckpointError):
        transport.rollback(other.checkpoint())
    assert calls == [] and names(pool) == sorted(map(str, [LANE, TARGET]))
    assert [channel.freed for channel in pool._all_channels] == [0, 0]


@both_pools
def test_a_checkpoint_is_good_once_and_ends_later_ones(make):  # R-C4 # C17
    pool = make()
    transport = adapter(pool)
    early, late = transport.checkpoint(), transport.checkpoint()
    calls = counted_rollbacks(pool)
    transport.rollback(early)
    transport.prepare([TARGET])
    for spent in (early, late):
        with pytest.raises(CheckpointError):
            transport.rollback(spent)
    assert len(calls) == 1 and transport.inventory() == {TARGET: BYTES}


@both_pools
def test_inside_a_scope_neither_is_possible(make):  # R-C4 # C17
    pool = make()
    transport = adapter(pool)
    checkpoint = transport.checkpoint()
    calls = counted_rollbacks(pool)
    with transport.capture(TARGET):
        with pytest.raises(RuntimeError, match="checkpoint inside the capture scope"):
            transport.checkpoint()
        with pytest.raises(RuntimeError, match="rollback inside the capture scope"):
            transport.rollback(checkpoint)
    assert calls == []
    transport.rollback(checkpoint)
    assert transport.inventory() == {} and pool._all_channels == []


@both_pools
def test_a_rollback_that_fails_can_be_tried_again(make):  # R-C1 # C38
    pool = make()
    transport = adapter(pool)
    checkpoint = transport.checkpoint()
    transport.prepare([TARGET])
    (channel,) = pool._all_channels
    channel.unmap_fails = True
    with pytest.raises(RuntimeError, match="not freed"):
        transport.rollback(checkpoint)
    assert transport.inventory() == {TARGET: BYTES} and channel.freed == 0
    channel.unmap_fails = False
    transport.rollback(checkpoint)
    assert transport.inventory() == {} and channel.freed == 1


def test_what_was_made_of_a_failed_prepare_goes_with_the_rollback():  # R-C2
    made = []

    def factory(stream):
        if len(made) == 1:
            raise MemoryError("the second")
        made.append(FakeChannel())
        return made[-1]

    pool = oneshot()
    pool._channel_factory = factory
    transport = adapter(pool)
    checkpoint = transport.checkpoint()
    with pytest.raises(MemoryError):
        transport.prepare([TARGET, DRAFT])
    assert transport.inventory() == {}
    transport.rollback(checkpoint)
    assert [channel.freed for channel in made] == [1]


# One process: the end -------------------------------------------------------


@both_pools
def test_a_close_is_tried_again_and_then_does_nothing(make):  # R-D1 # C38
    pool = make()
    transport = adapter(pool)
    transport.prepare([LANE, TARGET])
    channels = list(pool._all_channels)
    channels[1].unmap_fails = True
    with pytest.raises(RuntimeError, match="not freed"):
        transport.close()
    assert len(transport.inventory()) == 2
    channels[1].unmap_fails = False
    for _ in range(3):
        transport.close()
    assert [channel.freed for channel in channels] == [1, 1]
    assert transport.inventory() == transport.recorded() == {}


def test_a_closed_transport_says_so():  # R-D1
    transport = adapter(oneshot())
    checkpoint = transport.checkpoint()
    transport.close()
    for act in (
        lambda: transport.prepare([TARGET]),
        lambda: transport.capture(TARGET),
        lambda: transport.checkpoint(),
        lambda: transport.rollback(checkpoint),
    ):
        with pytest.raises(RuntimeError, match="b12x tp:0 was closed"):
            act()


@both_pools
def test_a_dropped_adapter_makes_no_call(make):  # R-D3 # C24
    pool = make()
    transport = adapter(pool)
    transport.prepare([LANE])
    with transport.capture(TARGET):
        asked(transport)
    channels, key = list(pool._all_channels), id(pool)
    del transport, pool
    gc.collect()
    assert [(c.unmapped, c.freed) for c in channels] == [(0, 0)] * 2
    parked = pcie_oneshot._ABANDONED_PCIE_RUNTIME_QUARANTINE.pop(key)
    parked.close()  # by b12x, whole; so a test leaves none


@pytest.mark.parametrize("cls", [B12xChannels, B12xAllReduce])
def test_half_built_ones_are_dropped_in_silence(cls):  # R-D3 # C24
    assert not hasattr(cls, "__del__")
    object.__new__(cls)


# Two processes --------------------------------------------------------------


@both_pools
def test_ranks_enter_prepared_channels_in_any_order(make):  # R-A2 # C06
    def body(rank, pool):
        transport = adapter(pool)
        transport.prepare([TARGET, DRAFT, LANE][:: 1 if rank else -1])
        for name in (TARGET, DRAFT) if rank == 0 else (DRAFT, TARGET):
            with transport.capture(name):
                runtime = transport.channel(LANE, "it").runtime
                assert runtime is pool._logical_channels[str(name)]
        # each name has the same place in the order of allocation
        return [
            pool._all_channels.index(pool._logical_channels[n]) for n in names(pool)
        ]

    assert on_two_ranks(make, body) == [[0, 1, 2]] * 2


@both_pools
def test_different_names_are_refused_on_both(make):  # R-A5 # C06
    def body(rank, pool):
        transport = adapter(pool)
        wanted = (TARGET, DRAFT)[rank]
        with pytest.raises(RuntimeError, match="differs across ranks"):
            transport.prepare([wanted])
        with (
            pytest.raises(RuntimeError, match="differing rank order"),
            transport.capture(wanted),
        ):
            pytest.fail("entered")
        assert transport.inventory() == {} and pool._all_channels == []
        transport.prepare([ENCODER])
        with transport.capture(ENCODER):
            return str(asked(transport))

    assert on_two_ranks(make, body) == [str(ENCODER)] * 2


@both_pools
def test_a_hundred_throwaway_captures_leave_nothing(make):  # R-C2 # C13
    def body(rank, pool):
        transport = adapter(pool)
        transport.prepare([LANE])
        asked(transport)
        with transport.capture(ENCODER):
            pass
        before = transport.inventory(), names(pool), list(pool._all_channels)
        for turn in range(100):
            checkpoint = transport.checkpoint()
            if turn % 2:
                transport.prepare([PROFILE])
            with transport.capture(PROFILE):
                asked(transport)
            transport.rollback(checkpoint)
            now = transport.inventory(), names(pool), list(pool._all_channels)
            assert now == before
        return {str(name): size for name, size in transport.inventory().items()}

    kept = {str(LANE): BYTES, str(ENCODER): BYTES}
    assert on_two_ranks(make, body) == [kept] * 2


@both_pools
def test_an_owner_is_entered_once_however_often(make):  # R-B4
    def body(rank, pool):
        transport = adapter(pool)
        with transport.capture(TARGET):
            # alone from here on: later entries ask no peer
            for _ in range(rank * 5):
                with transport.capture(TARGET):
                    asked(transport)
        dist.barrier()
        return names(pool)

    assert on_two_ranks(make, body) == [[str(TARGET)]] * 2


@both_pools
def test_one_rank_raises_in_the_body_and_waits_for_nobody(make):  # R-B5 # C40
    def body(rank, pool):
        transport = adapter(pool)
        checkpoint = transport.checkpoint()
        begun = 0.0
        try:
            with transport.capture(TARGET):
                begun = monotonic()
                if rank == 1:
                    raise MemoryError("of rank 1")
                dist.barrier()  # rank 1 comes here after it has left
        except MemoryError:
            dist.barrier()
        assert monotonic() - begun < 10
        transport.rollback(checkpoint)
        with transport.capture(TARGET):
            return str(asked(transport))

    assert on_two_ranks(make, body) == [str(TARGET)] * 2


@both_pools
def test_a_rank_that_cannot_unmap_holds_both_and_both_try_again(make):  # R-D1 # C38
    def body(rank, pool):
        transport = adapter(pool)
        transport.prepare([TARGET])
        (channel,) = pool._all_channels
        channel.unmap_fails = rank == 1
        with pytest.raises(RuntimeError, match="group rank 1"):
            transport.close()
        held = dict(transport.inventory()), channel.freed
        channel.unmap_fails = False
        transport.close()
        transport.close()
        return held == ({TARGET: BYTES}, 0), channel.freed

    assert on_two_ranks(make, body) == [(True, 1)] * 2


# Two processes, with the ledger ---------------------------------------------


def ledger_of(rank, transport, deadline=10.0):
    """A ledger over the ranks' common store that owns a transport."""
    store = PrefixStore("ledger", _get_default_store())
    ledger = Ledger(
        deadline=deadline, closing_deadline=5, names_demanded_by="VLLM_X=b12x"
    )
    group = Group("tp:0", Electorate(store, rank, 2, "tp:0"))
    ledger.register(transport, group, lanes=(LANE,))
    return ledger


def on_two_streams(rank, pool):
    """The scope's stream is 9 here; other threads are on 0, as in CUDA."""
    here = threading.get_ident()
    b12x_channels._current_stream = lambda device: SimpleNamespace(
        cuda_stream=9 if threading.get_ident() == here else 0
    )


@both_pools
def test_a_ledger_profiles_captures_and_closes(make):  # R-C1 # R-C2 # R-D1
    def body(rank, pool):
        on_two_streams(rank, pool)
        transport = adapter(pool)
        ledger = ledger_of(rank, transport)
        assert asked(transport) == LANE
        before = ledger.inventory()
        for _ in range(3):
            checkpoint = ledger.checkpoint()
            with ledger.scope(PROFILE):
                assert asked(transport) == PROFILE
                with ledger.scope(ChannelId(Owner.DRAFT, Phase.PROFILE)):
                    assert asked(transport).owner is Owner.DRAFT
            ledger.rollback(checkpoint)
            assert ledger.inventory() == before
        ledger.prepare([TARGET, DRAFT])
        for name in (TARGET, DRAFT) if rank == 0 else (DRAFT, TARGET):  # C06
            with ledger.scope(name):
                assert asked(transport) == name
        channels = list(pool._all_channels)
        assert len(channels) == 3
        ledger.close()
        return [channel.freed for channel in channels], dict(ledger.inventory())

    assert on_two_ranks(make, body) == [([1, 1, 1], {})] * 2


def test_entries_run_on_a_daemon_and_bind_the_scopes_stream():  # R-D2 # R-B2
    def body(rank, pool):
        on_two_streams(rank, pool)
        entered, real = [], pool.capture

        def capture(stream, *, channel_id):
            thread = threading.current_thread()
            entered.append((stream.cuda_stream, thread.daemon))
            return real(channel_id=channel_id)

        pool.capture = capture
        transport = adapter(pool)
        ledger = ledger_of(rank, transport)
        with ledger.scope(TARGET):
            stream = transport.channel(LANE, "it").stream
            for _ in range(2):
                with owner_scope(Owner.DRAFT):
                    assert asked(transport) == DRAFT
        return stream, entered

    assert on_two_ranks(oneshot, body) == [(9, [(9, True)] * 2)] * 2


def test_a_missing_name_is_refused_on_both():  # R-A5 # C05
    def body(rank, pool):
        ledger = ledger_of(rank, adapter(pool))
        refused = (Refused, ValueError)
        with pytest.raises(refused) as caught, ledger.scope((TARGET, None)[rank]):
            pytest.fail("entered")
        return "without a channel_id" in str(caught.value), names(pool)

    assert on_two_ranks(oneshot, body) == [(True, [str(LANE)])] * 2


@both_pools
def test_a_rank_that_cannot_unmap_keeps_its_memory_and_close_ends(make):  # R-D1 # C20
    def body(rank, pool):
        ledger = ledger_of(rank, adapter(pool))
        (channel,) = pool._all_channels
        channel.unmap_fails = rank == 1
        ledger.close()  # raises nothing
        kept = len(ledger.inventory()), channel.freed
        channel.unmap_fails = False
        ledger.close()
        return kept, len(ledger.inventory()), channel.freed

    assert on_two_ranks(make, body) == [((1, 0), 0, 1)] * 2


def test_a_rank_that_does_not_come_to_an_entry_is_not_waited_for():  # R-D2 # C37
    def body(rank, pool):
        ledger = ledger_of(rank, adapter(pool), deadline=1.5)
        if rank == 1:
            threading.Event().wait(3)
            return True
        begun = monotonic()
        with pytest.raises(GroupClosed, match="rank 1"), ledger.scope(TARGET):
            pytest.fail("entered")
        return monotonic() - begun < 3 and names(pool) == [str(LANE)]

    assert on_two_ranks(oneshot, body) == [True, True]


def test_both_kinds_of_pool_in_one_ledger():  # R-B1 # R-C1 # C19
    def body(rank, pool):
        other = dcp(rank)
        other._channel_factory = None
        other.exchange_group = dist.group.WORLD

        def new_channel(stream):
            other._all_channels.append(FakeChannel())
            return other._all_channels[-1]

        other._new_channel = new_channel
        first = adapter(pool)
        second = B12xChannels("b12x dcp:0", other, CPU, 2 * BYTES)
        ledger = ledger_of(rank, first)
        store = PrefixStore("dcp", _get_default_store())
        group = Group("dcp:0", Electorate(store, rank, 2, "dcp:0"))
        ledger.register(second, group, lanes=(EagerLane.DCP,))
        checkpoint = ledger.checkpoint()
        with ledger.scope(PROFILE):
            assert asked(first) == asked(second) == PROFILE
        ledger.rollback(checkpoint)
        assert (names(pool), names(other)) == ([str(LANE)], [str(EagerLane.DCP)])
        ledger.close()
        return dict(ledger.inventory())

    assert on_two_ranks(oneshot, body) == [{}] * 2
