# SPDX-License-Identifier: Apache-2.0
"""The host transport of one kind of attention layer."""

import torch

from vllm.distributed.device_communicators import host_operations
from vllm.distributed.device_communicators.dcp_geometry import DTYPES, DcpGeometry
from vllm.distributed.device_communicators.host_channels import HostChannels
from vllm.distributed.graph_channels.identity import EagerLane


class HostDcp(HostChannels):
    """``HostChannels`` that take the layouts which b12x takes.

    What is not contiguous is copied first; not while a graph is recorded, which
    would replay the copy's first contents: that is refused.
    """

    query_dtypes = DTYPES

    def on_main_stream(self) -> bool:
        """There are no streams."""
        return True

    def dcp_lse_reduce_scatter(
        self,
        out_partial: torch.Tensor,
        lse: torch.Tensor,
        is_lse_base_on_e: bool = True,
        lane: EagerLane = EagerLane.DCP,
        out: torch.Tensor | None = None,
        lse_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As of ``HostChannels``."""
        if self.recorder is None:
            out_partial, lse = out_partial.contiguous(), lse.float().contiguous()
        return super().dcp_lse_reduce_scatter(
            out_partial, lse, is_lse_base_on_e, lane, out, lse_out
        )

    def gather_heads(
        self,
        tensor: torch.Tensor,
        lane: EagerLane = EagerLane.DCP,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As of ``HostChannels``."""
        if self.recorder is None:
            tensor = tensor.contiguous()
        return super().gather_heads(tensor, lane, out)


def slot_bytes(geometry: DcpGeometry, world: int) -> int:
    """The largest message that a rank of a geometry sends."""
    tokens, heads, dtype = geometry.max_tokens, geometry.heads, geometry.dtype
    partial = (tokens, heads, geometry.head_size)
    query: int = tokens * (heads // world) * geometry.query_head_size * dtype.itemsize
    return max(host_operations.lse_reduce_bytes(partial, dtype), query)
