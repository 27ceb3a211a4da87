# SPDX-License-Identifier: Apache-2.0
"""Whose graphs a process captures and replays, told by the scope of each capture."""

from collections import Counter
from typing import Any

import torch

from vllm.distributed.graph_channels.scope import active_channel


class Replays:
    """Names of channels whose graphs were replayed, of all graphs from now on.

    The name is that of the innermost open scope; the text "None" where there was none.
    Engines without a transport open the same scopes.

    Attributes:
        captured: By name, how many graphs; each piece is one.
    """

    def __init__(self) -> None:
        self.captured: Counter[str] = Counter()
        self._seen: set[str] = set()
        graph = torch.cuda.CUDAGraph
        begin, replay = graph.capture_begin, graph.replay
        captured_for: dict[int, str] = {}

        def capture_begin(self_: Any, *given: Any, **named: Any) -> None:
            captured_for[id(self_)] = name = str(active_channel())
            self.captured[name] += 1
            begin(self_, *given, **named)

        def noted_replay(self_: Any) -> None:
            self._seen.add(captured_for[id(self_)])
            replay(self_)

        graph.capture_begin, graph.replay = capture_begin, noted_replay

    def take(self) -> set[str]:
        """Those since it was last asked."""
        seen, self._seen = self._seen, set()
        return seen
