# SPDX-License-Identifier: Apache-2.0
"""The order in which graphs, channels, communicators and groups go.

Runners, communicators, groups and functions are vLLM's; what they end writes its
name down in one list.
"""

import gc
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from tests.distributed.recording_transport import RecordingTransport, alone
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
from vllm.distributed.graph_channels.ledger import Ledger
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import (
    ExecutorWithExternalLauncher,
    UniProcExecutor,
)
from vllm.v1.worker import gpu_model_runner as v1
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager
from vllm.v1.worker.gpu import model_runner as v2
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu_ubatch_wrapper import UBatchWrapper
from vllm.v1.worker.graph_teardown import destroy_leftover_graphs, drop_graphs

COVERS = (
    "vllm/distributed/parallel_state.py",
    "vllm/v1/executor/uniproc_executor.py",
    "vllm/v1/worker/gpu_model_runner.py",
    "vllm/v1/worker/gpu/model_runner.py",
)

GROUPS = ("_TP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB", "_WORLD")
COMMUNICATORS = ("qr_comm", "fi_ar_comm", "aiter_ar_comm", "symm_mem_comm")


class Recorder:
    """A backend of a communicator."""

    def __init__(self, name, events):
        self._name, self._events = name, events

    def close(self):
        self._events.append(self._name)

    destroy = close


class Graph:
    """Stands for a captured graph: an event when nobody refers to it any more."""

    def __init__(self, owner, events):
        self._owner, self._events = owner, events

    def __del__(self):
        self._events.append(f"graph of {self._owner}")


@pytest.fixture
def events():
    """What went, in order."""
    return []


@pytest.fixture
def groups(events, monkeypatch):
    """vLLM's groups: TP and DCP with communicators, and the world."""
    monkeypatch.setattr(
        torch.distributed, "destroy_process_group", lambda group: events.append(group)
    )
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(parallel_state, "_NODE_COUNT", 1)
    for name in GROUPS:
        monkeypatch.setattr(parallel_state, name, None)
    for name in ("_TP", "_DCP", "_WORLD"):
        label = name[1:].lower()
        group = object.__new__(GroupCoordinator)
        group.device_group, group.cpu_group = f"{label} devices", f"{label} CPUs"
        group.mq_broadcaster = None
        group.device_communicator = _communicator(label, events)
        monkeypatch.setattr(parallel_state, name, group)


def _communicator(label, events):
    if label == "world":
        return None
    communicator = object.__new__(CudaCommunicator)
    for name in (*COMMUNICATORS, "all2all_manager", "b12x_comm"):
        setattr(communicator, name, None)
    communicator.ca_comm = Recorder(f"{label} custom", events)
    communicator.pynccl_comm = Recorder(f"{label} NCCL", events)
    return communicator


@pytest.fixture
def ledger(events, monkeypatch):
    """A pool for TP, one for DCP, and one that both share."""
    made = Ledger(deadline=5, closing_deadline=5)
    tp, dcp = alone("tp:0"), alone("dcp:0")
    shared = RecordingTransport("shared", events)
    for transport, group in (
        (RecordingTransport("tp", events), tp),
        (shared, tp),
        (shared, dcp),
        (RecordingTransport("dcp", events), dcp),
    ):
        made.register(transport, group)
    monkeypatch.setattr(parallel_state, "_LEDGER", made)
    return made


CHANNELS = ["dcp close", "shared close", "tp close"]
THE_REST = [
    *("tp custom", "tp NCCL", "tp devices", "tp CPUs"),
    *("dcp custom", "dcp NCCL", "dcp devices", "dcp CPUs"),
]
WORLD = ["world devices", "world CPUs"]


# Channels, communicators, groups ------------------------------------------------


def test_channels_of_all_groups_go_before_the_first_group(events, groups, ledger):
    # R-D1 # C20
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    assert events == [*CHANNELS, *THE_REST, *WORLD]


def test_a_second_teardown_does_nothing(events, groups, ledger):  # R-D1 # C20
    for _ in range(2):
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    assert events == [*CHANNELS, *THE_REST, *WORLD]


def test_what_cannot_be_closed_stays_owned_and_the_rest_goes(events, groups, ledger):
    # R-D1 # C20 # C38
    shared = ledger._members[1].transport
    shared.fail["close"] = RuntimeError("not unmapped")
    parallel_state.destroy_model_parallel()
    assert events == [*CHANNELS, *THE_REST]
    assert list(parallel_state.get_graph_channels().inventory()) == ["shared"]
    del shared.fail["close"]
    parallel_state.close_graph_channels()
    assert events[-1] == "shared close"
    assert parallel_state.get_graph_channels() is None


def test_after_a_lost_rank_no_group_is_destroyed(events, groups, ledger):  # R-D2
    ledger._groups[0]._lost = "rank 1 did not vote in time"
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    assert events == ["dcp close"]  # the group that has all its ranks
    assert parallel_state._TP is not None and parallel_state._WORLD is not None


def test_an_abandoned_ledger_closes_nothing(events, groups, ledger):  # R-D4
    parallel_state.abandon_graph_channels("SIGTERM")
    parallel_state.destroy_model_parallel()
    assert events == THE_REST
    assert parallel_state.get_graph_channels() is ledger


def test_without_channels_the_same_order(events, groups, monkeypatch):  # R-A5 # R-D1
    monkeypatch.setattr(parallel_state, "_LEDGER", None)
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    assert events == [*THE_REST, *WORLD]


# Graphs ---------------------------------------------------------------------------


