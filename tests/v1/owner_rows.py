# SPDX-License-Identifier: Apache-2.0
"""Runner, speculator and graph mode together: tiny engines, and their owners.

All are dense and have dummy weights. Those with drafts compute in float32 over a
small vocabulary, so that the best token leads clearly and batches of other shapes,
as drafts make them, choose the same one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.engines import LLAMA, MEASURED

V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
BREAKABLE = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}
# Triton would round float32 factors to TF32, by which best tokens may change places.
_EXACT = {"TRITON_F32_DEFAULT": "ieee"}

_SMALL = {"vocab_size": 64, "max_position_embeddings": 2048}
# Three layers: drafts that read the target's hidden states take two of them.
TARGET = LLAMA | _SMALL | {"num_hidden_layers": 3}
# With one MTP module of its own. MiMo is Qwen2 in all that a configuration says.
MIMO = TARGET | {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "num_nextn_predict_layers": 1,
}
# With two of them, and without experts.
EXAONE = TARGET | {
    "architectures": ["ExaoneMoeForCausalLM"],
    "model_type": "exaone_moe",
    "head_dim": 32,
    "layer_types": ["full_attention"] * 3,
    "mlp_layer_types": ["dense"] * 3,
    "sliding_windows": None,
    "num_nextn_predict_layers": 2,
    "mtp_layer_types": ["full_attention"] * 2,
    "mtp_sliding_windows": None,
}

_DRAFT = TARGET | {"num_hidden_layers": 1}
EAGLE3 = _DRAFT | {
    "num_aux_hidden_states": 2,
    "eagle_aux_hidden_state_layer_ids": [1, 2],
}
_QWEN = _DRAFT | {
    "model_type": "qwen3",
    "head_dim": 32,
    "attention_bias": False,
    "layer_types": ["full_attention"],
    "sliding_window": None,
}
_MASKED = {"mask_token_id": 3, "target_layer_ids": [0, 1]}
DFLASH = _QWEN | {"architectures": ["DFlashDraftModel"], "dflash_config": _MASKED}
DFLASH2 = _QWEN | {
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": _MASKED
    | {
        "conv_kernel_size": 3,
        "conv_group_size": 32,
        "selector_rank": 16,
        "selector_top_k": 4,
    },
}
DSPARK = _QWEN | {
    "architectures": ["Qwen3DSparkModel"],
    "dflash_config": _MASKED,
    "target_layer_ids": [0, 1],
    "mask_token_id": 3,
    "markov_rank": 16,
    "block_size": 4,
}

DRAFTED = 2  # tokens a step

_TRITON = {"attention_backend": "TRITON_ATTN"}

SIZES = [1, 2, 4, 8, 12]  # of batches that have graphs
_GRAPHS = {"custom_ops": ["none"], "cudagraph_capture_sizes": SIZES}
_UNCOMPILED = _GRAPHS | {"mode": 0}
# FlashInfer, where it is installed, would fuse the sums of compiled models: they
# would be its own.
_COMPILED = _GRAPHS | {"mode": 3, "pass_config": {"fuse_allreduce_rms": False}}


@dataclass(frozen=True)
class Row:
    """One combination.

    Attributes:
        environment: Which runner, and which kind of piecewise graphs.
        compilation: vLLM's compilation_config.
        owners: Values of the owners whose graphs record launches.
        target: The served model's ``config.json``.
        speculative: vLLM's speculative_config, if there is a draft; its ``model`` may
            be a ``config.json`` too.
        more: Other options of the engine.
    """

    environment: Mapping[str, str]
    compilation: Mapping[str, Any]
    owners: frozenset[str]
    target: Mapping[str, Any]
    speculative: Mapping[str, Any] | None
    more: Mapping[str, Any]

    def engine(self) -> dict[str, Any]:
        """The options of its engine, with the draft if there is one."""
        options = {**self.more, "compilation_config": self.compilation}
        if self.speculative is not None:
            options["speculative_config"] = self.speculative
        return options

    def plain(self) -> dict[str, Any]:
        """The options of the engine with neither a draft nor graphs."""
        return {
            **self.more,
            "compilation_config": {"custom_ops": ["none"]},
            "enforce_eager": True,
        }


def _target(environment, mode, compilation=_UNCOMPILED, **more):
    compilation = compilation | {"cudagraph_mode": mode}
    owners = frozenset(["target"])
    return Row(environment, compilation, owners, TARGET, None, _TRITON | more)


def _draft(
    environment,
    mode,
    owners,
    method,
    model=None,
    target=TARGET,
    compilation=_UNCOMPILED,
):
    draft = {"method": method, "num_speculative_tokens": DRAFTED}
    if model is not None:
        draft["model"] = model
    return Row(
        environment | _EXACT,
        compilation | {"cudagraph_mode": mode},
        frozenset(["target", *owners]),
        target,
        draft,
        _TRITON | {"dtype": "float32"},
    )


# Of bfloat16, as they are served.
TARGETS = {
    "V1, FULL_DECODE_ONLY": _target(V1, "FULL_DECODE_ONLY"),
    "V1, breakable PIECEWISE": _target(V1 | BREAKABLE, "PIECEWISE"),
    # with memory measured, by throwaway graphs too
    "V1, compiled FULL_AND_PIECEWISE": _target(
        V1, "FULL_AND_PIECEWISE", _COMPILED, **MEASURED
    ),
    "V2, FULL_DECODE_ONLY": _target(V2, "FULL_DECODE_ONLY"),
    "V2, breakable PIECEWISE": _target(V2 | BREAKABLE, "PIECEWISE"),
    "V2, compiled FULL_AND_PIECEWISE": _target(V2, "FULL_AND_PIECEWISE", _COMPILED),
}

_BY_PROPOSER = ("draft",)
V1_DRAFTS = {
    "V1, EAGLE, breakable PIECEWISE": _draft(
        V1 | BREAKABLE, "PIECEWISE", _BY_PROPOSER, "eagle", _DRAFT
    ),
    "V1, EAGLE, compiled FULL_AND_PIECEWISE": _draft(
        V1, "FULL_AND_PIECEWISE", _BY_PROPOSER, "eagle", _DRAFT, compilation=_COMPILED
    ),
    "V1, EAGLE3, breakable PIECEWISE": _draft(
        V1 | BREAKABLE, "PIECEWISE", _BY_PROPOSER, "eagle3", EAGLE3
    ),
    "V1, draft model, breakable PIECEWISE": _draft(
        V1 | BREAKABLE, "PIECEWISE", _BY_PROPOSER, "draft_model", _DRAFT
    ),
    "V1, MTP, breakable PIECEWISE": _draft(
        V1 | BREAKABLE, "PIECEWISE", _BY_PROPOSER, "mtp", target=MIMO
    ),
    "V1, DFlash, breakable PIECEWISE": _draft(
        V1 | BREAKABLE, "PIECEWISE", _BY_PROPOSER, "dflash", DFLASH
    ),
}

_PREFILL_AND_DECODE = ("draft_prefill", "draft_decode")
V2_AUTOREGRESSIVE = {
    "V2, EAGLE, FULL_DECODE_ONLY": _draft(
        V2, "FULL_DECODE_ONLY", _PREFILL_AND_DECODE, "eagle", _DRAFT
    ),
    "V2, EAGLE, breakable PIECEWISE": _draft(
        V2 | BREAKABLE, "PIECEWISE", ("draft_prefill",), "eagle", _DRAFT
    ),
    "V2, EAGLE, compiled FULL_AND_PIECEWISE": _draft(
        V2,
        "FULL_AND_PIECEWISE",
        _PREFILL_AND_DECODE,
        "eagle",
        _DRAFT,
        compilation=_COMPILED,
    ),
    "V2, EAGLE3, breakable FULL_AND_PIECEWISE": _draft(
        V2 | BREAKABLE, "FULL_AND_PIECEWISE", _PREFILL_AND_DECODE, "eagle3", EAGLE3
    ),
    "V2, MTP, FULL_DECODE_ONLY": _draft(
        V2, "FULL_DECODE_ONLY", _PREFILL_AND_DECODE, "mtp", target=MIMO
    ),
}
V2_ONE_OWNER = {
    "V2, multi-module MTP, FULL_DECODE_ONLY": _draft(
        V2, "FULL_DECODE_ONLY", ("multi_module_mtp",), "mtp", target=EXAONE
    ),
    "V2, DFlash, FULL_DECODE_ONLY": _draft(
        V2, "FULL_DECODE_ONLY", ("draft_query",), "dflash", DFLASH
    ),
    "V2, DFlash2, FULL_DECODE_ONLY": _draft(
        V2, "FULL_DECODE_ONLY", ("draft_query",), "dflash", DFLASH2
    ),
    "V2, DSpark, FULL_DECODE_ONLY": _draft(
        V2, "FULL_DECODE_ONLY", ("dspark",), "dspark", DSPARK
    ),
}
ROWS = TARGETS | V1_DRAFTS | V2_AUTOREGRESSIVE | V2_ONE_OWNER
