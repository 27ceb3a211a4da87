# SPDX-License-Identifier: Apache-2.0
"""What graph channels cannot be combined with, refused before anything starts."""

from typing import TYPE_CHECKING

import vllm.envs as envs

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def refuse_combinations(config: "VllmConfig") -> None:
    """Refuse a configuration whose ranks come, go or end in ways of their own.

    Raises:
        ValueError: It has such a feature, with a transport switched on.
    """
    parallel = config.parallel_config
    features = {
        # Their actors are killed where they stand, and may span hosts.
        "the Ray executor": parallel.distributed_executor_backend == "ray",
        # Replaces groups under a living tensor parallel group, and recaptures.
        "elastic expert parallelism": parallel.enable_elastic_ep,
        # Goes on after a step that failed on one rank.
        "fault tolerance": parallel.enable_fault_tolerance,
    }
    for feature, wanted in features.items():
        if wanted:
            raise ValueError(_refusal(feature))


def refuse_checkpoints() -> None:
    """Refuse to prepare a process checkpoint: mapped peer memory is not restored.

    Raises:
        RuntimeError: A transport is switched on.
    """
    if envs.VLLM_PCIE_ALLREDUCE_BACKEND != "cpp":
        raise RuntimeError(_refusal("process checkpoints"))


def _refusal(feature: str) -> str:
    return (
        f"VLLM_PCIE_ALLREDUCE_BACKEND={envs.VLLM_PCIE_ALLREDUCE_BACKEND} cannot be "
        f"combined with {feature}; unset it, or do without"
    )
