# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group agree, before each step that all must take together.

Every rank casts one ballot into a store that all of them reach. Whoever sees
every ballot, or has waited long enough, writes the verdict under one key by
compare-and-set; the first verdict stands, and all ranks obey it, late ones too.
A collective with a timeout is no such vote: a late rank would see it succeed.

Nothing is deleted from the store: a vote leaves one KiB a rank, a process holds
some dozen votes, and the ballots that stand show when two groups share a name.

One failure cannot be agreed on: a rank that loses the store after it has voted
takes the vote for abandoned, while the others may read ``GO``. It joins them in
no collective, so they miss the deadline of theirs.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from secrets import token_bytes
from threading import Event
from time import monotonic
from typing import Any, Literal, NamedTuple, Protocol, Self

from vllm.distributed.graph_channels.deadline import demand_seconds, run_with_deadline

# A rank is one bit in each of a ruling's two masks.
MAX_RANKS = 64

_VERSION = 1
_SUBJECT_BYTES, _ERROR_BYTES = 128, 384
# version; voter; whether there is an error; lengths of the texts; the texts
_BALLOT = struct.Struct(f"<H16s?HH{_SUBJECT_BYTES}s{_ERROR_BYTES}s")
# version; verdict; ranks that had not voted; ranks with an error
_RULING = struct.Struct("<H9sQQ")

# The store is asked at once, then less and less often: most ranks come at once,
# and those that wait long must not keep the store from the one that is missing.
_POLL_SECONDS = 0.001
_POLL_GROWTH = 1.2
_POLL_SECONDS_AT_MOST = 0.02
# So much of a deadline, but no more, is kept for writing and reading a verdict.
_RESERVED_SHARE, _RESERVED_SECONDS = 0.25, 2.0


class Store(Protocol):
    """What a vote needs of a ``torch.distributed.Store``.

    ``compare_set`` that expects an empty text sets a key that is absent, leaves
    one that is present, and returns what the key holds then.
    """

    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class GroupClosed(Exception):
    """A vote of this group did not end well; its ranks act together no more."""


class Verdict(Enum):
    """What was decided, as it stands in records and messages."""

    GO = "agreed"  # all voted on the same subject, and without an error
    NO = "refused"  # all voted
    ABANDONED = "abandoned"  # one had not voted when another stopped waiting


@dataclass(frozen=True)
class Outcome:
    """How a vote ended: alike on all ranks, except on one that lost the store.

    Attributes:
        subject: What this rank voted on.
        verdict: What was decided.
        errors: What ranks said against it, by rank.
        missing: The ranks that had not voted when the vote was abandoned.
    """

    subject: str
    verdict: Verdict
    errors: Mapping[int, str] = field(default_factory=dict)
    missing: tuple[int, ...] = ()

    def __str__(self) -> str:
        reasons = [f"rank {rank} did not vote in time" for rank in self.missing]
        reasons += [f"rank {rank}: {said}" for rank, said in self.errors.items()]
        decided = f"{self.subject}: {self.verdict.value}"
        return f"{decided}: {'; '.join(reasons)}" if reasons else decided


class _Ballot(NamedTuple):
    """One rank's vote; one that refuses has no subject, nor has what is malformed."""

    voter: bytes
    subject: str | None
    error: str | None

    def pack(self) -> str:
        texts = [(text or "").encode() for text in (self.subject, self.error)]
        fields = self.voter, self.error is not None, *map(len, texts), *texts
        return _BALLOT.pack(_VERSION, *fields).hex()

    @classmethod
    def unpack(cls, stored: bytes) -> Self:
        voter, erring, m, n, subject, error = _fields(_BALLOT, stored)
        said = error[:n].decode() if erring else None
        ballot = cls(voter, subject[:m].decode() or None, said)
        if ballot.subject is ballot.error is None:
            raise ValueError("neither a subject nor an error")
        _demand_canonical(ballot.pack(), stored)
        return ballot