def _runner(module, events, monkeypatch):
    """A runner of either kind, with graphs of all that it may capture."""
    runner = object.__new__(module.GPUModelRunner)
    runner.compilation_config = SimpleNamespace(static_forward_context={})
    runner.vllm_config = MagicMock()
    runner.cache_config = SimpleNamespace(num_gpu_blocks=1)

    def graphs(owner):
        return {0: Graph(owner, events)}

    encoder = object.__new__(EncoderCudaGraphManager)
    encoder.budget_graphs = {"default": graphs("encoder")}
    if module is v1:
        runner.encoder_cudagraph_manager = encoder
        runner.model = object.__new__(UBatchWrapper)
        runner.model.cudagraphs = graphs("micro-batches")
        runner.model.cudagraph_wrapper = None
        wrapper = SimpleNamespace()
        wrapper.clear_graphs = graphs("wrapper").clear
        monkeypatch.setattr(v1.CUDAGraphWrapper, "_all_instances", [wrapper])
        return runner
    speculator = SimpleNamespace()
    for part, name in (
        (runner, "cudagraph_manager"),
        (speculator, "prefill_cudagraph_manager"),
        (speculator, "decode_cudagraph_manager"),
        (speculator, "query_cudagraph_manager"),
    ):
        manager = object.__new__(CudaGraphManager)
        manager.graphs = graphs(name.removesuffix("_cudagraph_manager"))
        setattr(part, name, manager)
    runner.speculator = speculator
    runner.model_state = SimpleNamespace(
        supports_mm_inputs=True,
        encoder_runner=SimpleNamespace(cudagraph_manager=encoder, clear=encoder.clear),
    )
    return runner


@pytest.fixture(params=[v1, v2], ids=["V1", "V2"])
def runner(request, events, monkeypatch):
    """A runner whose shutdown waits for the device."""
    accelerator = SimpleNamespace(
        synchronize=lambda: events.append("waits for the device"),
        empty_cache=lambda: None,
        empty_host_cache=lambda: None,
    )
    monkeypatch.setattr(torch, "accelerator", accelerator)
    return _runner(request.param, events, monkeypatch)


OWNERS = {
    v1: ["graph of encoder", "graph of micro-batches", "graph of wrapper"],
    v2: [
        "graph of cudagraph_manager",
        "graph of decode",
        "graph of encoder",
        "graph of prefill",
        "graph of query",
    ],
}


def _owners(runner):
    return OWNERS[v1 if isinstance(runner, v1.GPUModelRunner) else v2]


def test_runners_drop_the_graphs_of_all_owners_first(runner, events):  # R-D1 # C21
    held = vars(runner).copy()  # as a caught exception's frames would
    runner.shutdown()
    dropped = events[: events.index("waits for the device")]
    assert sorted(dropped) == _owners(runner)
    del held


def test_a_half_built_runner_has_no_graphs_to_drop():
    for module in (v1, v2):
        drop_graphs(object.__new__(module.GPUModelRunner))


def test_leftover_graphs_are_destroyed_whoever_holds_them(events, monkeypatch):
    # R-D1 # C21
    class CudaGraph:
        def reset(self):
            events.append("reset")
            if len(events) == 1:
                raise RuntimeError("the device is in error")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", CudaGraph)

    def fail():
        graph = CudaGraph()
        graph.other = CudaGraph()
        raise MemoryError

    with pytest.raises(MemoryError) as caught:
        fail()
    destroy_leftover_graphs()
    assert events == ["reset", "reset"]
    del caught


def test_graphs_in_frozen_garbage_are_destroyed(events):  # R-D1 # C21
    graph = Graph("frozen garbage", events)
    graph.itself = graph
    gc.freeze()  # as a worker does when it is ready
    try:
        del graph
        destroy_leftover_graphs()
        assert events == ["graph of frozen garbage"]
    finally:
        gc.unfreeze()


# Engines in the process of their caller ----------------------------------------------


@pytest.fixture(params=[UniProcExecutor, ExecutorWithExternalLauncher])
def engine(request, runner, events, groups, ledger, monkeypatch):
    """vLLM's engine core over an executor of one process, with one worker."""
    worker = object.__new__(gpu_worker.Worker)
    worker.model_runner = runner
    worker.profiler = None
    executor = object.__new__(request.param)
    executor.driver_worker = worker
    core = object.__new__(EngineCore)
    core.model_executor = executor
    core.structured_output_manager = SimpleNamespace(clear_backend=lambda: None)
    core.scheduler = None
    return core


def _without_the_device(events):
    return [event for event in events if event != "waits for the device"]


def test_an_engine_in_one_process_ends_in_order(engine, runner, events):
    # R-D1 # R-D4 # C20
    owners = _owners(runner)
    engine.shutdown()
    went = _without_the_device(events)
    assert sorted(went[: len(owners)]) == owners
    assert went[len(owners) :] == [*CHANNELS, *THE_REST, *WORLD]


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_engine_that_failed_closes_nothing(engine, runner, events, failure):
    # R-D4
    owners = _owners(runner)
    with pytest.raises(failure):
        try:
            raise failure
        finally:
            engine.shutdown()
    went = _without_the_device(events)
    assert went[len(owners) :] == [*THE_REST, *WORLD]


def test_an_engine_that_lost_a_rank_waits_for_nothing(engine, events, ledger):
    # R-D2
    for group in ledger._groups:
        group._lost = "rank 1 did not vote in time"
    engine.shutdown()
    assert events == []
    assert ledger.inventory()
