# SPDX-License-Identifier: Apache-2.0
"""Who will capture graphs under a configuration, before anybody does.

Channels are made for a whole catalogue of owners at once, and every rank of a
group makes the same one, so it follows from the configuration and from the
group's place in the pipeline alone. It holds each owner whose scope the runners
will open: a scope that was not foreseen makes its channel when it opens, which
no memory measurement has counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from vllm.config import CUDAGraphMode, SpeculativeConfig, VllmConfig
from vllm.distributed.graph_channels.identity import Owner

_AUTOREGRESSIVE = (Owner.DRAFT_PREFILL, Owner.DRAFT_DECODE)


@dataclass(frozen=True)
class GraphOwners:
    """The owners whose scopes open under one configuration.

    Attributes:
        communicating: Those that may communicate in their scope.
        silent: Those that never do; they get no memory.
    """

    communicating: frozenset[Owner] = frozenset()
    silent: frozenset[Owner] = frozenset()


@dataclass(frozen=True)
class Stage:
    """The place of a tensor parallel group in the pipeline.

    Attributes:
        is_first: It takes the inputs in.
        is_last: It has the drafts.
    """

    is_first: bool = True
    is_last: bool = True


def graph_owners(
    config: VllmConfig, stage: Stage, *, v2_runner: bool, encoder_has_graphs: bool
) -> GraphOwners:
    """Whose scopes a runner opens when it captures for production.

    The V1 runner opens those of the same owners when it profiles.

    Args:
        config: Of the worker, alike on all ranks.
        stage: Where the worker's tensor parallel group stands.
        v2_runner: Whether the V2 runner is in use.
        encoder_has_graphs: Whether the model's encoder can be captured, and
            is to be.
    """
    owners = _v2_owners if v2_runner else _v1_owners
    # By owner: whether it communicates.
    found = owners(config, stage, encoder_has_graphs)
    return GraphOwners(
        communicating=frozenset(owner for owner, does in found.items() if does),
        silent=frozenset(owner for owner, does in found.items() if not does),
    )


def _v1_owners(
    config: VllmConfig, stage: Stage, encoder_has_graphs: bool
) -> dict[Owner, bool]:
    if config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE:
        return {}
    found = {Owner.TARGET: True}
    speculative = config.speculative_config
    if speculative is not None and stage.is_last:
        # It runs in its scope beside every graph of the target, also where it
        # captures none itself.
        if speculative.use_eagle() or speculative.uses_draft_model():
            found[Owner.DRAFT] = True
        elif speculative.uses_extract_hidden_states():
            found[Owner.DRAFT] = False  # its model only writes to a cache
    if encoder_has_graphs:
        found[Owner.ENCODER] = _encoder_communicates(config)
    return found


def _v2_owners(
    config: VllmConfig, stage: Stage, encoder_has_graphs: bool
) -> dict[Owner, bool]:
    if config.is_encoder_only or config.model_config.enforce_eager:
        return {}
    found = {}
    if encoder_has_graphs and stage.is_first:
        found[Owner.ENCODER] = _encoder_communicates(config)
    if config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE:
        return found  # the encoder is captured all the same
    found[Owner.TARGET] = True
    if config.speculative_config is not None and stage.is_last:
        mode = config.compilation_config.cudagraph_mode
        found |= _v2_drafts(config.speculative_config, mode.has_full_cudagraphs())
    return found


def _v2_drafts(speculative: SpeculativeConfig, full_graphs: bool) -> dict[Owner, bool]:
    # All but a draft's prefill have full graphs or none; with none, their scopes
    # open and nothing runs. Adaptive verification turns full graphs on.
    full = full_graphs or speculative.enable_adaptive_verification
    return {
        owner: full or owner is Owner.DRAFT_PREFILL
        for owner in _v2_draft_scopes(speculative)
    }


def _v2_draft_scopes(speculative: SpeculativeConfig) -> Iterable[Owner]:
    """Whose scopes a V2 speculator opens: by the class that vLLM makes of it."""
    if speculative.method == "dflash":
        return (Owner.DRAFT_QUERY,)
    if speculative.method == "dspark":
        return (Owner.DSPARK,)
    if speculative.use_multi_module_mtp() and not speculative.use_gemma4_mtp():
        return (Owner.MULTI_MODULE_MTP,)
    if speculative.num_speculative_tokens == 1:
        return (Owner.DRAFT_PREFILL,)
    return _AUTOREGRESSIVE


def _encoder_communicates(config: VllmConfig) -> bool:
    # In mode "data" each rank encodes whole items; they are gathered afterwards.
    multimodal = config.model_config.multimodal_config
    return multimodal is None or multimodal.mm_encoder_tp_mode != "data"
