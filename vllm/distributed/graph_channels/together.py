# SPDX-License-Identifier: Apache-2.0
"""What a group of ranks does together: agree to begin, do it, agree that it went.

A collective of a transport may have no deadline of its own (b12x's run on
NCCL), so it is begun only once every rank has said it will, runs on a thread
that can be left behind, and counts only when every rank has said how it went.
"""

from collections.abc import Callable
from time import monotonic

from vllm.distributed.graph_channels.deadline import DeadlineMissed, run_with_deadline
from vllm.distributed.graph_channels.trace import span
from vllm.distributed.graph_channels.vote import (
    Electorate,
    GroupClosed,
    Outcome,
    Verdict,
)

# What a vote is given when the time of the whole is nearly up: enough to say so.
_LAST_WORD_SECONDS = 0.2


class Refused(RuntimeError):
    """Not done, on any rank; the message has each rank's reason."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(str(outcome))
        self.outcome = outcome


class Group:
    """The ranks that share a set of transports, seen from one of them.

    Args:
        name: What the messages call it: ``tp:0``.
        electorate: How its ranks vote.
    """

    def __init__(self, name: str, electorate: Electorate) -> None:
        self.name = name
        self._electorate = electorate
        self._failed: str | None = None
        self._lost: str | None = None

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._electorate.rank

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return self._electorate.size

    @property
    def lost(self) -> str | None:
        """Why nothing collective can be done here any more; None if it can."""
        return self._lost

    def agree(self, subject: str, until: float, *, error: str | None = None) -> None:
        """Come to a verdict, and be done with it. All ranks call it.

        Args:
            subject: What is to be done, the same on all ranks.
            until: When to stop waiting, on the monotonic clock.
            error: Why this rank cannot; None if it can.

        Raises:
            Refused: A rank cannot, or wants something else.
            GroupClosed: A rank did not come, now or earlier.
        """
        if self._lost is not None:
            raise GroupClosed(self._lost)
        seconds = max(until - monotonic(), _LAST_WORD_SECONDS)
        try:
            with span("vote of %s: %s", self.name, subject):
                outcome = self._electorate.vote(subject, error, deadline=seconds)
        except BaseException as failure:
            self._lost = f"{self.name}: the vote to {subject} was cut off: {failure!r}"
            raise
        if outcome.verdict is Verdict.ABANDONED:
            self._lost = f"{self.name}: {outcome}"
            raise GroupClosed(self._lost)
        if outcome.verdict is Verdict.NO:
            raise Refused(outcome)

    def refuse(self, subject: str, error: str, seconds: float) -> None:
        """Let this group's ranks not do what they are about to. One rank calls it.

        They are refused with its error; it waits for none of them. Does nothing
        where nothing collective is begun any more.

        Args:
            subject: What is not to be done.
            error: Why this rank cannot.
            seconds: How long the store may take.
        """
        if self._lost is None and self._failed is None:
            self._electorate.refuse(subject, error, deadline=seconds)

    def together(
        self,
        subject: str,
        action: Callable[[], None],
        until: float,
        *,
        insist: bool = False,
        closing: bool = False,
    ) -> None:
        """Do something collective. All ranks call it.

        Args:
            subject: What is done, the same on all ranks.
            action: Does it; called on another thread, once all ranks agreed.
            until: When it has to be over, on the monotonic clock.
            insist: Whether to ask again when a rank wanted something else: it has
                been refused, and may come round.
            closing: Whether it is a close, which may follow a failure.

        Raises:
            Refused: Not begun, or it failed on another rank. In the second case
                nothing but a close is begun here any more.
            GroupClosed: A rank did not come, or an earlier failure stands.
            DeadlineMissed: It did not end here; nothing is begun any more.
            KeyboardInterrupt, SystemExit: At once; nothing is begun any more.
            Exception: What the action raised here.
        """
        if self._failed is not None and not closing:
            raise GroupClosed(self._failed)
        self._begin(subject, until, insist)
        failure = self._run(subject, action, until)
        said = None if failure is None else f"{type(failure).__name__}: {failure}"
        try:
            self.agree(f"{subject}: done", until, error=said)
        except Refused as verdict:
            self._failed = f"{self.name}: {verdict}; only closing is possible now"
            if failure is None:
                raise
            failure.add_note(str(verdict))
        except GroupClosed:
            if failure is None:
                raise
        self._lost = self._lost or self._unfinished(failure)
        if failure is not None:
            raise failure

    def _begin(self, subject: str, until: float, insist: bool) -> None:
        while True:
            try:
                return self.agree(subject, until)
            except Refused:
                if not insist or monotonic() >= until:
                    raise

    def _run(
        self, subject: str, action: Callable[[], None], until: float
    ) -> Exception | None:
        seconds = max(until - monotonic(), _LAST_WORD_SECONDS)
        try:
            with span("%s: %s", self.name, subject):
                run_with_deadline(action, seconds, f"{self.name}: {subject}")
        except Exception as failure:
            return failure
        except BaseException as interrupt:
            self._lost = f"{self.name}: {subject} was cut off: {interrupt!r}"
            raise
        return None

    def _unfinished(self, failure: Exception | None) -> str | None:
        """A call that may still be running leaves no room for another."""
        return str(failure) if isinstance(failure, DeadlineMissed) else None
