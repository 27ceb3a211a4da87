# SPDX-License-Identifier: Apache-2.0
"""What an engine's draft proposes, whether it is accepted or not."""

from typing import Any

import torch


class Proposals:
    """The proposals of a draft in this process, of all its steps from now on.

    Args:
        drafter: V2's speculator, or V1's proposer.
    """

    def __init__(self, drafter: Any) -> None:
        self._seen: list[torch.Tensor] = []
        propose = drafter.propose

        def noted(*given: Any, **named: Any) -> torch.Tensor:
            proposed: torch.Tensor = propose(*given, **named)
            # the next step writes where it stands
            self._seen.append(proposed.clone())
            return proposed

        drafter.propose = noted

    def take(self) -> list[list[list[int]]]:
        """By step, by request in the batch: the tokens."""
        seen, self._seen = self._seen, []
        return [proposed.tolist() for proposed in seen]
