# SPDX-License-Identifier: Apache-2.0
"""What a stream beside the main one is for, said where the code changes streams.

A channel serves one stream outside of physical captures, and the handle of a
stream says nothing about it that ranks could agree on. So the few places that
communicate on another stream are marked; an unmarked one is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local


class _Roles(local):
    """Of one thread: a dual-batch overlap runs its micro-batches on several."""

    def __init__(self) -> None:
        self.open: list[str] = []


_roles = _Roles()


def stream_role() -> str | None:
    """What the stream of this thread is for; None for the main stream."""
    return _roles.open[-1] if _roles.open else None


@contextmanager
def auxiliary_stream(role: str) -> Iterator[None]:
    """Mark what runs beside the main stream. Usable as a decorator.

    Outside of physical captures a marked all-reduce takes NCCL, on all ranks.

    Args:
        role: What the stream is for, in the words of a message.
    """
    _roles.open.append(role)
    try:
        yield
    finally:
        _roles.open.pop()
