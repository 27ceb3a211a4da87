# SPDX-License-Identifier: Apache-2.0
"""Serve a real model on two tensor-parallel ranks and check what it answers.

Run as ``python -m examples.serve_two_ranks WEIGHTS`` with the built vLLM
installed, where WEIGHTS is the folder of all-MiniLM-L6-v2.
"""

import argparse
import importlib.metadata
import importlib.util
import math
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

from examples.server import Server, ServerError, SharedMemoryWatch, wait_until_ready

SENTENCES = (
    "A man is eating a slice of bread.",
    "Someone is eating a slice of bread.",
    "A woman is slicing an onion in the kitchen.",
    "The central bank raised interest rates again.",
)
EATING = (0, 1)
UNRELATED = 3

_ALIKE_ABOVE = 0.85
_UNRELATED_BELOW = 0.1
_RANKS_DIFFER_BELOW = 1e-5
_START_SECONDS = 420.0
_DEMO_SECONDS = 300.0
_LOGS = Path("build/run")
# A line of the table, behind what vLLM's logger puts before it.
_OF_A_TABLE = re.compile(r"\] (Graph channels: |  (channel |vllm:|total a rank ))")

# Nothing is fetched at run time. Plugins would be imported by each of the seven
# processes, for kernels that this model has no use for.
_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # vLLM 0.28.0 cannot load on the CPU what it saves ahead of time, and compiles
    # again with a warning; the cache of torch's compiler works.
    "VLLM_USE_AOT_COMPILE": "0",
}

Vector = Sequence[float]


