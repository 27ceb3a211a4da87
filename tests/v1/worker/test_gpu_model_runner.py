# SPDX-License-Identifier: Apache-2.0
"""Both runners name the target's graphs; V1's profiling leaves no channel behind."""

import gc
import weakref
from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch

from tests.v1.speculators import SIZES, give_sizes
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.distributed.graph_channels.identity import (
    ChannelId,
    EagerLane,
    Owner,
    Phase,
)
from vllm.distributed.graph_channels.ledger import Ledger
from vllm.distributed.graph_channels.scope import active_channel, owner_scope
from vllm.distributed.graph_channels.vote import GroupClosed
from vllm.distributed.parallel_state import get_graph_channels
from vllm.v1.worker import graph_channels
from vllm.v1.worker.gpu import model_runner as v2_model_runner
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

COVERS = (
    "vllm/v1/worker/gpu_model_runner.py",
    "vllm/v1/worker/gpu/model_runner.py",
)


def test_v1_profile_and_production_differ(v1_runner, communicator, seen):  # R-A1, R-A3
    v1_runner.profile_cudagraph_memory()
    v1_runner.capture_model()
    assert communicator.names == ["vllm:target:profile", "vllm:target:production"]
    assert seen == [
        ("target", "vllm:target:profile"),
        ("encoder", "vllm:encoder:profile"),
        ("freed", ""),
        ("target", "vllm:target:production"),
        ("encoder", "vllm:encoder:production"),
    ]


def test_v1_a_second_profile_has_the_same_names(v1_runner, communicator):  # R-A2
    for _ in range(2):
        v1_runner.profile_cudagraph_memory()
    assert communicator.names == ["vllm:target:profile"] * 2


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_v1_a_failed_profile_closes_its_scope(
    v1_runner, communicator, seen, failure
):  # R-B5 # C18
    def fail(*args, **kwargs):
        raise failure("first error")

    v1_runner._warmup_and_capture = fail
    with pytest.raises(failure, match="first error"):
        v1_runner.profile_cudagraph_memory()
    assert active_channel() is None
    assert communicator.depth == 0
    assert seen == [("freed", "")]


def test_v1_without_graphs_opens_no_scope(v1_runner, communicator):  # R-A5
    v1_runner.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    assert v1_runner.capture_model() == 0
    assert communicator.names == []


FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


@pytest.mark.parametrize("breakable", [False, True])
@pytest.mark.parametrize("modes", [[FULL], [PIECEWISE], [PIECEWISE, FULL]])
def test_v2_names_the_target(
    modes, breakable, communicator, channels, no_graphs, monkeypatch
):  # R-A3 # R-B2
    seen = []

    def model(**inputs):
        seen.append(str(active_channel()))
        return torch.zeros(1, 1)

    runner = object.__new__(v2_model_runner.GPUModelRunner)
    manager = object.__new__(ModelCudaGraphManager)
    manager.device, manager.vllm_config = torch.device("cpu"), None
    give_sizes(manager, modes, breakable)
    manager.is_first_pp_rank = manager.is_last_pp_rank = True
    manager.hidden_states = None
    manager.run_pw_graph = lambda model, inputs: model(**inputs)
    runner.cudagraph_manager = manager
    runner.is_encoder_only = False
    runner.model, runner.model_state = model, MagicMock(supports_mm_inputs=False)
    runner.model_state.prepare_dummy_inputs = lambda *batch: {}
    runner.input_buffers = MagicMock()
    runner.speculator = runner.adaptive_verification = runner.lora_config = None
    runner.use_aux_hidden_state_outputs = False
    runner.intermediate_tensors = runner.block_tables = None
    runner.attn_groups = runner.kv_cache_config = None
    runner.maybe_setup_dummy_loras = lambda config: nullcontext()
    monkeypatch.setattr(
        v2_model_runner, "create_lora_capture_hook", lambda config, runner: None
    )
    runner.capture_model()
    name = "vllm:target:production"
    # a warm-up and a capture of each size
    assert seen == [name] * 2 * len(SIZES) * len(modes)
    assert [e for e in channels.events if "enter" in e] == [f"tp enter {name}"]
    assert communicator.names == [name]


# V1: nothing stays of a profile ----------------------------------------------

PREPARED = "vllm:draft:profile,vllm:encoder:profile,vllm:target:profile"
PROFILE = ChannelId(Owner.TARGET, Phase.PROFILE)
LANES = {EagerLane.ALLREDUCE: 64}


class _Graph:
    """Stands for a torch.cuda.CUDAGraph: somebody may hold it."""


@pytest.fixture(params=[CUDAGraphWrapper, BreakableCUDAGraphWrapper])
def wrapper(request, channels):
    """A wrapper of vLLM's, which notes the pools it is given."""

    class NotingWrapper(request.param):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "graph_pool":
                restored = value == "serving pool"
                channels.events.append(f"pool {'restored' if restored else 'swapped'}")

    wrapper = object.__new__(NotingWrapper)
    wrapper.runnable = None
    wrapper.graph_pool = "serving pool"
    wrapper.concrete_cudagraph_entries = wrapper.entries = {}
    request.param._all_instances.add(wrapper)
    channels.events.clear()
    yield wrapper
    request.param._all_instances.discard(wrapper)


