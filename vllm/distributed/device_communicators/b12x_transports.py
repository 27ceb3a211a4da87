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
    Place,
    asked_for,
    go_without,
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
        RuntimeError: NCCL does not work, a rank did not come or could not prepare
            its eager lane, or the self-test failed: nothing can go on from there.
    """
    place = asked_for(communicator, Backend.B12X)
    if place is None:
        return None
    try:
        if not custom_all_reduce:
            raise b12x_gate.Unavailable(b12x_gate.SWITCHED_OFF)
        return open_b12x_all_reduce(communicator, place)
    except (Refused, b12x_gate.Unavailable) as refused:
        go_without(place.ledger, place.group, refused)
        return None


def open_b12x_all_reduce(communicator: Communicator, place: Place) -> B12xAllReduce:
    """b12x's one-shot all-reduce, in its ledger's hands. All ranks call it.

    Args:
        communicator: Whose reductions it takes.
        place: Where it is made.

    Raises:
        Refused, Unavailable: It cannot be had, on any rank.
        RuntimeError: As of ``b12x_all_reduce``.
    """
    ledger, switches, group, store = place
    seat = b12x_gate.Seat(group, communicator.device, communicator.device_group, store)
    seconds = switches.startup_seconds
    off = None if switches.largest_bytes else "both cutoffs are 0"
    b12x_gate.admit(
        seat, needs(switches.allow_unvalidated), subject(switches), seconds, off
    )
    transport = open_all_reduce(
        seat, switches.all_reduce_bytes, switches.fused_bytes, seconds
    )
    ledger.register(transport, group, lanes=(EagerLane.ALLREDUCE,))
    b12x_gate.demand(seat, "b12x's self-test", transport.self_test, seconds)
    return transport
