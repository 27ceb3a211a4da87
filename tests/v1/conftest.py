# SPDX-License-Identifier: Apache-2.0
"""A V1 runner that captures nothing real."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.graph_channels.scope import active_channel
from vllm.v1.spec_decode import dflash, extract_hidden_states, llm_base_proposer
from vllm.v1.worker import gpu_model_runner, graph_channels
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.spec_decode.autoregressive import (
    cudagraph_utils as autoregressive,
)
from vllm.v1.worker.gpu.spec_decode.dflash import cudagraph as dflash_v2

_DESC = SimpleNamespace(num_tokens=8, uniform=True, num_active_loras=0)


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
    runner.vllm_config.speculative_config.method = "eagle"
    runner.supports_mm_inputs = True
    runner.get_model = lambda: None
    runner.compilation_config = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL)
    runner.max_model_len = runner.max_num_tokens = 64
    runner.lora_config = None
    runner.encoder_cudagraph_manager = _encoder(seen)
    runner.cudagraph_dispatcher = SimpleNamespace(
        get_capture_descs=lambda: [(CUDAGraphMode.FULL, [_DESC])],
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
    monkeypatch.setattr(graph_channels, "supports_encoder_cudagraph", lambda m: True)
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


@pytest.fixture
def no_forward_context(monkeypatch):
    """Proposers run without what a forward pass of the runner sets up."""
    for module in (dflash, extract_hidden_states, llm_base_proposer):
        monkeypatch.setattr(
            module, "set_forward_context", lambda *args, **kwargs: nullcontext()
        )


@pytest.fixture
def no_graphs(monkeypatch):
    """V2's managers capture nothing, of batches that are made up."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", MagicMock())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: nullcontext())
    for module, name, stub in (
        (cudagraph_utils, "set_graph_pool_id", lambda pool: None),
        (cudagraph_utils, "is_global_first_rank", lambda: False),
        (cudagraph_utils, "current_platform", MagicMock()),
        (cudagraph_utils, "set_forward_context", lambda *a, **k: nullcontext()),
        (cudagraph_utils, "prepare_inputs_to_capture", lambda *a, **k: (None, None)),
        (autoregressive, "prepare_inputs_to_capture", lambda *a, **k: (None, None)),
        (dflash_v2, "_prepare_dflash_inputs_to_capture", lambda *a, **k: (None, None)),
    ):
        monkeypatch.setattr(module, name, stub)
