# SPDX-License-Identifier: Apache-2.0
"""What channels do, under their names, in a profiler and in the log.

Ranges appear where vLLM's own do: ``VLLM_CUSTOM_SCOPES_FOR_PROFILING=1`` records
them for torch's profiler, ``VLLM_NVTX_SCOPES_FOR_PROFILING=1`` for Nsight. At debug
level each is logged with its duration. With neither there is nothing.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import monotonic

import vllm.envs as envs
from vllm.logger import init_logger

logger = init_logger(__name__)

_OFF = nullcontext()


def span(what: str, *names: object) -> AbstractContextManager[None]:
    """A range for a ``with`` block, on the thread that runs it. Local.

    Args:
        what: What is done, with a ``%s`` for each of the names.
        names: Of channels, groups and transports.
    """
    ranges = (
        envs.VLLM_CUSTOM_SCOPES_FOR_PROFILING or envs.VLLM_NVTX_SCOPES_FOR_PROFILING
    )
    if not (ranges or logger.isEnabledFor(logging.DEBUG)):
        return _OFF
    return _span(f"graph channels: {what % names}")


@contextmanager
def _span(text: str) -> Iterator[None]:
    # Not at the top: it imports most of vLLM, and this stands below that.
    from vllm.v1.utils import record_function_or_nullcontext

    began = monotonic()
    with record_function_or_nullcontext(text):
        try:
            yield
        finally:
            logger.debug("%s: %.3f ms", text, (monotonic() - began) * 1000)
