# SPDX-License-Identifier: Apache-2.0
"""vLLM's speculators and proposers, without a model."""

from unittest.mock import MagicMock

import torch

from vllm.distributed.graph_channels.scope import active_channel
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.autoregressive.cudagraph_utils import (
    SpeculatorCudaGraphManager,
)
from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager

MANAGERS = {
    "prefill_cudagraph_manager": SpeculatorCudaGraphManager,
    "decode_cudagraph_manager": SpeculatorCudaGraphManager,
    "cudagraph_manager": SpeculatorCudaGraphManager,
    "query_cudagraph_manager": DFlashCudaGraphManager,
}


SIZES = (4, 2, 1)


def give_sizes(manager, modes, breakable):
    """Let a V2 manager without a GPU capture batches of ``SIZES``, in each mode."""
    manager.graphs, manager.pool, manager.dp_size = {}, None, 1
    manager.max_num_reqs, manager.use_breakable_cg = max(SIZES), breakable
    manager.init_breakable_cg_runner = lambda model: None
    manager._capture_descs = {
        mode: [BatchExecutionDescriptor(mode, size, size) for size in SIZES]
        for mode in modes
    }


class Anything:
    """Gives a mock for whatever attribute is read."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=name)
        setattr(self, name, value)
        return value


def speculator_of(cls):
    """A speculator without a model, with real managers that have no batch sizes."""
    speculator = object.__new__(type(cls.__name__, (cls, Anything), {}))
    for attribute, manager_class in MANAGERS.items():
        manager = object.__new__(manager_class)
        manager.device = torch.device("cpu")
        manager.use_breakable_cg = False
        manager._capture_descs = {}
        setattr(speculator, attribute, manager)
    speculator.num_speculative_steps = 2
    return speculator


def proposer_of(cls, seen):
    """A V1 proposer whose model notes in which channel it runs."""
    proposer = object.__new__(type(cls.__name__, (cls, Anything), {}))
    model = MagicMock()
    model.side_effect = lambda **inputs: seen.append(str(active_channel()))
    proposer.model = model
    proposer.parallel_drafting = False
    proposer.num_speculative_tokens = 3
    proposer.max_query_tokens = 8
    proposer.supports_mm_inputs = False
    proposer.pass_hidden_states_to_model = False
    proposer._draft_attn_layer_names = proposer.attn_layer_names = []
    proposer._determine_batch_execution_and_padding = lambda *a, **k: (None, 1, None)
    return proposer
