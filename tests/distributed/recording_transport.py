# SPDX-License-Identifier: Apache-2.0
"""A transport that moves nothing and writes down what the ledger asks of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed import HashStore, Store

from vllm.distributed.graph_channels.identity import ChannelId, EagerLane
from vllm.distributed.graph_channels.together import Group
from vllm.distributed.graph_channels.transport import Checkpoint, Checkpoints
from vllm.distributed.graph_channels.vote import Electorate

Channel = ChannelId | EagerLane


class RecordingTransport:
    """Fulfils the Protocol; every call is one line of ``events``.

    Args:
        label: Begins each line.
        events: Where the lines go; several transports may share it.
        fail: Calls that raise, by method: the exception to raise.
        prepared_bytes: What a channel holds that is prepared.
    """

    def __init__(self, label: str, events: list[str]) -> None:
        self.label = label
        self.events = events
        self.fail: dict[str, BaseException] = {}
        self.prepared_bytes = 64
        self.channels: dict[Channel, int] = {}
        self._checkpoints: Checkpoints[dict[Channel, int]] = Checkpoints()

    def _note(self, method: str, what: object = "") -> None:
        self.events.append(f"{self.label} {method} {what}".rstrip())
        if method in self.fail:
            raise self.fail[method]

    def prepare(self, channels: Sequence[Channel]) -> None:
        self._note("prepare", ",".join(map(str, channels)))
        for channel in channels:
            self.channels.setdefault(channel, self.prepared_bytes)

    @contextmanager
    def capture(self, channel_id: ChannelId) -> Iterator[None]:
        self._note("enter", channel_id)
        self.channels.setdefault(channel_id, 64)
        try:
            yield
        finally:
            self.events.append(f"{self.label} leave {channel_id}")

    def checkpoint(self) -> Checkpoint[dict[Channel, int]]:
        self._note("checkpoint")
        return self._checkpoints.take(dict(self.channels))

    def rollback(self, checkpoint: Checkpoint[dict[Channel, int]]) -> None:
        self._checkpoints.demand(checkpoint)
        self._note("rollback")
        self.channels = self._checkpoints.spend(checkpoint)

    def synchronize(self) -> None:
        self._note("synchronize")

    def close(self) -> None:
        self._note("close")
        self.channels = {}

    def inventory(self) -> dict[Channel, int]:
        return dict(self.channels)

    def recorded(self) -> dict[Channel, int]:
        return {}


def alone(name: str = "tp:0") -> Group:
    """A group of one rank."""
    return Group(name, Electorate(HashStore(), 0, 1, name))


def group(name: str, rank: int, size: int, store: Store) -> Group:
    """A group of ranks that reach one store."""
    return Group(name, Electorate(store, rank, size, name))