class _Ruling(NamedTuple):
    """A verdict, by what it follows from."""

    missing: tuple[int, ...]
    erring: tuple[int, ...]

    @property
    def verdict(self) -> Verdict:
        if self.missing:
            return Verdict.ABANDONED
        return Verdict.NO if self.erring else Verdict.GO

    def pack(self) -> str:
        masks = (sum(1 << r for r in ranks) for ranks in (self.missing, self.erring))
        return _RULING.pack(_VERSION, self.verdict.value.encode(), *masks).hex()

    @classmethod
    def unpack(cls, stored: bytes, size: int) -> Self:
        _, *masks = _fields(_RULING, stored)
        # a bit beyond the group is dropped here, and missed in the comparison
        sets = (tuple(r for r in range(size) if mask >> r & 1) for mask in masks)
        ruling = cls(*sets)
        _demand_canonical(ruling.pack(), stored)
        return ruling


class Electorate:
    """The ranks of one group, seen from one of them.

    Args:
        store: Reached by all ranks of the group. While a call into it blocks,
            other users of the same client connection may wait too.
        rank: This rank's number in the group.
        size: How many ranks there are, ``MAX_RANKS`` at most.
        name: Of the group; the same on all its ranks, and no other group's that
            ever used the store.

    Attributes:
        rank: As given.
        size: As given.

    Raises:
        ValueError: There is no such rank, or there are too many.
    """

    def __init__(self, store: Store, rank: int, size: int, name: str) -> None:
        if not 0 <= rank < size <= MAX_RANKS:
            raise ValueError(
                f"{name}: no rank {rank} of {size}: a group has 1 to {MAX_RANKS} ranks"
            )
        self._store, self._name = store, name
        self.rank, self.size = rank, size
        self._voter, self._votes = token_bytes(16), 0
        self._closed: str | None = None

    def vote(
        self, subject: str, error: str | None = None, *, deadline: float
    ) -> Outcome:
        """Vote, and wait for the verdict. All ranks call it, in the same order.

        Different subjects are refused. A text that is too long ends in a checksum.

        Args:
            subject: What to do next, the same on all ranks.
            error: Why this rank cannot; None if it can.
            deadline: How many seconds this call may take. Peers are waited for
                until a quarter of it is left, or two seconds; these are for the
                verdict. May differ between ranks.

        Returns:
            The outcome, within the deadline. A store that fails or blocks makes
            it abandoned on this rank.

        Raises:
            ValueError: No such deadline is possible, or there is no subject; nothing
                was cast.
            GroupClosed: An earlier vote was abandoned, interrupted or has not
                ended, or somebody else voted in this rank's place.
            KeyboardInterrupt, SystemExit: At once, and this rank votes no more.
                Its ballot stays: the others may see ``GO``, and miss it then.
        """
        if not subject:
            raise ValueError(f"{self._name}: a vote needs a subject")
        return self._vote(subject, error, deadline, waits=True)

    def refuse(self, subject: str, error: str, *, deadline: float) -> Outcome:
        """Vote against, in place of ``vote``, and wait for no other rank.

        Whoever comes to the vote, on whatever subject, is refused, with this error,
        and need not wait for this rank. Others' errors may be missing from the outcome.

        Args:
            subject: What this rank does not come to; said here, not to the others.
            error: Why this rank cannot.
            deadline: How many seconds the store may take.

        Raises:
            ValueError, GroupClosed, KeyboardInterrupt, SystemExit: As ``vote``.
        """
        return self._vote(subject, error, deadline, waits=False)

    def _vote(
        self, subject: str, error: str | None, deadline: float, *, waits: bool
    ) -> Outcome:
        demand_seconds(deadline)
        if self._closed is not None:
            raise GroupClosed(self._closed)
        # stays so if an exception leaves the vote
        self._closed = f"{self._name} is closed: {subject}: the vote did not end"
        outcome = self._outcome(subject, error, deadline, waits)
        abandoned = outcome.verdict is Verdict.ABANDONED
        self._closed = f"{self._name} is closed: {outcome}" if abandoned else None
        return outcome

    def _outcome(
        self, subject: str, error: str | None, deadline: float, waits: bool
    ) -> Outcome:
        reserved = min(deadline * _RESERVED_SHARE, _RESERVED_SECONDS)
        until = monotonic() + deadline - reserved
        number, self._votes = self._votes, self._votes + 1
        left = Event()

        def settle() -> Outcome:
            self._cast(number, subject if waits else None, error)
            if waits:
                self._await(number, until, left)
            ruling = self._rule(number, left, waits)
            errors = self._complaints(number, ruling.erring)
            return Outcome(subject, ruling.verdict, errors, ruling.missing)

        try:
            return run_with_deadline(settle, deadline, f"{self._name}: {subject}")
        except (RuntimeError, OSError, ValueError) as failure:
            reason = f"the store failed: {type(failure).__name__}: {failure}"
            return Outcome(subject, Verdict.ABANDONED, {self.rank: reason})
        finally:
            left.set()

    def _cast(self, number: int, subject: str | None, error: str | None) -> None:
        step = None if subject is None else _fit(subject, _SUBJECT_BYTES)
        said = None if error is None else _fit(error, _ERROR_BYTES)
        cast = _Ballot(self._voter, step, said).pack()
        key = self._key(number, self.rank)
        if self._store.compare_set(key, "", cast) != cast.encode():
            raise GroupClosed(
                f"{self._name}: another has voted as rank {self.rank}; "
                f"give each group its own name, and each process its own rank"
            )

    def _await(self, number: int, until: float, left: Event) -> None:
        """Wait for a verdict or all ballots, or until the time is up."""
        verdict = [self._key(number, "verdict")]
        ballots = [self._key(number, rank) for rank in range(self.size)]
        pause = _POLL_SECONDS
        while not (self._store.check(verdict) or self._store.check(ballots)):
            if monotonic() >= until or left.wait(pause):
                break
            pause = min(pause * _POLL_GROWTH, _POLL_SECONDS_AT_MOST)

    def _rule(self, number: int, left: Event, waited: bool) -> _Ruling:
        """The verdict that stands: this rank's own, if there was none."""
        key = self._key(number, "verdict")
        if self._store.check([key]):
            return _Ruling.unpack(self._store.get(key), self.size)
        ballots = {rank: self._key(number, rank) for rank in range(self.size)}
        voted = [rank for rank in ballots if self._store.check([ballots[rank]])]
        missing = tuple(ballots.keys() - voted)
        erring = tuple(self._complaints(number, voted))
        # This rank's error is enough for a no; nobody was given time to come.
        own = _Ruling(missing if waited else (), erring).pack()
        if left.is_set():
            # peers must not be told that this rank, whose caller has gone, goes on
            raise InterruptedError("nobody waits for this verdict")
        return _Ruling.unpack(self._store.compare_set(key, "", own), self.size)

    def _complaints(self, number: int, voted: Iterable[int]) -> dict[int, str]:
        """What ranks that have voted say against going on.

        Those with a complaint give the same complaints when they are read alone:
        a ruling names them, and every rank reads just those.
        """
        ballots = {rank: self._ballot(number, rank) for rank in voted}
        subjects = {ballot.subject for ballot in ballots.values()} - {None}
        said: dict[int, list[str]] = {rank: [] for rank in ballots}
        for rank, ballot in ballots.items():
            if len(subjects) > 1 and ballot.subject is not None:
                said[rank].append(f"voted on {ballot.subject!r}")
            if ballot.error is not None:
                said[rank].append(ballot.error)
        return {rank: "; ".join(words) for rank, words in said.items() if words}

    def _ballot(self, number: int, rank: int) -> _Ballot:
        try:
            return _Ballot.unpack(self._store.get(self._key(number, rank)))
        except ValueError as error:
            return _Ballot(b"", None, f"malformed ballot: {error}")

    def _key(self, number: int, record: int | Literal["verdict"]) -> str:
        return f"{self._name}/{number}/{record}"


def _fit(text: str, limit: int) -> str:
    """A text of so many bytes in UTF-8 at most, unlike that of any other text."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= limit:
        return encoded.decode()
    mark = f"… [{sha256(encoded).hexdigest()[:8]}]"
    return encoded[: limit - len(mark.encode())].decode(errors="ignore") + mark


def _fields(layout: struct.Struct, stored: bytes) -> tuple[Any, ...]:
    """What a record, stored as a hexadecimal text, holds behind its version."""
    record = bytes.fromhex(stored.decode("ascii"))
    version = int.from_bytes(record[:2], "little")
    if (version, len(record)) != (_VERSION, layout.size):
        expected = f"{layout.size} of version {_VERSION}"
        raise ValueError(f"{len(record)} bytes of version {version}, not {expected}")
    return layout.unpack(record)[1:]


def _demand_canonical(packed: str, stored: bytes) -> None:
    """Refuse what no ``pack`` gives: lengths out of range, padding, other flags."""
    if packed.encode() != stored:
        raise ValueError("fields that contradict each other")
