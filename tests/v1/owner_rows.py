# SPDX-License-Identifier: Apache-2.0
"""Runner, speculator and graph mode together: tiny engines, and their owners.

All are dense and have dummy weights. Those with drafts compute in float32 over a
small vocabulary, so that the best token leads clearly and batches of other shapes,
as drafts make them, choose the same one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.engines import LLAMA, MEASURED

V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
RUNNERS = {"V1": V1, "V2": V2}
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


class Draft(NamedTuple):
    """How a speculator is asked for.

    Attributes:
        method: vLLM's name of it, in a speculative_config.
        target: The served model's ``config.json``.
        model: The draft's, if it has a model of its own.
    """

    method: str
    target: Mapping[str, Any] = TARGET
    model: Mapping[str, Any] | None = None


DRAFTS = {
    "EAGLE": Draft("eagle", model=_DRAFT),
    "EAGLE3": Draft("eagle3", model=EAGLE3),
    "draft model": Draft("draft_model", model=_DRAFT),
    "MTP": Draft("mtp", MIMO),
    "multi-module MTP": Draft("mtp", EXAONE),
    "DFlash": Draft("dflash", model=DFLASH),
    "DFlash2": Draft("dflash", model=DFLASH2),
    "DSpark": Draft("dspark", model=DSPARK),
}
# What vLLM makes of each speculator, by the name of a class or function.
SPECULATORS: Mapping[str, Mapping[str, str]] = {
    "V1": {
        "EAGLE": "EagleProposer",
        "EAGLE3": "EagleProposer",
        "MTP": "EagleProposer",
        "Step3.5 MTP": "Step3p5MTPProposer",
        "draft model": "DraftModelProposer",
        "DFlash": "DFlashProposer",
        "Gemma4": "Gemma4Proposer",
        "extract_hidden_states": "ExtractHiddenStatesProposer",
        "n-gram": "NgramProposer",
        "n-gram on the GPU": "NgramProposerGPU",
        "suffix": "SuffixDecodingProposer",
        "Medusa": "MedusaProposer",
        "custom class": "create_custom_proposer",
    },
    "V2": {
        "EAGLE": "EagleSpeculator",
        "EAGLE3": "EagleSpeculator",
        "MTP": "MTPSpeculator",
        "multi-module MTP": "MultiModuleMTPSpeculator",
        "Gemma4": "Gemma4Speculator",
        "DFlash": "DFlashSpeculator",
        "DFlash2": "DFlash2Speculator",
        "DSpark": "DSparkSpeculator",
    },
}
DRAFTED = 2  # tokens a step

SIZES = [1, 2, 4, 8, 12]  # of batches that have graphs
_GRAPHS = {"custom_ops": ["none"], "cudagraph_capture_sizes": SIZES}
# What makes pieces of graphs, if any are made. FlashInfer, where it is installed, would
# fuse the sums of compiled models: they would be its own.
_PIECES = {
    "": _GRAPHS | {"mode": 0},
    "breakable": _GRAPHS | {"mode": 0},
    "compiled": _GRAPHS | {"mode": 3, "pass_config": {"fuse_allreduce_rms": False}},
}


@dataclass(frozen=True)
class Row:
    """One combination.

    Attributes:
        runner: V1 or V2.
        mode: What makes pieces, if any are made, and vLLM's cudagraph_mode.
        owners: Values of the owners whose graphs record launches.
        speculator: Of ``DRAFTS``, if there is a draft.
        more: Other options of the engine.
    """

    runner: str
    mode: str
    owners: frozenset[str] = frozenset(["target"])
    speculator: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Runner, speculator if there is one, mode."""
        return ", ".join(filter(None, (self.runner, self.speculator, self.mode)))

    @property
    def cudagraph_mode(self) -> str:
        """As vLLM has it."""
        return self.mode.split()[-1]

    @property
    def target(self) -> Mapping[str, Any]:
        """The served model's ``config.json``."""
        return TARGET if self.speculator is None else DRAFTS[self.speculator].target

    @property
    def environment(self) -> dict[str, str]:
        """Of its engine."""
        breakable = BREAKABLE if self._pieces == "breakable" else {}
        return self.plain_environment | breakable

    @property
    def plain_environment(self) -> dict[str, str]:
        """Of the engine with neither a draft nor graphs."""
        return RUNNERS[self.runner] | ({} if self.speculator is None else _EXACT)

    def engine(self) -> dict[str, Any]:
        """The options of its engine, with the draft if there is one."""
        graphs = _PIECES[self._pieces] | {"cudagraph_mode": self.cudagraph_mode}
        options = self._shared() | {"compilation_config": graphs}
        if self.speculator is not None:
            method, _, model = DRAFTS[self.speculator]
            options["speculative_config"] = {
                "method": method,
                "num_speculative_tokens": DRAFTED,
                **({} if model is None else {"model": model}),
            }
        return options

    def plain(self) -> dict[str, Any]:
        """The options of the engine with neither a draft nor graphs."""
        return self._shared() | {
            "compilation_config": {"custom_ops": ["none"]},
            "enforce_eager": True,
        }

    @property
    def _pieces(self) -> str:
        return self.mode.rpartition(" ")[0]

    def _shared(self) -> dict[str, Any]:
        exact = {} if self.speculator is None else {"dtype": "float32"}
        return {"attention_backend": "TRITON_ATTN", **exact, **self.more}


