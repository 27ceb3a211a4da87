# SPDX-License-Identifier: Apache-2.0
"""V2 autoregressive drafts capture on the channels that the worker made for them."""

from types import SimpleNamespace

import pytest

from tests.v1.speculators import speculator_of
from vllm.config import SpeculativeConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import get_graph_channels
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.gemma4.speculator import Gemma4Speculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.graph_channels import reserves_graph_channels

PREFILL, DECODE = "vllm:draft_prefill:production", "vllm:draft_decode:production"
TARGET = "vllm:target:production"


def _worker(steps, mode):
    speculative = object.__new__(SpeculativeConfig)
    speculative.method = "eagle"
    speculative.draft_model_config = None
    speculative.num_speculative_tokens = steps
    speculative.enable_adaptive_verification = False
    config = SimpleNamespace(
        speculative_config=speculative,
        is_encoder_only=False,
        model_config=SimpleNamespace(enforce_eager=False, multimodal_config=None),
        compilation_config=SimpleNamespace(
            cudagraph_mode=mode, cudagraph_mm_encoder=False
        ),
    )
    runner = SimpleNamespace(vllm_config=config, supports_mm_inputs=False)
    return SimpleNamespace(model_runner=runner, use_v2_model_runner=True)


@reserves_graph_channels
def determine(worker):
    return 1 << 30


def _draft_channels(channels):
    return {str(name) for name in channels.channels if "draft" in str(name)}


@pytest.mark.parametrize("cls", [EagleSpeculator, MTPSpeculator, Gemma4Speculator])
@pytest.mark.parametrize(
    "mode", [CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.PIECEWISE]
)
@pytest.mark.parametrize("steps", [1, 3])
def test_capturing_makes_no_channel_beside_the_prepared(cls, mode, steps, channels):
    # R-C5 # R-A3 # C46
    assert determine(_worker(steps, mode)) < 1 << 30
    prepared = dict(channels.channels)
    full = mode.has_full_cudagraphs()
    expected = {PREFILL, DECODE} if steps > 1 and full else {PREFILL}
    assert _draft_channels(channels) == expected
    speculator = speculator_of(cls)
    speculator.num_speculative_steps = steps
    speculator.capture()
    assert channels.channels == prepared


def test_prefill_and_decode_each_enter_their_own(channels):  # R-A3 # C07
    determine(_worker(3, CUDAGraphMode.FULL_AND_PIECEWISE))
    channels.events.clear()
    speculator_of(EagleSpeculator).capture()
    entered = [event for event in channels.events if "enter" in event]
    assert entered == [f"tp enter {PREFILL}", f"tp enter {DECODE}"]


def test_channels_come_in_one_step_and_one_order(channels):  # R-C5 # C06
    determine(_worker(3, CUDAGraphMode.FULL_AND_PIECEWISE))
    names = ",".join(sorted([PREFILL, DECODE, TARGET]))
    assert channels.events == [f"tp prepare {names}"]


def test_their_bytes_are_counted(channels):  # R-C6 # C46
    channels.prepared_bytes = 1000
    left = determine(_worker(3, CUDAGraphMode.FULL_AND_PIECEWISE))
    assert left == (1 << 30) - 3 * 1000


def test_a_rollback_to_before_keeps_nothing_of_them(channels):  # R-C2
    ledger = get_graph_channels()
    before, checkpoint = dict(channels.channels), ledger.checkpoint()
    determine(_worker(3, CUDAGraphMode.FULL_AND_PIECEWISE))
    ledger.rollback(checkpoint)
    assert channels.channels == before
