# SPDX-License-Identifier: Apache-2.0
"""How a worker's process ends by itself, when others may wait for it or be gone.

Nothing is torn down then: any step could wait for the device, or for another
rank. A device that waits for a peer hears no signal, and the executor, which
would kill, may be gone, or wait for another rank's answer.
"""

import os
import signal
import sys

from vllm.distributed.graph_channels.ledger import with_transports
from vllm.distributed.parallel_state import get_graph_channels, ranks_are_lost
from vllm.logger import init_logger

logger = init_logger(__name__)

# Ranks wait for each other in these, and no engine goes on after one failed.
_STEPS = frozenset(
    {
        "determine_available_memory",
        "initialize_from_config",
        "compile_or_warm_up_model",
        "execute_model",
        "sample_tokens",
        "execute_dummy_batch",
    }
)
# How long the executor has to hear a rank's error before that rank ends.
_HEARD_SECONDS = 2.0
_AT_ONCE_SECONDS = 0.01


def end_process_if_not_heard(method: object) -> None:
    """See to it that a worker that failed in a step ends, and its peers too. Local.

    The executor waits for the answer of one rank, or of one after the other, and
    the rank that it waits for may wait for this one. If it hears of the error, it
    ends this process within the next seconds. Else this process does, which it
    hears of at once; then it ends the others.

    Args:
        method: What failed: the name of a worker's method, or pickled code.
    """
    ledger = with_transports(get_graph_channels())
    if ledger is not None and (ledger.lost is not None or method in _STEPS):
        end_process_in(_HEARD_SECONDS)


def end_process_if_ranks_are_lost() -> None:
    """End a process in which a deadline was missed. Local.

    What missed it may still be running, and would abort the process if it
    returned while the interpreter ends.
    """
    if ranks_are_lost():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def end_process_in(seconds: float) -> None:
    """End this process, unless it has ended by then. Local; the last call counts.

    By the kernel's alarm, which needs no thread and no interpreter: the process may
    be in a native call, or in the last of its exit. A worker has no other use for it.
    """
    # 0 would be no alarm at all
    signal.setitimer(signal.ITIMER_REAL, max(seconds, _AT_ONCE_SECONDS))
