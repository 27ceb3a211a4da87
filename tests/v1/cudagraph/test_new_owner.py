# SPDX-License-Identifier: Apache-2.0
"""A new owner is one line, and its graphs have a channel of their own.

``context_kv`` is that line: vLLM 0.28.0 has no graphs of a draft's context stage.
A speculator made up here has, with a manager made up here.
"""

import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vllm
from tests.distributed.test_graph_channels_ranks import on_ranks
from tests.host import Stream
from tests.v1.speculators import speculator_of
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.host_graphs import RecordedGraph
from vllm.distributed.graph_channels.identity import ChannelId, Owner, Phase
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
)
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

CPU = torch.device("cpu")
DESC = BatchExecutionDescriptor(CUDAGraphMode.FULL, num_tokens=1, num_reqs=1)
TURNS = 20


class ContextKVManager(CudaGraphManager):
    """Knows nothing of channels, as managers do."""


class ContextKVSpeculator(DFlashSpeculator):
    """DFlash whose context stage has graphs too."""

    def capture(self):
        super().capture()
        self.context_kv_manager.capture(
            self.context_forward,
            channel_id=ChannelId(Owner.CONTEXT_KV, Phase.PRODUCTION),
        )


def _manager(cls):
    manager = object.__new__(cls)
    manager.device, manager.use_breakable_cg = CPU, False
    manager.graphs, manager.pool = {}, None
    manager._capture_descs = {CUDAGraphMode.FULL: [DESC]}
    return manager


def _speculator():
    speculator = speculator_of(ContextKVSpeculator)
    speculator.context_kv_manager = _manager(ContextKVManager)
    speculator.context_forward = lambda desc, warmup: lambda mode: None
    return speculator


def test_it_is_one_line():  # R-A3
    root = Path(vllm.__path__[0])
    lines = [
        (path.relative_to(root).as_posix(), line)
        for path in root.rglob("*.py")
        for line in path.read_text().splitlines()
        if "CONTEXT_KV" in line or '"context_kv"' in line
    ]
    identity = "distributed/graph_channels/identity.py"
    assert lines == [(identity, '    CONTEXT_KV = "context_kv"')]


@pytest.fixture
def no_gpu(monkeypatch):
    """What a manager asks of a GPU when it captures; graphs are told by the test."""
    monkeypatch.setattr(cudagraph_utils, "set_graph_pool_id", lambda pool: None)
    monkeypatch.setattr(cudagraph_utils, "is_global_first_rank", lambda: False)
    platform = SimpleNamespace(graph_pool_handle=lambda: None)
    monkeypatch.setattr(cudagraph_utils, "current_platform", platform)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: graph.capture())


def test_it_gets_its_own_channel_beside_those_prepared(channels, no_gpu, monkeypatch):
    # R-A3 # R-B1 # C07
    graph = SimpleNamespace(capture=nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    ledger = parallel_state.get_graph_channels()
    query = ChannelId(Owner.DRAFT_QUERY, Phase.PRODUCTION)
    ledger.prepare([query])
    channels.events.clear()
    _speculator().capture()
    assert [event for event in channels.events if "enter" in event] == [
        "tp enter vllm:draft_query:production",
        "tp enter vllm:context_kv:production",
    ]


def test_its_graphs_replay_beside_others_in_any_order(
    communicator, no_gpu, monkeypatch
):  # R-A3 # C07
    def body(rank):
        parallel_state._LEDGER = rank.ledger
        monkeypatch.setattr(
            torch.cuda, "CUDAGraph", lambda: RecordedGraph(rank.transport)
        )
        owners = {}
        for owner in (Owner.TARGET, Owner.CONTEXT_KV):
            numbers, totals = torch.zeros(9), []

            def create_forward_fn(desc, warmup, numbers=numbers, totals=totals):
                return lambda mode: totals.append(rank.transport.all_reduce(numbers))

            manager = _manager(ContextKVManager)
            manager.capture(
                create_forward_fn, channel_id=ChannelId(owner, Phase.PRODUCTION)
            )
            owners[owner] = manager, numbers, totals[-1], Stream()
        # Each rank launches in an order of its own: on one channel this hangs.
        order = random.Random(rank.rank)
        for turn in range(TURNS):
            both = order.sample(list(owners.values()), 2)
            for at, (_, numbers, _, _) in enumerate(owners.values()):
                numbers.fill_(10 * turn + at + rank.rank)
            for manager, _, _, stream in both:
                stream.launch(lambda manager=manager: manager.run_fullgraph(DESC))
            for *_, stream in both:
                stream.synchronize()
            for at, (_, _, total, _) in enumerate(owners.values()):
                assert total.tolist() == [2 * (10 * turn + at) + 1] * 9
        for *_, stream in owners.values():
            stream.end()
        return [str(name) for name in rank.transport.inventory()]

    names = ["eager:allreduce", "target:production", "context_kv:production"]
    assert on_ranks(2, body) == [[f"vllm:{name}" for name in names]] * 2