@pytest.fixture
def profiled(v1_runner, channels, wrapper, monkeypatch):
    """The V1 runner with a draft, on the ledger; all that happens is one list."""
    events = channels.events

    def capture(owner):
        graph = _Graph()
        weakref.finalize(graph, events.append, f"graph of {owner} destroyed")
        wrapper.entries[owner] = graph
        events.append(f"graph of {owner} captured")

    def capture_both(*args, **kwargs):
        capture("target")
        with owner_scope(Owner.DRAFT):
            capture("draft")

    def free():
        events.append("profiling KV freed")

    def sample():
        events.append("sample")
        return 1 << 30, 1 << 31

    v1_runner._warmup_and_capture = capture_both
    v1_runner._cleanup_profiling_kv_cache = free
    monkeypatch.setattr(torch.accelerator, "get_memory_info", sample)
    gc.freeze()  # all of vLLM, else each collection walks it
    yield v1_runner
    gc.unfreeze()


def test_v1_profiles_between_a_checkpoint_and_a_rollback(profiled, channels):
    # R-C1 # R-C5 # C13 # C15
    profiled.profile_cudagraph_memory()
    assert channels.events == [
        "tp checkpoint",
        "pool swapped",
        f"tp prepare {PREPARED}",
        "tp enter vllm:target:profile",
        "tp synchronize",
        "sample",
        "graph of target captured",
        "tp enter vllm:draft:profile",
        "tp synchronize",
        "graph of draft captured",
        "tp leave vllm:draft:profile",
        "sample",
        "sample",
        "tp enter vllm:encoder:profile",
        "tp synchronize",
        "tp leave vllm:encoder:profile",
        "sample",
        "tp leave vllm:target:profile",
        "graph of target destroyed",
        "graph of draft destroyed",
        "pool restored",
        "tp synchronize",
        "tp rollback",
        "profiling KV freed",
    ]
    assert channels.channels == LANES


def test_v1_graphs_in_cycles_are_gone_before_the_rollback(profiled, channels, wrapper):
    # R-C1
    def capture(*args, **kwargs):
        graph = _Graph()
        graph.itself = wrapper.entries["target"] = graph
        weakref.finalize(graph, channels.events.append, "graph destroyed")

    profiled._warmup_and_capture = capture
    gc.disable()
    try:
        profiled.profile_cudagraph_memory()
    finally:
        gc.enable()
    assert channels.events[-4:] == [
        "graph destroyed",
        "tp synchronize",
        "tp rollback",
        "profiling KV freed",
    ]


def test_v1_nothing_stays_over_a_hundred_profiles(profiled, channels):  # R-C2 # C13
    for _ in range(100):
        profiled.profile_cudagraph_memory()
        assert channels.channels == LANES
    assert channels.events.count("tp rollback") == 100


def test_v1_production_does_not_inherit_a_profiles_channel(profiled, channels):
    # R-A1 # C13
    profiled.profile_cudagraph_memory()
    channels.events.clear()
    profiled.capture_model()
    assert not [event for event in channels.events if "profile" in event]
    assert not [name for name in channels.channels if "profile" in str(name)]


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_v1_a_failed_profile_is_rolled_back_and_a_second_works(
    profiled, channels, failure
):  # R-C1 # C18
    works = profiled._warmup_and_capture

    def fail(*args, **kwargs):
        graph = _Graph()  # under capture, held by nothing but this call
        weakref.finalize(graph, channels.events.append, "graph destroyed")
        raise failure("first error")

    profiled._warmup_and_capture = fail
    with pytest.raises(failure, match="first error") as raised:
        profiled.profile_cudagraph_memory()
    assert getattr(raised.value, "__notes__", []) == []
    assert channels.events[-6:] == [
        "tp leave vllm:target:profile",
        "pool restored",
        "graph destroyed",
        "tp synchronize",
        "tp rollback",
        "profiling KV freed",
    ]
    assert channels.channels == LANES
    profiled._warmup_and_capture = works
    profiled.profile_cudagraph_memory()
    assert channels.channels == LANES


