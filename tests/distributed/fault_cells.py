# SPDX-License-Identifier: Apache-2.0
"""One cell of the fault matrix: ranks that live a life, and a fault at one step.

Every rank profiles, captures for production, replays and closes, over a ledger
and the host transport, as a worker does. On one of them something happens at
one step: before that rank does its part of the step, and once only.
"""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import PrefixStore, Store

from tests import ranks
from tests.distributed.faults import Fault, Step
from tests.host import PROFILE, TARGET
from vllm.distributed.device_communicators.host_channels import HostChannels
from vllm.distributed.device_communicators.host_graphs import RecordedGraph
from vllm.distributed.device_communicators.host_segments import HostChannelError
from vllm.distributed.graph_channels.deadline import DeadlineMissed
from vllm.distributed.graph_channels.identity import EagerLane
from vllm.distributed.graph_channels.ledger import GraphChannelsCheckpoint, Ledger
from vllm.distributed.graph_channels.together import Group, Refused
from vllm.distributed.graph_channels.transport import Checkpoint
from vllm.distributed.graph_channels.vote import Electorate, GroupClosed

# An operation gives up before a vote does: a rank whose peer is missing in one
# comes to the vote on the rollback while that peer still waits there.
OPERATION, TOGETHER, CLOSING = 0.3, 1.2, 1.2
STALL = 3.0
# For one cell: the fault, an operation, the votes of a rollback and of a close.
LIMIT = STALL + OPERATION + 2 * TOGETHER + CLOSING + 3
COUNT = 64


@dataclass(frozen=True)
class Cell:
    """What happens, where, and to whom."""

    step: Step
    fault: Fault
    rank: int
    world: int

    def __str__(self) -> str:
        return f"{self.step}, {self.fault} on rank {self.rank} of {self.world}"


@dataclass(frozen=True)
class Ending:
    """What became of one rank.

    Attributes:
        words: How it ended, as the table says it.
        error: The text of what it raised, for a reader of a failing test.
        seconds: From the fault to the end of this rank.
        left: What should not be there any more.
    """

    words: str
    error: str = ""
    seconds: float = 0
    left: tuple[str, ...] = ()


class Injected(Exception):
    """The exception of the matrix."""


class Trap:
    """Springs once, at one step, if it is set on this rank."""

    def __init__(self, cell: Cell, rank: int) -> None:
        self._step = cell.step if rank == cell.rank else None
        self._fault = cell.fault
        self.sprung_at = time.monotonic()

    def at(self, step: Step) -> None:
        """Called before each step, on the thread that is about to take it."""
        if step is self._step:
            self._step = None
            self.sprung_at = time.monotonic()
            self._spring()

    def _spring(self) -> None:
        match self._fault:
            case Fault.EXCEPTION:
                raise Injected("out of memory")
            case Fault.KEYBOARD_INTERRUPT:
                self._signal(signal.SIGINT)
            case Fault.SYSTEM_EXIT | Fault.SIGTERM:
                self._signal(signal.SIGTERM)
            case Fault.SIGKILL:
                self._signal(signal.SIGKILL)
            case Fault.STALL:
                time.sleep(STALL)

    def _signal(self, number: signal.Signals) -> None:
        os.kill(os.getpid(), number)
        # Python's handlers run on the main thread. A collective's own thread is
        # stuck from here on: it takes no part, and cannot be called back.
        time.sleep(LIMIT)


class TrappedTransport(HostChannels):
    """The host transport, with the trap before each of its parts."""

    trap: Trap

    def prepare(self, channels: Sequence[object]) -> None:
        if PROFILE in channels and PROFILE not in self.inventory():
            self.trap.at(Step.PREPARE)
        super().prepare(channels)

    @contextmanager
    def capture(self, channel_id) -> Iterator[None]:
        self.trap.at(Step.ENTRY)
        with super().capture(channel_id):
            yield
            self.trap.at(Step.EXIT)

    def checkpoint(self) -> Checkpoint[object]:
        self.trap.at(Step.CHECKPOINT)
        return super().checkpoint()

    def rollback(self, checkpoint: Checkpoint[object]) -> None:
        self.trap.at(Step.ROLLBACK)
        super().rollback(checkpoint)

    def close(self) -> None:
        self.trap.at(Step.CLOSE)
        super().close()


