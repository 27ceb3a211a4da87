# SPDX-License-Identifier: Apache-2.0
"""Code that changes streams says so: the mark itself, and vLLM's marked places."""

import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from tests.distributed.test_graph_channels_ranks import on_ranks
from tests.host import Stream
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.device_communicators import b12x_channels
from vllm.distributed.device_communicators.b12x_pcie_all_reduce import B12xAllReduce
from vllm.distributed.device_communicators.host_graphs import RecordedGraph
from vllm.distributed.graph_channels.identity import ChannelId, Owner, Phase
from vllm.distributed.graph_channels.scope import active_channel, channel_scope
from vllm.distributed.graph_channels.stream_roles import auxiliary_stream, stream_role
from vllm.model_executor.layers.fused_moe.runner import shared_experts
from vllm.models.kimi_k3.nvidia import latent_moe_runner
from vllm.v1.worker import gpu_ubatch_wrapper
from vllm.v1.worker.gpu_ubatch_wrapper import UBatchWrapper

COVERS = (
    "vllm/model_executor/layers/fused_moe/runner/shared_experts.py",
    "vllm/models/kimi_k3/nvidia/latent_moe_runner.py",
    "vllm/v1/worker/gpu_ubatch_wrapper.py",
)

TARGET = ChannelId(Owner.TARGET, Phase.PRODUCTION)
SECONDS = 20


# The mark -------------------------------------------------------------------


def test_the_innermost_mark_counts_until_it_is_left():  # R-B8
    assert stream_role() is None
    with auxiliary_stream("outer"):
        with auxiliary_stream("inner"):
            assert stream_role() == "inner"
        assert stream_role() == "outer"
        with pytest.raises(KeyboardInterrupt), auxiliary_stream("inner"):
            raise KeyboardInterrupt
        assert stream_role() == "outer"
    assert stream_role() is None


def test_a_marked_function_is_marked_whenever_it_runs():  # R-B8
    @auxiliary_stream("a test")
    def depth(left):
        assert stream_role() == "a test"
        return 1 + depth(left - 1) if left else 1

    assert [depth(3), depth(2)] == [4, 3]
    assert stream_role() is None


def test_a_marked_function_that_raises_leaves_no_mark():  # R-B8 # R-B5
    @auxiliary_stream("a test")
    def fail():
        raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert stream_role() is None


def test_threads_have_marks_of_their_own():  # R-B8 # C12
    seen, both = {}, threading.Barrier(2, timeout=SECONDS)

    @auxiliary_stream("a micro-batch")
    def marked():
        both.wait()
        seen["marked"] = stream_role()
        both.wait()

    def unmarked():
        both.wait()
        seen["unmarked"] = stream_role()
        both.wait()

    threads = [threading.Thread(target=run, daemon=True) for run in (marked, unmarked)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert seen == {"marked": "a micro-batch", "unmarked": None}
    assert stream_role() is None


def test_one_line_a_role_says_that_nccl_takes_over(monkeypatch):  # R-B8 # R-F1
    lines = []
    monkeypatch.setattr(
        b12x_channels,
        "logger",
        SimpleNamespace(info_once=lambda text, *given: lines.append(text % given)),
    )
    sizes = {"all_reduce_bytes": 1024, "fused_bytes": 1024}
    transport = B12xAllReduce(
        "b12x tp:0", None, torch.device("cpu"), 0, rank=0, world=2, **sizes
    )
    tensor = torch.empty(2, 8)
    assert transport.should_all_reduce(tensor) and lines == []
    with auxiliary_stream("shared experts"):
        assert not transport.should_all_reduce(tensor)
        assert not transport.should_fuse_add_rms_norm(tensor, tensor, tensor[0])
        assert not transport.should_all_reduce(torch.empty(7))  # not b12x's anyway
    line = "b12x tp:0: shared experts takes NCCL outside of graphs"
    assert lines == [line] * 2  # and info_once drops the second


# vLLM's marked places -------------------------------------------------------


def test_shared_experts_on_their_stream_are_marked(monkeypatch):  # R-B8
    seen = []

    def layer(tensor):
        seen.append(stream_role())
        return tensor + 1

    experts = object.__new__(shared_experts.SharedExperts)
    torch.nn.Module.__init__(experts)
    experts._layer, experts._stream, experts.enable_dbo = layer, MagicMock(), False
    experts._output = [None, None]
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(shared_experts, "current_stream", MagicMock())
    orders = shared_experts.SharedExpertsOrder
    for order in (orders.MULTI_STREAM_OVERLAPPED, orders.NO_OVERLAP):
        experts._determine_shared_experts_order = lambda tensor, now=order: now
        experts(torch.zeros(2), order)
        assert experts.output.tolist() == [1, 1]
    assert seen == ["shared experts", None]


def test_the_overlapped_tail_of_kimi_k3_is_marked(monkeypatch):  # R-B8
    seen = []

    def all_reduce(tensor):
        seen.append(stream_role())
        return tensor

    runner = object.__new__(latent_moe_runner.LatentMoERunner)
    torch.nn.Module.__init__(runner)
    transform = SimpleNamespace(norm=None, up_proj=SimpleNamespace(weight=torch.eye(4)))
    monkeypatch.setattr(
        latent_moe_runner.LatentMoERunner, "routed_output_transform", transform, False
    )
    runner._shared_ar_events = (None, None)
    runner._maybe_reduce_final_output = lambda result, size, output_is_reduced: result
    monkeypatch.setattr(
        latent_moe_runner, "tensor_model_parallel_all_reduce", all_reduce
    )
    monkeypatch.setattr(
        latent_moe_runner,
        "maybe_execute_in_parallel",
        lambda first, second, *others: (first(), second()),
    )
    ones = torch.ones(2, 4)
    assert runner._overlap_allreduce_tail(ones, ones, None).tolist() == [[2.0] * 4] * 2
    assert seen == ["the overlapped tail"] * 2
    assert stream_role() is None


def test_nothing_traces_through_the_mark_of_kimi_k3():  # R-B8
    # A mark is left out of what torch.compile makes of a marked function. If this
    # fails, the model is compiled by now, and the mark has to go below an op.
    folder = Path(latent_moe_runner.__file__).parent
    compiled = [
        path.name
        for path in folder.rglob("*.py")
        if "support_torch_compile" in path.read_text()
    ]
    assert compiled == []


class MicroBatch:
    """A micro-batch and its context, which starts when the main thread lets it."""

    def __init__(self, number, ready):
        self.number = self.id = number
        self.num_tokens = 2
        self.input_ids = torch.full((2,), number)
        self.positions = self.intermediate_tensors = self.inputs_embeds = None
        self.compute_stream = self.comm_stream = MagicMock()
        self.cpu_wait_event = threading.Event()
        self.context, self._ready = self, ready

    def __enter__(self):
        self._ready.wait()
        if self.number == 0:
            assert self.cpu_wait_event.wait(SECONDS)

    def __exit__(self, *raised):
        return False


@pytest.fixture
def wrapper(monkeypatch):
    """A wrapper of micro-batches without a GPU, and the roles its model ran in."""
    wrapper = object.__new__(UBatchWrapper)
    wrapper.device, wrapper.cudagraphs = torch.device("cpu"), {}
    wrapper.cudagraph_wrapper = None
    wrapper.ready_barrier = threading.Barrier(3, timeout=SECONDS)
    wrapper.runtime_mode = CUDAGraphMode.FULL
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda *given, **named: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", MagicMock())
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: None)
    monkeypatch.setattr(
        torch, "accelerator", SimpleNamespace(set_device_index=lambda index: None)
    )
    monkeypatch.setattr(gpu_ubatch_wrapper, "get_offloader", MagicMock())
    monkeypatch.setattr(gpu_ubatch_wrapper, "set_graph_pool_id", lambda pool: None)
    monkeypatch.setattr(gpu_ubatch_wrapper, "current_platform", MagicMock())
    return wrapper