def test_v1_a_graph_that_an_earlier_error_holds_is_gone_too(profiled, channels):
    # R-C1 # C18
    def capture():
        graph = _Graph()
        weakref.finalize(graph, channels.events.append, "graph destroyed")
        raise ValueError("in the capture")

    def fail(*args, **kwargs):
        try:
            capture()
        except ValueError as error:
            raise RuntimeError("first error") from error

    profiled._warmup_and_capture = fail
    with pytest.raises(RuntimeError, match="first error"):
        profiled.profile_cudagraph_memory()
    assert channels.events[-4:] == [
        "graph destroyed",
        "tp synchronize",
        "tp rollback",
        "profiling KV freed",
    ]


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_v1_a_failing_rollback_is_noted_on_the_first_error(profiled, channels, failure):
    # R-C3 # C18: all ranks are there, so the rest is cleaned up.
    def fail(*args, **kwargs):
        raise failure("first error")

    profiled._warmup_and_capture = fail
    channels.fail["rollback"] = RuntimeError("second error")
    with pytest.raises(failure, match="first error") as raised:
        profiled.profile_cudagraph_memory()
    (note,) = raised.value.__notes__
    assert "second error" in note
    assert channels.events[-2:] == ["tp rollback", "profiling KV freed"]
    assert channels.channels != LANES  # still owned, not half forgotten


def test_v1_a_failing_rollback_after_a_good_capture_is_raised(profiled, channels):
    # R-C3
    channels.fail["rollback"] = RuntimeError("the only error")
    with pytest.raises(RuntimeError, match="the only error"):
        profiled.profile_cudagraph_memory()


def test_v1_channels_that_cannot_be_prepared_are_rolled_back(profiled, channels):
    # R-C1 # C18 # C40
    channels.fail["prepare"] = MemoryError("no memory for channels")
    with pytest.raises(MemoryError, match="no memory for channels"):
        profiled.profile_cudagraph_memory()
    assert channels.events[-2:] == ["pool restored", "profiling KV freed"]
    assert not [event for event in channels.events if "captured" in event]


@pytest.mark.parametrize("failure", [None, RuntimeError, KeyboardInterrupt])
def test_v1_after_a_lost_rank_nothing_waits_for_the_device(
    profiled, channels, monkeypatch, heard, failure
):  # R-C1 # C18 # C49
    (group,) = get_graph_channels()._groups

    def lose_it(*args, **kwargs):
        group._lost = "tp:0: rank 1 did not vote in time"
        channels.events.clear()
        if failure is not None:
            raise failure("first error")

    def forbidden():
        channels.events.append("waited for the device")

    profiled._warmup_and_capture = lose_it
    profiled.maybe_remove_all_loras = lambda config: forbidden()
    if failure is not None:  # else the capture itself goes on, and may wait
        monkeypatch.setattr(torch.accelerator, "synchronize", forbidden)
    with pytest.raises(failure or GroupClosed) as raised:
        profiled.profile_cudagraph_memory()
    assert not {"waited for the device", "profiling KV freed"} & {*channels.events}
    assert "tp synchronize" not in channels.events[-2:]
    assert "tp rollback" not in channels.events
    if failure is not None:
        assert "first error" in str(raised.value)
        assert "did not vote in time" in raised.value.__notes__[0]
    (said,) = [r.getMessage() for r in heard if "left to the end" in r.getMessage()]
    assert "rank 1 did not vote in time" in said
    assert list(channels.channels) != list(LANES)  # ownership is kept
    assert get_graph_channels().lost


def test_v1_an_error_that_the_caller_handles_is_not_the_captures(profiled, channels):
    # R-C3
    handled = RuntimeError("handled")
    channels.fail["rollback"] = RuntimeError("of the rollback")
    with pytest.raises(RuntimeError, match="of the rollback"):
        try:
            raise handled
        except RuntimeError:
            profiled.profile_cudagraph_memory()
    assert not hasattr(handled, "__notes__")


def test_v1_without_graphs_there_is_no_checkpoint(profiled, channels):  # R-A5
    profiled.cudagraph_dispatcher.get_capture_descs = lambda: []
    profiled._create_encoder_cudagraph_manager = lambda: None
    assert profiled.profile_cudagraph_memory() == 0
    assert channels.events == ["profiling KV freed"]


def test_v1_inside_an_open_scope_nothing_is_touched(profiled, channels, wrapper):
    # R-C4
    refused = pytest.raises(RuntimeError, match="leave the scope first")
    with get_graph_channels().scope(PROFILE), refused:
        profiled.profile_cudagraph_memory()
    assert wrapper.graph_pool == "serving pool"
    assert "pool swapped" not in channels.events


def test_v1_without_a_transport_nothing_of_ours_runs(v1_runner, seen, monkeypatch):
    # R-A5
    def never(*args, **kwargs):
        raise AssertionError("asked of a ledger without transports")

    for ledger in (None, Ledger(deadline=5, closing_deadline=5)):
        monkeypatch.setattr(parallel_state, "_LEDGER", ledger)
        if ledger is not None:
            for name in ("checkpoint", "prepare", "rollback", "silence"):
                monkeypatch.setattr(ledger, name, never)
        monkeypatch.setattr(graph_channels.gc, "collect", never)
        v1_runner.profile_cudagraph_memory()
    assert [who for who, _ in seen] == ["target", "encoder", "freed"] * 2


def test_v2_profiles_without_a_checkpoint(channels):  # C46
    runner = object.__new__(v2_model_runner.GPUModelRunner)
    assert runner.profile_cudagraph_memory() == 0
    assert channels.events == []
