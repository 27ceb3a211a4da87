# SPDX-License-Identifier: Apache-2.0
"""Which channel is active here: the stack of open capture scopes.

There is one stack a process. It is neither thread-local nor a context variable,
because a dual-batch overlap captures on threads that did not open the scope.
Opening and closing a scope makes no collective.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from vllm.distributed.graph_channels.identity import ChannelId, Owner

_open: list[ChannelId | None] = []


def active_channel() -> ChannelId | None:
    """The innermost open scope's name; None outside any, and in an unnamed one."""
    return _open[-1] if _open else None


@contextmanager
def channel_scope(channel_id: ChannelId | None) -> Iterator[None]:
    """Make a channel the active one for the time of a ``with`` block.

    Scopes nest and the innermost wins. When the block ends, after success or an
    exception, the scope around it is active again.

    Args:
        channel_id: The owner's channel. None opens an unnamed scope, which does
            not take over the name of the scope around it.
    """
    depth = len(_open)
    _open.append(channel_id)
    try:
        yield
    finally:
        del _open[depth:]


@contextmanager
def owner_scope(owner: Owner) -> Iterator[None]:
    """Let an owner that captures inside another's scope use its own channel.

    The V1 runner captures its drafts and its encoder inside the target's scope.
    Phase and generation are the outer scope's. Where no named scope is open, as
    while serving, nothing happens. Usable as a decorator; may be entered any
    number of times inside one outer scope.

    Args:
        owner: Who captures, or warms up to capture, inside the block.
    """
    outer = active_channel()
    if outer is None:
        yield
        return
    with channel_scope(replace(outer, owner=owner)):
        yield
