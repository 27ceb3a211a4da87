# SPDX-License-Identifier: Apache-2.0
"""How an API server ends that is told to while it starts.

It waits for its engine core then, which profiles and captures. What vLLM's handler of
SIGTERM raises is dropped in that wait, and asyncio's handler of SIGINT cancels a task
that does not run: the server would serve all the same, or outlive its engine core.
"""

import signal
from types import FrameType

import vllm.envs as envs
from vllm.logger import init_logger

logger = init_logger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def end_start_at_signals() -> None:
    """Let SIGTERM and SIGINT end the server until it serves. In the main thread.

    With the exit status that a shell gives to what the signal killed, after the
    engine core's process was ended. Only the first does, so that none interrupts
    the end. The HTTP server installs handlers of its own. Does nothing without
    graph channels.
    """
    if envs.VLLM_PCIE_ALLREDUCE_BACKEND != "cpp":
        for number in _SIGNALS:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    for ignored in _SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    name = signal.Signals(number).name
    logger.error("[shutdown] API server: %s before it was ready", name)
    raise SystemExit(128 + number)
