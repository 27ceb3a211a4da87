# SPDX-License-Identifier: Apache-2.0
"""What an engine's draft proposes, whether it is accepted or not."""

from typing import Any

import torch


class Proposals:
    """The proposals of an engine in this process, of all its steps from now on.

    Args:
        engine: A ``vllm.LLM``, on either runner.
    """

    def __init__(self, engine: Any) -> None:
        self._seen: list[torch.Tensor] = []
        (runner,) = engine.collective_rpc(lambda worker: worker.model_runner)
        speculator = getattr(runner, "speculator", None)  # of V2
        drafter = speculator or getattr(runner, "drafter", None)
        if drafter is None:
            return
        propose = drafter.propose

        def noted(*given: Any, **named: Any) -> torch.Tensor:
            proposed: torch.Tensor = propose(*given, **named)
            # the next step writes where it stands
            self._seen.append(proposed.clone())
            return proposed

        drafter.propose = noted

    def take(self) -> list[list[list[int]]]:
        """By step, by request in the batch: the tokens. None without a draft."""
        seen, self._seen = self._seen, []
        return [proposed.tolist() for proposed in seen]
