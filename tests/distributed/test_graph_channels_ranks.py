# SPDX-License-Identifier: Apache-2.0
"""The ledger on several ranks, over the host transport: all go, or none does."""

import gc
import logging
import math
import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed import PrefixStore

from tests import ranks
from tests.distributed.recording_transport import group
from tests.host import ENCODER, PROFILE, TARGET, Stream, host_channels
from vllm.distributed.device_communicators.host_channels import HostChannels
from vllm.distributed.device_communicators.host_graphs import RecordedGraph
from vllm.distributed.device_communicators.host_segments import HostChannelError
from vllm.distributed.graph_channels.identity import (
    EagerLane,
    Owner,
    Phase,
    catalogue,
)
from vllm.distributed.graph_channels.ledger import Ledger
from vllm.distributed.graph_channels.scope import open_scopes, owner_scope
from vllm.distributed.graph_channels.together import Refused
from vllm.distributed.graph_channels.vote import GroupClosed

SWITCH = "VLLM_PCIE_ALLREDUCE_BACKEND=host"
DEADLINE = 60


class Rank:
    """A worker's part of a world: its ledger, and a host transport a group."""

    def __init__(self, rank, world, store, *, groups=("tp:0",), deadline=10, closing=5):
        self.rank, self.world = rank, world
        self.ledger = Ledger(
            deadline=deadline, closing_deadline=closing, names_demanded_by=SWITCH
        )
        self.groups = [group(name, rank, world, store) for name in groups]
        self.transports = []
        for its_group in self.groups:
            own = PrefixStore(its_group.name, store)
            transport = host_channels(rank, world, own, max_bytes=1 << 12)
            transport.label = f"host {its_group.name}"
            transport.prepare([EagerLane.ALLREDUCE])
            self.ledger.register(transport, its_group)
            self.transports.append(transport)
        self.store = PrefixStore("test", store)

    @property
    def transport(self) -> HostChannels:
        return self.transports[0]

    def demand_sum(self):
        """Reduce on the scope's channel or the eager lane, exactly."""
        for transport in self.transports:
            total = transport.all_reduce(torch.arange(9.0) + self.rank)
            others = self.world * (self.world - 1) // 2
            assert torch.equal(total, torch.arange(9.0) * self.world + others)

    def recorded(self, channel_id):
        """A graph of one all-reduce, its input and its output."""
        graph, numbers = RecordedGraph(self.transport), torch.zeros(9)
        with self.ledger.scope(channel_id), graph.capture():
            total = self.transport.all_reduce(numbers)
        return graph, numbers, total

    def here(self, what):
        """Tell the others that this rank has come to a point."""
        self.store.set(what, b"here")

    def await_other(self, what):
        """Wait until a rank has come to it."""
        end = time.monotonic() + 30
        while not self.store.check([what]):
            assert time.monotonic() < end, f"nobody came to {what}"
            time.sleep(0.005)


def on_ranks(world, body, **settings):
    """What ``body(rank)`` gives on each rank of a world."""

    def of(number, store):
        return body(Rank(number, world, store, **settings))

    return ranks.values(world, of, deadline=DEADLINE)


def replay(graph, numbers, total, rank, turn):
    """Whether a replay of what ``recorded`` gave has the right sum."""
    numbers.fill_(turn + rank.rank)
    graph.replay()
    others = rank.world * (rank.world - 1) // 2
    return bool(torch.all(total == turn * rank.world + others))


@contextmanager
def errors_logged():
    """What vLLM's loggers say is an error meanwhile."""
    messages = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("vllm")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


# Scopes ---------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4])
def test_a_first_entry_ends_when_all_are_in_and_idle(world):  # R-B6
    def body(rank):
        idle_at = math.inf

        def synchronize():
            nonlocal idle_at
            time.sleep(0.1 * rank.rank)  # a device with work left
            idle_at = time.monotonic()

        rank.transport.synchronize = synchronize
        time.sleep(0.1 * rank.rank)
        with rank.ledger.scope(TARGET):
            return idle_at, time.monotonic()

    idle, entered = zip(*on_ranks(world, body))
    assert max(idle) <= min(entered)