class Worker:
    """One rank of a cell."""

    def __init__(self, cell: Cell, rank: int, store: Store) -> None:
        self.rank, self.world = rank, cell.world
        self.trap = Trap(cell, rank)
        self.group = Group(
            "tp:0", Electorate(PrefixStore("votes", store), rank, cell.world, "tp:0")
        )
        self.transport = TrappedTransport(
            "host tp:0",
            rank,
            cell.world,
            PrefixStore("segments", store),
            max_bytes=1 << 12,
            deadline=OPERATION,
        )
        self.transport.trap = self.trap
        self.ledger = Ledger(
            deadline=TOGETHER,
            closing_deadline=CLOSING,
            names_demanded_by="VLLM_PCIE_ALLREDUCE_BACKEND=host",
        )
        self.ledger.register(self.transport, self.group, [EagerLane.ALLREDUCE])
        self.before = self.ledger.inventory()

    def profile(self) -> None:
        """A throwaway capture, given back whether or not it goes well."""
        checkpoint = self.ledger.checkpoint()
        graph = RecordedGraph(self.transport)
        try:
            self.ledger.prepare([PROFILE])
            with self.ledger.scope(PROFILE):
                self.trap.at(Step.WARM_UP)
                self.demand_sum()
                with graph.capture():
                    self.trap.at(Step.CAPTURE)
                    self.transport.all_reduce(self.numbers())
        except BaseException as failure:
            self.give_back(graph, checkpoint, failure)
            raise
        self.give_back(graph, checkpoint, None)

    def give_back(
        self,
        graph: RecordedGraph,
        checkpoint: GraphChannelsCheckpoint,
        failure: BaseException | None,
    ) -> None:
        """Graphs first, then the channels that they used."""
        graph.reset()
        self.ledger.rollback(checkpoint, failure)

    def serve(self) -> None:
        """The production capture, and what requests make of it."""
        graph = RecordedGraph(self.transport)
        self.ledger.prepare([TARGET])
        with self.ledger.scope(TARGET), graph.capture():
            total = self.transport.all_reduce(self.numbers())
        self.trap.at(Step.REPLAY)
        graph.replay()
        assert torch.equal(total, self.expected())
        self.demand_sum()

    def demand_sum(self) -> None:
        """Reduce on the scope's channel; outside any, on the eager lane."""
        assert torch.equal(self.transport.all_reduce(self.numbers()), self.expected())

    def numbers(self) -> torch.Tensor:
        """What this rank adds to a sum."""
        return torch.arange(COUNT).float() + self.rank

    def expected(self) -> torch.Tensor:
        """The sum over the ranks, exactly."""
        others = self.world * (self.world - 1) // 2
        return torch.arange(COUNT).float() * self.world + others


def run_cell(cell: Cell, goes_on: bool, closes: bool) -> list[Ending]:
    """How each rank of a cell ended.

    Args:
        cell: Which.
        goes_on: Whether the rules let the ranks go on after the failure; all of
            them serve then, once they have met.
        closes: Whether they let the ranks close after it, and no more.
    """

    def body(rank: int, store: Store) -> Ending:
        _die_with_parent()
        signal.signal(signal.SIGTERM, _exit_as_vllm_does)
        if cell.fault is Fault.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        worker = Worker(cell, rank, store)
        try:
            error = _live(worker, lambda: _meet(rank, cell.world, store), goes_on)
            words = _end(worker, error, closes)
        except (KeyboardInterrupt, SystemExit) as interrupt:
            worker.ledger.abandon(repr(interrupt))
            error, words = interrupt, _described(interrupt) + _kept(worker)
        seconds = time.monotonic() - worker.trap.sprung_at
        left = _left(worker) if "freed" in words else ()
        return Ending(words, _told(error), seconds, (*left, *_threads(left)))

    outcomes = ranks.run(cell.world, body, deadline=2 * LIMIT)
    return [_ending(outcome) for outcome in outcomes]
