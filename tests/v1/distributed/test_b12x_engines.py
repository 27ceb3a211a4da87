# SPDX-License-Identifier: Apache-2.0
"""Whole engines on b12x channels: NCCL's tokens, and owners that carry them."""

import pytest

from tests import engines, gpus
from tests.distributed.b12x_ranks import SWITCHES

pytestmark = gpus.needs_gpu

_SIZES = {"cudagraph_capture_sizes": [1, 2, 4]}
_UNCOMPILED = _SIZES | {"mode": 0, "custom_ops": ["none"]}
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
BREAKABLE = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}

TARGET, DRAFT = "vllm:target:production", "vllm:draft:production"

# Environment, options of the engine, the owners that record launches.
ENGINES = {
    "V1, FULL decode": (
        V1,
        {"compilation_config": _UNCOMPILED | {"cudagraph_mode": "FULL_DECODE_ONLY"}},
        {TARGET},
    ),
    "V2, FULL decode": (
        V2,
        {"compilation_config": _UNCOMPILED | {"cudagraph_mode": "FULL_DECODE_ONLY"}},
        {TARGET},
    ),
    "V1, breakable piecewise, draft model": (
        V1 | BREAKABLE,
        {
            "compilation_config": _UNCOMPILED | {"cudagraph_mode": "PIECEWISE"},
            "speculative_config": {
                "method": "draft_model",
                "model": engines.LLAMA,
                "num_speculative_tokens": 2,
            },
        },
        {TARGET, DRAFT},
    ),
    "V2, breakable piecewise": (
        V2 | BREAKABLE,
        {"compilation_config": _UNCOMPILED | {"cudagraph_mode": "PIECEWISE"}},
        {TARGET},
    ),
    "V1, compiled, profiled": (
        V1,
        {
            "compilation_config": _SIZES
            | {
                "mode": 3,
                "custom_ops": ["none"],
                "cudagraph_mode": "FULL_AND_PIECEWISE",
                # by FlashInfer, where it is installed: the sums would be its own
                "pass_config": {"fuse_allreduce_rms": False},
            },
            **engines.MEASURED,
        },
        {TARGET},
    ),
}


@pytest.mark.parametrize(
    ("environment", "options", "owners"), ENGINES.values(), ids=ENGINES
)
def test_an_engine_gives_the_tokens_of_nccl(environment, options, owners):
    # R-B1 # R-F1 # C35
    shared = {"attention_backend": "TRITON_ATTN", **options}
    nccl = engines.generate(
        2, engines.LLAMA, environment, disable_custom_all_reduce=True, **shared
    )
    b12x = engines.generate(2, engines.LLAMA, environment | SWITCHES, **shared)

    assert [answer.tokens for answer in b12x] == [answer.tokens for answer in nccl]
    assert [answer.tables for answer in nccl] == [[], []]  # R-A5
    for rank, answer in enumerate(b12x):
        (recorded,) = answer.recorded.values()
        assert set(recorded) == owners
        assert len(answer.tables) == (rank == 0)
    (table,) = b12x[0].tables
    assert "b12x all-reduce of tp:0, 2 ranks" in table
    for owner in owners:
        assert f"{owner} " in table
