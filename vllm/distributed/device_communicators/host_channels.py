# SPDX-License-Identifier: Apache-2.0
"""The host transport: a group's collectives over shared memory of one machine.

It fulfils the contract of graph channels without a GPU, on real data between
real processes, and is what the contract is proved on. For every channel the
group's ranks map one segment, which holds their signals and messages.

Which ranks must call what is said in graph_channels/transport.py. All ranks of a
group run equal operations on a channel, in one order. Waiting ends at the
deadline with an error that names channel, rank and peer.
"""

from typing import Protocol

import torch

from vllm.distributed.device_communicators import host_operations
from vllm.distributed.device_communicators.host_lifecycle import HostLifecycle
from vllm.distributed.device_communicators.host_operations import HostOperation
from vllm.distributed.device_communicators.host_segments import (
    HostChannel,
    HostChannelError,
)
from vllm.distributed.graph_channels.identity import EagerLane
from vllm.distributed.graph_channels.scope import demand_owner


class Recorder(Protocol):
    """Takes operations in place of their execution."""

    def record(self, channel: HostChannel, operation: HostOperation) -> None:
        """Keep an operation, to be run on a channel later."""


class HostChannels(HostLifecycle):
    """A ``Transport`` of one group, and the collectives over its channels.

    Outside any scope an operation uses the eager lane that it is given, within
    one the innermost scope's channel, whichever thread it comes from. It is made
    with the arguments of ``HostLifecycle``.

    Attributes:
        recorder: Takes the operations that are issued; None, and they run.
    """

    recorder: Recorder | None = None

    def refusal(self, tensor: torch.Tensor) -> str | None:
        """Why all_reduce takes no such tensor, to go another way; None if it does."""
        if reason := host_operations.refusal(tensor):
            return reason
        if tensor.nbytes > self._max_bytes:
            return f"of {tensor.nbytes} bytes, above the {self._max_bytes} of a slot"
        return None

    def all_reduce(
        self,
        tensor: torch.Tensor,
        lane: EagerLane = EagerLane.ALLREDUCE,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The sum of a tensor over all ranks, in the same bits on each of them.

        Args:
            tensor: Contiguous, on the CPU; float32, bfloat16 or float16, any shape.
            lane: The channel to use outside any scope.
            out: Where the sum goes; may be ``tensor``. New memory if None.

        Returns:
            The sum, added in float32. While recording, memory it will stand in.

        Raises:
            ValueError: The tensor is refused, before anything is written.
            HostChannelError: There is no such channel, or a peer is missing or
                does something else.
        """
        return self._submit(host_operations.all_reduce(tensor, out), lane)

    def dcp_lse_reduce_scatter(
        self,
        out_partial: torch.Tensor,
        lse: torch.Tensor,
        is_lse_base_on_e: bool = True,
        lane: EagerLane = EagerLane.DCP,
        out: torch.Tensor | None = None,
        lse_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Combine attention over parts of the context; each rank gets its heads.

        Rank r gets heads ``r * heads / world`` up to the next rank's. A part whose
        LSE is NaN or infinite counts for nothing; if all are so, the output is 0.

        Args:
            out_partial: This rank's part, ``[batch, heads, width]``, contiguous, on
                the CPU; float32, bfloat16 or float16. ``world`` divides ``heads``.
            lse: The log-sum-exp of its scores, float32 ``[batch, heads]``.
            is_lse_base_on_e: Whether to base e; else to base 2.
            lane: The channel to use outside any scope.
            out: Where the result goes. New memory if None.
            lse_out: Where the combined LSE goes, float32 ``[batch, heads / world]``;
                -inf if no part counts. Not computed if None.

        Returns:
            ``[batch, heads / world, width]``, in the dtype of ``out_partial``.

        Raises:
            ValueError: A tensor is refused, before anything is written.
            HostChannelError: As of ``all_reduce``.
        """
        operation = host_operations.lse_reduce_scatter(
            out_partial, lse, out, lse_out, self._world, not is_lse_base_on_e
        )
        return self._submit(operation, lane)

    def gather_heads(
        self,
        tensor: torch.Tensor,
        lane: EagerLane = EagerLane.DCP,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Put every rank's heads side by side, in the order of ranks.

        Args:
            tensor: ``[batch, heads, width]``, as for ``all_reduce``.
            lane: The channel to use outside any scope.
            out: Where the result goes. New memory if None.

        Returns:
            ``[batch, world * heads, width]``.

        Raises:
            ValueError: A tensor is refused, before anything is written.
            HostChannelError: As of ``all_reduce``.
        """
        operation = host_operations.gather_heads(tensor, out, self._world)
        return self._submit(operation, lane)

    def _submit(self, operation: HostOperation, lane: EagerLane) -> torch.Tensor:
        """Run an operation on the channel whose turn it is, or have it recorded."""
        self._demand_open()
        size = host_operations.message_bytes(operation)
        if size > self._max_bytes:
            raise ValueError(
                f"{self.label}: {operation} is a message of {size} bytes, above the "
                f"{self._max_bytes} that a slot holds; raise max_bytes or split it"
            )
        channel_id = self.active_channel()
        if channel_id is not None:
            demand_owner(channel_id, f"{self.label}: {operation}")
        name = channel_id or lane
        channel = self._channels.get(name)
        if channel is None:
            raise HostChannelError(
                f"{self.label}: rank {self._rank} has no channel {name} for "
                f"{operation}; call prepare() with it on every rank first"
            )
        if self.recorder is None:
            channel.run(operation, self.deadline)
        else:
            self.recorder.record(channel, operation)
            self._recorded[name] += 1
        return operation.buffers[1]
