# SPDX-License-Identifier: Apache-2.0
"""The multimodal encoder names its graphs on both runners."""

import pytest
import torch

from vllm.distributed.graph_channels.identity import Phase
from vllm.distributed.graph_channels.scope import active_channel
from vllm.platforms import current_platform
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

COVERS = ("vllm/v1/worker/gpu/mm/encoder_runner.py",)


@pytest.fixture
def manager():
    """A manager with two budgets that notes the active channel of each capture."""
    manager = object.__new__(EncoderCudaGraphManager)
    manager.path_token_budgets = {"default": [64, 128]}
    manager.seen = []
    manager._capture_budget_graph = lambda budget, path: manager.seen.append(
        (budget, str(active_channel()))
    )
    return manager


def test_on_v1_it_captures_inside_the_targets_scope(v1_runner, seen, channels):
    # R-B4
    v1_runner.profile_cudagraph_memory()
    v1_runner.capture_model()
    phases = [phase.value for phase in (Phase.PROFILE, Phase.PRODUCTION)]
    names = [name for who, name in seen if who == "encoder"]
    assert names == [f"vllm:encoder:{phase}" for phase in phases]
    entered = [event for event in channels.events if "enter" in event]
    assert entered == [
        f"tp enter vllm:{owner}:{phase}"
        for phase in phases
        for owner in ("target", "encoder")
    ]


def test_on_v2_it_opens_a_scope_of_its_own(manager, communicator, monkeypatch):  # R-A3
    monkeypatch.setattr(current_platform, "graph_pool_handle", object, raising=False)
    runner = object.__new__(EncoderRunner)
    runner.device = torch.device("cpu")
    runner.cudagraph_manager = manager
    runner.capture()
    name = "vllm:encoder:production"
    assert communicator.names == [name]
    assert manager.seen == [(128, name), (64, name)]
    assert active_channel() is None
