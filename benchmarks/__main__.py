# SPDX-License-Identifier: Apache-2.0
"""Everything that this machine can measure, as one page of Markdown.

Run as ``python -m benchmarks [--rounds N] [--plots FOLDER] > page.md`` with the built
vLLM installed. Each benchmark runs in a process of its own, with its own defaults; what
needs a GPU is named as not run where there is none. Progress goes to stderr.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm.distributed.graph_channels.machine import facts
from vllm.platforms import current_platform

LAST_SECONDS = 1800.0


@dataclass(frozen=True)
class Benchmark:
    """One module of this folder.

    Attributes:
        module: Its name.
        title: What it measures.
        needs_gpu: Whether it runs on GPUs only.
        rounds: Whether it can be told how many.
    """

    module: str
    title: str
    needs_gpu: bool = False
    rounds: bool = True


ALL = (
    Benchmark("landing", "Landing and building", rounds=False),
    Benchmark("host_transport", "The host transport"),
    Benchmark("b12x_all_reduce", "b12x's all-reduce", needs_gpu=True),
    Benchmark("dcp_a2a", "Decode context parallelism over b12x", needs_gpu=True),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page; 0 if everything that was begun went well."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, help="of each comparison")
    parser.add_argument(
        "--plots", type=Path, help="where to draw what is measured by size"
    )
    given = parser.parse_args(arguments)
    draw = None if given.plots is None else _drawing_into(given.plots)
    print("# Benchmarks\n\n| this machine | |\n|---|---|")
    for subject, fact in facts().items():
        print(f"| {subject} | {fact.replace(chr(10), '<br>')} |")
    gpu, failed = current_platform.is_cuda(), 0
    for benchmark in ALL:
        print(f"\n## {benchmark.title}\n", flush=True)
        if benchmark.needs_gpu and not gpu:
            print("Not run: no GPU here.")
            continue
        print(f"running benchmarks.{benchmark.module}", file=sys.stderr, flush=True)
        said = run(benchmark, given.rounds)
        failed += said is None
        print(said or "Failed; see what it said.", flush=True)
        if said and draw is not None:
            picture = given.plots / f"{benchmark.module}.svg"
            if draw(said, picture):
                print(f"\n![{benchmark.title}]({picture})", flush=True)
    return 1 if failed else 0


def _drawing_into(folder: Path) -> Callable[[str, Path], bool]:
    """What draws, whose library is asked for before anything is measured."""
    try:
        from benchmarks.plots import draw
    except ModuleNotFoundError as missing:
        sys.exit(
            f"error: {missing}; --plots wants pip install -c constraints.txt matplotlib"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return draw


def run(benchmark: Benchmark, rounds: int | None) -> str | None:
    """What a benchmark prints; None if it fails, which it says itself."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark.module}"]
    if rounds is not None and benchmark.rounds:
        command += ["--rounds", str(rounds)]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=LAST_SECONDS
        )
    except subprocess.TimeoutExpired:
        print(f"{benchmark.module} took too long", file=sys.stderr)
        return None
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
