# SPDX-License-Identifier: Apache-2.0
"""Which channel is active here: the stack of open capture scopes.

There is one stack a process. It is neither thread-local nor a context variable,
because a dual-batch overlap captures on threads that did not open the scope.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from vllm.distributed.graph_channels.identity import ChannelId, EagerLane, Owner
from vllm.distributed.graph_channels.trace import span

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")

Admission = Callable[[ChannelId | None, ExitStack, object], None]
"""Lets transports take part in a claimant's scope: enters each on the stack, or raises.
"""


class NoScopeError(RuntimeError):
    """A graph is being captured, and no scope says whose it is."""


@dataclass(frozen=True)
class Scope:
    """One open scope.

    Attributes:
        channel_id: The owner's channel; None if the caller named none.
        members: What was entered for it; a transport made later may join.
        admit: How transports take part in it, and in scopes inside it.
        claimant: Whose graphs are captured in it.
        claims: Of an outermost scope: who has taken each name inside it.
    """

    channel_id: ChannelId | None
    members: ExitStack
    admit: Admission
    claimant: object
    claims: dict[ChannelId, object] = field(default_factory=dict)


_open: list[Scope] = []


def open_scopes() -> Sequence[Scope]:
    """The open scopes, the innermost last."""
    return tuple(_open)


def active_channel() -> ChannelId | None:
    """The innermost open scope's name; None outside any, and in an unnamed one."""
    return _open[-1].channel_id if _open else None


def demand_owner(channel: ChannelId | EagerLane, what: str) -> None:
    """See to it that an owner without a channel uses no other owner's.

    Args:
        channel: Of the scope that a transport takes part in.
        what: What is to be done on that channel, for the error.

    Raises:
        RuntimeError: The innermost scope is another, whose owner was silenced.
    """
    owner = active_channel()
    if owner is not None and owner != channel:
        raise RuntimeError(
            f"{what} in the scope of {owner}, which has no channel because its graphs "
            "were said to record no collective; see vllm/v1/worker/graph_owners.py"
        )


def no_transports(
    channel_id: ChannelId | None, members: ExitStack, claimant: object
) -> None:
    """The admission of a process without transports: names count, and no more."""


@contextmanager
def channel_scope(
    channel_id: ChannelId | None,
    admit: Admission = no_transports,
    claimant: object = None,
) -> Iterator[None]:
    """Make a channel the active one for the time of a ``with`` block.

    Scopes nest and the innermost wins. When the block ends, after success or an
    exception, the scope around it is active again; leaving is never collective.

    Args:
        channel_id: The owner's channel. None opens an unnamed scope, which does
            not take over the name of the scope around it.
        admit: Whether entering is collective, and what it raises, is its matter.
        claimant: Whose graphs are captured inside, if that may come again within one
            outer scope; by default every scope is somebody else's.
    """
    depth = len(_open)
    with span("scope %s", channel_id), ExitStack() as members:
        claimant = members if claimant is None else claimant
        admit(channel_id, members, claimant)
        _open.append(Scope(channel_id, members, admit, claimant))
        try:
            yield
        finally:
            del _open[depth:]


class owner_scope:  # noqa: N801 (used as a function is)
    """Let an owner that captures inside another's scope use its own channel.

    The V1 runner captures its drafts and its encoder inside the target's scope.
    Phase and generation are the outer scope's. Where no named scope is open, as
    while serving, nothing happens. It may come any number of times inside one outer
    scope, once a batch size, for the same claimant. Another one under that name would
    be in its buffers.

    For a ``with`` block, or to decorate a method: then its object is the claimant,
    whose methods may call each other in the scope.

    Args:
        owner: Who captures, or warms up to capture, inside.
        by: The claimant, an object of which each owner has one. Blocks that name none
            are one claimant.

    Raises:
        Refused: On entry, where there are transports: the name is another's, or an
            open scope's. Ranks that run the same code agree on it together.
    """

    def __init__(self, owner: Owner, by: object = "a with block") -> None:
        self._owner = owner
        self._by = by
        self._entered = ExitStack()

    def __call__(
        self, method: Callable[Concatenate[S, P], R]
    ) -> Callable[Concatenate[S, P], R]:
        """Run a method in the scope."""

        @wraps(method)
        def scoped(self_: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            with _inner_scope(self._owner, self_):
                return method(self_, *args, **kwargs)

        return scoped

    def __enter__(self) -> None:
        self._entered.enter_context(_inner_scope(self._owner, self._by))

    def __exit__(self, *raised: Any) -> None:
        self._entered.__exit__(*raised)


@contextmanager
def _inner_scope(owner: Owner, claimant: object) -> Iterator[None]:
    outer = _open[-1] if _open else None
    if outer is None or outer.channel_id is None:
        yield
        return
    channel_id = replace(outer.channel_id, owner=owner)
    if outer.channel_id == channel_id and outer.claimant is claimant:
        yield  # a method that the object's own calls
        return
    with channel_scope(channel_id, outer.admit, claimant):
        yield
