# SPDX-License-Identifier: Apache-2.0
"""DCP's exchange over b12x on GPUs, beside float64 and beside vLLM's NCCL path."""

from functools import partial
from itertools import product

import pytest
import torch

from tests import gpus
from tests.distributed.b12x_ranks import DRAFT, SWITCHES, TARGET
from tests.distributed.dcp_ranks import (
    HEAD_SIZE,
    HEADS,
    MAX_TOKENS,
    QUERY_HEAD_SIZE,
    Parts,
    decode_context_parallel,
    parts_of_all_kinds,
    wrong,
)
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.b12x_pcie_dcp import WORLD_SIZES
from vllm.distributed.graph_channels.identity import ChannelId, Owner, Phase
from vllm.distributed.graph_channels.report import table
from vllm.distributed.graph_channels.scope import NoScopeError

COVERS = (
    "vllm/v1/attention/ops/dcp_alltoall.py",
    "vllm/v1/attention/ops/dcp_utils.py",
)

pytestmark = gpus.needs_gpu
on_all_worlds = pytest.mark.parametrize(
    "world", [world for world in gpus.WORLDS if world in WORLD_SIZES]
)

DEADLINE = 280
PROFILES = [ChannelId(owner, Phase.PROFILE) for owner in (Owner.TARGET, Owner.DRAFT)]
DTYPES = (torch.bfloat16, torch.float16)


def on_ranks(world, body, **environment):
    """What ``body(rank)`` gives on each rank, with b12x's channels in place."""

    def rank_body(rank, device):
        with decode_context_parallel(world, world, device, "nccl") as here:
            return body(here)

    return gpus.values(world, rank_body, DEADLINE, **SWITCHES, **environment)


def recorded(here, channel_id, function):
    """A graph of a function in vLLM's scope of an owner, and what it returned."""
    with parallel_state.graph_capture(here.device, channel_id=channel_id) as context:
        return record(context.stream, function)


def record(stream, function):
    """The same in a scope that is open, on its stream."""
    function()  # as vLLM warms up: on the scope's stream, before capture
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = function()
    return graph, found


def over_nccl(here, layer, parts):
    """What vLLM makes of parts without channels."""
    kept, here.group.dcp_channels = here.group.dcp_channels, None
    try:
        return here.exchanged(layer, parts)
    finally:
        here.group.dcp_channels = kept


def eager(here):
    """Every kind of parts, in both dtypes and bases; what was wrong."""
    failed = []
    for dtype in DTYPES:
        for base_e in (True, False):
            layer = here.layer(dtype, base_e=base_e)
            assert layer.over_channels
            for parts in parts_of_all_kinds(here.world, here.device, dtype):
                output, lse = parts.laid_out(here.rank), parts.lses[here.rank]
                assert here.channels.takes_partial(output, lse), parts.name
                found = here.exchanged(layer, parts)
                if wrong(found, parts.wanted(here.rank, base_e=base_e)):
                    failed.append((parts.name, dtype, base_e, "float64"))
                other = over_nccl(here, layer, parts)
                if not torch.allclose(found, other, rtol=2**-7, atol=2e-5):
                    failed.append((parts.name, dtype, base_e, "NCCL"))
    return failed


def replayed(here):
    """Every kind of parts from graphs, in both dtypes and bases; what was wrong."""
    failed, target = [], PROFILES[0]
    checkpoint = parallel_state.get_graph_channels().checkpoint()
    with parallel_state.graph_capture(here.device, channel_id=target) as context:
        for dtype, base_e in product(DTYPES, (True, False)):
            layer = here.layer(dtype, base_e=base_e)
            for parts in parts_of_all_kinds(here.world, here.device, dtype):
                exchange = partial(here.exchanged, layer, parts)
                graph, found = record(context.stream, exchange)
                found.fill_(7)
                graph.replay()
                if wrong(found, parts.wanted(here.rank, base_e=base_e)):
                    failed.append((parts.name, dtype, base_e))
                graph.reset()
    parallel_state.get_graph_channels().rollback(checkpoint)
    return failed


def queries(here):
    """Gathered heads, in each dtype: whether they equal NCCL's."""
    layer = here.layer()
    same = []
    for dtype in (*DTYPES, torch.float8_e4m3fn):
        for batch in (1, MAX_TOKENS):
            shape = (batch, HEADS, QUERY_HEAD_SIZE)
            query = torch.randn(shape, device=here.device).to(dtype)
            assert here.channels.takes_query(query)
            found = layer.query_gather(query).view(torch.uint8)
            # NCCL moves bytes: not every dtype is one of its own
            sent = query.view(torch.uint8)
            other = here.group.all_gather(sent, dim=1)
            same.append(torch.equal(found, other))
    return same


