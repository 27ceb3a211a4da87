# SPDX-License-Identifier: Apache-2.0
"""One cell of the fault matrix: ranks that live a life, and a fault at one step.

Every rank profiles, captures for production, replays and closes, over a ledger
and the host transport, as a worker does. On one of them something happens at
one step: before that rank does its part of the step, and once only.
"""

import ctypes
import gc
import logging
import os
import signal
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
from tests.distributed.faults import Ending, Fault, How, Step, Then
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
OPERATION, TOGETHER, CLOSING = 0.6, 2.0, 1.5
STALL = 4.0
# From a fault to the end of a rank, at most: an operation, what was begun
# together, its rollback, the close; and what a busy machine adds.
LIMIT = OPERATION + 2 * TOGETHER + CLOSING + 4
SET_UP = 20.0
COUNT = 64

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Cell:
    """What happens, where, and to whom."""

    step: Step
    fault: Fault
    rank: int
    world: int

    def __str__(self) -> str:
        what = f"{self.step.value}, {self.fault.value}"
        return f"{what} on rank {self.rank} of {self.world}"


@dataclass(frozen=True)
class Observed:
    """What became of one rank.

    Attributes:
        ending: In the table's words.
        error: What it raised, with what is attached to it; or what it logged.
        seconds: To the end of this rank, from when it came to the step with the
            fault; or from its start, if it never came there.
        left: What should not be there any more.
    """

    ending: Ending
    error: str = ""
    seconds: float = 0
    left: tuple[str, ...] = ()


class Injected(Exception):
    """The exception of the matrix."""


class Trap:
    """Springs once, at one step, if it is set on this rank.

    Attributes:
        sprung_at: When this rank came to the step, on the monotonic clock.
    """

    def __init__(self, cell: Cell, rank: int) -> None:
        self._step: Step | None = cell.step
        self._fault = cell.fault
        self._is_set = rank == cell.rank
        self.sprung_at = time.monotonic()

    def at(self, step: Step, transport: HostChannels) -> None:
        """Called before each step, on the thread that is about to take it."""
        if step is self._step:
            self._step = None
            self.sprung_at = time.monotonic()
            transport.deadline = OPERATION  # none is missed before, on a busy machine
            if self._is_set:
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
            self.trap.at(Step.PREPARE, self)
        super().prepare(channels)

    @contextmanager
    def capture(self, channel_id) -> Iterator[None]:
        self.trap.at(Step.ENTRY, self)
        with super().capture(channel_id):
            yield
            self.trap.at(Step.EXIT, self)

    def checkpoint(self) -> Checkpoint[object]:
        self.trap.at(Step.CHECKPOINT, self)
        return super().checkpoint()

    def rollback(self, checkpoint: Checkpoint[object]) -> None:
        self.trap.at(Step.ROLLBACK, self)
        super().rollback(checkpoint)

    def close(self) -> None:
        self.trap.at(Step.CLOSE, self)
        super().close()


