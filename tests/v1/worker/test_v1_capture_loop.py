# SPDX-License-Identifier: Apache-2.0
"""The V1 runner's own loop: a draft runs beside every graph of the target.

``capture_model`` down to ``_dummy_run`` is vLLM's, and so is the proposer; models
are recorders, and what describes a batch is made up.
"""

from contextlib import nullcontext
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch

from tests.v1.speculators import SIZES, Anything, proposer_of
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.graph_channels.scope import active_channel
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer
from vllm.v1.spec_decode.gemma4 import Gemma4Proposer
from vllm.v1.spec_decode.step3p5 import Step3p5MTPProposer
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

# vLLM's cudagraph_mode, and what it has the loop capture, all sizes of one after those
# of the other.
MODES = {
    CUDAGraphMode.PIECEWISE: [CUDAGraphMode.PIECEWISE],
    CUDAGraphMode.FULL: [CUDAGraphMode.FULL],
    CUDAGraphMode.FULL_DECODE_ONLY: [CUDAGraphMode.FULL],
    CUDAGraphMode.FULL_AND_PIECEWISE: [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL],
}
TARGET, DRAFT = "vllm:target:production", "vllm:draft:production"
PROPOSERS = (
    EagleProposer,
    DraftModelProposer,
    DFlashProposer,
    Gemma4Proposer,
    Step3p5MTPProposer,
    ExtractHiddenStatesProposer,
)


def _desc(tokens):
    return SimpleNamespace(
        num_tokens=tokens, num_reqs=tokens, uniform=True, num_active_loras=0
    )


@pytest.fixture(params=MODES, ids=lambda mode: mode.name)
def mode(request):
    """vLLM's cudagraph_mode."""
    return request.param


@pytest.fixture
def runner(mode, v1_runner, no_forward_context, seen, monkeypatch):
    """The V1 runner of conftest with its own loop, and a target that is a recorder."""
    for name in ("_warmup_and_capture", "_capture_cudagraphs"):
        delattr(v1_runner, name)
    v1_runner.__class__ = type("Runner", (GPUModelRunner, Anything), {})
    v1_runner.encoder_cudagraph_manager = None
    current = []

    def capture_descs():
        for captured in MODES[mode]:
            current[:] = [captured]
            yield captured, [_desc(size) for size in SIZES]

    v1_runner.cudagraph_dispatcher.get_capture_descs = capture_descs
    v1_runner.compilation_config = SimpleNamespace(
        cudagraph_mode=mode,
        cudagraph_num_of_warmups=1,
        cudagraph_specialize_lora=False,
    )
    v1_runner.vllm_config.model_config.multimodal_config = None
    v1_runner.scheduler_config.max_num_seqs = 4
    v1_runner.parallel_config.use_ubatching = False
    v1_runner.uniform_decode_query_len = 1
    v1_runner.supports_mm_inputs = v1_runner.enable_prompt_embeds = False
    v1_runner.uses_mrope = False
    v1_runner.uses_xdrope_dim = 0
    v1_runner.use_aux_hidden_state_outputs = False
    v1_runner.speculative_config.enforce_eager = False
    v1_runner._determine_batch_execution_and_padding = (
        lambda num_tokens, force_eager, **batch: (
            CUDAGraphMode.NONE if force_eager else current[0],
            _desc(num_tokens),
            False,
            None,
            None,
        )
    )
    v1_runner._get_slot_mappings = lambda **batch: (None, None)
    v1_runner._build_attention_metadata = lambda **batch: (None, None)
    v1_runner._get_cumsum_and_arange = lambda counts, out: counts.cumsum()
    v1_runner._init_model_kwargs = dict
    v1_runner._register_layerwise_nvtx_hooks = lambda: None
    v1_runner.synchronize_input_prep = nullcontext
    for name in ("maybe_dummy_run_with_lora", "maybe_randomize_inputs"):
        setattr(v1_runner, name, lambda *given, **named: nullcontext())

    def target(**inputs):
        seen.append(str(active_channel()))
        return torch.zeros(max(SIZES), 1)

    v1_runner.model = target
    for name, stub in {
        "set_forward_context": lambda *given, **named: nullcontext(),
        "get_dcp_dummy_context_len": lambda *given: 0,
        "prepare_dcp_dummy_context_metadata": lambda **batch: None,
        "maybe_create_ubatch_slices": lambda *given: (None, None),
        "is_global_first_rank": lambda: False,
    }.items():
        monkeypatch.setattr(gpu_model_runner, name, stub)
    return v1_runner


@pytest.mark.parametrize("cls", PROPOSERS, ids=lambda cls: cls.__name__)
def test_a_draft_has_its_own_channel_beside_every_graph(
    runner, mode, seen, cls, channels
):
    # R-B4 # C07: a warm-up and a capture of each size; a draft may take more steps
    runner.drafter = proposer_of(cls, seen)
    runner.capture_model()
    in_turn = [name for name, _ in groupby(seen)]
    assert in_turn == [TARGET, DRAFT] * 2 * len(SIZES) * len(MODES[mode])
    entered = [event for event in channels.events if "enter" in event]
    assert entered[:2] == [f"tp enter {TARGET}", f"tp enter {DRAFT}"]
    # the target's scope is entered once, the draft's once a run
    assert entered.count(f"tp enter {TARGET}") == 1
    assert channels.events.count("tp synchronize") == 2


def test_a_target_alone_has_one_channel(runner, mode, seen, channels):  # R-A3
    runner.speculative_config = None
    runner.capture_model()
    assert seen == [TARGET] * 2 * len(SIZES) * len(MODES[mode])
    assert [e for e in channels.events if "enter" in e] == [f"tp enter {TARGET}"]
