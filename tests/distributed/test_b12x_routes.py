# SPDX-License-Identifier: Apache-2.0
"""Which way a tensor goes: alike on all ranks, and never where b12x refuses it."""

import os
import random
from types import SimpleNamespace

import pytest
import torch
from b12x.comm.pcie.pcie_oneshot import PCIeOneshotAllReduce

from tests import ranks
from vllm.distributed.device_communicators.b12x_pcie_all_reduce import (
    DTYPES,
    MAX_FUSED_ROWS,
    B12xAllReduce,
    slot_bytes,
)

DEADLINE = 60
CPU = torch.device("cpu")
CUTOFFS = {"all_reduce_bytes": 64 << 10, "fused_bytes": 84 << 10}
OTHER_DTYPES = (torch.float64, torch.int32, torch.uint8, torch.bool, torch.complex64)


def reducer(rank=0, **cutoffs):
    """The transport that decides; it is asked for nothing else here."""
    sizes = CUTOFFS | cutoffs
    return B12xAllReduce("b12x tp:0", None, CPU, 0, rank=rank, world=2, **sizes)


def b12x_channel(most):
    """What b12x's own checks look at, of a channel with staging of so many bytes."""
    channel = SimpleNamespace(
        _closed=False,
        device=CPU,
        max_size=most,
        _check_stream=lambda: None,
        _prepare_input=lambda tensor, pointers: None,
        _ptr=0,
        _ext=SimpleNamespace(all_reduce_fused_add_rms_norm=lambda *arguments: None),
    )
    channel.should_allreduce = lambda tensor: takes(channel, tensor)
    return channel


def takes(channel, tensor):
    return PCIeOneshotAllReduce.should_allreduce(channel, tensor)


def strided(tensor, chance):
    """The tensor, or a view of it that is laid out in another way."""
    kind = chance.randrange(6)
    if kind == 0 and tensor.dim() > 1:
        return tensor.transpose(0, -1)
    if kind == 1 and tensor.dim() and tensor.shape[0] > 1:
        return tensor[:: chance.randrange(1, 3)]
    if kind == 2 and tensor.dim() and tensor.shape[-1] > 8:
        return tensor[..., : chance.randrange(1, 9)]
    if kind == 3 and tensor.dim():
        return tensor[:1].expand(tensor.shape)
    if kind == 4:  # contiguous, and begins anywhere
        start = chance.randrange(9)
        flat = torch.empty(start + tensor.numel(), dtype=tensor.dtype)
        return flat[start:].view(tensor.shape)
    return tensor


def is_packed(tensor):
    """What b12x's kernels assume, and no code of b12x checks."""
    return tensor.data_ptr() % 16 == 0


def shapes(chance, count):
    """Shapes, most of them near a limit of size, rows or alignment."""
    for _ in range(count):
        hidden = chance.choice((0, 1, 3, 7, 8, 64, 896, 1000, 1024, 4096, 7168))
        rows = chance.choice((0, 1, 2, 5, 16, MAX_FUSED_ROWS, MAX_FUSED_ROWS + 1))
        yield chance.choice(((), (hidden,), (rows, hidden), (2, rows, hidden)))


def tensors(seed, count):
    """The same tensors, as far as ranks have to agree, for the same seed."""
    chance = random.Random(seed)
    for shape in shapes(chance, count):
        dtype = chance.choice(DTYPES + DTYPES + OTHER_DTYPES)
        yield strided(torch.empty(shape, dtype=dtype), chance)


def fused_arguments(tensor, chance):
    """A residual and a weight that fit, or one of them does not."""
    residual = torch.empty_like(tensor)
    weight = torch.empty(tensor.shape[-1:], dtype=tensor.dtype)
    odd = chance.randrange(6)
    if odd == 0:
        residual = torch.empty((2, *tensor.shape), dtype=tensor.dtype)
    elif odd == 1:
        weight = torch.empty((*tensor.shape[-1:], 2), dtype=tensor.dtype)[..., 0]
    elif odd == 2:
        weight = torch.empty(weight.shape[0] + 1 if weight.dim() else 1)
    elif odd == 3:
        weight = torch.empty(weight.numel() + 1, dtype=tensor.dtype)[1:]
    return residual, weight


def decisions(transport, seed, count=500):
    """(plain, fused) for each of the tensors."""
    chance = random.Random(seed + 1)
    taken = []
    for tensor in tensors(seed, count):
        fits = transport.should_fuse_add_rms_norm(
            tensor, *fused_arguments(tensor, chance)
        )
        taken.append((transport.should_all_reduce(tensor), fits))
    return taken


