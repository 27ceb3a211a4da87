# SPDX-License-Identifier: Apache-2.0
"""The exchange of decode context parallelism over b12x's PCIe all-to-all pool."""

import torch

from vllm.distributed.device_communicators.b12x_channels import (
    CONCURRENT_CHANNELS,
    B12xChannels,
    Pool,
)
from vllm.distributed.device_communicators.b12x_gate import Needs, Seat, make_pool
from vllm.distributed.device_communicators.dcp_geometry import DTYPES, DcpGeometry
from vllm.distributed.graph_channels.identity import (
    ChannelId,
    EagerLane,
    Owner,
    Phase,
)

WORLD_SIZES = (2, 4, 8, 16)

# Kernels of a channel are up to so many blocks, which wait for their peers'.
_MULTIPROCESSORS = 64

_SELF_TEST = ChannelId(Owner.TARGET, Phase.PROFILE)


class B12xDcp(B12xChannels):
    """A ``DcpTransport`` of one geometry.

    Args:
        label: What messages call this transport.
        pool: b12x's all-to-all pool, made by all ranks together.
        device: The device of this rank.
        channel_bytes: What a channel takes of this rank's memory.
        rank: This rank's number in the group.
        world: The group's size.
        geometry: What the pool was made for.
    """

    query_dtypes = (*DTYPES, torch.float8_e4m3fn)

    def __init__(
        self,
        label: str,
        pool: Pool,
        device: torch.device,
        channel_bytes: int,
        *,
        rank: int,
        world: int,
        geometry: DcpGeometry,
    ) -> None:
        super().__init__(label, pool, device, channel_bytes)
        self._rank, self._world, self._geometry = rank, world, geometry

    def dcp_lse_reduce_scatter(
        self, out_partial: torch.Tensor, lse: torch.Tensor, is_lse_base_on_e: bool
    ) -> torch.Tensor:
        """Combine attention over parts of the context; each rank gets its heads.

        All ranks call it. A part whose LSE is NaN or infinite counts for nothing.

        Args:
            out_partial: What the geometry takes.
            lse: ``[batch, heads]``.
            is_lse_base_on_e: Whether to base e; else to base 2.

        Returns:
            ``[batch, heads / world, head_size]``, in new memory.

        Raises:
            NoScopeError: A graph is being captured, and no scope is open.
            RuntimeError: The channel serves another stream.
        """
        channel = self.channel(EagerLane.DCP, "a DCP reduction")
        reduced: torch.Tensor = channel.runtime.lse_reduce_scatter(
            _with_plain_strides(out_partial),
            lse.float().contiguous(),
            is_lse_base_on_e=is_lse_base_on_e,
        )
        return reduced

    def gather_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put every rank's heads side by side, in the order of ranks.

        All ranks call it.

        Args:
            tensor: ``[batch, heads / world, query_head_size]``.

        Returns:
            ``[batch, heads, query_head_size]``, in new memory.

        Raises:
            NoScopeError, RuntimeError: As of ``dcp_lse_reduce_scatter``.
        """
        channel = self.channel(EagerLane.DCP, "a gather of heads")
        gathered: torch.Tensor = channel.runtime.all_gather_heads(tensor.contiguous())
        return gathered

    def self_test(self) -> None:
        """Gather and reduce once, on a channel that is rolled back. Collective.

        It also prepares the kernels of later captures, on any channel: b12x keeps
        them for the process, and refuses to prepare them during a capture.

        Raises:
            RuntimeError: A result is wrong.
        """
        checkpoint = self.checkpoint()
        self.prepare([_SELF_TEST])
        with self._on_device():
            runtime = self._pool.for_stream(channel_id=str(_SELF_TEST))
            runtime.prepare_graph_lse_reduce_scatter(dtype=self._geometry.dtype)
            runtime.prepare_graph_all_gather_heads()
            # Both, whatever the first says: peers come to both.
            gathered, reduced = self._gathers(runtime), self._reduces(runtime)
            self.synchronize()
        self.rollback(checkpoint)
        if not (gathered and reduced):
            raise RuntimeError(f"{self.label}: wrong results")

    def _gathers(self, runtime: object) -> bool:
        made = self._geometry
        own = made.heads // self._world
        shape = (1, own, made.query_head_size)
        query = torch.full(shape, self._rank, dtype=made.dtype, device=self._device)
        found = runtime.all_gather_heads(query)  # type: ignore[attr-defined]
        ranks = torch.arange(self._world, device=self._device).repeat_interleave(own)
        wanted = ranks[None, :, None].expand_as(found).to(made.dtype)
        return bool(torch.equal(found, wanted))

    def _reduces(self, runtime: object) -> bool:
        made = self._geometry
        shape = (1, made.heads, made.head_size)
        numbers = torch.arange(made.head_size, device=self._device) % 8
        partial = (numbers + self._rank).expand(shape).to(made.dtype).contiguous()
        # Models are built with another default dtype.
        even = torch.zeros(shape[:2], dtype=torch.float32, device=self._device)
        found = runtime.lse_reduce_scatter(partial, even)  # type: ignore[attr-defined]
        # Equal weights, of a power of two: exact in 16 bits.
        wanted = (numbers + (self._world - 1) / 2).expand_as(found).to(made.dtype)
        return bool(torch.equal(found, wanted))


def needs(allow_unvalidated: bool) -> Needs:
    """What b12x's all-to-all pool asks of every rank."""
    return Needs(
        pool="DcpAllToAllPool",
        sizes=("max_batch_size", "total_heads", "head_dim", "query_head_dim"),
        channel="DcpAllToAll",
        operations=(
            "all_gather_heads",
            "lse_reduce_scatter",
            "prepare_graph_all_gather_heads",
            "prepare_graph_lse_reduce_scatter",
        ),
        world_sizes=WORLD_SIZES,
        multiprocessors=_MULTIPROCESSORS * CONCURRENT_CHANNELS,
        allow_unvalidated=allow_unvalidated,
    )