class PolledStore:
    """A store whose waits end in time; a FileStore counts whole seconds."""

    def __init__(self, store: Store) -> None:
        self.set, self.get, self._check = store.set, store.get, store.check

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Return when the keys are there; raise RuntimeError if they never are."""
        end = time.monotonic() + timeout.total_seconds()
        while not self._check(keys):
            if time.monotonic() > end:
                raise RuntimeError(f"{keys} never came")
            time.sleep(0.005)


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
            PolledStore(PrefixStore("segments", store)),
            max_bytes=1 << 12,
            deadline=SET_UP,
        )
        self.transport.trap = self.trap
        self.transport.prepare([EagerLane.ALLREDUCE])  # returns when all are here
        self.ledger = Ledger(
            deadline=TOGETHER,
            closing_deadline=CLOSING,
            names_demanded_by="VLLM_PCIE_ALLREDUCE_BACKEND=host",
        )
        self.ledger.register(self.transport, self.group)
        self.before = self.ledger.inventory()
        self.gave_back = False

    def profile(self) -> None:
        """A throwaway capture, given back whether or not it goes well."""
        checkpoint = self.ledger.checkpoint()
        graph = RecordedGraph(self.transport)
        try:
            self.ledger.prepare([PROFILE])
            with self.ledger.scope(PROFILE):
                self.trap.at(Step.WARM_UP, self.transport)
                self.demand_sum()
                with graph.capture():
                    self.trap.at(Step.CAPTURE, self.transport)
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
        self.gave_back = not getattr(failure, "__notes__", ())  # R-C3
        if self.gave_back:
            assert self.ledger.inventory() == self.before  # R-C2

    def serve(self) -> None:
        """The production capture, and what requests make of it."""
        graph = RecordedGraph(self.transport)
        self.ledger.prepare([TARGET])
        with self.ledger.scope(TARGET), graph.capture():
            total = self.transport.all_reduce(self.numbers())
        self.trap.at(Step.REPLAY, self.transport)
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


def run_cell(cell: Cell, allowed: Then) -> list[Observed]:
    """How each rank of a cell ended.

    Args:
        cell: Which.
        allowed: What the table lets the ranks do after a failure. To go on they
            meet, and serve; or they meet, and close.
    """

    def body(rank: int, store: Store) -> Observed:
        _die_with_the_parent()
        if cell.fault is not Fault.SIGTERM:
            signal.signal(signal.SIGTERM, _exit)
        worker = Worker(cell, rank, store)
        with _errors_logged() as logged:
            error = _live(worker, store, allowed)
        seconds = time.monotonic() - worker.trap.sprung_at
        ending = Ending(_how(error, logged), _then(worker, allowed))
        said = logged if error is None else [str(error), *_notes(error)]
        stuck = rank == cell.rank and cell.fault is not Fault.EXCEPTION
        return Observed(ending, "; ".join(said), seconds, _left(ending, stuck))

    outcomes = ranks.run(cell.world, body, deadline=SET_UP + STALL + 2 * LIMIT)
    return [_observed(outcome) for outcome in outcomes]


def _live(worker: Worker, store: Store, allowed: Then) -> BaseException | None:
    """A worker's life; what ended it, or its profile."""
    error: BaseException | None = None
    try:
        try:
            worker.profile()
        except Exception as failure:
            error = failure
        if allowed is Then.GOES_ON:
            _meet(worker, store)
            worker.transport.deadline = SET_UP
        if allowed is Then.GOES_ON or error is None:
            worker.serve()
            worker.ledger.close()
    except BaseException as failure:
        error = error or failure
    interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
    if allowed is Then.CLOSES and not interrupted:
        _meet(worker, store)
        worker.ledger.close()
    elif error is not None and allowed is not Then.GOES_ON:
        worker.ledger.abandon(repr(error))  # R-D4
        worker.ledger.close()
    return error


def _how(error: BaseException | None, logged: list[str]) -> How:
    match error:
        case None:
            return How.KEPT if logged else How.NOTHING
        case Injected() | KeyboardInterrupt() | SystemExit():
            return How.RAISES
        case Refused():
            return How.REFUSED
        case GroupClosed():
            return How.ABANDONED
        case DeadlineMissed():
            return How.MISSED
        case HostChannelError():
            return How.WAITS
    raise error


def _then(worker: Worker, allowed: Then) -> Then:
    held = worker.ledger.inventory()
    if not held:
        return Then.GOES_ON if allowed is Then.GOES_ON else Then.CLOSES
    rolled_back = worker.gave_back and held == worker.before
    return Then.ROLLS_BACK if rolled_back else Then.KEEPS


def _left(ending: Ending, stuck: bool) -> tuple[str, ...]:
    """Segments and threads that a rank's ending does not account for.

    Args:
        ending: Of the rank.
        stuck: Whether it was interrupted, or late, in something that holds a
            daemon thread until the process ends.
    """
    gc.collect()
    left = [] if stuck else _threads()
    if ending.then in (Then.GOES_ON, Then.CLOSES):
        maps = Path("/proc/self/maps").read_text().splitlines()
        left += [line for line in maps if "/memfd:vllm:" in line]
    return tuple(left)


def _threads() -> list[str]:
    """Threads beside this one that do not end by themselves."""
    others = [t for t in threading.enumerate() if t is not threading.current_thread()]
    for thread in others:  # one has its result out before it ends
        thread.join(1)
    return [thread.name for thread in others if thread.is_alive()]


def _observed(outcome: ranks.Outcome) -> Observed:
    assert not outcome.late, "a rank hangs"
    if outcome.status < 0:
        killer = signal.Signals(-outcome.status).name
        return Observed(Ending(How.DIES, Then.GONE), killer)
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


def _meet(worker: Worker, store: Store) -> None:
    """Wait for all ranks, as an executor would before its next step."""
    met = PolledStore(PrefixStore("met", store))
    met.set(str(worker.rank), b"here")
    everyone = [str(rank) for rank in range(worker.world)]
    met.wait(everyone, timedelta(seconds=LIMIT))


@contextmanager
def _errors_logged() -> Iterator[list[str]]:
    """What the ledger logs as an error meanwhile."""
    handler = logging.Handler(logging.ERROR)
    messages: list[str] = []
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("vllm")
    before, logger.handlers = logger.handlers, [handler]
    try:
        yield messages
    finally:
        logger.handlers = before


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _exit(number: int, frame: object) -> None:
    """What a worker does on SIGTERM, if it lives to do it."""
    raise SystemExit(f"signal {number}")


def _die_with_the_parent() -> None:
    """Ranks of a cell are the children of a process that may be killed itself."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
