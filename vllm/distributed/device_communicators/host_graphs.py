# SPDX-License-Identifier: Apache-2.0
"""Recorded graphs on the CPU: what a CUDA graph is to a channel.

    graph = RecordedGraph(transport)
    with transport.capture(channel_id), graph.capture():
        total = transport.all_reduce(tensor)
    tensor.fill_(2)
    graph.replay()  # total holds the sum now

As in a CUDA graph, what is recorded keeps its buffers and its channel for good,
and nothing is executed while it is recorded.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.distributed.device_communicators.host_channels import HostChannels
from vllm.distributed.device_communicators.host_operations import HostOperation
from vllm.distributed.device_communicators.host_segments import HostChannel


class RecordedGraph:
    """Operations of one transport, to be run again and again.

    Args:
        transport: Whose operations are recorded.
    """

    def __init__(self, transport: HostChannels) -> None:
        self._transport = transport
        self._operations: list[tuple[HostChannel, HostOperation]] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record the transport's operations, of all threads, for a ``with`` block.

        Operations recorded before are dropped. If the block raises, so are those
        recorded in it.

        Raises:
            RuntimeError: No capture scope is open, or another graph is recording.
        """
        label = self._transport.label
        if self._transport.active_channel() is None:
            raise RuntimeError(
                f"{label}: a graph is recorded outside any capture scope, so its "
                "operations would have no owner's channel; enter "
                "graph_capture(device, channel_id=...) or owner_scope(owner) first"
            )
        if self._transport.recorder is not None:
            raise RuntimeError(
                f"{label}: another graph is being recorded; end that one first"
            )
        self.reset()
        self._transport.recorder = self
        try:
            yield
        except BaseException:
            self.reset()
            raise
        finally:
            self._transport.recorder = None

    def record(self, channel: HostChannel, operation: HostOperation) -> None:
        """Keep an operation; the transport calls this while it is recorded."""
        self._operations.append((channel, operation))

    def replay(self) -> None:
        """Run what was recorded, in order, on the buffers and channels it had.

        Every rank of the group replays its graph.

        Raises:
            HostChannelError: A channel was rolled back or closed, or a peer is
                missing or does something else; later operations were not run.
        """
        for channel, operation in self._operations:
            channel.run(operation, self._transport.deadline)

    def reset(self) -> None:
        """Drop what was recorded, and with it the buffers that nobody else has."""
        self._operations.clear()
