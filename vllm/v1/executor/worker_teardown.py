# SPDX-License-Identifier: Apache-2.0
"""How a worker's teardown begins and ends: who takes part, and for how long."""

import sys

import vllm.envs as envs
from vllm.distributed.graph_channels.ledger import with_transports
from vllm.distributed.parallel_state import (
    abandon_graph_channels,
    get_graph_channels,
    ranks_are_lost,
)
from vllm.v1.executor.lost_ranks import end_process_if_ranks_are_lost, end_process_in
from vllm.v1.worker.graph_teardown import destroy_leftover_graphs


def limit_teardown() -> None:
    """End a worker's process with the time that its executor grants for that. Local.

    From now on, whatever it does: its loop may be in a step that never ends, and
    the executor, which would kill it, may be dead.
    """
    if with_transports(get_graph_channels()) is not None:
        end_process_in(float(envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS))


def begin_teardown(*, in_order: bool) -> None:
    """Begin the teardown of a worker in a process of its own. Local.

    Ends the process here if a peer was lost: every step of a teardown may wait
    for the device, or for the peer.

    Args:
        in_order: Whether the busy loop returned. After an exception, a signal or
            the death of the executor, peers may be anywhere, so nothing
            collective is begun.
    """
    if with_transports(get_graph_channels()) is None:
        return
    end_process_if_ranks_are_lost()
    limit_teardown()
    if not in_order:
        abandon_graph_channels("this worker was told to end at once, or failed")
    destroy_leftover_graphs()


def end_teardown() -> None:
    """End the process here if its close lost a peer, as groups stand then. Local."""
    end_process_if_ranks_are_lost()


def begin_teardown_in_process() -> bool:
    """Begin the teardown of a worker in its caller's process. Local.

    Nothing collective is begun while an exception leaves: peers may be anywhere.

    Returns:
        Whether the worker can be shut down, which waits for the device: no, if
        a peer was lost. The caller's process should end then.
    """
    failure = sys.exception()
    if failure is not None:
        abandon_graph_channels(f"the engine ends with {failure!r}")
    return not ranks_are_lost()
