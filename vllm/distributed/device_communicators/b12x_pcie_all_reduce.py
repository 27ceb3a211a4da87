# SPDX-License-Identifier: Apache-2.0
"""All-reduce, alone or fused with add and RMSNorm, over b12x's PCIe one-shot pool.

Which tensors are taken depends on shape, dtype, layout, the stream's role and
values that all ranks share, so all ranks go the same way, captured or not; what
is not taken goes on to the communicator's next backend.
"""

from typing import Any

import torch

from vllm.distributed.device_communicators.b12x_channels import (
    CONCURRENT_CHANNELS,
    B12xChannels,
    Pool,
)
from vllm.distributed.device_communicators.b12x_gate import Needs, Seat, make_pool
from vllm.distributed.device_communicators.packs import PACK_BYTES, begins_on_a_pack
from vllm.distributed.graph_channels.identity import (
    ChannelId,
    EagerLane,
    Owner,
    Phase,
)

WORLD_SIZES = (2, 4, 6, 8)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_FUSED_ROWS = 36

# Kernels of a channel are up to so many blocks, which wait for their peers'.
_MULTIPROCESSORS = 36
# Three tables of 16 pointers: signals, and the two staging buffers.
_TABLE_BYTES = 3 * 16 * 8
_SLAB_ALIGNMENT = 256

_SELF_TEST = ChannelId(Owner.TARGET, Phase.PROFILE)
_SELF_TEST_ELEMENTS = 1024


class B12xAllReduce(B12xChannels):
    """A ``Transport`` of one tensor parallel group, and what it reduces.

    Args:
        label: What messages call this transport.
        pool: b12x's one-shot pool, made by all ranks together.
        device: The device of this rank.
        channel_bytes: What a channel takes of this rank's memory.
        rank: This rank's number in the group.
        world: The group's size.
        all_reduce_bytes: Largest tensor of ``all_reduce``; 0 for none.
        fused_bytes: Largest tensor of the fused form; 0 for none.
    """

    def __init__(
        self,
        label: str,
        pool: Pool,
        device: torch.device,
        channel_bytes: int,
        *,
        rank: int,
        world: int,
        all_reduce_bytes: int,
        fused_bytes: int,
    ) -> None:
        super().__init__(label, pool, device, channel_bytes)
        self._rank, self._world = rank, world
        self._all_reduce_bytes = all_reduce_bytes
        self._fused_bytes = fused_bytes

    def should_all_reduce(self, tensor: torch.Tensor) -> bool:
        """Whether ``all_reduce`` takes a tensor; alike on all ranks."""
        return _fits(tensor, self._all_reduce_bytes) and self.on_main_stream()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all ranks, each of which calls this.

        Args:
            tensor: On this rank's device; float16, bfloat16 or float32, contiguous
                from a multiple of 16 bytes on, of a multiple of 16 bytes up to the
                cutoff, any shape.

        Returns:
            The sum, in new memory.

        Raises:
            NoScopeError: A graph is being captured, and no scope is open.
            RuntimeError: The channel serves another stream.
            ValueError: b12x refuses the tensor.
        """
        channel = self.channel(EagerLane.ALLREDUCE, "an all-reduce")
        summed: torch.Tensor = channel.runtime.all_reduce(tensor)
        return summed

    def should_fuse_add_rms_norm(
        self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> bool:
        """Whether ``all_reduce_add_rms_norm`` takes tensors; alike on all ranks."""
        return (
            _fits(tensor, self._fused_bytes)
            and _has_rows(tensor)
            and _alike(residual, tensor.shape, tensor.dtype)
            and _alike(weight, tensor.shape[-1:], tensor.dtype)
            and self.on_main_stream()
        )

    def all_reduce_add_rms_norm(
        self,
        tensor: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reduce, add the residual, and normalise by the root mean square.

        All ranks call this. With ``h = sum over ranks of tensor + residual``, rows
        along the last dimension:

        Args:
            tensor: As of ``all_reduce``, at most 36 rows of a multiple of 16 bytes.
            residual: Same shape and dtype.
            weight: ``[hidden]``, same dtype.
            epsilon: Added to the mean square; not negative.

        Returns:
            ``h / sqrt(mean(h ** 2) + epsilon) * weight`` and ``h``, in new memory.

        Raises:
            NoScopeError, RuntimeError, ValueError: As of ``all_reduce``.
        """
        channel = self.channel(EagerLane.ALLREDUCE, "a fused all-reduce")
        both: tuple[torch.Tensor, torch.Tensor]
        both = channel.runtime.all_reduce_fused_add_rms_norm(
            tensor, residual, weight, epsilon
        )
        return both

    def self_test(self) -> None:
        """Reduce once, on a channel that is rolled back. Collective.

        It also compiles the kernels that eager calls and captures in bfloat16
        launch.

        Raises:
            RuntimeError: The sum is wrong.
        """
        checkpoint = self.checkpoint()
        self.prepare([_SELF_TEST])
        with self._on_device():
            runtime = self._pool.for_stream(channel_id=str(_SELF_TEST))
            numbers = torch.arange(_SELF_TEST_ELEMENTS, device=self._device) % 8
            summed = runtime.all_reduce((numbers + self._rank).bfloat16())
            self.synchronize()
        self.rollback(checkpoint)
        ranks = self._world * (self._world - 1) // 2
        if not torch.equal(summed, (numbers * self._world + ranks).bfloat16()):
            raise RuntimeError(f"{self.label}: wrong sums")


