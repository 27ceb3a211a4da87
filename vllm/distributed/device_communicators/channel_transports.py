# SPDX-License-Identifier: Apache-2.0
"""Which transports a group of ranks gets, and the ledger that owns them.

``parallel_state`` calls these; they read the switches and know the adapters, so
that the ledger need not.
"""

from collections.abc import Callable
from time import monotonic

from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

import vllm.envs as envs
from vllm.distributed.device_communicators.host_channels import HostChannels
from vllm.distributed.device_communicators.host_reduction import reduce_over
from vllm.distributed.graph_channels.identity import EagerLane
from vllm.distributed.graph_channels.ledger import Ledger
from vllm.distributed.graph_channels.switches import Backend, Switches, read_switches
from vllm.distributed.graph_channels.together import Group, Refused
from vllm.distributed.graph_channels.transport import Transport
from vllm.distributed.graph_channels.vote import Electorate
from vllm.logger import init_logger

logger = init_logger(__name__)


def make_ledger() -> Ledger:
    """The ledger of this process, as its switches want it. Local.

    Raises:
        ValueError: A switch has a value that is refused here.
    """
    switches = read_switches()
    _demand_platform(switches.backend)
    demanded = switches.backend is not Backend.CPP
    name = f"VLLM_PCIE_ALLREDUCE_BACKEND={switches.backend.value}"
    return Ledger(
        deadline=switches.startup_seconds,
        closing_deadline=switches.shutdown_seconds,
        names_demanded_by=name if demanded else None,
    )


def attach_transports(
    ledger: Ledger | None,
    name: str,
    ranks: list[int],
    rank: int,
    communicator: object | None,
) -> tuple[Transport, ...]:
    """Give a group the transports it reduces over, if it is to have any.

    All ranks of the group call it. They decide alike: if one of them cannot, none
    does, and the group goes on without.

    Args:
        ledger: Takes them in; None where there is none.
        name: The group's unique name, ``tp:0``.
        ranks: The group's ranks in the world.
        rank: This rank's number in the group.
        communicator: The group's device communicator; None for a group of one.

    Returns:
        What was attached, and is owned by the ledger from now on.
    """
    if ledger is None or communicator is None or not name.startswith("tp:"):
        return ()
    switches = read_switches()
    if switches.backend is not Backend.HOST or switches.all_reduce_bytes == 0:
        return ()
    # Groups of other stages have the same name, and the same store.
    members = "-".join(map(str, ranks))
    store = PrefixStore(f"graph_channels/{name}/{members}", _get_default_store())
    group = Group(name, Electorate(store, rank, len(ranks), name))
    transport = _agreed(
        group,
        switches,
        lambda: HostChannels(
            f"host all-reduce of {name}",
            rank,
            len(ranks),
            PrefixStore("segments", store),
            max_bytes=switches.all_reduce_bytes,
            deadline=switches.startup_seconds,
        ),
    )
    if transport is None:
        return ()
    ledger.register(transport, group, lanes=(EagerLane.ALLREDUCE,))
    # From here on a peer may be compiling: as long as vLLM waits for a step.
    transport.deadline = float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)
    reduce_over(transport, communicator)  # type: ignore[arg-type]
    logger.info(
        "Graph channels of %s: %s, %d ranks, %s",
        name,
        transport.label,
        len(ranks),
        ", ".join(f"{lane} ({size} bytes)" for lane, size in _sizes(transport)),
    )
    return (transport,)


def _sizes(transport: Transport) -> list[tuple[str, int]]:
    return [(str(name), size) for name, size in transport.inventory().items()]


def _agreed(
    group: Group, switches: Switches, make: Callable[[], HostChannels]
) -> HostChannels | None:
    """The transport, if every rank could make its part of it."""
    transport, error = None, None
    try:
        transport = make()
    except (ValueError, RuntimeError) as failure:
        error = str(failure)
    try:
        subject = (
            f"use VLLM_PCIE_ALLREDUCE_BACKEND={switches.backend.value} up to "
            f"{switches.all_reduce_bytes} bytes"
        )
        group.agree(subject, monotonic() + switches.startup_seconds, error=error)
    except Refused as refused:
        logger.error("%s goes on without graph channels: %s", group.name, refused)
        return None
    return transport


def _demand_platform(backend: Backend) -> None:
    # Not at the top: the platform is chosen when it is first asked for.
    from vllm.platforms import current_platform

    if backend is Backend.HOST and not current_platform.is_cpu():
        raise ValueError(
            "VLLM_PCIE_ALLREDUCE_BACKEND=host reduces in the memory of the host and "
            f"needs the CPU platform, not {current_platform.device_name}; unset it"
        )
    if backend is Backend.B12X:
        raise ValueError(
            "VLLM_PCIE_ALLREDUCE_BACKEND=b12x is not part of this build yet; unset it"
        )