class WrongAnswer(Exception):
    """The model answered, and not as it should."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the whole demonstration; 0 if everything was as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path, help="the folder of the model")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        demonstrate(options.weights)
    except (ServerError, WrongAnswer) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the servers are stopped", file=sys.stderr)
        return 130
    return 0


def demonstrate(weights: Path) -> None:
    """Serve from two ranks and from one, compare, and leave nothing behind.

    Raises:
        ServerError: A server failed, or left something behind.
        WrongAnswer: An answer is not what it should be.
    """
    print(f"vllm {importlib.metadata.version('vllm')}")
    watch = SharedMemoryWatch()
    with ExitStack() as stack:
        # Both at once: starting is mostly one thread that imports.
        two, one = (
            stack.enter_context(_server(weights, ranks, bind))
            for ranks, bind in _bindings().items()
        )
        print("graph owners:")
        for name in owner_names():
            print(f"  {name}")
        print("starting vllm serve on two tensor-parallel ranks, and on one:")
        wait_until_ready([two, one], _START_SECONDS)
        watch.note([two, one])
        from_two, from_one = two.embed(SENTENCES), one.embed(SENTENCES)
        check_lane(two)
    print(table(from_two))
    check_meaning(from_two)
    difference = largest_difference(from_two, from_one)
    print(f"two ranks and one differ by {difference:.1e} at most")
    if not difference <= _RANKS_DIFFER_BELOW:
        raise WrongAnswer(f"that is more than {_RANKS_DIFFER_BELOW:.0e}")
    left = watch.left()
    if left:
        raise ServerError(
            f"the servers left files in /dev/shm: {', '.join(left)}; remove them there"
        )
    print("servers stopped; no process and no shared memory is left")
    demonstrate_channels()


def check_lane(server: Server) -> None:
    """Demand that the ranks reduce over the channel for eager use.

    Raises:
        WrongAnswer: The table of channels says something else, or is not there once.
    """
    said = [
        line.partition("] ")[2]
        for line in server.log_lines()
        if _OF_A_TABLE.search(line)
    ]
    print("what the server says of its channels:")
    for line in said:
        print(f"  {line}")
    expected = f"Graph channels: host all-reduce of tp:0, {server.ranks} ranks"
    titles = [line for line in said if line.startswith("Graph channels: ")]
    lanes = [line for line in said if line.split()[0] == "vllm:eager:allreduce"]
    if titles != [expected] or len(lanes) != 1:
        raise WrongAnswer(f"the table should be there once, for {server.ranks} ranks")


def demonstrate_channels() -> None:
    """Show the life of channels that graphs are captured on.

    Raises:
        WrongAnswer: It did not go as it should.
    """
    print("the life of graph channels, on the host transport:", flush=True)
    command = [sys.executable, "-m", "vllm.distributed.graph_channels", "demo"]
    done = subprocess.run(command, timeout=_DEMO_SECONDS)
    if done.returncode != 0:
        raise WrongAnswer(f"the demonstration ended with status {done.returncode}")


def owner_names() -> list[str]:
    """The names that the installed vLLM gives its graph owners."""
    # Read from its file: importing vllm takes ten seconds of a core, and the
    # servers are starting. This module imports nothing of vLLM.
    package = importlib.util.find_spec("vllm")
    assert package is not None and package.submodule_search_locations
    folder = Path(package.submodule_search_locations[0], "distributed/graph_channels")
    names = runpy.run_path(str(folder / "identity.py"))
    channel, phase = names["ChannelId"], names["Phase"].PRODUCTION
    return [str(channel(owner, phase)) for owner in names["Owner"]]


def table(vectors: Sequence[Vector]) -> str:
    """The cosine similarity of every two sentences, the most alike first."""
    rows = [
        f"  {value:6.3f}  {one}  |  {other}" for value, one, other in _rank(vectors)
    ]
    return "\n".join(["cosine similarity, from two ranks:", *rows])


def check_meaning(vectors: Sequence[Vector]) -> None:
    """Demand that what means the same is near, and what does not is far.

    Raises:
        WrongAnswer: It is not so.
    """
    highest, *pair = _rank(vectors)[0]
    if pair != [SENTENCES[i] for i in EATING] or highest <= _ALIKE_ABOVE:
        raise WrongAnswer(
            f"the two sentences about eating should be the nearest, above "
            f"{_ALIKE_ABOVE}; the nearest are at {highest:.3f}: {' | '.join(pair)}"
        )
    for eating in EATING:
        value = cosine(vectors[eating], vectors[UNRELATED])
        if value >= _UNRELATED_BELOW:
            raise WrongAnswer(
                f"'{SENTENCES[UNRELATED]}' should be below {_UNRELATED_BELOW} from "
                f"'{SENTENCES[eating]}', and is at {value:.3f}"
            )


def cosine(left: Vector, right: Vector) -> float:
    """The cosine of the angle between two vectors."""
    product = sum(x * y for x, y in zip(left, right, strict=True))
    return product / (math.hypot(*left) * math.hypot(*right))


def largest_difference(left: Sequence[Vector], right: Sequence[Vector]) -> float:
    """The largest difference of two numbers at the same place."""
    return max(
        abs(x - y)
        for one, other in zip(left, right, strict=True)
        for x, y in zip(one, other, strict=True)
    )


def _rank(vectors: Sequence[Vector]) -> list[tuple[float, str, str]]:
    pairs = combinations(range(len(vectors)), 2)
    found = [(cosine(vectors[i], vectors[j]), i, j) for i, j in pairs]
    return [(value, SENTENCES[i], SENTENCES[j]) for value, i, j in sorted(found)[::-1]]


def _server(weights: Path, ranks: int, bind: str) -> Server:
    settings = {
        **_SETTINGS,
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        "VLLM_PCIE_ALLREDUCE_BACKEND": "host",
    }
    return Server(weights, ranks, _LOGS / f"ranks-{ranks}.log", settings)


def _bindings() -> dict[int, str]:
    """By number of ranks: the core, or cores, that each rank's threads run on."""
    cores = sorted(os.sched_getaffinity(0))
    first, last = cores[0], cores[-1]
    return {2: f"{first}|{last}", 1: f"{first},{last}"}


if __name__ == "__main__":
    sys.exit(main())