def needs(allow_unvalidated: bool) -> Needs:
    """What b12x's one-shot pool asks of every rank."""
    return Needs(
        pool="OneshotAllReducePool",
        sizes=("eager_buffer_bytes", "max_size", "rank_data_bytes"),
        channel="OneshotAllReduce",
        operations=("all_reduce", "all_reduce_fused_add_rms_norm"),
        world_sizes=WORLD_SIZES,
        multiprocessors=_MULTIPROCESSORS * CONCURRENT_CHANNELS,
        allow_unvalidated=allow_unvalidated,
    )


def open_all_reduce(
    seat: Seat, all_reduce_bytes: int, fused_bytes: int, seconds: float
) -> B12xAllReduce:
    """Make the pool of a group whose ranks were all admitted. All ranks call it.

    Raises:
        Refused, Unavailable: It could not be made, on any rank; nothing is mapped.
        RuntimeError: A rank did not come in time.
    """
    from b12x.comm.pcie import OneshotAllReducePool  # only where it is asked for

    rank, world = seat.group.rank, seat.group.size
    slot = slot_bytes(all_reduce_bytes, fused_bytes)
    pool = make_pool(
        seat,
        lambda: OneshotAllReducePool(
            rank=rank,
            world_size=world,
            device=seat.device,
            exchange_group=seat.device_group,
            eager_buffer_bytes=slot,
            max_size=slot,
            rank_data_bytes=_TABLE_BYTES,
            max_concurrent_channels=CONCURRENT_CHANNELS,
        ),
        seconds,
    )
    return B12xAllReduce(
        f"b12x all-reduce of {seat.group.name}",
        pool,
        seat.device,
        channel_bytes(pool, slot),
        rank=rank,
        world=world,
        all_reduce_bytes=all_reduce_bytes,
        fused_bytes=fused_bytes,
    )


def channel_bytes(pool: Any, slot: int) -> int:
    """What a channel of a pool asks for on this rank: a slab, and its tables.

    b12x tells neither; the two attributes are those of 1.2.
    """
    shards = pool.world_size if pool._sharded_eager_storage else 1
    signals, staging = map(_slab_part, (pool._signal_bytes, slot * shards))
    return signals + staging + slot * shards + _TABLE_BYTES


def _slab_part(size: int) -> int:
    return -(-size // _SLAB_ALIGNMENT) * _SLAB_ALIGNMENT


def slot_bytes(all_reduce_bytes: int, fused_bytes: int) -> int:
    """What a staging buffer of a channel has to hold, for two cutoffs."""
    largest = max(all_reduce_bytes, fused_bytes)
    return -(-largest // PACK_BYTES) * PACK_BYTES


def _fits(tensor: torch.Tensor, most: int) -> bool:
    return (
        0 < tensor.nbytes <= most
        and tensor.nbytes % PACK_BYTES == 0
        and tensor.dtype in DTYPES
        and _is_packed(tensor)
    )


def _is_packed(tensor: torch.Tensor) -> bool:
    """Whether kernels can read it pack by pack."""
    return begins_on_a_pack(tensor) and tensor.is_contiguous()


def _has_rows(tensor: torch.Tensor) -> bool:
    if tensor.dim() == 0 or tensor.shape[-1] * tensor.element_size() % PACK_BYTES:
        return False
    rows: int = tensor.numel() // tensor.shape[-1]
    return rows <= MAX_FUSED_ROWS


def _alike(tensor: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> bool:
    return (tensor.shape, tensor.dtype) == (shape, dtype) and _is_packed(tensor)
