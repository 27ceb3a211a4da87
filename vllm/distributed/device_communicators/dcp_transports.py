# SPDX-License-Identifier: Apache-2.0
"""The DCP channels of a group, made by all its ranks as they build their layers."""

from collections.abc import Sequence
from time import monotonic
from typing import Protocol

import torch
from torch.distributed import PrefixStore, ProcessGroup

import vllm.envs as envs
from vllm.config import VllmConfig
from vllm.distributed.device_communicators import b12x_gate, b12x_pcie_dcp
from vllm.distributed.device_communicators.b12x_pcie_dcp import B12xDcp
from vllm.distributed.device_communicators.channel_transports import (
    asked_for,
    go_without,
)
from vllm.distributed.device_communicators.dcp_channels import (
    DcpChannels,
    DcpTransport,
)
from vllm.distributed.device_communicators.dcp_geometry import DcpGeometry
from vllm.distributed.device_communicators.host_dcp import HostDcp, slot_bytes
from vllm.distributed.graph_channels.identity import EagerLane
from vllm.distributed.graph_channels.switches import Backend, Switches
from vllm.distributed.graph_channels.together import Refused


class Coordinator(Protocol):
    """What is used of the group's ``GroupCoordinator``."""

    unique_name: str
    ranks: Sequence[int]
    rank_in_group: int
    world_size: int
    device: torch.device
    device_group: ProcessGroup
    dcp_channels: DcpChannels | None


def open_dcp_channels(
    coordinator: Coordinator,
    config: VllmConfig,
    *,
    heads_per_rank: int,
    head_size: int,
    query_head_size: int,
    dtype: torch.dtype,
) -> bool:
    """See to it that a layer can exchange over channels, if it is to.

    All ranks of the group call it, in one order: whoever builds a layer does.
    Layers that are alike share a transport. If one rank cannot, none does.

    Args:
        coordinator: The decode context parallel group.
        config: Says whether and how much is exchanged.
        heads_per_rank: Query heads of this rank.
        head_size: Of the attention output.
        query_head_size: Of the query.
        dtype: Of the attention output.

    Returns:
        Whether there is a transport for such a layer.

    Raises:
        RuntimeError: A rank did not come or could not prepare its eager lane, NCCL
            does not work, or a self-test failed: nothing can go on from there.
    """
    if coordinator.world_size == 1 or config.parallel_config.dcp_comm_backend != "a2a":
        return False
    channels = coordinator.dcp_channels or _placed(coordinator)
    if channels is None:
        return False
    coordinator.dcp_channels = channels
    geometry = DcpGeometry(
        heads_per_rank * coordinator.world_size,
        head_size,
        query_head_size,
        dtype,
        largest_batch(config, channels.place.switches),
    )
    if not channels.refused and not channels.knows(geometry):
        channels.add(geometry, _opened(coordinator, channels, geometry))
    return channels.serves(geometry)


def largest_batch(config: VllmConfig, switches: Switches) -> int:
    """How many tokens are exchanged over channels at most.

    By default those of the largest graph: a channel for the scheduler's largest
    batch would take many times the memory, and larger batches have NCCL.
    """
    scheduler, compilation = config.scheduler_config, config.compilation_config
    sizes = compilation.cudagraph_capture_sizes or [0]
    captured = compilation.max_cudagraph_capture_size or max(sizes)
    wanted = switches.dcp_tokens or captured or scheduler.max_num_seqs
    return min(wanted, scheduler.max_num_batched_tokens)


def _placed(coordinator: Coordinator) -> DcpChannels | None:
    for backend in (Backend.B12X, Backend.HOST):
        place = asked_for(coordinator, backend, kind="dcp")
        if place is not None:
            return DcpChannels(place)
    return None


def _opened(
    coordinator: Coordinator, channels: DcpChannels, geometry: DcpGeometry
) -> DcpTransport | None:
    ledger, switches, group, _ = channels.place
    transport: B12xDcp | HostDcp
    try:
        _demand_all(channels, geometry)
        if switches.backend is Backend.B12X:
            transport = _open_b12x(coordinator, channels, geometry)
        else:
            transport = _open_host(channels, geometry)
    except (Refused, b12x_gate.Unavailable) as refused:
        if switches.backend is Backend.B12X and not channels.admitted:
            channels.refused = True
        go_without(ledger, group, refused)
        return None
    if isinstance(transport, B12xDcp):
        # Before it is registered and joins the open scopes.
        seat = _seat(coordinator, channels)
        test = transport.self_test
        b12x_gate.demand(seat, "b12x's DCP self-test", test, switches.startup_seconds)
    ledger.register(transport, group, lanes=(EagerLane.DCP,))
    if isinstance(transport, HostDcp):
        # A peer may be compiling: as long as vLLM waits for a step.
        transport.deadline = float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)
    return transport


def _demand_all(channels: DcpChannels, geometry: DcpGeometry) -> None:
    """Wait for all ranks to want this. Weights may be read between two layers."""
    switches, group = channels.place.switches, channels.place.group
    reason = geometry.refusal()
    if switches.backend is Backend.B12X and not _custom_all_reduce():
        reason = b12x_gate.SWITCHED_OFF
    patience = max(switches.startup_seconds, envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)
    subject = f"exchange over {switches.backend.value}: {geometry}"
    group.agree(subject, monotonic() + patience, error=reason)


def _open_b12x(
    coordinator: Coordinator, channels: DcpChannels, geometry: DcpGeometry
) -> B12xDcp:
    switches, seat = channels.place.switches, _seat(coordinator, channels)
    seconds = switches.startup_seconds
    if not channels.admitted:
        needs = b12x_pcie_dcp.needs(switches.allow_unvalidated)
        b12x_gate.admit(seat, needs, "use b12x's DCP all-to-all", seconds)
        channels.admitted = True
    try:
        return b12x_pcie_dcp.open_dcp(seat, geometry, seconds)
    except (Refused, b12x_gate.Unavailable):
        channels.refused = True  # after a failure nothing is begun in a group
        raise


def _seat(coordinator: Coordinator, channels: DcpChannels) -> b12x_gate.Seat:
    return b12x_gate.Seat(
        channels.place.group,
        coordinator.device,
        coordinator.device_group,
        channels.place.store,
    )


def _open_host(channels: DcpChannels, geometry: DcpGeometry) -> HostDcp:
    _, switches, group, store = channels.place
    transport, error = None, None
    try:
        transport = HostDcp(
            f"host DCP all-to-all of {group.name} ({geometry})",
            group.rank,
            group.size,
            PrefixStore(f"segments/{geometry}", store),
            max_bytes=slot_bytes(geometry, group.size),
            deadline=switches.startup_seconds,
        )
    except (ValueError, RuntimeError) as failure:
        error = str(failure)
    until = monotonic() + switches.startup_seconds
    group.agree("exchange in the memory of the host", until, error=error)
    assert transport is not None  # else this rank's error had been a no
    return transport


def _custom_all_reduce() -> bool:
    from vllm.distributed import parallel_state  # imports this module

    return bool(parallel_state._ENABLE_CUSTOM_ALL_REDUCE)
