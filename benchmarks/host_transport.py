# SPDX-License-Identifier: Apache-2.0
"""All-reduce over a host channel, beside gloo and vLLM's own shared memory.

Run as ``python -m benchmarks.host_transport [--ranks N] [--rounds N]`` with the
built vLLM installed. Prints a Markdown table of medians of ratios: in every round
the ways take turns on the same tensor, with a few calls in a row; each rank has
one thread, and rank 0's clock counts. A second table has what the ledger adds to
the bare transport.

vLLM's own communicator is in its library for AVX-512 and not in that for AVX2;
where it is missing, vLLM reduces over gloo, and the table has no figures for it.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.distributed import PrefixStore, Store

from tests import ranks
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.distributed.device_communicators.host_channels import HostChannels
from vllm.distributed.device_communicators.host_reduction import reduce_over
from vllm.distributed.graph_channels.identity import (
    ChannelId,
    EagerLane,
    Owner,
    Phase,
)
from vllm.distributed.graph_channels.ledger import Ledger
from vllm.distributed.graph_channels.together import Group
from vllm.distributed.graph_channels.vote import Electorate
from vllm.platforms import current_platform

SIZES = [1 << power for power in range(10, 23)]
TARGET = ChannelId(Owner.TARGET, Phase.PRODUCTION)
IN_A_ROW = 8  # more, and 7 ranks would sum to what float32 cannot hold
LAST_SECONDS = 600.0

Way = Callable[[torch.Tensor], object]


@dataclass(eq=False)
class Communicator:
    """Stands for vLLM's CpuCommunicator, which takes an engine to set up."""

    ranks: list[int]
    rank: int
    world_size: int
    device_group: Any
    unique_name: str = "tp:0"
    dist_module: object = distributed
    host_channels: HostChannels | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="2 to 8")
    parser.add_argument("--rounds", type=int, default=200, help="per size")
    given = parser.parse_args(arguments)
    current_platform.import_kernels()  # before the fork, so that it is paid once

    def body(rank: int, store: Store) -> tuple[list[list[float]], list[float]]:
        return measure(rank, given.ranks, given.rounds, store)

    by_size, overheads = ranks.values(given.ranks, body, LAST_SECONDS)[0]
    print(
        f"{given.ranks} ranks with one thread each, {os.cpu_count()} cores, "
        f"{platform.machine()}, torch {torch.__version__}, float32, median of "
        f"{given.rounds} rounds of {IN_A_ROW} calls\n\n"
        "| bytes | gloo / host | vLLM shm / host |\n|---:|---:|---:|"
    )
    for size, (gloo, *shm) in zip(SIZES, by_size):
        print(f"| {size} | {gloo:.2f} | {f'{shm[0]:.2f}' if shm else 'not here'} |")
    print(
        "\n| with the ledger / bare transport | ratio |\n|---|---:|\n"
        f"| eager all-reduce of {SIZES[0]} bytes, as vLLM's op | {overheads[0]:.2f} |\n"
        f"| entering a scope again | {overheads[1]:.2f} |"
    )


def measure(
    rank: int, world: int, rounds: int, store: Store
) -> tuple[list[list[float]], list[float]]:
    """One rank's part; the ratios of each size, and those of the ledger."""
    distributed.init_process_group(
        "gloo", store=PrefixStore("gloo", store), rank=rank, world_size=world
    )
    transport = HostChannels(
        "benchmark", rank, world, PrefixStore("host", store), max_bytes=SIZES[-1]
    )
    transport.prepare([EagerLane.ALLREDUCE, TARGET])
    stand_in = Communicator(list(range(world)), rank, world, distributed.group.WORLD)

    def host(tensor: torch.Tensor) -> object:
        return transport.all_reduce(tensor, out=tensor)

    def as_op(tensor: torch.Tensor) -> object:
        return torch.ops.vllm.host_channels_all_reduce(tensor, "tp:0")

    ways: list[Way] = [host, distributed.all_reduce]
    if hasattr(torch.ops._C, "init_shm_manager"):
        os.environ["VLLM_DIST_IDENT"] = f"benchmark-{os.getppid()}"
        ways.append(_CPUSHMDistributed(stand_in).all_reduce)
    by_size = [compare(ways, size, world, rounds) for size in SIZES]
    stand_in.host_channels = transport
    reduce_over(stand_in)
    eager = compare([host, as_op], SIZES[0], world, rounds)
    return by_size, [*eager, scope_overhead(transport, rank, world, rounds, store)]


def compare(ways: Sequence[Way], size: int, world: int, rounds: int) -> list[float]:
    """Median time of each further way, in times of the first one's."""
    tensor = torch.empty(size // 4)
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds + rounds // 10):
        for way, taken in zip(ways, times):
            tensor.fill_(1)
            distributed.barrier()
            start = time.perf_counter()
            for _ in range(IN_A_ROW):
                way(tensor)
            if turn >= rounds // 10:  # the first tenth warms up
                taken.append(time.perf_counter() - start)
            assert torch.all(tensor == world**IN_A_ROW), way
    return _ratios(times)


def scope_overhead(
    transport: HostChannels, rank: int, world: int, rounds: int, store: Store
) -> float:
    """What a scope of the ledger costs when entered again, in bare scopes."""
    ledger = Ledger(deadline=30.0, closing_deadline=30.0)
    electorate = Electorate(PrefixStore("votes", store), rank, world, "tp:0")
    ledger.register(transport, Group("tp:0", electorate))
    scopes: list[Callable[[ChannelId], AbstractContextManager[None]]]
    scopes = [transport.capture, ledger.scope]
    times: list[list[float]] = [[] for _ in scopes]
    for turn in range(1 + rounds):
        for scope, taken in zip(scopes, times):
            start = time.perf_counter()
            with scope(TARGET):
                pass
            if turn:  # the first entry waits for all ranks
                taken.append(time.perf_counter() - start)
    return _ratios(times)[0]


def _ratios(times: Sequence[Sequence[float]]) -> list[float]:
    """The medians of the ratios to the first, round by round."""
    first, *others = times
    return [
        statistics.median(ours / base for ours, base in zip(other, first))
        for other in others
    ]


if __name__ == "__main__":
    main()