def _named(*rows: Row) -> dict[str, Row]:
    return {row.name: row for row in rows}


# Of bfloat16, as they are served.
TARGETS = _named(
    Row("V1", "FULL_DECODE_ONLY"),
    Row("V1", "breakable PIECEWISE"),
    Row("V2", "FULL_DECODE_ONLY"),
    Row("V2", "breakable PIECEWISE"),
    Row("V2", "compiled FULL_AND_PIECEWISE"),
)
# With memory measured, by throwaway graphs too: nothing may run beside it.
MEASURED_TARGETS = _named(Row("V1", "compiled FULL_AND_PIECEWISE", more=MEASURED))

_BY_PROPOSER = frozenset(["target", "draft"])
V1_DRAFTS = _named(
    Row("V1", "breakable PIECEWISE", _BY_PROPOSER, "EAGLE"),
    Row("V1", "compiled FULL_AND_PIECEWISE", _BY_PROPOSER, "EAGLE"),
    Row("V1", "breakable PIECEWISE", _BY_PROPOSER, "EAGLE3"),
    Row("V1", "breakable PIECEWISE", _BY_PROPOSER, "draft model"),
    Row("V1", "breakable PIECEWISE", _BY_PROPOSER, "MTP"),
    Row("V1", "breakable PIECEWISE", _BY_PROPOSER, "DFlash"),
)

_PREFILL = frozenset(["target", "draft_prefill"])
_AUTOREGRESSIVE = _PREFILL | {"draft_decode"}
V2_AUTOREGRESSIVE = _named(
    Row("V2", "FULL_DECODE_ONLY", _AUTOREGRESSIVE, "EAGLE"),
    Row("V2", "breakable PIECEWISE", _PREFILL, "EAGLE"),
    Row("V2", "compiled FULL_AND_PIECEWISE", _AUTOREGRESSIVE, "EAGLE"),
    Row("V2", "breakable FULL_AND_PIECEWISE", _AUTOREGRESSIVE, "EAGLE3"),
    Row("V2", "FULL_DECODE_ONLY", _AUTOREGRESSIVE, "MTP"),
)
V2_ONE_OWNER = _named(
    *(
        Row("V2", "FULL_DECODE_ONLY", frozenset(["target", owner]), speculator)
        for speculator, owner in (
            ("multi-module MTP", "multi_module_mtp"),
            ("DFlash", "draft_query"),
            ("DFlash2", "draft_query"),
            ("DSpark", "dspark"),
        )
    )
)
ROWS = TARGETS | MEASURED_TARGETS | V1_DRAFTS | V2_AUTOREGRESSIVE | V2_ONE_OWNER
