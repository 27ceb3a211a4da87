# SPDX-License-Identifier: Apache-2.0
"""Two owners under one name are refused when the second captures.

Nothing in vLLM does that. Each hook here makes one of its classes do it, and its
own capture runs: on recorders, over the host transport and on b12x's pools, both
with two ranks.
"""

from functools import partial
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
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager
from vllm.v1.worker.gpu.cudagraph_utils import (
    CudaGraphManager,
    ModelCudaGraphManager,
)
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
DRAFT = ChannelId(Owner.DRAFT, Phase.PRODUCTION)


def _encoder_manager():
    manager = object.__new__(EncoderCudaGraphManager)
    manager.path_token_budgets = {"default": [64, 128]}
    manager._capture_budget_graph = lambda budget, path: None
    return manager


def _v1_captures(runner):
    """The V1 runner's own capture: a draft and an encoder in the target's scope."""
    proposer = proposer_of(EagleProposer, [])

    def with_draft(*given, **named):
        for size in (4, 2):
            proposer.dummy_run(size, is_graph_capturing=True)

    runner._capture_cudagraphs = with_draft
    return runner.capture_model


def _v2_captures(speculator):
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


def _encoder_becomes(owner):
    return lambda patch: patch.setattr(
        gpu_model_runner, "owner_scope", lambda _, by: owner_scope(owner, by)
    )


# The hook; the name that is then taken twice. V1's captures are of EAGLE.
V1_HOOKS = {
    "V1, draft as target": (
        _scope_becomes(SpecDecodeBaseProposer, "dummy_run", Owner.TARGET),
        "target",
    ),
    "V1, target as draft": (_name_becomes(gpu_model_runner, Owner.DRAFT), "draft"),
    "V1, target as encoder": (
        _name_becomes(gpu_model_runner, Owner.ENCODER),
        "encoder",
    ),
    "V1, encoder as target": (_encoder_becomes(Owner.TARGET), "target"),
    "V1, encoder as draft": (_encoder_becomes(Owner.DRAFT), "draft"),
}
# Whose captures, the hook, and the name.
V2_HOOKS = {
    "V2, encoder as target": (
        EagleSpeculator,
        _name_becomes(encoder_runner, Owner.TARGET),
        "target",
    ),
    "V2, draft decode as prefill": (
        EagleSpeculator,
        _name_becomes(autoregressive, Owner.DRAFT_PREFILL),
        "draft_prefill",
    ),
    "V2, multi-module MTP as target": (
        MultiModuleMTPSpeculator,
        _name_becomes(multi_module, Owner.TARGET),
        "target",
    ),
    "V2, DFlash as target": (
        DFlashSpeculator,
        _owner_becomes(DFlashSpeculator, Owner.TARGET),
        "target",
    ),
    "V2, DSpark as encoder": (
        DSparkSpeculator,
        _owner_becomes(DSparkSpeculator, Owner.ENCODER),
        "encoder",
    ),
}


@pytest.fixture(params=[*V1_HOOKS, *V2_HOOKS])
def hook(request, v1_runner, no_forward_context, monkeypatch):
    """(what captures, what turns the hook on, what is said then)."""
    monkeypatch.setattr(current_platform, "graph_pool_handle", object, raising=False)
    if request.param in V1_HOOKS:
        captures = _v1_captures(v1_runner)
        install, name = V1_HOOKS[request.param]
    else:
        speculator, install, name = V2_HOOKS[request.param]
        captures = _v2_captures(speculator)
    said = f"a second capture as vllm:{name}:production"
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


def test_a_hook_on_one_rank_is_refused_on_both(hook):  # R-A3 # C06
    captures, install, _ = hook

    def body(rank):
        parallel_state._LEDGER = rank.ledger
        if rank.rank == 1:
            install()
        return _refusal(captures)

    # the deadline is not waited for: they vote, each with its reason
    for refusal in on_ranks(2, body):
        assert "rank 0: voted on 'capture on vllm:" in refusal
        assert "rank 1: " in refusal


# Two owners by one class's code ------------------------------------------------


def _manager():
    manager = object.__new__(CudaGraphManager)
    manager.device, manager.use_breakable_cg, manager._capture_descs = CPU, False, {}
    return manager


def _dummy_run(proposer):
    return partial(proposer.dummy_run, 4, is_graph_capturing=True)


def _capture(manager):
    return partial(manager.capture, None, channel_id=DRAFT)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (EagleProposer, EagleProposer),
        (EagleProposer, DraftModelProposer),
        (EagleProposer, DFlashProposer),
        (EagleProposer, CudaGraphManager),
        (CudaGraphManager, EagleProposer),
        (CudaGraphManager, CudaGraphManager),
    ],
)
def test_another_object_of_the_name_is_refused(
    first, second, channels, no_forward_context
):  # R-A3
    one, other = (
        _capture(_manager())
        if cls is CudaGraphManager
        else _dummy_run(proposer_of(cls, []))
        for cls in (first, second)
    )
    with graph_capture(device=CPU, channel_id=TARGET):
        one()
        by = "owner_scope" if second is CudaGraphManager else second.__name__
        refused = rf"second capture as vllm:draft:production \(by .*{by}"
        with pytest.raises(Refused, match=refused):
            other()
        if first is not CudaGraphManager:
            one()  # the same draft, for the next size
