# SPDX-License-Identifier: Apache-2.0
"""b12x's all-reduce on GPUs, on channels named by owner: sums, graphs, memory."""

import ctypes
import os
import random
from contextlib import contextmanager, nullcontext

import pytest
import torch

from tests import gpus
from tests.distributed.b12x_ranks import (
    DRAFT,
    SWITCHES,
    TARGET,
    channel_memory,
    tensor_parallel,
)
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.b12x_pcie_all_reduce import (
    MAX_FUSED_ROWS,
    B12xAllReduce,
)
from vllm.distributed.device_communicators.cuda_wrapper import (
    CudaRTLibrary,
    cudaIpcMemHandle_t,
)
from vllm.distributed.graph_channels.identity import (
    ChannelId,
    EagerLane,
    Owner,
    Phase,
)
from vllm.distributed.graph_channels.scope import NoScopeError, owner_scope
from vllm.distributed.graph_channels.stream_roles import auxiliary_stream

COVERS = (
    "vllm/distributed/device_communicators/cuda_communicator.py",
    "vllm/v1/worker/gpu_worker.py",
)

pytestmark = [gpus.needs_gpu, pytest.mark.parametrize("world", gpus.WORLDS)]

DEADLINE = 240
PROFILE = ChannelId(Owner.TARGET, Phase.PROFILE)
SHAPES = [(1,), (8,), (5, 64), (8, 2048), (2, 3, 8)]
# Rows and hidden sizes; b12x has a kernel of its own for 4,096 on eight ranks.
FUSED_SHAPES = [(1, 1024), (8, 896), (MAX_FUSED_ROWS, 1024), (4, 4096)]


def on_ranks(world, body, **environment):
    """What ``body(rank)`` gives on each rank, with b12x's channels in place."""

    def rank_body(rank, device):
        with tensor_parallel(world, device) as here:
            return body(here)

    return gpus.values(world, rank_body, DEADLINE, **SWITCHES, **environment)


@contextmanager
def capturing(here, channel_id):
    """vLLM's capture scope; gives a function that records a graph in it."""
    with parallel_state.graph_capture(here.device, channel_id=channel_id) as context:

        def record(function, kept=False):
            function()  # as vLLM warms up: on the scope's stream, before capture
            context.stream.synchronize()
            graph = torch.cuda.CUDAGraph(keep_graph=kept)
            with torch.cuda.graph(graph, stream=context.stream):
                outputs = function()
            return graph, outputs

        yield record


