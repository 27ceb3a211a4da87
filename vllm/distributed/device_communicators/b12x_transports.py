# SPDX-License-Identifier: Apache-2.0
"""The b12x transports of a group's communicator, made by all its ranks together."""

from vllm.distributed.device_communicators import b12x_gate
from vllm.distributed.device_communicators.b12x_pcie_all_reduce import (
    B12xAllReduce,
    needs,
    open_all_reduce,
)
from vllm.distributed.device_communicators.channel_transports import (
    Communicator,
    asked_for,
    go_without,
    say_in_use,
    subject,
)
from vllm.distributed.graph_channels.identity import EagerLane
from vllm.distributed.graph_channels.switches import Backend
from vllm.distributed.graph_channels.together import Refused


def b12x_all_reduce(
    communicator: Communicator, *, custom_all_reduce: bool
) -> B12xAllReduce | None:
    """b12x's one-shot all-reduce of a group's communicator, if it is to have one.

    All ranks of the group call it, before they make anything else over NCCL. They
    decide alike: if one of them cannot, none does, and the group uses NCCL.

    Args:
        communicator: Whose reductions it takes.
        custom_all_reduce: Whether custom all-reduce is on at all.

    Raises:
        RuntimeError: NCCL does not work, a rank did not come, or the self-test
            failed: nothing can go on from there.
    """
    place = asked_for(communicator, Backend.B12X)
    if place is None:
        return None
    ledger, switches, group, store = place
    if not custom_all_reduce:
        go_without(ledger, group, "custom all-reduce is switched off")
        return None
    seat = b12x_gate.Seat(group, communicator.device, communicator.device_group, store)
    seconds = switches.startup_seconds
    off = None if switches.largest_bytes else "both cutoffs are 0"
    try:
        b12x_gate.admit(
            seat, needs(switches.allow_unvalidated), subject(switches), seconds, off
        )
        transport = open_all_reduce(
            seat, switches.all_reduce_bytes, switches.fused_bytes, seconds
        )
    except (Refused, b12x_gate.Unavailable) as refused:
        go_without(ledger, group, refused)
        return None
    ledger.register(transport, group, lanes=(EagerLane.ALLREDUCE,))
    b12x_gate.demand(seat, "b12x's self-test", transport.self_test, seconds)
    say_in_use(group, transport)
    return transport
