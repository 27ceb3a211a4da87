# SPDX-License-Identifier: Apache-2.0
"""Both runners name the target's graphs, in profiling and in production."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.graph_channels.scope import active_channel
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager
from vllm.v1.worker.gpu import model_runner as v2_model_runner
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

COVERS = (
    "vllm/v1/worker/gpu_model_runner.py",
    "vllm/v1/worker/gpu/model_runner.py",
)

DESC = SimpleNamespace(num_tokens=8, uniform=True, num_active_loras=0)


def _encoder(seen):
    manager = object.__new__(EncoderCudaGraphManager)
    manager.path_token_budgets = {"default": [64]}
    manager.token_budgets = [64]
    manager.budget_graphs = {}
    manager._capture_budget_graph = lambda budget, path: seen.append(
        ("encoder", str(active_channel()))
    )
    return manager


@pytest.fixture
def seen():
    """(who captured, in which channel) in order."""
    return []


@pytest.fixture
def v1_runner(communicator, seen, monkeypatch):
    """A V1 runner without a model: one FULL graph, and an encoder's."""
    runner = object.__new__(gpu_model_runner.GPUModelRunner)
    runner.device = torch.device("cpu")
    runner.vllm_config = MagicMock()
    runner.vllm_config.profiler_config.capture_torch_profiler = False
    runner.compilation_config = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL)
    runner.max_model_len = runner.max_num_tokens = 64
    runner.lora_config = None
    runner.encoder_cudagraph_manager = _encoder(seen)
    runner.cudagraph_dispatcher = SimpleNamespace(
        get_capture_descs=lambda: [(CUDAGraphMode.FULL, [DESC])],
        cudagraph_keys={},
        keys_initialized=True,
    )

    def capture_one(*args, **kwargs):
        seen.append(("target", str(active_channel())))

    runner._freeze_gc = nullcontext
    runner._init_minimal_kv_cache_for_profiling = lambda: None
    runner._create_encoder_cudagraph_manager = lambda: runner.encoder_cudagraph_manager
    runner._warmup_and_capture = capture_one
    runner._capture_cudagraphs = capture_one
    runner._cleanup_profiling_kv_cache = lambda: seen.append(("freed", ""))
    runner.maybe_remove_all_loras = lambda config: None

    platform = MagicMock()
    platform.is_rocm.return_value = False
    monkeypatch.setattr(gpu_model_runner, "current_platform", platform)
    monkeypatch.setattr(
        gpu_model_runner, "set_current_vllm_config", lambda config: nullcontext()
    )
    monkeypatch.setattr(gpu_model_runner, "lock_workspace", lambda: None)
    monkeypatch.setattr(
        "vllm.distributed.parallel_state.get_world_group",
        lambda: SimpleNamespace(local_rank=1),
    )
    return runner


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


def test_v2_names_the_target(communicator, monkeypatch):  # R-A3
    runner = object.__new__(v2_model_runner.GPUModelRunner)
    manager = object.__new__(ModelCudaGraphManager)
    manager.device = torch.device("cpu")
    manager.use_breakable_cg = False
    manager._capture_descs = {}
    manager.needs_capture = lambda: True
    runner.cudagraph_manager = manager
    runner.is_encoder_only = False
    runner.model_state = SimpleNamespace(supports_mm_inputs=False)
    runner.speculator = runner.adaptive_verification = runner.lora_config = None
    runner.use_aux_hidden_state_outputs = False
    for name in ("model", "input_buffers", "intermediate_tensors", "block_tables"):
        setattr(runner, name, None)
    runner.attn_groups = runner.kv_cache_config = None

    @contextmanager
    def no_loras(config):
        yield

    runner.maybe_setup_dummy_loras = no_loras
    monkeypatch.setattr(
        v2_model_runner, "create_lora_capture_hook", lambda config, runner: None
    )
    runner.capture_model()
    assert communicator.names == ["vllm:target:production"]
