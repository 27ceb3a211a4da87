# SPDX-License-Identifier: Apache-2.0
"""Runner, speculator and graph mode together: tiny engines, and their owners.

All are dense and have dummy weights. They compute in float32 over a small
vocabulary, so that the best token leads clearly and batches of other shapes, as
drafts make them, choose the same one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.engines import DEEPSEEK, LLAMA

V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
BREAKABLE = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}

_SMALL = {"vocab_size": 64, "max_position_embeddings": 2048}
# Three layers: drafts that read the target's hidden states take two of them.
TARGET = LLAMA | _SMALL | {"num_hidden_layers": 3}
# With MTP modules of its own, one or two; none of them has experts.
_MTP = (
    DEEPSEEK
    | _SMALL
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 8,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 1.0,
    }
)
ONE_MTP = _MTP | {"num_nextn_predict_layers": 1}
TWO_MTP = _MTP | {"num_nextn_predict_layers": 2}

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

_GRAPHS = {
    "mode": 0,
    "custom_ops": ["none"],
    "cudagraph_capture_sizes": [1, 2, 4, 8, 12, 16],
}


@dataclass(frozen=True)
class Row:
    """One combination.

    Attributes:
        environment: Which runner, and which kind of piecewise graphs.
        graphs: vLLM's cudagraph_mode.
        owners: Values of the owners whose graphs record launches.
        target: The served model's ``config.json``.
        speculative: vLLM's speculative_config; its ``model`` may be a
            ``config.json`` too.
        options: Others, for ``vllm.LLM``.
    """

    environment: Mapping[str, str]
    graphs: str
    owners: frozenset[str]
    target: Mapping[str, Any] = field(default_factory=lambda: TARGET)
    speculative: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def engine(self) -> dict[str, Any]:
        """The options of its engine, with the draft."""
        draft = {"speculative_config": self.speculative} if self.speculative else {}
        return {**self.undrafted(), **draft}

    def undrafted(self) -> dict[str, Any]:
        """The options of the engine without a draft."""
        return {
            "dtype": "float32",
            "compilation_config": _GRAPHS | {"cudagraph_mode": self.graphs},
            **self.options,
        }


def _draft(method: str, model: Mapping[str, Any] | None, steps: int) -> dict[str, Any]:
    given = {} if model is None else {"model": model}
    return {"method": method, "num_speculative_tokens": steps, **given}


def _row(environment, graphs, owners, method, model, steps, target=TARGET, **options):
    return Row(
        environment,
        graphs,
        frozenset(owners),
        target,
        _draft(method, model, steps),
        options,
    )


_AUTOREGRESSIVE = ("target", "draft_prefill", "draft_decode")
_MLA = {"attention_backend": "TRITON_MLA"}

ROWS = {
    "V1, EAGLE, breakable PIECEWISE": _row(
        V1 | BREAKABLE, "PIECEWISE", ("target", "draft"), "eagle", _DRAFT, 2
    ),
    "V1, EAGLE3, breakable PIECEWISE": _row(
        V1 | BREAKABLE, "PIECEWISE", ("target", "draft"), "eagle3", EAGLE3, 2
    ),
    "V1, draft model, breakable PIECEWISE": _row(
        V1 | BREAKABLE, "PIECEWISE", ("target", "draft"), "draft_model", _DRAFT, 2
    ),
    "V2, EAGLE, FULL_DECODE_ONLY": _row(
        V2, "FULL_DECODE_ONLY", _AUTOREGRESSIVE, "eagle", _DRAFT, 2
    ),
    "V2, EAGLE3, breakable FULL_AND_PIECEWISE": _row(
        V2 | BREAKABLE, "FULL_AND_PIECEWISE", _AUTOREGRESSIVE, "eagle3", EAGLE3, 2
    ),
    "V2, MTP, FULL_DECODE_ONLY": _row(
        V2, "FULL_DECODE_ONLY", _AUTOREGRESSIVE, "mtp", None, 2, ONE_MTP, **_MLA
    ),
    "V2, multi-module MTP, FULL_DECODE_ONLY": _row(
        V2,
        "FULL_DECODE_ONLY",
        ("target", "multi_module_mtp"),
        "mtp",
        None,
        2,
        TWO_MTP,
        **_MLA,
    ),
    "V2, DFlash, FULL_DECODE_ONLY": _row(
        V2, "FULL_DECODE_ONLY", ("target", "draft_query"), "dflash", DFLASH, 3
    ),
    "V2, DFlash2, FULL_DECODE_ONLY": _row(
        V2, "FULL_DECODE_ONLY", ("target", "draft_query"), "dflash", DFLASH2, 3
    ),
    "V2, DSpark, FULL_DECODE_ONLY": _row(
        V2, "FULL_DECODE_ONLY", ("target", "dspark"), "dspark", DSPARK, 3
    ),
}
