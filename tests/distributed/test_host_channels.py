# SPDX-License-Identifier: Apache-2.0
"""The host transport's collectives: their results, and what they refuse."""

import math

import pytest
import torch
from torch.distributed import Store

from tests import ranks
from tests.host import ENCODER, TARGET, host_channels
from vllm.distributed.device_communicators import host_operations
from vllm.distributed.device_communicators.host_segments import (
    HostChannelError,
)
from vllm.distributed.graph_channels.identity import EagerLane, Owner
from vllm.distributed.graph_channels.ledger import Ledger
from vllm.distributed.graph_channels.scope import owner_scope
from vllm.distributed.graph_channels.together import Group
from vllm.distributed.graph_channels.vote import Electorate

DTYPES = list(host_operations.DTYPES)


def prepared(rank: int, world: int, store: Store, **settings):
    transport = host_channels(rank, world, store, **settings)
    transport.prepare([*EagerLane])
    return transport


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_sums_of_integers_are_exact(world):  # R-E2
    def body(rank, store):
        transport = prepared(rank, world, store)
        for count in (0, 1, 7, 1024, 1025, 100_003):
            tensor = torch.arange(count, dtype=torch.float32) * (rank + 1)
            expected = torch.arange(count) * (world * (world + 1) // 2)
            assert torch.equal(transport.all_reduce(tensor), expected.float())
            assert transport.all_reduce(tensor, out=tensor) is tensor
            assert torch.equal(tensor, expected.float())

    ranks.values(world, body, deadline=30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ranks_get_the_bits_of_a_float32_sum_in_rank_order(dtype):
    world = 4
    generator = torch.Generator().manual_seed(1)
    parts = (torch.randn(world, 5003, generator=generator) * 30).to(dtype)
    parts[0, :4] = torch.tensor([math.inf, -math.inf, math.nan, math.inf])
    parts[1, :4] = torch.tensor([1, math.inf, 1, math.inf])
    parts[:, 4] = 60000  # above what float16 can hold
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()

    def body(rank, store):
        return prepared(rank, world, store).all_reduce(parts[rank])

    sums = ranks.values(world, body, deadline=30)
    assert torch.equal(sums[0].isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(sums[0][numbers], expected.to(dtype)[numbers])
    for other in sums[1:]:
        assert torch.equal(sums[0].view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_survives_its_way_to_float32_and_back(dtype):
    every = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    neutral = torch.full_like(every, -0.0)

    def body(rank, store):
        transport = prepared(rank, 2, store)
        return transport.all_reduce(neutral if rank else every)

    for found in ranks.values(2, body, deadline=30):
        assert torch.equal(found.isnan(), every.isnan())
        number = ~every.isnan()
        assert torch.equal(
            found.view(torch.int16)[number], every.view(torch.int16)[number]
        )


def reference(parts: torch.Tensor, lses: torch.Tensor, base: float):
    """The combination in float64: of [world, batch, heads, width] and its LSEs."""
    counts = lses.isfinite()
    lses = torch.where(counts, lses.double(), -math.inf)
    largest = lses.amax(0).nan_to_num(neginf=0)
    powers = torch.pow(base, lses - largest)
    total = powers.sum(0)
    parts = torch.where(counts.unsqueeze(-1), parts.double(), 0)
    weights = (powers / total.clamp(min=1e-300)).unsqueeze(-1)
    return (weights * parts).sum(0), largest + total.log() / math.log(base)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("base", [math.e, 2.0])
@pytest.mark.parametrize("world", [2, 4])
def test_attention_over_parts_is_combined(world, base, dtype):
    generator = torch.Generator().manual_seed(2)
    shape = (world, 5, 2 * world, 300)
    parts = torch.randn(shape, generator=generator).to(dtype)
    lses = torch.randn(shape[:-1], generator=generator) * 20
    lses[0, 0], lses[0, 1], lses[0, 2] = math.nan, math.inf, -math.inf
    parts[0, :3] = math.nan  # an empty part holds whatever was there
    lses[:, 3] = -math.inf
    lses[0, 4], lses[1, 4] = 3e38, -3e38
    output, lse = reference(parts, lses, base)

    def body(rank, store):
        transport = prepared(rank, world, store)
        lse_out = torch.empty(5, 2)
        combined = transport.dcp_lse_reduce_scatter(
            parts[rank], lses[rank], is_lse_base_on_e=base != 2, lse_out=lse_out
        )
        return combined, lse_out

    for rank, (combined, lse_out) in enumerate(ranks.values(world, body, deadline=30)):
        heads = slice(2 * rank, 2 * rank + 2)
        assert combined.dtype == dtype
        torch.testing.assert_close(combined.double(), output[:, heads], **CLOSE[dtype])
        assert torch.all(combined[3] == 0) and torch.all(lse_out[3] == -math.inf)
        torch.testing.assert_close(
            lse_out.double(), lse[:, heads], rtol=1e-6, atol=1e-5
        )


# half a unit in the last place, and the float32 weights' error
CLOSE = {
    torch.float32: {"rtol": 2e-6, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-5},
    torch.float16: {"rtol": 2**-10, "atol": 1e-5},
}


def test_a_batch_of_none_is_combined():
    def body(rank, store):
        transport = prepared(rank, 2, store)
        empty = torch.empty(0, 4, 8)
        return transport.dcp_lse_reduce_scatter(empty, torch.empty(0, 4)).shape

    assert ranks.values(2, body, deadline=30) == [(0, 2, 8)] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_gathered_in_the_order_of_ranks(dtype):
    world = 3
    parts = torch.arange(world * 4 * 2 * 5).reshape(world, 4, 2, 5).to(dtype)

    def body(rank, store):
        return prepared(rank, world, store).gather_heads(parts[rank])

    for gathered in ranks.values(world, body, deadline=30):
        assert torch.equal(gathered, torch.cat(list(parts), dim=1))


def test_the_largest_message_passes_and_a_larger_one_is_refused():  # R-E2
    def body(rank, store):
        size = host_operations.lse_reduce_bytes((2, 4, 16), torch.float16)
        transport = prepared(rank, 2, store, max_bytes=size)
        part, lse = torch.ones(2, 4, 16, dtype=torch.float16), torch.zeros(2, 4)
        assert torch.all(transport.dcp_lse_reduce_scatter(part, lse) == 1)
        with pytest.raises(ValueError, match="a message of .* bytes, above the"):
            transport.dcp_lse_reduce_scatter(part.float(), lse)
        fits = torch.ones(size // 4)
        assert transport.refusal(fits) is None
        too_large = torch.ones(size // 4 + 1)
        assert "above" in transport.refusal(too_large)
        with pytest.raises(ValueError, match="a message of"):
            transport.all_reduce(too_large)
        assert torch.all(transport.all_reduce(fits) == 2)  # nothing was disturbed

    ranks.values(2, body, deadline=30)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(4, dtype=torch.int32), "of torch.int32, not of"),
        (torch.zeros(4, 4).T[:2], "not contiguous"),
        (torch.zeros(4, device="meta"), "on meta, not on the CPU"),
    ],
)
def test_other_tensors_are_refused_with_words(tensor, reason):  # R-E2
    transport = host_channels(0, 2, None)
    assert reason in transport.refusal(tensor)
    with pytest.raises(ValueError, match=reason):
        transport.all_reduce(tensor)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda t: t.all_reduce(torch.zeros(3), out=torch.zeros(4)), "out must be"),
        (lambda t: t.gather_heads(torch.zeros(3)), "batch, heads, width"),
        (
            lambda t: t.dcp_lse_reduce_scatter(torch.zeros(1, 3, 2), torch.zeros(1, 3)),
            "heads among 2 ranks evenly",
        ),
        (
            lambda t: t.dcp_lse_reduce_scatter(torch.zeros(1, 2, 2), torch.zeros(2)),
            "lse must be",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call, reason):
    with pytest.raises(ValueError, match=reason):
        call(host_channels(0, 2, None))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"world": 1}, "world must be 2 to 8, not 1"),
        ({"world": 9}, "world must be 2 to 8, not 9"),
        ({"rank": 2}, "rank must be 0 to 1, not 2"),
        ({"max_bytes": 0}, "max_bytes must be 1 to 1073741824, not 0"),
        ({"deadline": math.nan}, "deadline must be above 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, reason):  # R-F3
    with pytest.raises(ValueError, match=reason):
        host_channels(**{"rank": 0, "world": 2, "store": None} | settings)


def test_a_lane_that_was_not_prepared_is_named():  # R-B8
    with pytest.raises(HostChannelError, match="no channel vllm:eager:allreduce .*pre"):
        host_channels(0, 2, None).all_reduce(torch.zeros(1))


def test_a_silent_owner_does_not_get_the_channel_around_it():  # R-B4 # R-A2
    def body(rank, store):
        transport = host_channels(rank, 2, store)
        ledger = Ledger(deadline=5, closing_deadline=5)
        ledger.register(transport, Group("tp:0", Electorate(store, rank, 2, "tp:0")))
        ledger.silence([Owner.ENCODER])
        refused = pytest.raises(RuntimeError, match="encoder.* said to record no coll")
        with ledger.scope(TARGET), owner_scope(Owner.ENCODER), refused:
            transport.all_reduce(torch.ones(4))
        ledger.close()

    ranks.values(2, body, 30)


def test_ranks_in_different_operations_are_told_of_both():
    def body(rank, store):
        transport = prepared(rank, 3, store)
        count = 5 if rank == 2 else 4
        with pytest.raises(HostChannelError) as failure:
            transport.all_reduce(torch.zeros(count))
        with pytest.raises(HostChannelError, match="failed before"):
            transport.all_reduce(torch.zeros(count))  # poisoned
        return str(failure.value)

    first, _, last = ranks.values(3, body, deadline=30)
    assert "rank 0 is in all-reduce of 4 float32" in first
    assert "vllm:eager:allreduce (generation 1)" in first
    assert "rank 2 is in all-reduce of 5 float32" in first
    assert "rank 2 is in all-reduce of 5 float32" in last
    assert "rank 0 is in all-reduce of 4 float32" in last


def test_scopes_nest_and_each_reduces_on_its_own_channel():  # R-B4
    def body(rank, store):
        transport = host_channels(rank, 2, store)
        one = torch.ones(3)
        with transport.capture(TARGET):
            with (
                pytest.raises(KeyError),
                transport.capture(ENCODER),
                transport.capture(TARGET),
            ):
                raise KeyError
            assert transport.active_channel() is TARGET  # R-B5
            assert torch.all(transport.all_reduce(one) == 2)
        with transport.capture(ENCODER):  # not collective any more
            assert transport.active_channel() is ENCODER
        assert transport.active_channel() is None
        return list(transport.inventory())

    assert ranks.values(2, body, deadline=30) == [[TARGET, ENCODER]] * 2


def test_prepared_channels_are_entered_in_any_order():  # C06
    def body(rank, store):
        transport = host_channels(rank, 2, store)
        transport.prepare([TARGET, ENCODER])
        one = torch.ones(8)
        for channel_id in (TARGET, ENCODER) if rank else (ENCODER, TARGET):
            with transport.capture(channel_id):  # the other rank is in the other one
                pass
        for channel_id in (TARGET, ENCODER):
            with transport.capture(channel_id):
                assert torch.all(transport.all_reduce(one) == 2)

    ranks.values(2, body, deadline=30)


@pytest.mark.parametrize("name", [None, "vllm:target:production"])
def test_a_scope_without_a_name_is_refused(name):  # R-A5
    refused = pytest.raises(TypeError, match="needs its owner's ChannelId")
    with refused, host_channels(0, 2, None).capture(name):
        raise AssertionError("entered")
