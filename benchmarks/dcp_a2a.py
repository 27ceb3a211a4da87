# SPDX-License-Identifier: Apache-2.0
"""DCP's exchange over channels, beside vLLM's NCCL path.

Run as ``python -m benchmarks.dcp_a2a [--ranks N] [--rounds N]`` on a machine with
GPUs, with the built vLLM installed. Prints a Markdown table of medians of ratios, a
batch size a line: above 1, NCCL takes longer. Both ways are captured into graphs,
which take turns; each replay makes a few exchanges in a row, of a query and of the
attention over it, and rank 0's clock counts. Ranks that share a GPU take turns on
it, so that their ratios say nothing of several GPUs.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tests import gpus
from tests.distributed.b12x_ranks import SWITCHES, TARGET
from tests.distributed.dcp_ranks import Rank, decode_context_parallel
from vllm.distributed import parallel_state
from vllm.v1.attention.ops.dcp_utils import MLADCPManager

BATCHES = [1, 2, 4, 8, 16, 32, 64]
HEADS, HEAD_SIZE, QUERY_HEAD_SIZE = 16, 512, 576  # a rank's, of DeepSeek
IN_A_ROW = 8
LAST_SECONDS = 280.0


class Ways(NamedTuple):
    """Graphs of one exchange both ways, and what keeps its tensors."""

    over_b12x: torch.cuda.CUDAGraph
    over_nccl: torch.cuda.CUDAGraph
    exchange: Callable[[], None]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="2, 4 or 8")
    parser.add_argument("--rounds", type=int, default=100, help="per batch size")
    given = parser.parse_args(arguments)

    def body(rank: int, device: torch.device) -> tuple[str, list[float]]:
        groups = decode_context_parallel(given.ranks, given.ranks, device, "nccl")
        with groups as here:
            return torch.cuda.get_device_name(device), measure(here, given.rounds)

    environment = SWITCHES | {"VLLM_DCP_A2A_MAX_TOKENS": str(BATCHES[-1])}
    name, ratios = gpus.values(given.ranks, body, LAST_SECONDS, **environment)[0]
    shared = f"{given.ranks} ranks on {min(given.ranks, gpus.GPUS)} of {name}"
    print(
        f"{shared}, torch {torch.__version__}, {HEADS} heads a rank of {HEAD_SIZE}, "
        f"queries of {QUERY_HEAD_SIZE}, bfloat16, median of {given.rounds} rounds\n\n"
        "| tokens | NCCL / b12x |\n|---:|---:|"
    )
    for batch, ratio in zip(BATCHES, ratios, strict=True):
        print(f"| {batch} | {ratio:.2f} |")


def measure(here: Rank, rounds: int) -> list[float]:
    """One rank's part: the ratio of each batch size."""
    layer = MLADCPManager(
        here.config,
        here.device,
        num_heads=HEADS,
        query_head_dim=QUERY_HEAD_SIZE,
        output_head_dim=HEAD_SIZE,
        query_dtype=torch.bfloat16,
        output_dtype=torch.bfloat16,
        padded_num_heads=None,
        is_lse_base_on_e=True,
        use_pcp=False,
    )
    assert layer.over_channels
    with parallel_state.graph_capture(here.device, channel_id=TARGET) as context:
        ways = [captured(here, layer, batch, context.stream) for batch in BATCHES]
    return [ratio(way.over_b12x, way.over_nccl, rounds) for way in ways]


def captured(
    here: Rank, layer: MLADCPManager, batch: int, stream: torch.cuda.Stream
) -> Ways:
    """Graphs of exchanges over b12x and over NCCL."""
    shape = (batch, HEADS, QUERY_HEAD_SIZE)
    query = torch.randn(shape, device=here.device).bfloat16()
    part = torch.randn(batch, HEADS * here.world, HEAD_SIZE, device=here.device)
    part, lse = part.bfloat16(), torch.randn(part.shape[:2], device=here.device)

    def exchange() -> None:
        for _ in range(IN_A_ROW):
            layer.query_gather(query)
            layer.combine(part, lse, seq_lens=None, query_start_loc=None)

    channels, before = here.group.dcp_channels, launches(here)
    over_b12x = graph_of(exchange, stream)
    assert launches(here) == before + 2 * IN_A_ROW
    here.group.dcp_channels = None
    try:
        over_nccl = graph_of(exchange, stream)
    finally:
        here.group.dcp_channels = channels
    assert launches(here) == before + 2 * IN_A_ROW
    return Ways(over_b12x, over_nccl, exchange)


def launches(here: Rank) -> int:
    """How many are recorded in graphs, over channels."""
    return sum(sum(usage.recorded.values()) for usage in here.ledger.usage())


def graph_of(
    exchange: Callable[[], None], stream: torch.cuda.Stream
) -> torch.cuda.CUDAGraph:
    """A graph, after a warm-up; the scope of its owner is open."""
    exchange()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        exchange()
    return graph


def ratio(
    over_b12x: torch.cuda.CUDAGraph, over_nccl: torch.cuda.CUDAGraph, rounds: int
) -> float:
    """Median time over NCCL, in times of that over b12x."""
    times: list[list[float]] = [[], []]
    for turn in range(rounds + rounds // 10):
        for graph, taken in zip((over_b12x, over_nccl), times, strict=True):
            torch.distributed.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= rounds // 10:  # the first tenth warms up
                taken.append(begin.elapsed_time(end))
    return statistics.median(nccl / b12x for b12x, nccl in zip(*times, strict=True))


if __name__ == "__main__":
    main()
