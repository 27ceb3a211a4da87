# SPDX-License-Identifier: Apache-2.0
"""Entering a channel on several transports, with all ranks and under a deadline."""

from collections.abc import Sequence
from contextlib import ExitStack
from threading import Lock

from vllm.distributed.graph_channels.identity import ChannelId
from vllm.distributed.graph_channels.together import Group
from vllm.distributed.graph_channels.transport import Transport


def enter_together(
    group: Group,
    subject: str,
    transports: Sequence[Transport],
    channel_id: ChannelId,
    until: float,
) -> ExitStack:
    """Make a channel the one that all these transports use. All ranks call it.

    The transports enter on a thread that may be left behind. Whoever finishes
    last keeps the entries or leaves them again, so none stays entered that
    nobody will leave.

    Args:
        group: The ranks that take part.
        subject: What they vote on.
        transports: Each is entered and then synchronised, in this order.
        channel_id: The channel, on this rank.
        until: When all ranks have to be in, on the monotonic clock.

    Returns:
        What leaves the transports again when it is closed.

    Raises:
        Refused, GroupClosed, DeadlineMissed, Exception: As ``Group.together``;
            nothing is entered on this rank then.
    """
    # Asked for on this thread, whose current stream is the scope's.
    scopes = [transport.capture(channel_id) for transport in transports]
    handing_over, awaited = Lock(), True
    with ExitStack() as entered:

        def enter() -> None:
            with ExitStack() as entering:
                for scope in scopes:
                    entering.enter_context(scope)
                for transport in transports:
                    transport.synchronize()
                with handing_over:
                    if awaited:  # else left again, here
                        entered.push(entering.pop_all())

        try:
            group.together(subject, enter, until)
        finally:
            with handing_over:
                awaited = False
        return entered.pop_all()
