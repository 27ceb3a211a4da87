# SPDX-License-Identifier: Apache-2.0
"""The life of graph channels, replayed on the host transport without a GPU.

Each rank is a process. They profile with throwaway graphs and roll them back,
capture the graphs of three owners, launch these in opposite orders from two
threads, reduce outside any graph, and take everything down. Every sum is
checked; what is printed is what happened.
"""

import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed import FileStore, PrefixStore

from vllm.distributed.device_communicators.host_channels import HostChannels
from vllm.distributed.device_communicators.host_graphs import RecordedGraph
from vllm.distributed.device_communicators.host_library import MAX_WORLD, MIN_WORLD
from vllm.distributed.graph_channels.identity import (
    ChannelId,
    EagerLane,
    Owner,
    Phase,
    catalogue,
)
from vllm.distributed.graph_channels.ledger import Ledger
from vllm.distributed.graph_channels.processes import in_ranks
from vllm.distributed.graph_channels.scope import owner_scope
from vllm.distributed.graph_channels.together import Group
from vllm.distributed.graph_channels.vote import Electorate

RANKS = range(MIN_WORLD, MAX_WORLD + 1)

# The target's scope has the draft and the encoder inside it, as on the V1 runner.
_INNER = (Owner.DRAFT, Owner.ENCODER)
_OWNERS = (Owner.TARGET, *_INNER)
_ELEMENTS = 1024
_DEADLINE = 20.0
_WHOLE_SECONDS = 300.0


@dataclass
class Tally:
    """What happened on one channel.

    Attributes:
        size: Bytes of the channel on this rank.
        done: Replays, or eager calls.
        wrong: How many of the sums were not the sum.
    """

    size: int
    done: int = 0
    wrong: int = 0


@dataclass
class Report:
    """What one rank saw.

    Attributes:
        channels: A tally for each channel's name.
        profiled: Bytes that profiling allocated for a while.
        rolled_back: Whether names and bytes were as before afterwards; None if it
            did not come to that.
        left: Channels that were there after the end.
        error: What went wrong, if the rank did not get to the end.
    """

    channels: dict[str, Tally] = field(default_factory=dict)
    profiled: int = 0
    rolled_back: bool | None = None
    left: int = 0
    error: str | None = None

    @property
    def good(self) -> bool:
        """Whether every sum was right and nothing is left."""
        right = all(tally.done and not tally.wrong for tally in self.channels.values())
        return bool(right and self.rolled_back and not self.left and not self.error)


@dataclass
class _Captured:
    """A recorded all-reduce with the buffers that it works on."""

    graph: RecordedGraph
    source: torch.Tensor
    total: torch.Tensor


