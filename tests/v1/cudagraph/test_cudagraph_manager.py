# SPDX-License-Identifier: Apache-2.0
"""V2 graph managers hand their owner's name to graph_capture."""

import inspect
from unittest.mock import MagicMock

import pytest
import torch

import vllm.v1.worker.gpu
from tests.utils import import_all, with_subclasses
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.graph_channels.identity import ChannelId, Owner, Phase
from vllm.distributed.graph_channels.scope import active_channel
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)
from vllm.v1.worker.gpu.spec_decode.autoregressive.cudagraph_utils import (
    SpeculatorCudaGraphManager,
)
from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager

COVERS = (
    "vllm/v1/worker/gpu/cudagraph_utils.py",
    "vllm/v1/worker/gpu/spec_decode/autoregressive/cudagraph_utils.py",
    "vllm/v1/worker/gpu/spec_decode/dflash/cudagraph.py",
)

NAME = ChannelId(Owner.CONTEXT_KV, Phase.PRODUCTION)

# What each kind of manager is given beside the name.
ARGUMENTS = {
    CudaGraphManager: 1,
    ModelCudaGraphManager: 7,
    SpeculatorCudaGraphManager: 6,
    DFlashCudaGraphManager: 7,
}


def _managers():
    import_all(vllm.v1.worker.gpu)
    return with_subclasses(CudaGraphManager)


def _manager(cls):
    manager = object.__new__(cls)
    manager.device = torch.device("cpu")
    manager.use_breakable_cg = False
    manager.graphs = {}
    manager.pool = None
    manager._capture_descs = {}
    return manager


def test_every_kind_of_manager_is_tested():
    assert set(_managers()) == set(ARGUMENTS)


@pytest.mark.parametrize("cls", ARGUMENTS)
def test_the_name_reaches_the_communicator(cls, communicator):  # R-A4
    arguments = [MagicMock()] * ARGUMENTS[cls]
    _manager(cls).capture(*arguments, channel_id=NAME)
    assert communicator.names == ["vllm:context_kv:production"]


@pytest.mark.parametrize("cls", ARGUMENTS)
def test_a_caller_that_passes_nothing_works_as_before(cls, communicator):  # R-A5
    arguments = [MagicMock()] * ARGUMENTS[cls]
    _manager(cls).capture(*arguments)
    assert communicator.names == [None]


def test_every_override_takes_the_name():  # R-A4 # C07
    for cls in _managers():
        assert "channel_id" in inspect.signature(cls.capture).parameters, cls


FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


@pytest.mark.parametrize(
    ("mode", "breakable"), [(FULL, False), (PIECEWISE, False), (PIECEWISE, True)]
)
def test_warm_up_and_capture_run_in_the_owners_scope(
    mode, breakable, communicator, no_graphs
):  # R-B2 # C09
    desc = BatchExecutionDescriptor(mode, num_tokens=1, num_reqs=1)
    seen = []

    def create_forward_fn(desc, warmup):
        return lambda mode: seen.append((warmup, mode, str(active_channel())))

    manager = _manager(CudaGraphManager)
    manager._capture_descs = {mode: [desc]}
    manager.use_breakable_cg = breakable
    manager.capture(create_forward_fn, channel_id=NAME)
    # Compiled pieces are captured by the model's own wrappers, with the inputs of
    # the warm-up; the two others get inputs of their own.
    compiled = mode is PIECEWISE and not breakable
    captured = CUDAGraphMode.NONE if mode is FULL else PIECEWISE
    assert seen == [
        (True, CUDAGraphMode.NONE, str(NAME)),
        (compiled, captured, str(NAME)),
    ]
    assert list(manager.graphs) == ([desc] if mode is FULL else [])
    assert active_channel() is None