def node_kinds(graph):
    """The kinds of a captured graph's nodes, as CUDA numbers them."""
    runtime = CudaRTLibrary()
    captured, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    get = runtime.lib.cudaGraphGetNodes
    runtime.CUDART_CHECK(get(captured, None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    runtime.CUDART_CHECK(get(captured, nodes, ctypes.byref(count)))
    kind = ctypes.c_int()
    kinds = []
    for node in nodes:
        asked = runtime.lib.cudaGraphNodeGetType(
            ctypes.c_void_p(node), ctypes.byref(kind)
        )
        runtime.CUDART_CHECK(asked)
        kinds.append(kind.value)
    return sorted(kinds)


def test_eager_sums_are_exact_and_large_ones_take_nccl(world):  # R-B8 # R-E2
    def body(here):
        for turn, shape in enumerate(SHAPES):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                numbers = here.numbers(shape, turn).to(dtype)
                assert here.comm.should_all_reduce(numbers) == (shape != (1,))
                summed = here.group.all_reduce(numbers)
                assert torch.equal(summed, here.total(shape, turn).to(dtype))
        large = here.numbers((64, 1024))  # 128 KiB
        assert not here.comm.should_all_reduce(large)
        assert torch.equal(here.group.all_reduce(large), here.total((64, 1024)))
        return here.comm.recorded(), list(map(str, here.comm.inventory()))

    assert on_ranks(world, body) == [({}, ["vllm:eager:allreduce"])] * world


def test_captured_sums_are_exact_on_changing_inputs(world):  # R-B1 # R-F1
    def body(here):
        inputs = [torch.zeros(shape, device=here.device) for shape in SHAPES]
        inputs = [tensor.bfloat16() for tensor in inputs]
        with capturing(here, TARGET) as record:
            graph, sums = record(lambda: [here.group.all_reduce(t) for t in inputs])
        for turn in range(50):
            for tensor in inputs:
                tensor.copy_(here.numbers(tuple(tensor.shape), turn))
            graph.replay()
            for tensor, summed in zip(inputs, sums, strict=True):
                assert torch.equal(summed, here.total(tuple(tensor.shape), turn))
        # the tensor of 2 bytes takes NCCL, in the graph as well
        return {str(name): count for name, count in here.comm.recorded().items()}

    recorded = {"vllm:target:production": len(SHAPES) - 1}
    assert on_ranks(world, body) == [recorded] * world


def test_two_owners_replay_at_once_in_opposite_orders(world):  # R-A2 # C01
    def body(here):
        shape = (4, 1024)
        owners = (TARGET, DRAFT)
        inputs = [torch.zeros(shape, device=here.device).bfloat16() for _ in owners]
        graphs = []
        for channel_id, tensor in zip(owners, inputs, strict=True):
            with capturing(here, channel_id) as record:
                graphs.append(record(lambda t=tensor: here.group.all_reduce(t)))
        streams = [torch.cuda.Stream() for _ in owners]
        order = (0, 1) if here.rank % 2 == 0 else (1, 0)
        wrong = 0
        for turn in range(200):
            for n, tensor in enumerate(inputs):
                tensor.copy_(here.numbers(shape, turn + n))
            torch.cuda.synchronize()
            for n in order:
                with torch.cuda.stream(streams[n]):
                    graphs[n][0].replay()
            torch.cuda.synchronize()
            for n, (_, summed) in enumerate(graphs):
                wrong += not torch.equal(summed, here.total(shape, turn + n))
        return wrong

    assert on_ranks(world, body) == [0] * world


def test_replays_back_to_back_with_a_late_rank(world):  # C11
    def body(here):
        shape = (2, 2048)
        tensor = here.numbers(shape)

        def thrice():
            first = here.group.all_reduce(tensor)
            second = here.group.all_reduce(first / here.world)
            return first, second, here.group.all_reduce(second / here.world)

        with capturing(here, TARGET) as record:
            graph, sums = record(thrice)
        kept = [torch.zeros_like(torch.stack(sums)) for _ in range(1000)]
        late = random.Random(here.rank)
        for turn in range(1000):
            tensor.copy_(here.numbers(shape, turn))
            if here.rank == 1 and late.random() < 0.05:
                torch.cuda._sleep(late.randrange(1_000_000))
            graph.replay()
            kept[turn].copy_(torch.stack(sums))
        torch.cuda.synchronize()
        return sum(
            not torch.equal(found, here.total(shape, turn).expand_as(found))
            for turn, found in enumerate(kept)
        )

    assert on_ranks(world, body) == [0] * world


def test_graphs_with_products_survive_profile_graphs(world):  # C50 # R-C1
    def body(here):
        weight = torch.eye(256, device=here.device).bfloat16()
        shape = (8, 256)
        tensor = here.numbers(shape)

        def layer():
            return here.group.all_reduce(torch.mm(tensor, weight))

        checkpoint = parallel_state.get_graph_channels().checkpoint()
        with capturing(here, PROFILE) as record:
            profiles = [record(layer) for _ in range(3)]
        with capturing(here, TARGET) as record:
            graph, summed = record(layer)
        # The survivor's channel would go with the profile's: so by hand.
        del checkpoint
        for profile, _ in profiles:
            profile.reset()
        del profiles
        torch.cuda.synchronize()
        wrong = 0
        for turn in range(1000):
            tensor.copy_(here.numbers(shape, turn))
            graph.replay()
            wrong += not torch.equal(summed, here.total(shape, turn))
        return wrong

    assert on_ranks(world, body) == [0] * world


def test_a_graph_holds_the_kernels_of_bare_calls_and_no_other(world):
    def body(here):
        tensors = [here.numbers(shape) for shape in SHAPES[1:]]
        found = []
        with capturing(here, TARGET) as record:
            bare = here.comm.channel(EagerLane.ALLREDUCE, "a test").runtime
            for reduce in (here.group.all_reduce, bare.all_reduce):
                graph, _ = record(lambda r=reduce: [r(t) for t in tensors], kept=True)
                found.append(node_kinds(graph))
        return found

    kernel = 0  # cudaGraphNodeTypeKernel
    for through_vllm, bare in on_ranks(world, body):
        assert through_vllm == bare
        assert through_vllm.count(kernel) >= len(SHAPES) - 1


def test_a_rollback_frees_profile_channels_and_no_other(world):  # R-C2 # C13
    def body(here):
        tensor = here.numbers((4, 1024))
        before = here.ledger.inventory()
        for _ in range(3):
            checkpoint = parallel_state.get_graph_channels().checkpoint()
            with capturing(here, PROFILE) as record:
                graph, _ = record(lambda: here.group.all_reduce(tensor))
            assert here.ledger.inventory() != before
            graph.reset()
            parallel_state.get_graph_channels().rollback(checkpoint)
            assert here.ledger.inventory() == before
        with capturing(here, TARGET) as record:
            graph, summed = record(lambda: here.group.all_reduce(tensor))
        graph.replay()
        return torch.equal(summed, here.total((4, 1024)))

    assert on_ranks(world, body) == [True] * world


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graph"])
def test_fused_with_add_and_norm(world, graphs):
    def reference(total, residual, weight, epsilon):
        hidden = total.float() + residual.float()
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon)
        return hidden * scale * weight.float(), hidden

    def body(here):
        torch.manual_seed(0)
        worst = 0.0
        for rows, hidden in FUSED_SHAPES:
            shape = (rows, hidden)
            tensor, residual = here.numbers(shape), torch.randn(shape).bfloat16()
            residual = residual.to(here.device)
            weight = torch.randn(hidden).bfloat16().to(here.device)

            def fused(t=tensor, r=residual, w=weight):
                communicator = here.group.device_communicator
                return communicator.all_reduce_add_rms_norm(t, r, w, 1e-6)

            if graphs:
                owner = ChannelId(Owner.TARGET, Phase.PRODUCTION, rows)
                with capturing(here, owner) as record:
                    graph, (normed, added) = record(fused)
                normed.zero_()
                graph.replay()
            else:
                normed, added = fused()
            expected = reference(here.total(shape), residual, weight, 1e-6)
            for found, wanted in zip((normed, added), expected, strict=True):
                close = torch.isclose(found.float(), wanted, rtol=2**-7, atol=2**-7)
                worst = max(worst, 1 - close.float().mean().item())
        return worst

    assert on_ranks(world, body) == [0.0] * world


def test_more_rows_than_its_grid_has_are_not_fused(world):  # R-E2
    def body(here):
        shape = (MAX_FUSED_ROWS + 1, 512)
        tensor = here.numbers(shape)
        weight = tensor[0].clone()
        communicator = here.group.device_communicator
        return communicator.all_reduce_add_rms_norm(tensor, tensor, weight, 1e-6)

    assert on_ranks(world, body) == [None] * world


def test_a_capture_outside_a_scope_is_refused(world):  # R-B7 # C09
    def body(here):
        tensor = here.numbers((8, 8))
        here.group.all_reduce(tensor)
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.raises(NoScopeError, match="graph_capture"),
            torch.cuda.graph(graph),
        ):
            here.group.all_reduce(tensor)
        return torch.equal(here.group.all_reduce(tensor), here.total((8, 8)))

    assert on_ranks(world, body) == [True] * world


