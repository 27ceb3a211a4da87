# SPDX-License-Identifier: Apache-2.0
"""May b12x run here? Asked of all ranks, before anything collective is made.

A no of one rank is a no of all, and leaves nothing mapped. What cannot be taken
back (NCCL or a kernel that waits for its peer for ever) is an error instead.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from time import monotonic
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed import PrefixStore, ProcessGroup, Store

from vllm.distributed.device_communicators.b12x_peers import peer_refusal, published
from vllm.distributed.graph_channels.together import Group, Refused
from vllm.distributed.graph_channels.vote import GroupClosed

Made = TypeVar("Made")

# The releases whose channels are what this was written against: device-side
# slots from the first, and the last before launch plans came in.
_OLDEST, _TOO_NEW = Version("1.2.4"), Version("1.3")

_VALIDATED_CAPABILITY = 12
_OVERRIDE = "VLLM_B12X_ALLOW_UNVALIDATED_DEVICE"
_OFF = "VLLM_PCIE_ALLREDUCE_BACKEND=cpp turns b12x off"

SWITCHED_OFF = "custom all-reduce is switched off"

# What is called of a pool, by the parameters that are passed; its constructor is
# passed what kinds of pools differ in as well.
_CONSTRUCTOR = (
    "rank",
    "world_size",
    "device",
    "exchange_group",
    "max_concurrent_channels",
)
_POOL_CALLS = {
    "prepare_channels": ("channel_ids",),
    "checkpoint_channels": (),
    "rollback_channels": ("checkpoint",),
    "for_stream": ("channel_id",),
    "capture": ("stream", "channel_id"),
    "close": (),
}


class Unavailable(Exception):
    """A pool that cannot be made, on any rank; they go on without it."""


@dataclass(frozen=True)
class Needs:
    """What a kind of pool asks of every rank.

    Attributes:
        pool: Its name in ``b12x.comm.pcie``.
        sizes: What its constructor is passed of sizes, by parameter.
        channel: The name of its channels' class there.
        operations: Methods of a channel that are called.
        world_sizes: Sizes of group that it serves.
        multiprocessors: Streaming multiprocessors that must be visible: kernels
            wait for their peers, so a whole grid has to be resident.
        allow_unvalidated: Whether GPUs other than SM12x may be used.
    """

    pool: str
    sizes: tuple[str, ...]
    channel: str
    operations: tuple[str, ...]
    world_sizes: tuple[int, ...]
    multiprocessors: int
    allow_unvalidated: bool


@dataclass(frozen=True)
class Seat:
    """Where a rank sits.

    Attributes:
        group: Its group.
        device: Its GPU.
        device_group: The group's NCCL communicator, which b12x exchanges over.
        store: Of this group alone.
    """

    group: Group
    device: torch.device
    device_group: ProcessGroup
    store: Store


def admit(
    seat: Seat, needs: Needs, subject: str, seconds: float, error: str | None = None
) -> None:
    """Find out whether every rank can use a pool. All ranks call it.

    Args:
        seat: Where this rank sits.
        needs: What is asked of it.
        subject: What is asked for, with the values that must be equal on all.
        seconds: How long it may take.
        error: Why this rank does not want it, whatever else there is; None if it does.

    Raises:
        Refused: A rank cannot; on every rank, with each rank's reason. Nothing is
            mapped and NCCL works.
        RuntimeError: NCCL does not work, or a rank did not come.
    """
    until = monotonic() + seconds
    peers = PrefixStore(needs.pool, seat.store)
    with published(peers, seat.group.rank, seat.device) as export_refusal:
        _demand_nccl(seat, until)
        # All ranks have published: the vote before that reduction says so.
        reason = error or _refusal(seat, needs, peers, export_refusal)
        try:
            seat.group.agree(subject, until, error=reason)
        except GroupClosed as failure:
            raise RuntimeError(f"{failure}; {_OFF}") from failure


def make_pool(seat: Seat, make: Callable[[], Made], seconds: float) -> Made:
    """Let all ranks make a pool together, under a deadline. All ranks call it.

    Raises:
        Refused, Unavailable: It could not be made, on any rank; nothing is mapped.
        RuntimeError: A rank did not come in time.
    """
    made: list[Made] = []

    def construct() -> None:
        with torch.cuda.device(seat.device):
            made.append(make())

    until = monotonic() + seconds
    try:
        seat.group.together("make b12x's pool", construct, until)
    except Refused:
        raise
    except Exception as failure:
        # Peers that came to no verdict wait in b12x's exchange, and go on nowhere.
        if isinstance(failure, GroupClosed) or seat.group.lost is not None:
            raise RuntimeError(f"{failure}; {_OFF}") from failure
        raise Unavailable(f"{type(failure).__name__}: {failure}") from failure
    return made[0]


def demand(seat: Seat, what: str, action: Callable[[], None], seconds: float) -> None:
    """Run a pool's self-test on all ranks.

    Raises:
        RuntimeError: It failed on a rank, or did not end; kernels may be waiting
            for ever, so the process has to end too.
    """
    try:
        seat.group.together(what, action, monotonic() + seconds)
    except Exception as failure:  # kernels are compiled, which may fail in any way
        raise RuntimeError(
            f"{seat.group.name}: {what} failed: {failure}. If a result is wrong or "
            "late, a GPU does not see what its peer writes: look for ACS or an IOMMU "
            "between the GPUs (`lspci -vvv | grep ACSCtl`), or allow more time with "
            f"VLLM_GRAPH_CHANNELS_DEADLINE; {_OFF}"
        ) from failure


def local_refusal(world: int, device: torch.device, needs: Needs) -> str | None:
    """Why this rank cannot use a pool, apart from its peers; None if it can."""
    if world not in needs.world_sizes:
        sizes = ", ".join(map(str, needs.world_sizes))
        return f"b12x's {needs.pool} serves groups of {sizes} ranks, not of {world}"
    return package_refusal(needs) or _device_refusal(device, needs)


def _refusal(
    seat: Seat, needs: Needs, peers: Store, export_refusal: str | None
) -> str | None:
    """Why this rank cannot. A check that raises is a no: peers wait for the vote."""
    rank, world, device = seat.group.rank, seat.group.size, seat.device
    try:
        return (
            local_refusal(world, device, needs)
            or export_refusal
            or peer_refusal(peers, rank, world, device)
        )
    except Exception as failure:
        return f"a check failed: {type(failure).__name__}: {failure}"


def package_refusal(needs: Needs) -> str | None:
    """Why b12x, as it is installed, has no such pool; None if it has."""
    try:
        found = version("b12x")
    except PackageNotFoundError:
        return "the package b12x is not installed; pip install 'b12x==1.2.6'"
    if not _OLDEST <= Version(found) < _TOO_NEW:
        return (
            f"b12x {found} is installed; from {_OLDEST} up to, not including, "
            f"{_TOO_NEW} is served: pip install 'b12x==1.2.6'"
        )
    try:
        lacking = _lacking(needs)
    except Exception as failure:  # an import may fail in any way
        return f"b12x {found} cannot be used: {type(failure).__name__}: {failure}"
    return f"b12x {found} lacks {', '.join(lacking)}" if lacking else None


def _lacking(needs: Needs) -> list[str]:
    """What is called of b12x and is not there."""
    import b12x.comm.pcie as pcie  # only where it is asked for

    pool, channel = getattr(pcie, needs.pool), getattr(pcie, needs.channel)
    calls = _POOL_CALLS | {"__init__": _CONSTRUCTOR + needs.sizes}
    lacking = [
        f"{needs.pool}.{method}({name})"
        for method, names in calls.items()
        for name in _absent(pool, method, names)
    ]
    return lacking + [
        f"{needs.channel}.{method}"
        for method in needs.operations
        if not callable(getattr(channel, method, None))
    ]


def _absent(pool: Any, method: str, names: tuple[str, ...]) -> list[str]:
    function = getattr(pool, method, None)
    if not callable(function):
        return list(names) or [""]
    return [name for name in names if name not in signature(function).parameters]


def _device_refusal(device: torch.device, needs: Needs) -> str | None:
    properties = torch.cuda.get_device_properties(device)
    if properties.major != _VALIDATED_CAPABILITY and not needs.allow_unvalidated:
        return (
            f"{properties.name} is of compute capability {properties.major}."
            f"{properties.minor}, and b12x was validated on {_VALIDATED_CAPABILITY}.x "
            f"only; {_OVERRIDE}=1 uses it all the same, for validation"
        )
    visible = properties.multi_processor_count
    # b12x's own, so that tests of it and of this see the same device.
    if limit := int(os.getenv("B12X_PCIE_TEST_VISIBLE_SM_COUNT") or 0):
        visible = min(visible, limit)
    if visible < needs.multiprocessors:
        return (
            f"{properties.name} shows {visible} multiprocessors, and "
            f"{needs.multiprocessors} are needed at once"
        )
    return None


def _demand_nccl(seat: Seat, until: float) -> None:
    began = False

    def reduce() -> None:
        nonlocal began
        began = True
        with torch.cuda.device(seat.device):
            ones = torch.ones(1, device=seat.device)
            dist.all_reduce(ones, group=seat.device_group)
            if ones.item() != seat.group.size:
                raise RuntimeError(f"ones of all ranks add up to {ones.item()}")

    try:
        seat.group.together("reduce over NCCL", reduce, until)
    except Exception as failure:
        if not began:
            raise RuntimeError(
                f"{failure}. It failed before, which its log says, or does not want "
                "b12x: VLLM_PCIE_ALLREDUCE_BACKEND has to be the same on all ranks"
            ) from failure
        raise RuntimeError(
            f"{seat.group.name}: NCCL, over which b12x exchanges its handles, does not "
            f"work: {failure}. NCCL_P2P_DISABLE=1 takes it off the PCIe peer path, "
            "which ACS or an IOMMU may block; NCCL_DEBUG=INFO says more"
        ) from failure
