# SPDX-License-Identifier: Apache-2.0
"""Two owners under one name are refused when the second captures.

Nothing in vLLM does that. Each hook here makes one of its classes do it, and its
own capture runs: on recorders, over the host transport and on b12x's pools, both
with two ranks.
"""

from unittest.mock import MagicMock

import pytest
import torch

from tests.distributed.test_b12x_channels import adapter, ledger_of
from tests.distributed.test_b12x_pools import both_pools, on_two_ranks
from tests.distributed.test_graph_channels_ranks import on_ranks
from tests.v1.speculators import proposer_of, speculator_of
from vllm.distributed import parallel_state
from vllm.distributed.graph_channels.identity import ChannelId, Owner, Phase
from vllm.distributed.graph_channels.scope import owner_scope
from vllm.distributed.graph_channels.together import Refused
from vllm.distributed.parallel_state import graph_capture
from vllm.platforms import current_platform
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm.v1.worker.gpu.mm import encoder_runner
from vllm.v1.worker.gpu.spec_decode.autoregressive import speculator as autoregressive
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.multi_module_mtp import speculator as multi_module
from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import (
    MultiModuleMTPSpeculator,
)

CPU = torch.device("cpu")
TARGET = ChannelId(Owner.TARGET, Phase.PRODUCTION)
TAKEN = "a second capture as vllm:{}:production"
INSIDE = "what captures inside the target's scope is not the target"


def _encoder_manager():
    manager = object.__new__(EncoderCudaGraphManager)
    manager.path_token_budgets = {"default": [64, 128]}
    manager._capture_budget_graph = lambda budget, path: None
    return manager


def v1_captures():
    """As the V1 runner does: the inner owners in the target's scope."""
    proposer = proposer_of(EagleProposer, [])
    with graph_capture(device=CPU, channel_id=TARGET):
        for size in (4, 2):
            proposer.dummy_run(size, is_graph_capturing=True)
        _encoder_manager().capture(graph_pool=None)


def v2_captures(speculator):
    """As the V2 runner does: each owner in a scope of its own."""

    def capture():
        encoder = object.__new__(encoder_runner.EncoderRunner)
        encoder.device, encoder.cudagraph_manager = CPU, _encoder_manager()
        encoder.capture()
        target = object.__new__(ModelCudaGraphManager)
        target.device, target.use_breakable_cg, target._capture_descs = CPU, False, {}
        target.capture(*[MagicMock()] * 7, channel_id=TARGET)
        speculator_of(speculator).capture()

    return capture


def _scope_becomes(cls, method, owner):
    unmarked = getattr(cls, method).__wrapped__
    return lambda patch: patch.setattr(cls, method, owner_scope(owner)(unmarked))


def _name_becomes(module, owner):
    return lambda patch: patch.setattr(
        module, "ChannelId", lambda _, phase: ChannelId(owner, phase)
    )


def _owner_becomes(cls, owner):
    return lambda patch: patch.setattr(cls, "graph_owner", owner)


# What captures, the hook, and what is said of it.
HOOKS = {
    "V1, draft as target": (
        v1_captures,
        _scope_becomes(SpecDecodeBaseProposer, "dummy_run", Owner.TARGET),
        INSIDE,
    ),
    "V1, encoder as target": (
        v1_captures,
        _scope_becomes(EncoderCudaGraphManager, "capture", Owner.TARGET),
        INSIDE,
    ),
    "V1, encoder as draft": (
        v1_captures,
        _scope_becomes(EncoderCudaGraphManager, "capture", Owner.DRAFT),
        TAKEN.format("draft"),
    ),
    "V2, encoder as target": (
        v2_captures(EagleSpeculator),
        _name_becomes(encoder_runner, Owner.TARGET),
        TAKEN.format("target"),
    ),
    "V2, draft decode as prefill": (
        v2_captures(EagleSpeculator),
        _name_becomes(autoregressive, Owner.DRAFT_PREFILL),
        TAKEN.format("draft_prefill"),
    ),
    "V2, multi-module MTP as target": (
        v2_captures(MultiModuleMTPSpeculator),
        _name_becomes(multi_module, Owner.TARGET),
        TAKEN.format("target"),
    ),
    "V2, DFlash as target": (
        v2_captures(DFlashSpeculator),
        _owner_becomes(DFlashSpeculator, Owner.TARGET),
        TAKEN.format("target"),
    ),
    "V2, DSpark as encoder": (
        v2_captures(DSparkSpeculator),
        _owner_becomes(DSparkSpeculator, Owner.ENCODER),
        TAKEN.format("encoder"),
    ),
}


@pytest.fixture(params=HOOKS)
def hook(request, communicator, no_forward_context, monkeypatch):
    """(what captures, what turns the hook on, what is said then)."""
    monkeypatch.setattr(current_platform, "graph_pool_handle", object, raising=False)
    captures, install, said = HOOKS[request.param]
    return captures, lambda: install(monkeypatch), said


def _refusal(captures):
    with pytest.raises((Refused, ValueError)) as refused:
        captures()
    return str(refused.value)


def test_on_recorders(hook, channels):  # R-A3 # C07
    captures, install, said = hook
    ledger = parallel_state.get_graph_channels()
    for _ in range(2):  # a rollback frees names too
        checkpoint = ledger.checkpoint()
        captures()
        ledger.rollback(checkpoint)
    install()
    assert said in _refusal(captures)


def test_over_the_host_transport(hook):  # R-A3 # C07
    captures, install, said = hook

    def body(rank):
        parallel_state._LEDGER = rank.ledger
        checkpoint = rank.ledger.checkpoint()
        captures()
        rank.ledger.rollback(checkpoint)
        install()
        refusal = _refusal(captures)
        rank.demand_sum()  # refused, not lost: they are in step
        return refusal

    assert all(said in refusal for refusal in on_ranks(2, body))


@both_pools
def test_on_b12x_pools(hook, make):  # R-A3 # C07
    captures, install, said = hook

    def body(rank, pool):
        ledger = parallel_state._LEDGER = ledger_of(rank, adapter(pool))
        checkpoint = ledger.checkpoint()
        captures()
        ledger.rollback(checkpoint)
        install()
        refusal = _refusal(captures)
        ledger.close()
        return refusal

    assert all(said in refusal for refusal in on_two_ranks(make, body))


def test_a_hook_on_one_rank_is_refused_on_both(
    communicator, no_forward_context, monkeypatch
):  # R-A3 # C06
    monkeypatch.setattr(current_platform, "graph_pool_handle", object, raising=False)
    captures, install, said = HOOKS["V2, draft decode as prefill"]

    def body(rank):
        parallel_state._LEDGER = rank.ledger
        if rank.rank == 1:
            install(monkeypatch)
        return _refusal(captures)

    for refusal in on_ranks(2, body):
        assert "rank 0: voted on 'capture on vllm:draft_decode" in refusal
        assert said in refusal.partition("rank 1: ")[2]
