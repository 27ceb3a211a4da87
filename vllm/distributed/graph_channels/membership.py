# SPDX-License-Identifier: Apache-2.0
"""What a ledger knows of each transport, and of the names that graphs live under."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from vllm.distributed.graph_channels.identity import ChannelId, EagerLane
from vllm.distributed.graph_channels.scope import open_scopes
from vllm.distributed.graph_channels.together import Group
from vllm.distributed.graph_channels.transport import Checkpoint, Transport


@dataclass(eq=False)
class Member:
    """A transport, its group, and the channels that were captured on."""

    transport: Transport
    group: Group
    entered: set[ChannelId] = field(default_factory=set)


@dataclass(frozen=True)
class Usage:
    """What a transport holds on this rank, for a reader.

    Attributes:
        label: The transport's.
        rank: This rank's number in the group.
        ranks: The group's size.
        channels: Bytes by channel.
        recorded: Operations recorded into graphs, by channel.
    """

    label: str
    rank: int
    ranks: int
    channels: Mapping[ChannelId | EagerLane, int]
    recorded: Mapping[ChannelId | EagerLane, int]


@dataclass(eq=False)
class Snapshot:
    """What was there when a checkpoint was taken; or came, if it came later.

    Attributes:
        members: Each transport's checkpoint, and what had been captured on it.
        admitted: First entries that the groups had agreed to.
        taken: Of ``TakenNames``.
    """

    members: dict[Member, tuple[Checkpoint[object], frozenset[ChannelId]]]
    admitted: frozenset[tuple[Group, ChannelId]]
    taken: Mapping[ChannelId, ExitStack]

    def add(self, member: Member) -> None:
        """Take a transport in, as it is now."""
        state = member.transport.checkpoint(), frozenset(member.entered)
        self.members[member] = state


class TakenNames:
    """Names under which graphs live, each by the outermost scope they were made in.

    Two owners under one name would be in each other's buffers at replay. Within that
    scope one claimant may come again; after it, nobody.
    """

    def __init__(self) -> None:
        self._taken: dict[ChannelId, ExitStack] = {}

    def take(
        self, channel_id: ChannelId, entering: ExitStack, claimant: object
    ) -> None:
        """Keep a name for who enters, and for what the scope stands in."""
        around = open_scopes()
        self._taken[channel_id] = around[0].members if around else entering
        if around:
            around[0].claims[channel_id] = claimant

    def refusal(
        self, channel_id: ChannelId, entering: ExitStack, claimant: object
    ) -> str | None:
        """Why a name cannot be entered here; None if it can."""
        around = open_scopes()
        if around:
            first = around[0].claims.get(channel_id, claimant)
            within_itself = any(scope.channel_id == channel_id for scope in around)
            if within_itself or first is not claimant:
                return _second(channel_id, f" (by {_called(claimant)})")
        outermost = around[0].members if around else entering
        if self._taken.get(channel_id, outermost) is not outermost:
            return _second(channel_id)
        return None

    def noted(self) -> Mapping[ChannelId, ExitStack]:
        """For a checkpoint."""
        return dict(self._taken)

    def restore(self, noted: Mapping[ChannelId, ExitStack]) -> None:
        """Free the names that were taken since: their graphs are gone."""
        self._taken = dict(noted)


def _second(channel_id: ChannelId, by: str = "") -> str:
    return (
        f"a second capture as {channel_id}{by}, whose first graphs live; another "
        "owner needs a name of its own (see Owner), and the same owner's recapture "
        "its generation: ChannelId(owner, phase, generation=2)"
    )


def _called(claimant: object) -> str:
    if isinstance(claimant, ExitStack):
        return "another scope; only what enters owner_scope may come again"
    if isinstance(claimant, str):
        return claimant
    return f"a {type(claimant).__module__}.{type(claimant).__qualname__}"