def test_a_re_entry_waits_for_nobody():  # R-B4
    def body(rank):
        with rank.ledger.scope(TARGET):
            with owner_scope(Owner.DRAFT):
                pass
            if rank.rank == 1:
                rank.await_other("done")
                return
            with owner_scope(Owner.DRAFT):
                rank.here("done")

    on_ranks(2, body)


def test_a_late_rank_enters_no_more_than_the_early_ones():  # R-D6
    deadline = 0.8

    def body(rank):
        if rank.rank == 1:
            rank.await_other("gave up")
        began = time.monotonic()
        closed = pytest.raises(GroupClosed, match="rank 1 did not vote in time")
        with closed, rank.ledger.scope(TARGET):
            pytest.fail("entered")
        first = time.monotonic() - began
        rank.here("gave up")
        began = time.monotonic()
        with pytest.raises(GroupClosed, match="rank 1 did not vote in time"):
            rank.ledger.prepare([ENCODER])
        assert not open_scopes()
        return first, time.monotonic() - began, list(rank.transport.inventory())

    endings = on_ranks(2, body, deadline=deadline)
    for first, second, held in endings:
        assert first < deadline + 2
        assert second < deadline / 2  # what is closed is not waited for again
        assert held == [EagerLane.ALLREDUCE]


def test_members_of_a_catalogue_are_entered_in_any_order():  # R-A2 # R-B6 # C06
    def body(rank):
        members = catalogue([Owner.TARGET, Owner.ENCODER], Phase.PRODUCTION)
        # however the configuration lists them
        rank.ledger.prepare(members if rank.rank == 0 else members[::-1])
        order = members if rank.rank == 0 else members[::-1]
        graphs = {member: rank.recorded(member) for member in order}
        streams = [Stream() for _ in order]
        for stream, member in zip(streams, order):
            stream.launch(lambda m=member: results.append(replay(*graphs[m], rank, 5)))
        results = []
        for stream in streams:
            stream.synchronize()
        rank.demand_sum()
        return results, [str(name) for name in rank.transport.inventory()]

    names = ["vllm:eager:allreduce", "vllm:encoder:production"]
    names.append("vllm:target:production")
    assert on_ranks(2, body) == [([True, True], names)] * 2


def test_first_entries_of_channels_that_nobody_prepared_are_refused_on_all():  # C06
    def body(rank):
        before = rank.ledger.inventory()
        wanted = TARGET if rank.rank == 0 else ENCODER
        with pytest.raises(Refused) as refused, rank.ledger.scope(wanted):
            pytest.fail("entered")
        assert rank.ledger.inventory() == before
        with rank.ledger.scope(TARGET):  # nothing was begun: they are in step
            rank.demand_sum()
        return str(refused.value)

    for said in on_ranks(2, body):
        assert "rank 0: voted on 'capture on vllm:target:production'" in said
        assert "rank 1: voted on 'capture on vllm:encoder:production'" in said


def test_lanes_that_a_peer_could_not_prepare_are_freed_by_the_close():  # C38
    def body(rank):
        other = host_channels(rank.rank, 2, rank.store, deadline=1)
        beside = group("other", rank.rank, 2, rank.store)
        if rank.rank == 1:
            prepare = other.prepare

            def fail(channels):
                prepare(channels)
                raise MemoryError("x")

            other.prepare = fail
        with pytest.raises(RuntimeError, match="cannot prepare vllm:eager:dcp: .*x"):
            rank.ledger.register(other, beside, lanes=(EagerLane.DCP,))
        assert other.inventory()
        rank.ledger.close()
        assert not other.inventory()

    on_ranks(2, body)


