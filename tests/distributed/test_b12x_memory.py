# SPDX-License-Identifier: Apache-2.0
"""What F1's table says of memory is what b12x's own allocator asks for."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from b12x.comm.pcie import pcie_oneshot
from b12x.comm.pcie.pcie_oneshot import PCIeOneshotAllReduce

from tests.distributed import memory
from vllm.distributed.device_communicators import b12x_pcie_all_reduce
from vllm.distributed.device_communicators.b12x_pcie_all_reduce import (
    WORLD_SIZES,
    channel_bytes,
    slot_bytes,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "memory.md"
TABLES = 3 * 16 * 8


@pytest.fixture
def asked_for(monkeypatch):
    """(world, slot, sharded) -> the bytes that b12x's allocator asks CUDA for."""

    def measure(world, slot, sharded):
        asked = []

        def cuda_malloc(size):
            asked.append(size)
            return 1 << 20

        ipc = SimpleNamespace(
            cudaMalloc=cuda_malloc,
            cudaMemset=lambda pointer, value, size: None,
            cudaIpcGetMemHandleBytes=lambda pointer: b"handle",
            cudaIpcOpenMemHandleBytes=lambda handle: 1 << 30,
        )
        monkeypatch.setattr(dist, "get_world_size", lambda group: world)
        monkeypatch.setattr(dist, "get_rank", lambda group: 0)
        monkeypatch.setattr(
            pcie_oneshot, "_broadcast_gather_object", lambda own, group: [own] * world
        )
        PCIeOneshotAllReduce._allocate_eager_channel_buffers(
            object(),
            signal_bytes=pcie_oneshot._SIGNAL_BYTES,
            eager_buffer_bytes=slot,
            sharded_eager_storage=sharded,
            ipc=ipc,
        )
        (slab,) = asked
        return slab

    monkeypatch.setattr(
        pcie_oneshot, "_exchange_setup_failures", lambda *given, **named: [()]
    )
    monkeypatch.setattr(
        pcie_oneshot, "_require_no_retained_ipc_setup", lambda group: None
    )
    return measure


CUTOFFS = [
    (64 << 10, 84 << 10),
    (1, 0),
    (0, 1),
    (0, 84 << 10),
    (64 << 10, 0),
    (1000, 1001),
    (255, 257),
    (4096 + 16, 0),
    (1 << 20, 1 << 20),
    (8 << 20, 84 << 10),
]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("world", WORLD_SIZES)
@pytest.mark.parametrize("cutoffs", CUTOFFS, ids=str)
def test_a_channel_is_counted_to_the_byte(asked_for, world, cutoffs, sharded):
    # C45 # R-C6
    slot = slot_bytes(*cutoffs)
    pool = memory.pool_of(world, sharded=sharded)
    assert channel_bytes(pool, slot) == asked_for(world, slot, sharded) + TABLES


@pytest.mark.parametrize("cutoffs", CUTOFFS, ids=str)
def test_a_slot_holds_either_form_and_wastes_no_pack(cutoffs):  # C45
    slot = slot_bytes(*cutoffs)
    assert max(cutoffs) <= slot < max(cutoffs) + 16 and slot % 16 == 0


def test_off_is_no_slot_at_all():  # R-F3
    assert slot_bytes(0, 0) == 0


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_at_the_defaults_a_channel_takes_two_mib_at_most(world):  # C45
    assert memory.size(world, 64 << 10, 84 << 10) <= 2 << 20


def test_a_pools_tables_fit_into_what_it_is_given():  # C45
    # signals and the two slots, each one pointer a rank of b12x's largest group
    assert 3 * pcie_oneshot._POINTER_TABLE_BYTES == b12x_pcie_all_reduce._TABLE_BYTES
    assert TABLES == b12x_pcie_all_reduce._TABLE_BYTES


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_b12xs_own_pool_says_what_the_arithmetic_reads(world, monkeypatch):  # C28
    for name in ("ONESHOT_PUSH", "TP2_REMOTE_PUSH", "TP4_REMOTE_PUSH"):
        monkeypatch.delenv(f"B12X_PCIE_{name}", raising=False)
    monkeypatch.delenv("B12X_PCIE_TP8_OWNER_REDUCE", raising=False)
    pool = pcie_oneshot.PCIeOneshotAllReducePool(
        rank=0,
        world_size=world,
        device="cpu",
        channel_factory=lambda stream: pytest.fail("made a channel"),
    )
    pool._signal_bytes = pcie_oneshot._CuTeOneshotBackend.meta_size()
    slot = slot_bytes(64 << 10, 84 << 10)
    assert channel_bytes(pool, slot) == memory.size(world, 64 << 10, 84 << 10)
    pool.close()


def test_the_document_is_the_table():  # C45 # R-F1
    assert DOCUMENT.read_text() == memory.document()
