# SPDX-License-Identifier: Apache-2.0
"""Which transports a group of ranks gets, and the ledger that owns them.

``parallel_state`` and the communicators call these; they read the switches and
know the adapters, so that the ledger need not.
"""

from collections.abc import Sequence
from time import monotonic
from typing import NamedTuple, Protocol

import torch
from torch.distributed import PrefixStore, ProcessGroup
from torch.distributed.distributed_c10d import _get_default_store

import vllm.envs as envs
from vllm.distributed.device_communicators.host_channels import HostChannels
from vllm.distributed.device_communicators.host_reduction import reduce_over
from vllm.distributed.graph_channels.identity import EagerLane
from vllm.distributed.graph_channels.ledger import Ledger
from vllm.distributed.graph_channels.switches import (
    Backend,
    Switches,
    check_switches,
    outdated_variables,
    read_switches,
)
from vllm.distributed.graph_channels.together import Group, Refused
from vllm.distributed.graph_channels.vote import Electorate
from vllm.logger import init_logger

logger = init_logger(__name__)


class Communicator(Protocol):
    """What is used of a group's device communicator."""

    unique_name: str
    ranks: Sequence[int]
    rank_in_group: int
    world_size: int
    device: torch.device
    device_group: ProcessGroup


class Place(NamedTuple):
    """Where a transport is made.

    Attributes:
        ledger: Will own it.
        switches: As this rank has them.
        group: The ranks that share it.
        store: Seen by this group's transports alone.
    """

    ledger: Ledger
    switches: Switches
    group: Group
    store: PrefixStore


def make_ledger() -> Ledger:
    """The ledger of this process, as its switches want it. Local.

    Raises:
        ValueError: A switch has a value that is refused here.
    """
    switches = check_switches()
    for note in outdated_variables():
        logger.warning_once("%s", note)
    demanded = switches.backend is not Backend.CPP
    return Ledger(
        deadline=switches.startup_seconds,
        closing_deadline=switches.shutdown_seconds,
        names_demanded_by=_asked(switches) if demanded else None,
    )


def host_all_reduce(communicator: Communicator) -> HostChannels | None:
    """The host transport of a group's communicator, if it is to have one.

    All ranks of the group call it. They decide alike: if one of them cannot, none
    does, and the group goes on without.

    Raises:
        RuntimeError: A rank did not come, or could not prepare its eager lane.
    """
    place = asked_for(communicator, Backend.HOST)
    if place is None:
        return None
    try:
        transport = open_host_all_reduce(place)
    except Refused as refused:
        go_without(place.ledger, place.group, refused)
        return None
    reduce_over(communicator)  # type: ignore[arg-type]
    return transport


def open_host_all_reduce(place: Place) -> HostChannels:
    """The host transport of a group, in its ledger's hands. All ranks call it.

    Raises:
        Refused: A rank cannot; on every rank, with each rank's reason.
        RuntimeError: As of ``host_all_reduce``.
    """
    ledger, switches, group, store = place
    transport, error = None, None
    try:
        transport = HostChannels(
            f"host all-reduce of {group.name}",
            group.rank,
            group.size,
            PrefixStore("segments", store),
            max_bytes=switches.all_reduce_bytes,
            deadline=switches.startup_seconds,
        )
    except (ValueError, RuntimeError) as failure:
        error = str(failure) if switches.all_reduce_bytes else "the cutoff is 0"
    group.agree(subject(switches), monotonic() + switches.startup_seconds, error=error)
    assert transport is not None  # else this rank's error had been a no
    ledger.register(transport, group, lanes=(EagerLane.ALLREDUCE,))
    # From here on a peer may be compiling: as long as vLLM waits for a step.
    transport.deadline = float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)
    return transport


def asked_for(
    communicator: Communicator, backend: Backend, *, kind: str = "tp"
) -> Place | None:
    """Where to make a group's transports, if it is to have some. Local.

    To be asked once a group: its ranks count their votes in what is returned.

    Args:
        communicator: The group.
        backend: What the transports would be.
        kind: The groups that they are for, as vLLM calls them.
    """
    from vllm.distributed import parallel_state  # imports this module

    ledger, name = parallel_state._LEDGER, communicator.unique_name
    if ledger is None or name.partition(":")[0] != kind:
        return None
    switches = read_switches()
    if switches.backend is not backend:
        return None
    # Groups of other stages have the same name, and the same store.
    members = "-".join(map(str, communicator.ranks))
    store = PrefixStore(f"graph_channels/{name}/{members}", _get_default_store())
    rank, size = communicator.rank_in_group, communicator.world_size
    group = Group(name, Electorate(store, rank, size, name))
    ledger.watch(group)
    return Place(ledger, switches, group, store)


def subject(switches: Switches) -> str:
    """What ranks vote on: the values that have to be equal on all of them."""
    return (
        f"use {_asked(switches)} up to {switches.all_reduce_bytes} bytes, fused up to "
        f"{switches.fused_bytes}"
    )


def go_without(ledger: Ledger, group: Group, reason: object) -> None:
    """Say, once a group, why what was asked for is not used."""
    ledger.go_without()
    if group.rank == 0:
        logger.error("%s goes on without graph channels: %s", group.name, reason)


def _asked(switches: Switches) -> str:
    return f"VLLM_PCIE_ALLREDUCE_BACKEND={switches.backend.value}"
