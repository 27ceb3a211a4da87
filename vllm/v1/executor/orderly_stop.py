# SPDX-License-Identifier: Apache-2.0
"""How an executor lets its workers stop together, so that they may close together.

A worker is told to end by the closing of a pipe, which interrupts it, and looks
to it like the death of the executor. Over graph channels the executor first lets
the workers return from their loops: with a message in the queue of their work,
so that all of them have done the same work by then.
"""

import sys
from collections.abc import Collection
from typing import Any, Protocol

import vllm.envs as envs
from vllm.logger import init_logger

logger = init_logger(__name__)

RETURN_FROM_WORK = "return_from_work"
"""The message after which a worker's busy loop returns."""

# Idle workers answer at once; others are interrupted.
_ANSWER_SECONDS = 1.0


class Executor(Protocol):
    """What is used of a multiprocess executor."""

    is_failed: bool
    futures_queue: Collection[object]

    def collective_rpc(self, method: str, timeout: float) -> Any: ...


def let_workers_return(executor: Executor) -> None:
    """Ask workers to return from their loops, if they are idle and all is well.

    Does nothing without graph channels, after a failure, with a step under way, or
    before the executor has started.
    """
    if envs.VLLM_PCIE_ALLREDUCE_BACKEND == "cpp":
        return
    # An engine shuts its executor down while what ended it is raised.
    ended_by = sys.exception()
    failed = executor.is_failed or not isinstance(ended_by, SystemExit | None)
    if failed or getattr(executor, "futures_queue", True):
        return
    try:
        executor.collective_rpc(RETURN_FROM_WORK, timeout=_ANSWER_SECONDS)
    except Exception as error:
        logger.debug("Workers did not return from work: %s", error)