def test_a_different_catalogue_is_refused_on_all():  # R-D6 # C06
    def body(rank):
        before = rank.ledger.inventory()
        with pytest.raises(Refused, match="rank 1: voted on 'prepare vllm:encoder"):
            rank.ledger.prepare([TARGET, ENCODER][rank.rank :])
        assert rank.ledger.inventory() == before
        rank.ledger.prepare([TARGET])
        return len(rank.transport.inventory())

    assert on_ranks(2, body) == [2, 2]


@pytest.mark.parametrize("groups", [(), ("tp:0",)])
def test_one_rank_passes_no_name_and_all_are_refused(groups):  # R-A5 # C05
    def body(rank):
        if not groups:  # no transport yet, and refused all the same
            rank.ledger.add_group(group("tp:1", rank.rank, 2, rank.store))
        wanted = None if rank.rank == 1 else TARGET
        with pytest.raises(Refused) as refused, rank.ledger.scope(wanted):
            pytest.fail("entered")
        with rank.ledger.scope(TARGET):
            rank.demand_sum()
        return str(refused.value)

    for said in on_ranks(2, body, groups=groups):
        assert "rank 1: " in said and "without a channel_id" in said
        assert f"with {SWITCH}" in said


def test_one_rank_runs_out_of_memory_and_leaves_alone():  # R-B5 # C40
    def body(rank):
        votes = rank.groups[0]._electorate
        began = time.monotonic()
        try:
            with rank.ledger.scope(TARGET):
                inside = votes._votes
                if rank.rank == 1:
                    raise MemoryError("out of memory")
                rank.await_other("left")  # inside, while rank 1 leaves
        except MemoryError as error:
            assert time.monotonic() - began < 5
            rank.here("left")
            said = str(error)
        else:
            said = "went on"
        assert votes._votes == inside
        assert not open_scopes() and rank.transport.active_channel() is None
        return said

    assert on_ranks(2, body) == ["went on", "out of memory"]


def test_a_rank_that_cannot_take_part_keeps_no_peer_waiting():  # R-E1 # C37
    def body(number, store):
        votes = group("tp:0", number, 2, store)
        error = "no shared memory here" if number == 1 else None
        began = time.monotonic()
        with pytest.raises(Refused, match="rank 1: no shared memory here"):
            votes.agree("use the host transport", began + 30, error=error)
        assert time.monotonic() - began < 15
        votes.agree("go on without", time.monotonic() + 30)

    ranks.values(2, body, deadline=DEADLINE)


# Disposable captures --------------------------------------------------------


def profile(rank, body=lambda: None, owners=(PROFILE,)):
    """A throwaway capture of each owner; what is done inside may raise."""
    checkpoint = rank.ledger.checkpoint()
    try:
        for owner in owners:
            with rank.ledger.scope(owner):
                body()
                rank.demand_sum()
    except BaseException as failure:
        rank.ledger.rollback(checkpoint, failure)
        raise
    rank.ledger.rollback(checkpoint)


def test_one_rank_fails_in_a_profile_and_a_second_one_works():  # R-C1 # R-C3 # C18
    def body(rank):
        rank.transport.deadline = 0.5
        before = rank.ledger.inventory()

        def fail():
            if rank.rank == 1:
                raise MemoryError("out of memory")

        expected = MemoryError if rank.rank == 1 else HostChannelError
        with pytest.raises(expected) as caught:
            profile(rank, fail)
        assert not hasattr(caught.value, "__notes__")  # it was rolled back
        assert rank.ledger.inventory() == before
        profile(rank)
        assert rank.ledger.inventory() == before
        rank.demand_sum()

    on_ranks(2, body)


