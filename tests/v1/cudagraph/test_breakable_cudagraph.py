# SPDX-License-Identifier: Apache-2.0
"""Breakable graphs: eager parts in the owner's scope, and nothing of a profile left."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from vllm.compilation import breakable_cudagraph
from vllm.compilation.breakable_cudagraph import (
    BreakableCUDAGraphCapture,
    BreakableCUDAGraphWrapper,
)
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.graph_channels.scope import active_channel
from vllm.distributed.parallel_state import get_graph_channels


class _Graph:
    """Stands for torch.cuda.CUDAGraph, which begins and ends a segment."""

    def capture_begin(self, pool=None):
        pass

    def capture_end(self):
        pass

    def replay(self):
        pass


@pytest.fixture
def breakable(v1_runner, channels, monkeypatch):
    """A runner whose model is two graphs with an eager call between them."""
    events = channels.events

    def make():
        graph = _Graph()
        weakref.finalize(graph, events.append, "graph destroyed")
        return graph

    def eager():
        events.append(f"eager in {active_channel()}")

    def model():
        events.append(f"graph in {active_channel()}")
        BreakableCUDAGraphCapture.current().add_eager(eager)
        if v1_runner.fails:
            raise RuntimeError("first error")
        events.append(f"graph in {active_channel()}")
        return torch.zeros(1)

    wrapper = object.__new__(BreakableCUDAGraphWrapper)
    wrapper.runnable, wrapper.entries = model, {}
    wrapper.graph_pool, wrapper.is_debugging_mode = "pool", False
    BreakableCUDAGraphWrapper._all_instances.add(wrapper)
    v1_runner.wrapper, v1_runner.fails = wrapper, False
    v1_runner._warmup_and_capture = lambda *args, **kwargs: wrapper()
    v1_runner._capture_cudagraphs = v1_runner._warmup_and_capture
    v1_runner._cleanup_profiling_kv_cache = lambda: events.append("KV freed")

    context = SimpleNamespace(
        batch_descriptor="4 tokens", cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE
    )
    for name, stub in {
        "is_forward_context_available": lambda: True,
        "get_forward_context": lambda: context,
        "set_graph_pool_id": lambda pool: None,
        "weak_ref_tensors": lambda tensors: tensors,
    }.items():
        monkeypatch.setattr(breakable_cudagraph, name, stub)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", make)
    gc.freeze()  # all of vLLM, else each collection walks it
    yield v1_runner
    gc.unfreeze()
    BreakableCUDAGraphWrapper._all_instances.discard(wrapper)


def _of(events, *words):
    return [event for event in events if event.startswith(words)]


def test_all_parts_of_a_profile_run_in_its_scope(breakable, channels):  # R-B2 # C09
    breakable.profile_cudagraph_memory()
    scope = "vllm:target:profile"
    assert _of(channels.events, "graph in", "eager in") == [
        f"graph in {scope}",
        f"eager in {scope}",
        f"graph in {scope}",
    ]


def test_its_graphs_are_gone_before_the_rollback(breakable, channels):
    # R-C1 # C13 # C15
    breakable.profile_cudagraph_memory()
    assert _of(channels.events, "graph destroyed", "tp rollback", "KV") == [
        "graph destroyed",
        "graph destroyed",
        "tp rollback",
        "KV freed",
    ]
    assert breakable.wrapper.graph_pool == "pool"


def test_a_capture_that_fails_between_breaks_leaves_nothing(breakable, channels):
    # R-C1 # C18
    before = dict(channels.channels)
    breakable.fails = True
    with pytest.raises(RuntimeError, match="first error"):
        breakable.profile_cudagraph_memory()
    assert _of(channels.events, "graph destroyed", "tp rollback", "KV") == [
        "graph destroyed",
        "graph destroyed",
        "tp rollback",
        "KV freed",
    ]
    assert channels.channels == before
    assert not BreakableCUDAGraphCapture.is_active()
    breakable.fails = False
    breakable.profile_cudagraph_memory()
    assert channels.channels == before


def test_production_captures_anew_and_keeps_its_graphs(breakable, channels):  # R-A1
    breakable.profile_cudagraph_memory()
    channels.events.clear()
    breakable.capture_model()
    assert len(_of(channels.events, "graph in vllm:target:production")) == 2
    assert not _of(channels.events, "graph destroyed", "tp rollback")
    assert get_graph_channels().lost is None
