# SPDX-License-Identifier: Apache-2.0
"""What a channel takes of a rank's memory, by world size and cutoff.

``python -m tests.distributed.memory`` prints it as docs/memory.md;
test_b12x_memory.py holds it against what b12x's own allocator asks for.
"""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

from b12x.comm.pcie import pcie_oneshot

from vllm.distributed.device_communicators.b12x_pcie_all_reduce import (
    WORLD_SIZES,
    channel_bytes,
    slot_bytes,
)

KIB = 1 << 10
CUTOFFS = {
    "64KB, fused 84KB (default)": (64 * KIB, 84 * KIB),
    "256KB": (256 * KIB, 256 * KIB),
    "1MB": (1024 * KIB, 1024 * KIB),
    "8MB": (8192 * KIB, 8192 * KIB),
}

# Of b12x, by which it decides whether a slot holds one share a rank.
_AS_SHIPPED = (False, False, False, True)


def pool_of(world: int, *, sharded: bool) -> SimpleNamespace:
    """What the arithmetic looks at of a pool of so many ranks."""
    return SimpleNamespace(
        world_size=world,
        _sharded_eager_storage=sharded,
        _signal_bytes=pcie_oneshot._CuTeOneshotBackend.meta_size(),
    )


def shipped_pool(world: int) -> SimpleNamespace:
    """The same, with none of b12x's variables set."""
    sharded = pcie_oneshot._uses_sharded_eager_storage(world, _AS_SHIPPED)
    return pool_of(world, sharded=sharded)


def size(world: int, all_reduce_bytes: int, fused_bytes: int) -> int:
    """Bytes a channel and rank, with b12x as it is shipped."""
    slot = slot_bytes(all_reduce_bytes, fused_bytes)
    return channel_bytes(shipped_pool(world), slot)


_INTRODUCTION = """\
# What a channel takes

<!-- Written by `python -m tests.distributed.memory > docs/memory.md`. -->

Bytes that b12x asks for on each rank, for one channel of the all-reduce: flags, two
staging slots that hold the larger of the two cutoffs, and three tables of pointers.
There is a channel for each owner of graphs and one for eager use, and the table that
vLLM logs once its captures are done has the same number. The driver may reserve more,
2 MiB at a time.

With eight ranks b12x's fused form keeps one share a rank in each slot, hence the
jump; `B12X_PCIE_TP8_OWNER_REDUCE=0`, alike on all ranks, takes it away. The variables
`B12X_PCIE_TP2_REMOTE_PUSH`, `B12X_PCIE_TP4_REMOTE_PUSH` and `B12X_PCIE_ONESHOT_PUSH`
do the same to other sizes, and are off unless set.
"""


def _rows() -> Iterator[Sequence[str]]:
    yield "ranks", *CUTOFFS
    for world in WORLD_SIZES:
        sizes = (size(world, *cutoffs) for cutoffs in CUTOFFS.values())
        yield str(world), *(f"{bytes_:,}" for bytes_ in sizes)


def document() -> str:
    """docs/memory.md."""
    first, *others = (f"| {' | '.join(row)} |\n" for row in _rows())
    columns = len(CUTOFFS)
    return f"{_INTRODUCTION}\n{first}|---|{'---:|' * columns}\n{''.join(others)}"


if __name__ == "__main__":
    print(document(), end="")