def test_one_rank_fails_while_another_goes_on_to_its_next_owner():  # R-C1
    def body(rank):
        before = rank.ledger.inventory()
        encoder = catalogue([Owner.ENCODER], Phase.PROFILE)[0]
        checkpoint = rank.ledger.checkpoint()
        with pytest.raises((KeyboardInterrupt, Refused)) as caught:
            try:
                with rank.ledger.scope(PROFILE):
                    if rank.rank == 1:
                        raise KeyboardInterrupt
                with rank.ledger.scope(encoder):
                    pytest.fail("entered alone")
            except BaseException as failure:
                rank.ledger.rollback(checkpoint, failure)
                raise
        assert not hasattr(caught.value, "__notes__")
        assert rank.ledger.inventory() == before
        rank.demand_sum()
        return type(caught.value)

    assert on_ranks(2, body) == [Refused, KeyboardInterrupt]


def test_a_rank_that_is_missing_from_the_rollback_keeps_what_there_is():  # R-C1
    def body(rank):
        # As long as a vote: the rank that waits in the warm-up misses the next.
        rank.transport.deadline = 2.0

        def fail():
            if rank.rank == 1:
                raise MemoryError("out of memory")

        expected = MemoryError if rank.rank == 1 else HostChannelError
        with pytest.raises(expected) as caught:
            profile(rank, fail)
        (note,) = caught.value.__notes__
        assert "roll back: abandoned: rank 0 did not vote in time" in note
        return [str(name) for name in rank.transport.inventory()]

    kept = ["vllm:eager:allreduce", "vllm:target:profile"]
    assert on_ranks(2, body, deadline=2.0) == [kept, kept]


def test_a_hundred_profiles_leave_names_bytes_and_descriptors():  # R-C2 # C13
    owners = catalogue([Owner.TARGET, Owner.ENCODER], Phase.PROFILE)

    def held(rank):
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("/memfd:vllm:")
        return rank.ledger.inventory(), len(os.listdir("/proc/self/fd")), maps

    def body(rank):
        rank.ledger.prepare([TARGET])
        profile(rank, owners=owners)  # what is opened once, such as the store's file
        before = held(rank)
        for _ in range(100):
            profile(rank, owners=owners)
        assert held(rank) == before

    on_ranks(2, body, groups=("tp:0", "dcp:0"))


def test_a_profile_between_two_replays_leaves_the_sums_right():  # R-C2
    def body(rank):
        production = rank.recorded(TARGET)
        right = [replay(*production, rank, 1)]
        checkpoint = rank.ledger.checkpoint()
        throwaway = rank.recorded(PROFILE)
        right.append(replay(*throwaway, rank, 2))
        right.append(replay(*production, rank, 3))
        throwaway[0].reset()
        rank.ledger.rollback(checkpoint)
        return [*right, replay(*production, rank, 4)]

    assert on_ranks(2, body) == [[True] * 4] * 2


def test_one_graph_is_recorded_while_another_replays():  # R-A2
    def body(rank):
        production, stream, right = rank.recorded(TARGET), Stream(), []
        for turn in range(50):
            stream.launch(
                lambda: right.extend(replay(*production, rank, n) for n in range(20))
            )
            checkpoint = rank.ledger.checkpoint()
            throwaway = rank.recorded(PROFILE)
            right.append(replay(*throwaway, rank, turn))
            throwaway[0].reset()
            rank.ledger.rollback(checkpoint)
            stream.synchronize()
        stream.end()
        return right.count(True), right.count(False)

    assert on_ranks(2, body) == [(50 * 21, 0)] * 2


# Interrupts -----------------------------------------------------------------


def test_an_interrupt_of_a_collective_closes_the_group():  # R-C1 # R-D2 # R-D4
    def body(rank):
        if rank.rank == 0:
            with pytest.raises(GroupClosed, match="rank 1 did not vote in time"):
                rank.ledger.prepare([TARGET])
            return True
        allocate = rank.transport.prepare

        def interrupted(channels):
            allocate(channels)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(DEADLINE)  # the call stays behind

        rank.transport.prepare = interrupted
        with pytest.raises(KeyboardInterrupt):
            rank.ledger.prepare([TARGET])
        votes = rank.groups[0]._electorate._votes
        # Another call would run beside the one that was left, and out of step.
        with pytest.raises(GroupClosed, match="cut off: KeyboardInterrupt"):
            rank.ledger.prepare([TARGET])
        with errors_logged() as said:
            rank.ledger.close()
        assert len(said) == 1 and "cut off: KeyboardInterrupt" in said[0]
        return rank.groups[0]._electorate._votes == votes

    assert on_ranks(2, body, deadline=2) == [True, True]