def test_a_second_stream_is_refused_unless_it_is_marked(world):  # R-B8 # C12
    def body(here):
        tensor = here.numbers((8, 8))
        here.group.all_reduce(tensor)
        with torch.cuda.stream(torch.cuda.Stream()):
            with pytest.raises(RuntimeError, match="auxiliary_stream") as caught:
                here.group.all_reduce(tensor)
            assert "vllm:eager:allreduce serves stream" in str(caught.value)
            with auxiliary_stream("a test"):
                assert not here.comm.should_all_reduce(tensor)
                summed = here.group.all_reduce(tensor)
            torch.cuda.current_stream().synchronize()
        with capturing(here, TARGET) as record, auxiliary_stream("a test"):
            graph, captured = record(lambda: here.group.all_reduce(tensor))
        graph.replay()
        recorded = here.comm.recorded()
        total = here.total((8, 8))
        return torch.equal(summed, total), torch.equal(captured, total), recorded

    assert on_ranks(world, body) == [(True, True, {TARGET: 1})] * world


def test_scopes_nest_and_an_owner_is_entered_again_and_again(world):  # R-B4 # C04
    def body(here):
        target, draft = here.numbers((4, 64)), here.numbers((4, 64), 1)
        kept = []
        with capturing(here, TARGET) as record:
            for _ in range(3):
                kept.append(record(lambda: here.group.all_reduce(target)))
                with owner_scope(Owner.DRAFT):
                    kept.append(record(lambda: here.group.all_reduce(draft)))
        wrong = 0
        for n, (graph, summed) in enumerate(kept):
            graph.replay()
            wrong += not torch.equal(summed, here.total((4, 64), n % 2))
        return wrong, here.comm.recorded()

    assert on_ranks(world, body) == [(0, {TARGET: 3, DRAFT: 3})] * world