def open_dcp(seat: Seat, geometry: DcpGeometry, seconds: float) -> B12xDcp:
    """Make a pool of a group whose ranks were all admitted. All ranks call it.

    Raises:
        Refused, Unavailable: It could not be made, on any rank; nothing is mapped.
        RuntimeError: A rank did not come in time.
    """
    from b12x.comm.pcie import DcpAllToAllPool  # only where it is asked for

    rank, world = seat.group.rank, seat.group.size
    pool = make_pool(
        seat,
        lambda: DcpAllToAllPool(
            rank=rank,
            world_size=world,
            device=seat.device,
            max_batch_size=geometry.max_tokens,
            total_heads=geometry.heads,
            head_dim=geometry.head_size,
            query_head_dim=geometry.query_head_size,
            exchange_group=seat.device_group,
            max_concurrent_channels=CONCURRENT_CHANNELS,
        ),
        seconds,
    )
    return B12xDcp(
        f"b12x DCP all-to-all of {seat.group.name} ({geometry})",
        pool,
        seat.device,
        channel_bytes(geometry, world),
        rank=rank,
        world=world,
        geometry=geometry,
    )


def channel_bytes(geometry: DcpGeometry, world: int) -> int:
    """What a channel takes on this rank: signals, and two staging buffers.

    b12x tells it nobody; what is asked here is of 1.2.
    """
    from b12x.comm.pcie import pcie_dcp_a2a  # only where it is asked for

    layout = pcie_dcp_a2a._staging_layout(
        signal_bytes=pcie_dcp_a2a._SIGNAL_BYTES,
        world_size=world,
        max_batch_size=geometry.max_tokens,
        total_heads=geometry.heads,
        head_dim=geometry.head_size,
        query_head_dim=geometry.query_head_size,
    )
    return int(layout.slab_bytes)


def _with_plain_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same; a contiguous batch of one may have any stride, which b12x refuses."""
    return tensor.view(-1).view(tensor.shape) if tensor.is_contiguous() else tensor