def test_an_entry_that_ends_after_an_interrupt_is_left_again():  # R-B5
    def body(rank):
        capture = rank.transport.capture

        @contextmanager
        def slow(channel_id):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)  # the main thread has gone by then
            with capture(channel_id):
                rank.here("entered")
                yield

        if rank.rank == 1:
            rank.transport.capture = slow
        with (
            pytest.raises(KeyboardInterrupt if rank.rank else GroupClosed) as left,
            rank.ledger.scope(TARGET),
        ):
            pytest.fail("entered")
        rank.await_other("entered")
        end = time.monotonic() + 5
        while rank.transport.active_channel() and time.monotonic() < end:
            time.sleep(0.01)
        assert left.value.__traceback__  # keeps alive what the entry had in hand
        return rank.transport.active_channel(), open_scopes()

    assert on_ranks(2, body, deadline=2) == [(None, ())] * 2


# Closing --------------------------------------------------------------------


def test_closing_takes_the_memory_of_a_graph_that_still_lives():  # R-D1 # C21
    def body(rank):
        graph, numbers, total = rank.recorded(TARGET)
        assert replay(graph, numbers, total, rank, 1)
        try:
            raise ValueError("a traceback that holds the graph")
        except ValueError as error:
            kept = error
        with errors_logged() as said:
            rank.ledger.close()
        assert said == []
        assert rank.ledger.inventory() == {}
        assert "/memfd:vllm:" not in Path("/proc/self/maps").read_text()
        with pytest.raises(HostChannelError, match="rolled back or closed"):
            graph.replay()
        assert torch.all(total == 3)  # what it gave before stays
        return str(kept)

    on_ranks(2, body)


def test_a_shutdown_has_one_deadline_for_all_groups():  # R-D2
    closing = 1.5
    groups = ("tp:0", "dcp:0", "tp:1", "dcp:1")

    def body(rank):
        if rank.rank == 1:
            rank.await_other("done")
            return
        with errors_logged() as said:
            began = time.monotonic()
            rank.ledger.close()
            took = time.monotonic() - began
            rank.ledger.close()
        rank.here("done")
        return took, said, sorted(rank.ledger.inventory())

    (took, said, kept), _ = on_ranks(2, body, groups=groups, closing=closing)
    # each group has a word of 0.2 s left to say when the time is up
    assert took < closing + 0.2 * len(groups) + 1
    assert len(said) == len(groups)  # once, though close was called twice
    assert all("rank 1 did not vote in time" in line for line in said)
    assert kept == sorted(f"host {name}" for name in groups)


def test_after_an_abandon_nothing_waits_for_anybody():  # R-D4
    def body(rank):
        checkpoint = rank.ledger.checkpoint()
        with rank.ledger.scope(TARGET):
            pass
        with errors_logged() as said:
            began = time.monotonic()
            if rank.rank == 0:
                rank.ledger.abandon("SIGTERM")
                rank.ledger.rollback(checkpoint)
                closed = pytest.raises(GroupClosed, match="SIGTERM")
                with closed, rank.ledger.scope(ENCODER):
                    pytest.fail("entered")
            rank.ledger.close()
            took = time.monotonic() - began
        assert len(rank.transport.inventory()) == 2  # still owned
        return took, said

    (left, silent), (waited, said) = on_ranks(2, body, closing=1.0)
    assert left < 0.5 and silent == []
    assert waited < 1 + 1
    assert len(said) == 1 and "rank 0 did not vote in time" in said[0]
