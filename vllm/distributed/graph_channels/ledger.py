# SPDX-License-Identifier: Apache-2.0
"""Who owns which transport, from the first group to the last.

One ledger a process. It knows transports by their Protocol only, and sees to it
that whatever needs all ranks is begun by all of them, ends for all alike, and is
never begun again after a rank failed to come. Every collective has a deadline
on this host; a rank that misses it is told of, not waited for.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack

from vllm.distributed.graph_channels.entry import enter_together
from vllm.distributed.graph_channels.identity import ChannelId, EagerLane, Owner
from vllm.distributed.graph_channels.membership import (
    Member,
    Snapshot,
    TakenNames,
    Usage,
)
from vllm.distributed.graph_channels.scope import (
    Admission,
    channel_scope,
    no_transports,
    open_scopes,
)
from vllm.distributed.graph_channels.together import Group
from vllm.distributed.graph_channels.trace import span
from vllm.distributed.graph_channels.transport import (
    Checkpoint,
    Checkpoints,
    Transport,
)
from vllm.distributed.graph_channels.vote import GroupClosed
from vllm.logger import init_logger

logger = init_logger(__name__)

# How long a rank that has failed tries to tell the others.
_WORD_SECONDS = 1.0


GraphChannelsCheckpoint = Checkpoint[Snapshot]


class Ledger:
    """The transports of this process, and what all of them do together.

    Every method that is not said to be local is called by all ranks of each group,
    in the same order.

    Args:
        deadline: Seconds that a collective may take at start-up.
        closing_deadline: Seconds that ``close`` may take, all groups together.
        names_demanded_by: The switch that chose a transport, such as
            ``VLLM_PCIE_ALLREDUCE_BACKEND=host``: a capture without a name is
            refused then, whether or not a transport exists yet. None if no
            transport is on.
    """

    def __init__(
        self,
        *,
        deadline: float,
        closing_deadline: float,
        names_demanded_by: str | None = None,
    ) -> None:
        self.names_demanded_by = self._chosen_by = names_demanded_by
        self._deadline = deadline
        self._closing_deadline = closing_deadline
        self._watched: list[Group] = []
        self._groups: list[Group] = []
        self._members: list[Member] = []
        # First entries that the groups agreed to, with or without a transport.
        self._admitted: set[tuple[Group, ChannelId]] = set()
        self._taken = TakenNames()
        self._checkpoints: Checkpoints[Snapshot] = Checkpoints()
        self._silent: frozenset[Owner] = frozenset()
        self._abandoned: str | None = None
        self._said: set[Member] = set()

    def watch(self, group: Group) -> None:
        """Count a group in ``lost`` from its first vote on. Local."""
        self._watched.append(group)

    def add_group(self, group: Group) -> None:
        """Let a group's ranks vote on captures, before it has any transport. Local."""
        if group not in self._groups:
            self._groups.append(group)

    def register(
        self, transport: Transport, group: Group, lanes: Sequence[EagerLane] = ()
    ) -> None:
        """Take a transport in; one that two groups share counts once.

        It joins the scopes that are open. What it allocates from now on, but for
        its eager lanes, is rolled back with the checkpoints that are older.

        Args:
            transport: Closed by this ledger from now on.
            group: The ranks that share it, all of which register theirs.
            lanes: Prepared at once, for what runs outside any scope.

        Raises:
            RuntimeError: A rank could not prepare them, on all ranks: what others
                prepared is mapped, and nothing can go on from there.
        """
        if any(member.transport is transport for member in self._members):
            return
        self.add_group(group)
        self.names_demanded_by = self._chosen_by
        member = Member(transport, group)
        self._members.append(member)  # now, to be closed even if the next step fails
        if lanes:
            try:
                group.together(
                    _preparing(lanes),
                    lambda: transport.prepare(lanes),
                    self._until(),
                )
            except Exception as failure:
                raise RuntimeError(
                    f"{transport.label} cannot {_preparing(lanes)}: {failure}; unset "
                    f"{self._chosen_by} to do without"
                ) from failure
        for snapshot in self._checkpoints.honoured():
            snapshot.add(member)
        for scope in open_scopes():
            if scope.channel_id is not None and scope.admit == self.admit:
                self._admit_group(group, scope.channel_id, scope.members)

    @property
    def lost(self) -> str | None:
        """Why a peer, or its device, may never answer again; None if all came.

        A rank did not come to a step in time, or this one left in the middle.
        """
        groups = self._watched + self._groups
        return next(filter(None, (group.lost for group in groups)), None)

    def silence(self, owners: Iterable[Owner]) -> None:
        """Name the owners whose graphs record no collective. Local.

        Their scopes enter no transport from now on, so they get no memory. They
        may not communicate there: nothing would keep them off the channel of a
        scope around theirs.
        """
        self._silent = frozenset(owners)

    def scope(self, channel_id: ChannelId | None) -> AbstractContextManager[None]:
        """Capture graphs of an owner: every transport moves to its channel.

        The first entry of a channel is collective and ends when all ranks are
        in and their devices idle; later ones are not, and leaving never is.
        Later ones stand in the outermost scope of the first, and are the same
        claimant's: a name is one owner's, whose graphs live on when that scope has
        ended.

        Raises:
            Refused: A rank passed no name though a transport is on, or a name
                that is taken, or could not enter; on every rank, with each
                rank's reason.
        """
        return channel_scope(channel_id, self.admit)

    def prepare(self, channels: Sequence[ChannelId | EagerLane]) -> None:
        """Allocate channels on every transport, in one order on all ranks."""
        listed = sorted(set(channels), key=str)
        subject = _preparing(listed)

        def allocate(members: Sequence[Member]) -> None:
            for member in members:
                member.transport.prepare(listed)

        self._all_groups(
            lambda group, members: group.together(
                subject, lambda: allocate(members), self._until()
            )
        )

    def refuse(self, channels: Sequence[ChannelId], error: str) -> None:
        """Come to no ``prepare`` of these, and let the others not wait for it. Local.

        For a rank that has failed: its peers are refused, with its error, at their
        next step together. It waits for none of them.
        """
        for group in self._groups:
            if self._members_of(group):
                group.refuse(_preparing(channels), error, _WORD_SECONDS)

    def checkpoint(self) -> GraphChannelsCheckpoint:
        """Note what every transport holds, before a disposable capture. Local.

        Raises:
            RuntimeError: A capture scope is open.
        """
        self._demand_no_scope("a checkpoint")
        snapshot = Snapshot({}, frozenset(self._admitted), self._taken.noted())
        for member in self._members:
            snapshot.add(member)
        return self._checkpoints.take(snapshot)

    def rollback(
        self,
        checkpoint: GraphChannelsCheckpoint,
        failure: BaseException | None = None,
    ) -> None:
        """Free what every transport allocated since a checkpoint.

        The graphs captured since then are gone. A rank that does not come
        before the deadline may be inside a kernel for ever: then nothing is
        freed, the ledger is abandoned, and that is all.

        Args:
            checkpoint: Of this ledger, not spent, taken outside any scope.
            failure: What the capture raised. A rollback that fails too is
                attached to it as a note and not raised in its place.

        Raises:
            CheckpointError: Another ledger's, or spent; nothing was touched.
            RuntimeError: A capture scope is open.
        """
        self._demand_no_scope("a rollback")
        snapshot = self._checkpoints.spend(checkpoint)
        if self._abandoned is not None:
            return
        until = self._until()
        try:
            self._all_groups(
                lambda group, members: self._roll_back(group, members, snapshot, until)
            )
            self._taken.restore(snapshot.taken)
        except BaseException as error:
            if self.lost is not None:
                self.abandon(self.lost)
            if failure is None:
                raise
            failure.add_note(f"Rolling its channels back failed too: {error}")

    def close(self) -> None:
        """Free all transports of all groups, before any group is destroyed.

        May be called again: what failed is tried again, what is closed is left.
        A transport that cannot be closed stays owned until the process ends.
        """
        until = time.monotonic() + self._closing_deadline
        for member in reversed(self._members if self._abandoned is None else ()):
            try:
                with span("close %s", _names(member.transport.inventory())):
                    member.group.together(
                        f"close {member.transport.label}",
                        member.transport.close,
                        until,
                        closing=True,
                    )
                self._members.remove(member)
            except Exception as error:
                self._say_kept(member, error)

    def abandon(self, reason: str) -> None:
        """Begin nothing collective from now on. Local; said once.

        Args:
            reason: What happened, as the user will read it.
        """
        if self._abandoned is None:
            self._abandoned = reason
            if self._members:
                logger.warning(
                    "Graph channels are left to the end of the process: %s", reason
                )

    def inventory(self) -> Mapping[str, Mapping[str, int]]:
        """Bytes on this rank, by transport and channel. Local."""
        return {
            member.transport.label: {
                str(name): size for name, size in member.transport.inventory().items()
            }
            for member in self._members
        }

    def usage(self) -> Sequence[Usage]:
        """What each transport holds, and what was recorded on it. Local."""
        return [
            Usage(
                member.transport.label,
                member.group.rank,
                member.group.size,
                member.transport.inventory(),
                member.transport.recorded(),
            )
            for member in self._members
        ]

    def go_without(self) -> None:
        """A group gets no transport after all. Local.

        Where no other has one, captures without a name are taken again.
        """
        if not self._members:
            self.names_demanded_by = None

    def admit(
        self, channel_id: ChannelId | None, members: ExitStack, claimant: object
    ) -> None:
        """Let every transport take part in a scope: see ``scope.Admission``."""
        if self._abandoned is not None:
            raise GroupClosed(f"no capture begins any more: {self._abandoned}")
        # of one rank, no group asks for a transport, whatever the switch says
        demanded = self.names_demanded_by and (self._watched or self._groups)
        if channel_id is None:
            if demanded:
                self._refuse_on_all_ranks(
                    f"a capture without a channel_id, with {self.names_demanded_by}; "
                    "pass graph_capture(..., channel_id=ChannelId(owner, phase))"
                )
            return
        if demanded or self._members:
            refusal = self._taken.refusal(channel_id, members, claimant)
            self._refuse_on_all_ranks(refusal)
        for group in self._groups:
            self._admit_group(group, channel_id, members)
        self._taken.take(channel_id, members, claimant)

    def _refuse_on_all_ranks(self, reason: str | None) -> None:
        if reason is None:
            return
        if self._groups:  # of the first, that is: whom it refuses votes in no other
            self._groups[0].agree("capture", self._until(), error=reason)
        raise ValueError(reason)

    def _admit_group(
        self, group: Group, channel_id: ChannelId, members: ExitStack
    ) -> None:
        if channel_id.owner in self._silent:
            return
        there = self._members_of(group)
        fresh = [member for member in there if channel_id not in member.entered]
        first = self.names_demanded_by and (group, channel_id) not in self._admitted
        if fresh or first:
            self._enter_together(group, channel_id, fresh, members)
        for member in there:
            if member not in fresh:
                members.enter_context(member.transport.capture(channel_id))

    def _enter_together(
        self,
        group: Group,
        channel_id: ChannelId,
        fresh: Sequence[Member],
        members: ExitStack,
    ) -> None:
        prepared = all(channel_id in m.transport.inventory() for m in fresh)
        # Ranks may take what is prepared in any order; what is not, together.
        which = "a prepared channel" if fresh and prepared else channel_id
        entered = enter_together(
            group,
            f"capture on {which}",
            [member.transport for member in fresh],
            channel_id,
            self._until(),
        )
        members.enter_context(entered)
        self._admitted.add((group, channel_id))
        for member in fresh:
            member.entered.add(channel_id)

    def _roll_back(
        self,
        group: Group,
        members: Sequence[Member],
        snapshot: Snapshot,
        until: float,
    ) -> None:
        def free() -> None:
            for member in members:
                member.transport.synchronize()
            for member in reversed(members):
                member.transport.rollback(snapshot.members[member][0])

        # A rank that failed comes here while another goes on to its next owner,
        # is refused there, and comes here too.
        made = {n for m in members for n in m.entered - snapshot.members[m][1]}
        with span("roll back %s", _names(made)):
            group.together("roll back", free, until, insist=True)
        self._admitted -= {
            (where, channel_id)
            for where, channel_id in self._admitted - snapshot.admitted
            if where is group
        }
        for member in members:
            member.entered = set(snapshot.members[member][1])

    def _all_groups(self, act: Callable[[Group, Sequence[Member]], None]) -> None:
        """Act in each group that has transports, whatever becomes of the others."""
        errors = []
        for group in self._groups:
            members = self._members_of(group)
            if members:
                try:
                    act(group, members)
                except Exception as error:
                    errors.append(error)
        if errors:
            for other in errors[1:]:
                errors[0].add_note(str(other))
            raise errors[0]

    def _members_of(self, group: Group) -> list[Member]:
        return [member for member in self._members if member.group is group]

    def _until(self) -> float:
        return time.monotonic() + self._deadline

    def _demand_no_scope(self, what: str) -> None:
        if any(scope.admit == self.admit for scope in open_scopes()):
            raise RuntimeError(f"{what} inside a capture scope; leave the scope first")

    def _say_kept(self, member: Member, error: Exception) -> None:
        if member not in self._said:
            self._said.add(member)
            logger.error(
                "%s is not closed and keeps its memory until the process ends: %s",
                member.transport.label,
                error,
            )


def _preparing(channels: Sequence[ChannelId | EagerLane]) -> str:
    return f"prepare {_names(channels)}"


def _names(channels: Iterable[ChannelId | EagerLane]) -> str:
    return ", ".join(sorted(map(str, channels)))


def with_transports(ledger: Ledger | None) -> Ledger | None:
    """The ledger, if it has a transport: else there is nothing to be done. Local."""
    return ledger if ledger is not None and ledger.inventory() else None


def admission(ledger: Ledger | None) -> Admission:
    """How transports take part in a scope, with or without a ledger."""
    return no_transports if ledger is None else ledger.admit
