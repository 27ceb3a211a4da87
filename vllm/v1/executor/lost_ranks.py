# SPDX-License-Identifier: Apache-2.0
"""How a worker ends when its peers are lost."""

import os
import sys

from vllm.distributed.parallel_state import get_graph_channels


def end_process_if_ranks_are_lost() -> None:
    """End a worker that has reported an error, if a peer of it is lost. Local.

    A rank that is stuck in a kernel never answers the executor, which waits for
    one answer after the other; that a process has died it hears at once, and
    then it kills the others. Nothing is torn down here: any step could wait for
    the device, or for the rank.
    """
    ledger = get_graph_channels()
    if ledger is not None and ledger.lost is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
