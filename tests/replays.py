# SPDX-License-Identifier: Apache-2.0
"""Whose graphs a process replays, told by the scope in which each was captured."""

from typing import Any

import torch

from vllm.distributed.graph_channels.scope import active_channel


class Replays:
    """Names of channels whose graphs were replayed, of all graphs from now on.

    The name is that of the innermost open scope; the text "None" where there was none.
    Engines without a transport open the same scopes.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()
        graph = torch.cuda.CUDAGraph
        begin, replay = graph.capture_begin, graph.replay
        captured_for: dict[int, str] = {}

        def capture_begin(self_: Any, *given: Any, **named: Any) -> None:
            captured_for[id(self_)] = str(active_channel())
            begin(self_, *given, **named)

        def noted_replay(self_: Any) -> None:
            self._seen.add(captured_for[id(self_)])
            replay(self_)

        graph.capture_begin, graph.replay = capture_begin, noted_replay

    def take(self) -> set[str]:
        """Those since it was last asked."""
        seen, self._seen = self._seen, set()
        return seen