@pytest.mark.parametrize("channel_id", [None, TARGET])
def test_micro_batches_are_marked_in_both_ways_to_run(wrapper, channel_id):
    # R-B8 # R-B9 # C12: on their threads, in the scope of the thread that captures
    roles = []

    def model(*, input_ids, **others):
        roles.append((stream_role(), active_channel()))
        return input_ids

    with channel_scope(channel_id):
        for run in (wrapper._run_ubatches, wrapper._capture_ubatches):
            batches = [MicroBatch(n, wrapper.ready_barrier) for n in range(2)]
            assert run(batches, model).tolist() == [0, 0, 1, 1]
    assert roles == [("a micro-batch", channel_id)] * 4
    assert stream_role() is None


class InTurn(MicroBatch):
    """A micro-batch that computes when the one before it has, as vLLM hands over."""

    then = None

    def __enter__(self):
        self._ready.wait()
        assert self.cpu_wait_event.wait(SECONDS)

    def __exit__(self, *raised):
        if self.then is not None:
            self.then.cpu_wait_event.set()
        return False


def test_micro_batches_of_a_graph_reduce_on_their_owners_channel(wrapper, monkeypatch):
    # R-B8 # R-B9 # C12: on two ranks, from threads that opened no scope
    monkeypatch.setattr(
        torch.cuda, "graph", lambda graph, **named: graph.capture(), raising=False
    )

    def body(rank):
        monkeypatch.setattr(
            torch.cuda, "CUDAGraph", lambda: RecordedGraph(rank.transport)
        )
        owners = {}
        for owner in (Owner.TARGET, Owner.DRAFT):
            numbers, totals = [torch.zeros(9) for _ in range(2)], []

            def model(*, input_ids, numbers=numbers, totals=totals, **others):
                number = numbers[int(input_ids[0])]
                totals.append(rank.transport.all_reduce(number))
                return input_ids

            first, second = (InTurn(n, wrapper.ready_barrier) for n in range(2))
            first.then = second
            wrapper.cudagraphs.clear()
            with rank.ledger.scope(ChannelId(owner, Phase.PRODUCTION)):
                wrapper._capture_ubatches([first, second], model)
            (captured,) = wrapper.cudagraphs.values()
            owners[owner] = captured.cudagraph, numbers, totals
        for turn in range(20):
            # ranks replay in opposite orders, on threads as a GPU's streams would
            launched = [Stream() for _ in owners]
            for at, (_, numbers, _) in enumerate(owners.values()):
                for n, number in enumerate(numbers):
                    number.fill_(100 * turn + 10 * at + n + rank.rank)
            in_turn = [*owners.values()][:: 1 if rank.rank == 0 else -1]
            for stream, (graph, *_) in zip(launched, in_turn, strict=True):
                stream.launch(graph.replay)
            for stream in launched:
                stream.end()
            for at, (*_, totals) in enumerate(owners.values()):
                for n, total in enumerate(totals):
                    assert total.tolist() == [2 * (100 * turn + 10 * at + n) + 1] * 9
        recorded = rank.transport.recorded()
        return {str(name): count for name, count in recorded.items()}

    names = ("vllm:target:production", "vllm:draft:production")
    assert on_ranks(2, body) == [dict.fromkeys(names, 2)] * 2