def test_two_ranks_in_different_states_decide_alike():  # R-E2 # C34
    def body(rank, store):
        kept = []
        if rank == 1:
            # what must not matter: variables, free memory, other tensors, errors
            os.environ["VLLM_PCIE_ONESHOT_ALLREDUCE_MAX_SIZE"] = "1KB"
            os.environ["B12X_PCIE_ONESHOT_PUSH"] = "1"
            torch.manual_seed(7)
            kept = [torch.ones(1 << n) for n in range(20)]
        decided = decisions(reducer(rank), seed=5)
        return decided, len(kept)

    (first, none), (second, some) = ranks.values(2, body, DEADLINE)
    assert (none, some) == (0, 20)
    assert first == second
    for route in (0, 1):  # both ways are taken often enough to mean something
        assert 10 < sum(taken[route] for taken in first) < 490


@pytest.mark.parametrize(
    "cutoffs",
    [CUTOFFS, {"all_reduce_bytes": 1000, "fused_bytes": 0}, {"all_reduce_bytes": 0}],
    ids=["default", "odd", "fused only"],
)
def test_b12x_takes_all_that_is_admitted(cutoffs):  # R-E2
    sizes = CUTOFFS | cutoffs
    transport = reducer(**sizes)
    channel = b12x_channel(slot_bytes(sizes["all_reduce_bytes"], sizes["fused_bytes"]))
    chance = random.Random(12)
    admitted = 0
    for tensor in tensors(11, 500):
        residual, weight = fused_arguments(tensor, chance)
        if transport.should_all_reduce(tensor):
            admitted += 1
            assert takes(channel, tensor), (tensor.shape, tensor.dtype)
            assert is_packed(tensor), tensor.storage_offset()
        if transport.should_fuse_add_rms_norm(tensor, residual, weight):
            admitted += 1
            PCIeOneshotAllReduce._all_reduce_fused_on_device(
                channel, tensor, residual, weight, 1e-6
            )
            assert tensor.numel() // tensor.shape[-1] <= MAX_FUSED_ROWS
            assert all(map(is_packed, (tensor, residual, weight)))
    assert admitted > 5


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        torch.empty(4, 0, 8),
        torch.empty(1),
        torch.empty(7, dtype=torch.bfloat16),
        torch.empty(()),
        torch.empty(8, 8).t(),
        torch.empty(8, 16)[:, :8],
        torch.empty(1, 8).expand(8, 8),
        torch.empty(16)[::2],
        torch.empty(9)[1:],
        torch.empty(3, 12, dtype=torch.bfloat16)[1:],  # starts at byte 24
        torch.empty(8, dtype=torch.float64),
        torch.empty(8, dtype=torch.int32),
        torch.empty(1, (64 << 10) // 4 + 4),
    ],
)
def test_what_is_empty_odd_strided_or_large_takes_nccl(tensor):  # R-E2
    assert not reducer().should_all_reduce(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cutoffs_are_met_and_not_passed(dtype):  # R-E2 # R-F3
    size = torch.empty((), dtype=dtype).element_size()
    transport = reducer(all_reduce_bytes=1024, fused_bytes=2048)

    def plain(nbytes):
        return transport.should_all_reduce(torch.empty(nbytes // size, dtype=dtype))

    def fused(nbytes):
        tensor = torch.empty(2, nbytes // size // 2, dtype=dtype)
        return transport.should_fuse_add_rms_norm(tensor, tensor, tensor[0])

    assert [plain(n) for n in (16, 1024, 1040)] == [True, True, False]
    assert [fused(n) for n in (32, 2048, 2080)] == [True, True, False]


def test_a_cutoff_of_zero_turns_one_form_off_and_not_the_other():  # R-F3
    tensor = torch.empty(2, 8)
    plain = reducer(fused_bytes=0)
    fused = reducer(all_reduce_bytes=0)
    assert plain.should_all_reduce(tensor)
    assert not plain.should_fuse_add_rms_norm(tensor, tensor, tensor[0])
    assert not fused.should_all_reduce(tensor)
    assert fused.should_fuse_add_rms_norm(tensor, tensor, tensor[0])


@pytest.mark.parametrize(
    ("shape", "taken"),
    [
        ((MAX_FUSED_ROWS, 64), True),
        ((MAX_FUSED_ROWS + 1, 64), False),
        ((6, 6, 64), True),
        ((6, 7, 64), False),
        ((64,), True),
        ((4, 6), False),  # a row of 24 bytes
    ],
)
def test_rows_are_counted_over_all_leading_dimensions(shape, taken):  # R-E2
    tensor = torch.empty(shape)
    weight = torch.empty(shape[-1])
    assert reducer().should_fuse_add_rms_norm(tensor, tensor, weight) == taken
