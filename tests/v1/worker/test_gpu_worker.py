# SPDX-License-Identifier: Apache-2.0
"""The worker makes the channels that serve, and takes their bytes off the KV cache."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

import vllm.envs as envs
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.distributed.graph_channels.identity import ChannelId, Owner, Phase
from vllm.distributed.graph_channels.ledger import Ledger
from vllm.distributed.parallel_state import get_graph_channels
from vllm.v1.worker import gpu_worker, graph_channels
from vllm.v1.worker.gpu_worker import Worker

COVERS = ("vllm/v1/worker/gpu_worker.py",)

GIB = 1 << 30
MIB = 1 << 20
TARGET = ChannelId(Owner.TARGET, Phase.PRODUCTION)
ENCODER = ChannelId(Owner.ENCODER, Phase.PRODUCTION)

# How determine_available_memory may end: what changes, and what it returned.
WAYS = {
    "profiled": 9 * GIB - 2 * MIB,
    "no graphs to profile": 9 * GIB,
    "estimate off": 9 * GIB,
    "kv_cache_memory_bytes": 5 * GIB,
}


@pytest.fixture(params=[False, True], ids=["V1", "V2"])
def worker(request, monkeypatch, events):
    """A worker that has loaded a model of text; what happens is in ``events``."""
    worker = object.__new__(Worker)
    worker.use_v2_model_runner = request.param
    config = MagicMock()
    config.is_encoder_only = config.model_config.enforce_eager = False
    config.model_config.multimodal_config = None
    config.speculative_config = None
    config.compilation_config = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, cudagraph_mm_encoder=False
    )
    worker.vllm_config, worker.model_config = config, config.model_config
    worker.parallel_config = SimpleNamespace()
    worker.cache_config = SimpleNamespace(
        kv_cache_memory_bytes=None, gpu_memory_utilization=0.9
    )
    worker.init_snapshot = SimpleNamespace(free_memory=12 * GIB, total_memory=16 * GIB)
    worker.requested_memory = 10 * GIB
    worker.model_runner = SimpleNamespace(
        vllm_config=config,
        supports_mm_inputs=False,
        model_memory_usage=0,
        profile_run=lambda: events.append("profile_run"),
        profile_cudagraph_memory=lambda: events.append("profile_graphs") or 2 * MIB,
    )
    worker.model_runner.get_model = lambda: None
    monkeypatch.setattr(gpu_worker, "maybe_apply_startup_plan", lambda worker: None)
    monkeypatch.setattr(gpu_worker.current_platform, "is_cuda_alike", lambda: True)
    monkeypatch.setattr(gpu_worker, "memory_profiling", _measured(events))
    return worker


def _measured(events):
    @contextmanager
    def memory_profiling(snapshot, weights_memory):
        result = MagicMock(
            non_kv_cache_memory=GIB, total_consumed=GIB, transient_peak_headroom=0
        )
        result.after_profile.free_memory = 11 * GIB
        yield result
        events.append("memory measured")

    return memory_profiling


@pytest.fixture
def events(channels):
    channels.prepared_bytes = 3 * MIB
    return channels.events


@pytest.fixture(params=WAYS)
def way(request, worker, monkeypatch):
    """One way to end; what the method returned upstream."""
    if request.param == "no graphs to profile":
        worker.model_runner.profile_cudagraph_memory = lambda: 0
    if request.param == "estimate off":
        monkeypatch.setattr(
            envs, "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", False, raising=False
        )
    if request.param == "kv_cache_memory_bytes":
        worker.cache_config.kv_cache_memory_bytes = 5 * GIB
    return WAYS[request.param]


def _lines(heard):
    said = [record.getMessage() for record in heard]
    return [line for line in said if line.startswith("Graph channels")]


def test_channels_come_last_and_off_what_is_available(
    worker, way, channels, events, heard
):  # R-C5 # R-C6 # C46
    assert worker.determine_available_memory() == way - 3 * MIB
    assert events[-1] == "tp prepare vllm:target:production"
    assert len([event for event in events if "tp" in event]) == 1  # no checkpoint
    assert channels.channels[TARGET] == 3 * MIB
    (line,) = _lines(heard)
    assert "take 3.00 MiB" in line
    assert f"leaves {(way - 3 * MIB) / MIB:.2f} MiB" in line
    assert "vllm:target:production 3.00 MiB" in line


@pytest.mark.parametrize(("size", "level"), [(3 * MIB, "INFO"), (512 * MIB, "WARNING")])
def test_a_large_share_is_warned_of(worker, channels, heard, size, level):  # C45
    channels.prepared_bytes = size
    worker.determine_available_memory()
    (record,) = [r for r in heard if r.getMessage().startswith("Graph channels")]
    assert record.levelname == level


def test_capturing_makes_no_further_channel(worker, channels):  # R-C5 # C45
    worker.determine_available_memory()
    prepared = dict(channels.channels)
    with get_graph_channels().scope(TARGET):
        assert channels.channels == prepared


def test_every_transport_counts(worker, channels, events):  # R-C6
    from tests.distributed.recording_transport import RecordingTransport, alone

    second = RecordingTransport("dcp", events)
    second.prepared_bytes = 4 * MIB
    get_graph_channels().register(second, alone("dcp:0"))
    assert worker.determine_available_memory() == 9 * GIB - (2 + 3 + 4) * MIB


def test_channels_that_are_there_are_counted_again_but_not_made_again(worker, channels):
    # R-C5 # R-C6: a second measurement starts from the same snapshot
    first = worker.determine_available_memory()
    assert worker.determine_available_memory() == first
    assert len(channels.channels) == 2


def test_a_worker_without_graphs_makes_no_channel(worker, channels, heard):  # R-A3
    worker.vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    assert worker.determine_available_memory() == 9 * GIB
    assert TARGET not in channels.channels
    assert _lines(heard) == []


@pytest.mark.parametrize("mode", ["weights", "data"])
def test_an_encoder_without_collectives_gets_no_memory(
    worker, channels, monkeypatch, mode
):  # R-A3
    config = worker.vllm_config
    config.compilation_config.cudagraph_mm_encoder = True
    config.model_config.multimodal_config = MagicMock(mm_encoder_tp_mode=mode)
    monkeypatch.setattr(gpu_worker, "reserve_mm_ipc_gpu_memory", lambda n, *_: n)
    monkeypatch.setattr(graph_channels, "supports_encoder_cudagraph", lambda m: True)
    worker.model_runner.supports_mm_inputs = True
    worker.determine_available_memory()
    with get_graph_channels().scope(ENCODER):
        assert (ENCODER in channels.channels) is (mode == "weights")


def test_a_failed_measurement_makes_no_channel(worker, channels, events):  # R-C3
    def fail():
        raise RuntimeError("first error")

    worker.model_runner.profile_run = fail
    with pytest.raises(RuntimeError, match="first error") as raised:
        worker.determine_available_memory()
    assert events == []
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.FULL])
def test_peers_are_told_where_they_come_to_make_channels(
    worker, channels, monkeypatch, mode
):  # R-A3 # R-C3
    refuse = MagicMock()
    monkeypatch.setattr(Ledger, "refuse", refuse)
    worker.vllm_config.compilation_config.cudagraph_mode = mode
    worker.model_runner.profile_run = MagicMock(side_effect=RuntimeError)
    with pytest.raises(RuntimeError):
        worker.determine_available_memory()
    assert refuse.called is (mode is CUDAGraphMode.FULL)


def test_peers_that_cannot_be_told_are_a_note(worker, channels, monkeypatch):  # R-C3
    def fail():
        raise RuntimeError("first error")

    worker.model_runner.profile_run = fail
    monkeypatch.setattr(graph_channels, "_owners", None)
    with pytest.raises(RuntimeError, match="first error") as raised:
        worker.determine_available_memory()
    assert "Other ranks could not be told" in raised.value.__notes__[0]


@pytest.mark.parametrize("ledger", [None, Ledger(deadline=5, closing_deadline=5)])
def test_without_a_transport_nothing_changes(worker, way, monkeypatch, heard, ledger):
    # R-A5
    monkeypatch.setattr(parallel_state, "_LEDGER", ledger)
    monkeypatch.setattr(graph_channels, "_owners", None)
    assert worker.determine_available_memory() == way
    assert _lines(heard) == []