def other_ways(here):
    """What no channel takes: it still comes out right."""
    layer = here.layer()
    shape = (here.world, MAX_TOKENS + 1, here.world * HEADS, HEAD_SIZE)
    generator = torch.Generator().manual_seed(9)
    outputs = torch.randn(shape, generator=generator).to(here.device).bfloat16()
    lses = torch.randn(shape[:-1], generator=generator).to(here.device)
    parts = Parts("too many", outputs, lses)
    assert not here.channels.takes_partial(outputs[here.rank], lses[here.rank])
    failed = wrong(here.exchanged(layer, parts), parts.wanted(here.rank, base_e=True))
    few = Parts("LSE back", outputs[:, :3], lses[:, :3])
    found, _ = layer.combine.func(
        few.laid_out(here.rank),
        few.lses[here.rank].clone(),
        here.group,
        return_lse=True,
    )
    return failed, wrong(found, few.wanted(here.rank, base_e=True))


def graphs(here):
    """Two owners' graphs, launched in opposite orders; how many were wrong."""
    layer = here.layer()
    shape = (here.world, 4, here.world * HEADS, HEAD_SIZE)
    starts = torch.arange(5, dtype=torch.int32, device=here.device)
    owners = []
    for channel_id in (TARGET, DRAFT):
        output = torch.zeros(shape[1:], device=here.device).bfloat16()
        lse = torch.zeros(shape[1:-1], device=here.device)
        lens = torch.ones(4, dtype=torch.int32, device=here.device)
        query = torch.zeros(4, HEADS, QUERY_HEAD_SIZE, device=here.device).bfloat16()

        def step(output=output, lse=lse, lens=lens, query=query):
            gathered = layer.query_gather(query)
            return gathered, layer.combine(
                output, lse.clone(), seq_lens=lens, query_start_loc=starts
            )

        graph, found = recorded(here, channel_id, step)
        owners.append((graph, found, output, lse, lens, query))
    streams = [torch.cuda.Stream() for _ in owners]
    order = (0, 1) if here.rank % 2 == 0 else (1, 0)
    failed = 0
    for turn in range(60):
        generator = torch.Generator().manual_seed(turn)
        expected = []
        for n, (_, _, output, lse, lens, query) in enumerate(owners):
            outputs = torch.randn(shape, generator=generator).bfloat16()
            lses = torch.randn(shape[:-1], generator=generator) * 8
            all_lens = torch.randint(0, 2, (here.world, 4), generator=generator)
            output.copy_(outputs[here.rank])
            lse.copy_(lses[here.rank])
            lens.copy_(all_lens[here.rank])
            query.fill_(turn + n + here.rank)
            parts = Parts("", outputs, lses, all_lens, starts.cpu())
            expected.append(parts.wanted(here.rank, base_e=True))
        torch.cuda.synchronize()
        for n in order:
            with torch.cuda.stream(streams[n]):
                owners[n][0].replay()
        torch.cuda.synchronize()
        own = torch.arange(here.world).repeat_interleave(HEADS)
        for n, (_, (gathered, found), *_) in enumerate(owners):
            failed += wrong(found.cpu(), expected[n])
            failed += not torch.equal(
                gathered[-1, :, -1].cpu(), (own + turn + n).bfloat16()
            )
    counts = {}
    for transport in here.channels._transports.values():
        for name, count in transport.recorded().items():
            counts[str(name)] = counts.get(str(name), 0) + count
    return failed, counts


def profiles(here):
    """TP and DCP in one scope, profiled and rolled back; what was left."""
    layer = here.layer()
    part = torch.zeros(4, here.world * HEADS, HEAD_SIZE, device=here.device).bfloat16()
    tensor = torch.ones(8, 64, device=here.device).bfloat16()

    def step():
        lse = torch.zeros(part.shape[:2], device=here.device)
        layer.combine(part, lse, seq_lens=None, query_start_loc=None)
        return parallel_state.get_tp_group().all_reduce(tensor)

    before, left = here.ledger.inventory(), []
    for _ in range(4):
        checkpoint = parallel_state.get_graph_channels().checkpoint()
        made = [recorded(here, channel_id, step) for channel_id in PROFILES]
        during = here.ledger.inventory()
        assert all(
            {*map(str, PROFILES)} <= channels.keys() for channels in during.values()
        )
        for graph, _ in made:
            graph.reset()
        del made, graph
        torch.cuda.synchronize()
        parallel_state.get_graph_channels().rollback(checkpoint)
        assert here.ledger.inventory() == before
        torch.cuda.empty_cache()
        left.append(free(here))
    return left[-1] - left[0]


