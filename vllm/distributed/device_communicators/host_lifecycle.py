# SPDX-License-Identifier: Apache-2.0
"""The life of a group's host channels: prepared, captured on, freed.

What a ledger asks of a transport, without what is done on the channels.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from vllm.distributed.device_communicators.host_exchange import Exchange, Store
from vllm.distributed.device_communicators.host_library import (
    MAX_SLOT_BYTES,
    MAX_WORLD,
    MIN_WORLD,
    library,
)
from vllm.distributed.device_communicators.host_segments import (
    HostChannel,
    HostChannelError,
)
from vllm.distributed.graph_channels.identity import ChannelId, EagerLane
from vllm.distributed.graph_channels.transport import Checkpoint, Checkpoints


class HostLifecycle:
    """The channels of one group over shared memory.

    Args:
        label: What messages call this transport.
        rank: This process within the group.
        world: The group's size, 2 to 8, all of one user on one machine.
        store: Seen by this group's transport alone (a PrefixStore); the ranks meet
            through it whenever they prepare channels.
        max_bytes: The largest message of one rank, 1 to 2**30: an all-reduce's
            tensor, or what ``host_operations.lse_reduce_bytes`` says. A channel
            takes ``2 * world * max_bytes`` of memory, once for all ranks.
        deadline: Seconds that any call waits for peers. May be assigned to later.

    Attributes:
        label: As given.
        deadline: As given or assigned.

    Raises:
        ValueError: An argument is out of range.
        RuntimeError: The library is not installed.
    """

    def __init__(
        self,
        label: str,
        rank: int,
        world: int,
        store: Store,
        *,
        max_bytes: int,
        deadline: float = 30.0,
    ) -> None:
        _demand_range("world", world, MIN_WORLD, MAX_WORLD)
        _demand_range("rank", rank, 0, world - 1)
        _demand_range("max_bytes", max_bytes, 1, MAX_SLOT_BYTES)
        if not (math.isfinite(deadline) and deadline > 0):
            raise ValueError(f"deadline must be above 0 seconds, not {deadline}")
        library()  # its absence is said now, not when the first channel is needed
        self.label = label
        self.deadline = deadline
        self._rank = rank
        self._world = world
        self._store = store
        self._max_bytes = max_bytes
        self._exchanges = 0
        self._closed = False
        self._channels: dict[ChannelId | EagerLane, HostChannel] = {}
        self._scopes: list[ChannelId] = []
        self._checkpoints = Checkpoints[object]()
        self._recorded: Counter[ChannelId | EagerLane] = Counter()

    def prepare(self, channels: Sequence[ChannelId | EagerLane]) -> None:
        """Allocate channels, in the order given; those that exist are left alone.

        Collective. Either all exist afterwards on this rank, or none of the new.

        Raises:
            HostChannelError: A rank failed, is missing or prepares other channels.
        """
        self._demand_open()
        new = [name for name in dict.fromkeys(channels) if name not in self._channels]
        if not new:
            return
        self._exchanges += 1
        exchange = Exchange(
            self._rank,
            self._world,
            self._max_bytes,
            [str(name) for name in new],
            self.deadline,
        )
        made = exchange.run(self._store, f"host_channels/{self._exchanges}")
        self._channels.update(zip(new, made, strict=True))

    @contextmanager
    def capture(self, channel_id: ChannelId) -> Iterator[None]:
        """Make a channel the one that operations use; prepared if it is not yet.

        Collective if it is not; each rank may enter prepared ones in any order.

        Raises:
            TypeError: No name is given.
            HostChannelError: A peer did not come by the deadline.
        """
        self._demand_open()
        if not isinstance(channel_id, ChannelId):
            raise TypeError(
                f"{self.label}: a capture scope needs its owner's ChannelId, not "
                f"{channel_id!r}; pass channel_id to graph_capture()"
            )
        self.prepare([channel_id])
        depth = len(self._scopes)
        self._scopes.append(channel_id)
        try:
            yield
        finally:
            del self._scopes[depth:]

    def checkpoint(self) -> Checkpoint[object]:
        """Note which channels there are. Local.

        Raises:
            RuntimeError: A capture scope is open, or the transport is closed.
        """
        self._demand_open()
        self._demand_no_scope("checkpoint")
        return self._checkpoints.take(frozenset(self._channels))

    def rollback(self, checkpoint: Checkpoint[object]) -> None:
        """Free what was prepared since a checkpoint. Every rank calls it.

        Graphs recorded on those channels refuse to replay afterwards.

        Raises:
            CheckpointError: Another transport's, or spent; nothing is touched.
            HostChannelError: A thread still uses one of them; nothing is freed,
                and the checkpoint may be used again.
            RuntimeError: A capture scope is open, or the transport is closed.
        """
        self._demand_open()
        self._demand_no_scope("rollback")
        self._checkpoints.demand(checkpoint)
        kept = checkpoint.state
        assert isinstance(kept, frozenset)
        self._free([name for name in self._channels if name not in kept])
        self._checkpoints.spend(checkpoint)

    def synchronize(self) -> None:
        """Nothing is left to wait for: operations end before they return."""

    def close(self) -> None:
        """Free everything. Every rank calls it; the second time it does nothing.

        Raises:
            HostChannelError: A thread still uses a channel; nothing is freed, and
                close() may be called again.
        """
        self._free(list(self._channels))
        self._closed = True

    def inventory(self) -> Mapping[ChannelId | EagerLane, int]:
        """The channels there are, with the bytes of their segments."""
        return {name: channel.bytes for name, channel in self._channels.items()}

    def recorded(self) -> Mapping[ChannelId | EagerLane, int]:
        """Operations recorded into graphs, by channel; those with none are absent."""
        return dict(self._recorded)

    def active_channel(self) -> ChannelId | None:
        """The innermost open scope's name; None outside any."""
        return self._scopes[-1] if self._scopes else None

    def _free(self, names: Sequence[ChannelId | EagerLane]) -> None:
        """Unmap channels, after making sure that none of them is in use."""
        for name in names:
            self._channels[name].retire(self.deadline)
        for name in names:
            self._channels.pop(name).release()
            del self._recorded[name]

    def _demand_open(self) -> None:
        if self._closed:
            raise HostChannelError(f"{self.label} was closed; make a new transport")

    def _demand_no_scope(self, what: str) -> None:
        if self._scopes:
            raise RuntimeError(
                f"{self.label}: {what} inside the capture scope of {self._scopes[-1]}; "
                "leave all scopes first"
            )


def _demand_range(what: str, value: int, least: int, most: int) -> None:
    if not (isinstance(value, int) and least <= value <= most):
        raise ValueError(f"{what} must be {least} to {most}, not {value!r}")
