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

    Two owners under one name would be in each other's buffers at replay.
    """

    def __init__(self) -> None:
        self._taken: dict[ChannelId, ExitStack] = {}

    def take(self, channel_id: ChannelId, entering: ExitStack) -> None:
        """Keep a name for what the scope that is being entered stands in."""
        self._taken[channel_id] = _outermost(entering)

    def refusal(self, channel_id: ChannelId, entering: ExitStack) -> str | None:
        """Why a name cannot be entered here; None if it can."""
        within_itself = any(scope.channel_id == channel_id for scope in open_scopes())
        outermost = _outermost(entering)
        if within_itself or self._taken.get(channel_id, outermost) is not outermost:
            return (
                f"a second capture as {channel_id}, whose first graphs live; another "
                "owner needs a name of its own (see Owner), and the same owner's "
                "recapture its generation: ChannelId(owner, phase, generation=2)"
            )
        return None

    def noted(self) -> Mapping[ChannelId, ExitStack]:
        """For a checkpoint."""
        return dict(self._taken)

    def restore(self, noted: Mapping[ChannelId, ExitStack]) -> None:
        """Free the names that were taken since: their graphs are gone."""
        self._taken = dict(noted)


def _outermost(entering: ExitStack) -> ExitStack:
    """What tells the outermost open scope, or the one that is about to be that."""
    around = open_scopes()
    return around[0].members if around else entering
