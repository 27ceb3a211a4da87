# SPDX-License-Identifier: Apache-2.0
"""b12x's all-reduce on channels: what the adapter adds, and what else there is.

Run as ``python -m benchmarks.b12x_all_reduce [--ranks N] [--rounds N]`` on a
machine with GPUs, with the built vLLM installed. Prints Markdown tables:

- the time on the host of an eager call, through vLLM's communicator, which asks the
  adapter and then launches, and on the bare pool, taking turns in one run;
- the memory of 16 channels, as it is asked for and as the driver reserves it;
- the time of an all-reduce by size, eager and replayed from a graph, beside NCCL,
  vLLM's own custom all-reduce, and FlashInfer's PCIe IPC where one is installed that
  has it (0.7 does), as it was tuned here; as medians of ratios to NCCL, round by round.

Ranks that share a GPU take turns on it: there is no last table then.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests import gpus
from tests.distributed.b12x_ranks import (
    SWITCHES,
    TARGET,
    Rank,
    channel_memory,
    tensor_parallel,
)
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
from vllm.distributed.graph_channels.identity import EagerLane

SIZES = [1 << power for power in range(10, 17)]
HOST_BYTES = 8192
IN_A_ROW = 20
CHANNELS = 16
LAST_SECONDS = 900.0

Way = Callable[[torch.Tensor], object]


class Host(NamedTuple):
    """Microseconds of the host an eager call takes, medians of one run."""

    adapter: float
    bare: float


class Latency(NamedTuple):
    """A way's time in times of NCCL's; None where it is not to be had."""

    size: int
    way: str
    eager: float | None
    graph: float | None


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="2, 4, 6 or 8")
    parser.add_argument("--rounds", type=int, default=100, help="of each comparison")
    given = parser.parse_args(arguments)

    def body(
        rank: int, device: torch.device
    ) -> tuple[Host, tuple[int, int], list[Latency]]:
        with tensor_parallel(given.ranks, device) as here:
            host = host_time(here, given.rounds)
            memory = channel_memory(here, CHANNELS)
            shared = given.ranks > gpus.GPUS
            return host, memory, [] if shared else latencies(here, given.rounds)

    measured = gpus.values(given.ranks, body, LAST_SECONDS, **SWITCHES)
    host, (requested, reserved), by_size = measured[0]
    print(
        f"{given.ranks} ranks on {gpus.GPUS} GPUs ({torch.cuda.get_device_name()}), "
        f"torch {torch.__version__}, bfloat16, medians of {given.rounds} rounds of "
        f"{IN_A_ROW} calls\n\n"
        f"| host time of an eager call of {HOST_BYTES} bytes | us |\n|---|---:|\n"
        f"| the bare pool | {host.bare:.1f} |\n| the adapter | {host.adapter:.1f} |\n"
        f"| allowed: 1.1 times the bare pool's and 5 us | {1.1 * host.bare + 5:.1f} |\n"
        f"\n| {CHANNELS} channels of all ranks on a GPU | bytes |\n|---|---:|\n"
        f"| requested | {requested:,} |\n| reserved | {reserved:,} |\n"
    )
    if given.ranks > gpus.GPUS:
        print("Ranks share a GPU here, so there are no latencies to be measured.")
        return
    print("| bytes | way | eager / NCCL | graph / NCCL |\n|---:|---|---:|---:|")
    for line in by_size:
        print(
            f"| {line.size} | {line.way} | {_said(line.eager)} | {_said(line.graph)} |"
        )


def host_time(here: Rank, rounds: int) -> Host:
    """What issuing an eager call takes, through the adapter and without it."""
    pool, lane = here.comm._pool, str(EagerLane.ALLREDUCE)
    through_vllm = here.group.device_communicator.all_reduce
    tensor = torch.zeros(HOST_BYTES // 2, dtype=torch.bfloat16, device=here.device)

    def bare(tensor: torch.Tensor) -> object:
        return pool.all_reduce(tensor, channel_id=lane)  # type: ignore[attr-defined]

    assert here.comm.should_all_reduce(tensor)
    times: dict[Way, list[float]] = {through_vllm: [], bare: []}
    for turn in range(rounds + 10):
        for way, taken in times.items():
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(IN_A_ROW):
                way(tensor)
            passed = time.perf_counter() - start
            torch.cuda.synchronize()
            if turn >= 10:
                taken.append(passed / IN_A_ROW * 1e6)
    adapter, alone = map(statistics.median, times.values())
    return Host(adapter, alone)


def latencies(here: Rank, rounds: int) -> list[Latency]:
    """Each way's time in times of NCCL's, by size."""
    communicator = here.group.device_communicator
    own = CustomAllreduce(communicator.cpu_group, here.device)
    with flashinfers(communicator.device_group) as pcie_ipc:
        ways: dict[str, Way | None] = {
            "NCCL": communicator.pynccl_comm.all_reduce,
            "b12x": here.comm.all_reduce,
            "vLLM's custom": None if own.disabled else own.custom_all_reduce,
            "FlashInfer's PCIe IPC": pcie_ipc,
        }
        lines = _compared(here, own, ways, rounds)
    own.close()
    return lines


@contextmanager
def flashinfers(group: dist.ProcessGroup) -> Iterator[Way | None]:
    """FlashInfer's all-reduce over PCIe, if it can be had. All ranks call it.

    Args:
        group: Of all ranks.
    """
    try:
        workspace_class = getattr(
            import_module("flashinfer.comm"), "PcieIpcAllReduceWorkspace", None
        )
    except ImportError:
        workspace_class = None
    if workspace_class is None:
        yield None
        return
    try:
        workspace = workspace_class(group, SIZES[-1] // 2, torch.bfloat16)
    except RuntimeError as refusal:  # which all ranks share
        print(f"FlashInfer's PCIe IPC is left out: {refusal}", file=sys.stderr)
        yield None
        return

    def all_reduce(tensor: torch.Tensor) -> Any:
        workspace.rebind_stream()  # the last turn's, which has ended
        return workspace.all_reduce(tensor)

    try:
        yield all_reduce
    finally:
        workspace.destroy()


def _compared(
    here: Rank, own: CustomAllreduce, ways: dict[str, Way | None], rounds: int
) -> list[Latency]:
    tensors = [
        torch.zeros(size // 2, dtype=torch.bfloat16, device=here.device)
        for size in SIZES
    ]
    # vLLM's own registers its graphs' buffers where its capture ends.
    with (
        parallel_state.graph_capture(here.device, channel_id=TARGET) as context,
        own.capture(),
    ):
        graphs = [
            {
                name: way and _graph(way, tensor, context.stream)
                for name, way in ways.items()
            }
            for tensor in tensors
        ]
    lines = []
    for size, tensor, replays in zip(SIZES, tensors, graphs, strict=True):
        calls = {name: way and _calls(way, tensor) for name, way in ways.items()}
        eager, graph = _ratios(calls, rounds), _ratios(replays, rounds)
        lines += [
            Latency(size, name, eager[name], graph[name])
            for name in ways
            if name != "NCCL"
        ]
    return lines


def _calls(way: Way, tensor: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        for _ in range(IN_A_ROW):
            way(tensor)

    return run


def _graph(
    way: Way, tensor: torch.Tensor, stream: torch.cuda.Stream
) -> Callable[[], None]:
    way(tensor)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        _calls(way, tensor)()
    return graph.replay


def _ratios(
    runs: dict[str, Callable[[], None] | None], rounds: int
) -> dict[str, float | None]:
    """Medians of the ratios to the first, round by round."""
    times: dict[str, list[float]] = {name: [] for name, run in runs.items() if run}
    for turn in range(rounds + 5):
        for name, taken in times.items():
            run = runs[name]
            assert run is not None
            dist.barrier()
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            if turn >= 5:
                taken.append(start.elapsed_time(end))
    first = next(iter(times.values()))
    ratios: dict[str, float | None] = dict.fromkeys(runs)
    for name, taken in times.items():
        pairs = zip(taken, first, strict=True)
        ratios[name] = statistics.median(ours / base for ours, base in pairs)
    return ratios


def _said(ratio: float | None) -> str:
    return "not here" if ratio is None else f"{ratio:.2f}"


if __name__ == "__main__":
    main()