def test_a_body_that_raises_leaves_and_its_name_stays_taken(world):  # R-B5 # C40
    def body(here):
        tensor = here.numbers((8, 8))
        try:
            with capturing(here, TARGET):
                if here.rank == 1:
                    raise MemoryError("on rank 1")
        except MemoryError:
            pass
        return torch.equal(here.group.all_reduce(tensor), here.total((8, 8)))

    assert on_ranks(world, body) == [True] * world


@pytest.mark.parametrize("allocator", ["default", "expandable segments", "cumem"])
def test_every_allocator_is_served(world, allocator):  # C32
    expandable = allocator == "expandable segments"

    def body(here):
        with cumem_pool() if allocator == "cumem" else nullcontext():
            tensors = [here.numbers((4, 1024), n) for n in range(2)]
        segments = torch.cuda.memory_snapshot()
        assert any(segment["is_expandable"] for segment in segments) == expandable
        wrong = 0
        for channel_id, tensor in zip((TARGET, DRAFT), tensors, strict=True):
            with capturing(here, channel_id) as record:
                graph, summed = record(lambda t=tensor: here.group.all_reduce(t))
            for turn in range(100):
                tensor.copy_(here.numbers((4, 1024), turn))
                graph.replay()
                wrong += not torch.equal(summed, here.total((4, 1024), turn))
        return wrong

    environment = {
        "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}",
    }
    assert on_ranks(world, body, **environment) == [0] * world


@contextmanager
def cumem_pool():
    """vLLM's allocator of memory that sleeps."""
    # Its library is the CUDA wheel's.
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.get_instance()
    with allocator.use_memory_pool(tag="a test"):
        yield
        assert allocator.pointer_to_data


def test_a_rank_with_too_few_multiprocessors_takes_all_to_nccl(world):  # C29 # R-E1
    def rank_body(rank, device):
        if rank == 1:
            os.environ["B12X_PCIE_TEST_VISIBLE_SM_COUNT"] = "20"
        with tensor_parallel(world, device) as here:
            communicator = here.group.device_communicator
            summed = here.group.all_reduce(here.numbers((8, 8)))
            total = here.total((8, 8))
            return (
                communicator.b12x_comm,
                communicator.ca_comm,
                here.ledger.names_demanded_by,
                torch.equal(summed, total),
            )

    expected = [(None, None, None, True)] * world
    assert gpus.values(world, rank_body, DEADLINE, **SWITCHES) == expected


def test_a_handle_that_no_peer_can_open_takes_all_to_nccl(world):  # R-E1
    def rank_body(rank, device):
        if rank == 1:
            CudaRTLibrary.cudaIpcGetMemHandle = lambda *_: cudaIpcMemHandle_t()
        with tensor_parallel(world, device) as here:
            # kernels of torch's, which raise what CUDA calls left for them
            summed = here.group.all_reduce(here.numbers((8, 8)))
            total = here.total((8, 8))
            communicator = here.group.device_communicator
            return communicator.b12x_comm, torch.equal(summed, total)

    expected = [(None, True)] * world
    assert gpus.values(world, rank_body, DEADLINE, **SWITCHES) == expected


@gpus.not_over_mps
def test_a_self_test_that_a_rank_skips_ends_it_in_time(world):  # C30 # R-E4
    def rank_body(rank, device):
        if rank == 1:
            B12xAllReduce.self_test = lambda self: None
        with tensor_parallel(world, device):
            pass

    short = {"VLLM_GRAPH_CHANNELS_DEADLINE": "15"}
    outcomes = gpus.run(world, rank_body, 100, **SWITCHES, **short)
    for outcome in outcomes:
        assert not outcome.late
        assert "self-test" in str(outcome.error) and "ACS" in str(outcome.error)


def test_channels_take_what_the_table_says(world):  # C45 # R-F1
    count, step = 16, 2 << 20  # the driver reserves 2 MiB at a time

    def body(here):
        # It imports b12x, which might use CUDA: not in a process that forks ranks.
        from tests.distributed.memory import size

        documented = size(world, 64 << 10, 84 << 10)
        assert set(here.comm.inventory().values()) == {documented}
        return *channel_memory(here, count), gpus.sharing(here.device, world)

    for requested, reserved, sharing in on_ranks(world, body):
        assert requested <= count * sharing * (2 << 20)
        assert requested <= reserved + sharing * step
        assert reserved <= requested + count * sharing * step