def free(here):
    """What all ranks together have left on this GPU."""
    torch.cuda.synchronize()
    torch.distributed.barrier()
    there, _ = torch.cuda.mem_get_info()
    torch.distributed.barrier()
    return there


def memory(here):
    """What the table says of a channel, and what 12 more of the owners' take."""
    names = [ChannelId(Owner.ENCODER, Phase.PROFILE, n) for n in range(1, 14)]
    here.ledger.prepare(names[:1])
    said = sum(t.inventory()[names[0]] for t in here.channels._transports.values())
    said += parallel_state.get_tp_group().device_communicator.b12x_comm.inventory()[
        names[0]
    ]
    before = free(here)
    here.ledger.prepare(names)
    return said, before - free(here), len(here.channels._transports) + 1


@on_all_worlds
def test_parts_and_queries_are_exchanged(world):  # R-E2 # C19
    def body(here):
        return eager(here), queries(here), other_ways(here)

    assert on_ranks(world, body) == [([], [True] * 6, (False, False))] * world


@on_all_worlds
def test_graphs_exchange_every_kind_of_parts(world):  # R-B1 # C19
    assert on_ranks(world, replayed) == [[]] * world


@on_all_worlds
def test_two_owners_replay_at_once_in_opposite_orders(world):  # R-A2 # R-F1
    assert on_ranks(world, graphs) == [(0, {str(TARGET): 2, str(DRAFT): 2})] * world


@on_all_worlds
def test_a_capture_outside_a_scope_is_refused(world):  # R-B7
    def body(here):
        layer, shape = here.layer(), (1, HEADS, QUERY_HEAD_SIZE)
        query = torch.zeros(shape, device=here.device).bfloat16()
        with pytest.raises(NoScopeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            layer.query_gather(query)

    on_ranks(world, body)


@on_all_worlds
def test_profiles_leave_nothing_and_channels_take_what_the_table_says(world):
    # R-C2 # C45
    def body(here):
        for dtype in DTYPES:  # a pool each
            here.layer(dtype)
        grown = profiles(here)
        titles = [table(usage).splitlines()[0] for usage in here.ledger.usage()]
        return grown, titles, *memory(here), gpus.sharing(here.device, world)

    for grown, titles, said, taken, pools, sharing in on_ranks(world, body):
        assert abs(grown) <= 4 << 20
        assert len(titles) == 3  # tensor parallel, and a pool for each dtype
        assert "b12x DCP all-to-all of dcp:0" in titles[1]
        # The driver reserves 2 MiB at a time, for each rank on this GPU.
        slack = (2 << 20) * sharing
        assert 12 * said * sharing <= taken + pools * slack
        assert taken <= 12 * sharing * said + 12 * pools * slack


def test_a_pool_made_inside_a_scope_joins_it():  # R-B3 # C04
    def body(here):
        query = torch.full(
            (2, HEADS, QUERY_HEAD_SIZE), here.rank, device=here.device
        ).bfloat16()
        layers = []

        def gather():
            if not layers:  # in the scope, before the capture
                layers.append(here.layer())
            return layers[0].query_gather(query)

        graph, found = recorded(here, TARGET, gather)
        found.zero_()
        graph.replay()
        (transport,) = here.channels._transports.values()
        counts = {str(name): count for name, count in transport.recorded().items()}
        return found[0, :, 0].tolist(), counts

    gathered = [0.0] * HEADS + [1.0] * HEADS
    assert on_ranks(2, body) == [(gathered, {str(TARGET): 1})] * 2


def test_too_few_multiprocessors_for_dcp_leave_tensor_parallelism_its_channels():
    # R-E1 # C29
    def rank_body(rank, device):
        import os

        if rank == 1:
            os.environ["B12X_PCIE_TEST_VISIBLE_SM_COUNT"] = "40"
        with decode_context_parallel(2, 2, device, "nccl") as here:
            layer = here.layer()
            (parts, *_) = parts_of_all_kinds(2, device, torch.bfloat16)
            found = here.exchanged(layer, parts)
            return (
                layer.over_channels,
                wrong(found, parts.wanted(here.rank, base_e=True)),
                list(here.ledger.inventory()),
                here.ledger.names_demanded_by,
            )

    # Direct workspaces, the other way, want a GPU a rank.
    direct = dict.fromkeys(
        ("VLLM_USE_DIRECT_DCP_A2A", "VLLM_USE_DIRECT_DCP_Q_GATHER"), "0"
    )
    environment = SWITCHES | direct
    kept = ["b12x all-reduce of tp:0"], "VLLM_PCIE_ALLREDUCE_BACKEND=b12x"
    expected = [(False, False, *kept)] * 2
    assert gpus.values(2, rank_body, DEADLINE, **environment) == expected
