# SPDX-License-Identifier: Apache-2.0
"""What the ledger asks of a transport: something that moves data over channels.

A transport belongs to one group of ranks and holds that group's channels, each
a set of buffers with a name. The ledger calls it; it calls nobody back.

Which ranks call what, and in what order:

===============  ======================  =====================================
method           which ranks             before it
===============  ======================  =====================================
``prepare``      all of the group        a vote, by the ledger
``capture``      all, an id's first time  a vote, by the ledger; none again
``checkpoint``   any, alone              nothing
``rollback``     all of the group        a vote, by the ledger; graphs are gone
``synchronize``  any, alone              nothing
``close``        all of the group        a vote, by the ledger; graphs are gone
===============  ======================  =====================================

A rank that enters one of the collective methods alone waits for the others, so
nothing but the ledger calls them, and it calls them under a deadline.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Generic, Protocol, TypeVar

from vllm.distributed.graph_channels.identity import ChannelId, EagerLane

State = TypeVar("State")


class Checkpoint(Generic[State]):
    """What a transport's channels were at some moment; made by ``Checkpoints``."""

    def __init__(self, state: State) -> None:
        self.state = state


class CheckpointError(ValueError):
    """A checkpoint that may not be rolled back to; nothing was touched."""


class Checkpoints(Generic[State]):
    """The checkpoints that a transport still honours, oldest first.

    Rolling back spends a checkpoint and every later one: what they describe is
    gone. A checkpoint of another transport is never honoured.
    """

    def __init__(self) -> None:
        self._open: list[Checkpoint[State]] = []

    def take(self, state: State) -> Checkpoint[State]:
        """A new checkpoint of the given state."""
        checkpoint = Checkpoint(state)
        self._open.append(checkpoint)
        return checkpoint

    def honoured(self) -> Sequence[State]:
        """The states of the checkpoints that may still be rolled back to."""
        return [checkpoint.state for checkpoint in self._open]

    def demand(self, checkpoint: Checkpoint[State]) -> None:
        """Make sure that a checkpoint may be rolled back to; changes nothing.

        Raises:
            CheckpointError: It is another transport's, or is spent.
        """
        if checkpoint not in self._open:
            raise CheckpointError(
                "this checkpoint was made by another transport, or was rolled back "
                "to already, or an earlier one was; take a new one"
            )

    def spend(self, checkpoint: Checkpoint[State]) -> State:
        """Its state; it and all later ones are honoured no more.

        Raises:
            CheckpointError: It is another transport's, or is spent.
        """
        self.demand(checkpoint)
        del self._open[self._open.index(checkpoint) :]
        return checkpoint.state


class Transport(Protocol):
    """Channels of one group, as the ledger sees them.

    Attributes:
        label: What the messages call it: ``host all-reduce of tp:0``.
    """

    label: str

    def prepare(self, channels: Sequence[ChannelId | EagerLane]) -> None:
        """Allocate channels, in the order given; those that exist are left alone.

        Collective: every rank of the group calls it with the same channels.
        Either all of them exist afterwards on this rank, or none of the new.
        """

    def capture(self, channel_id: ChannelId) -> AbstractContextManager[None]:
        """Make a channel the one that operations use, for a ``with`` block.

        Scopes nest and the innermost wins. An id that is not prepared is, so the
        ranks enter the same one then. The first entry of a prepared id, and of
        one that was rolled back, may be collective, but each rank may enter
        another id. Later entries are not collective. Leaving never is, and never
        fails for what the body raised.
        """

    def checkpoint(self) -> Checkpoint[object]:
        """Note which channels there are, and which were captured on. Local.

        Raises:
            RuntimeError: A capture scope is open, or the transport is closed.
        """

    def rollback(self, checkpoint: Checkpoint[object]) -> None:
        """Free what was allocated since a checkpoint. Collective.

        Graphs that use those channels are gone and devices are idle. Channels
        first captured on since then may be captured on again.

        Raises:
            CheckpointError: Another transport's, or spent; nothing is touched.
            RuntimeError: A capture scope is open, or the transport is closed.
        """

    def synchronize(self) -> None:
        """Return when this rank's device has finished what it was given. Local."""

    def close(self) -> None:
        """Free everything. Collective; does nothing the second time.

        If it fails it has freed nothing that a peer may still use, and may be
        called again.
        """

    def inventory(self) -> Mapping[ChannelId | EagerLane, int]:
        """The channels there are, with the bytes that each holds on this rank."""

    def recorded(self) -> Mapping[ChannelId | EagerLane, int]:
        """How many operations were recorded into graphs, by channel. Local."""