class _Rank:
    """One rank of the demonstration."""

    def __init__(
        self, rank: int, world: int, path: str, rounds: int, report: Report
    ) -> None:
        self.rank, self.world, self.rounds = rank, world, rounds
        store = FileStore(path, world)
        self.transport = HostChannels(
            "host all-reduce",
            rank,
            world,
            PrefixStore("segments", store),
            max_bytes=4 * _ELEMENTS,
            deadline=_DEADLINE,
        )
        self.ledger = Ledger(
            deadline=_DEADLINE, closing_deadline=_DEADLINE, names_demanded_by="the demo"
        )
        group = Group("demo", Electorate(store, rank, world, "demo"))
        self.ledger.register(self.transport, group, lanes=(EagerLane.ALLREDUCE,))
        self.report = report

    def live(self) -> None:
        """From the first profile to the last close."""
        self.profile()
        self.ledger.prepare(catalogue(_OWNERS, Phase.PRODUCTION))
        graphs = self.capture(Phase.PRODUCTION)
        self.tally()
        self.replay_against_each_other(graphs)
        self.reduce_eagerly()
        graphs.clear()
        self.ledger.close()
        self.report.left = sum(map(len, self.ledger.inventory().values()))

    def profile(self) -> None:
        before = self.ledger.inventory()
        checkpoint = self.ledger.checkpoint()
        graphs = self.capture(Phase.PROFILE)
        self.report.profiled = _total(self.ledger.inventory()) - _total(before)
        graphs.clear()
        self.ledger.rollback(checkpoint)
        self.report.rolled_back = self.ledger.inventory() == before

    def capture(self, phase: Phase) -> dict[Owner, _Captured]:
        """Graphs of all owners, the inner ones captured inside the target's scope."""
        graphs = {}
        with self.ledger.scope(ChannelId(Owner.TARGET, phase)):
            graphs[Owner.TARGET] = self._record()
            for owner in _INNER:
                with owner_scope(owner):
                    graphs[owner] = self._record()
        return graphs

    def _record(self) -> _Captured:
        source = torch.zeros(_ELEMENTS)
        self.transport.all_reduce(source)  # a warm-up: it runs on the scope's channel
        graph = RecordedGraph(self.transport)
        with graph.capture():
            total = self.transport.all_reduce(source)
        return _Captured(graph, source, total)

    def tally(self) -> None:
        for names in self.ledger.inventory().values():
            self.report.channels |= {name: Tally(size) for name, size in names.items()}

    def replay_against_each_other(self, graphs: dict[Owner, _Captured]) -> None:
        """One thread an owner, begun in another order on every other rank."""
        owners = list(graphs) if self.rank % 2 else list(reversed(graphs))
        failures: list[BaseException] = []

        def work(owner: Owner) -> None:
            try:
                self._replay(owner, graphs[owner])
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=work, args=(owner,)) for owner in owners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def _replay(self, owner: Owner, captured: _Captured) -> None:
        tally = self.report.channels[str(ChannelId(owner, Phase.PRODUCTION))]
        weight = 1 + _OWNERS.index(owner)
        for turn in range(self.rounds):
            captured.source.fill_(self._value(weight, turn))
            captured.graph.replay()
            self._count(tally, captured.total, weight, turn)

    def reduce_eagerly(self) -> None:
        tally = self.report.channels[str(EagerLane.ALLREDUCE)]
        for turn in range(self.rounds):
            tensor = torch.full((_ELEMENTS,), self._value(7, turn))
            self._count(tally, self.transport.all_reduce(tensor), 7, turn)

    def _value(self, weight: int, turn: int) -> float:
        # Small integers, so that sums are exact; different for all that could mix.
        return float(weight * (turn % 997) + self.rank)

    def _count(self, tally: Tally, total: torch.Tensor, weight: int, turn: int) -> None:
        ranks = self.world * (self.world - 1) // 2
        expected = float(self.world * weight * (turn % 997) + ranks)
        tally.done += 1
        tally.wrong += not bool((total == expected).all())


def run(world: int, rounds: int) -> int:
    """Run the demonstration and print what happened.

    Args:
        world: How many ranks, one process each.
        rounds: How often each graph is replayed.

    Returns:
        0 if every sum was right on every rank and nothing was left, 1 if not, and
        130 after an interrupt. No process is left.
    """
    print(f"{world} ranks, one process each, reducing over shared memory", flush=True)
    started = time.monotonic()
    try:
        answers = in_ranks(
            world, lambda rank, path: _live(rank, world, path, rounds), _WHOLE_SECONDS
        )
    except KeyboardInterrupt:
        print("interrupted; every rank was ended", file=sys.stderr)
        return 130
    reports = [answer.value or Report(error=answer.error) for answer in answers]
    _print(reports)
    good = all(report.good for report in reports)
    seconds = time.monotonic() - started
    said = "every sum was right, nothing is left" if good else "NOT as it should be"
    print(f"{said} ({seconds:.1f} s)")
    return 0 if good else 1


def _live(rank: int, world: int, path: str, rounds: int) -> Report:
    report = Report()
    try:
        _Rank(rank, world, path, rounds, report).live()
    except Exception as error:
        report.error = f"rank {rank}: {type(error).__name__}: {error}"
    return report


def _print(reports: list[Report]) -> None:
    fullest = max(reports, key=lambda report: len(report.channels))
    if any(report.rolled_back is not None for report in reports):
        back = all(report.rolled_back is not False for report in reports)
        kept = "names and bytes are as before" if back else "NOT all of it came back"
        profiled = max(report.profiled for report in reports) // 1024
        print(f"profiling took {profiled} KiB and was rolled back: {kept}")
    rows = [("channel", "owner", "KiB", "replays", "wrong sums")]
    for name, tally in fullest.channels.items():
        wrong = sum(r.channels[name].wrong for r in reports if name in r.channels)
        owner = name.split(":")[1]
        rows.append((name, owner, f"{tally.size // 1024}", f"{tally.done}", f"{wrong}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, owner, *numbers in rows:
        left = f"  {name:<{widths[0]}}  {owner:<{widths[1]}}"
        columns = zip(numbers, widths[2:], strict=True)
        print(left + "".join(f"  {text:>{width}}" for text, width in columns))
    for report in reports:
        if report.error is not None:
            print(report.error, file=sys.stderr)


def _total(inventory: Mapping[str, Mapping[str, int]]) -> int:
    return sum(sum(names.values()) for names in inventory.values())
