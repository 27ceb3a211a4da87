# SPDX-License-Identifier: Apache-2.0
"""What one pool of a decode context parallel group exchanges, and what it leaves.

The answers depend on shape, dtype and strides, and on values that all ranks
share, so all ranks go the same way, captured or not.
"""

from dataclasses import dataclass

import torch

from vllm.distributed.device_communicators.packs import PACK_BYTES, begins_on_a_pack

DTYPES = (torch.float16, torch.bfloat16)

_PACK_ELEMENTS = PACK_BYTES // 2


@dataclass(frozen=True)
class DcpGeometry:
    """The shapes of one kind of attention layer. Equal ones share a pool.

    Attributes:
        heads: Query heads of all ranks of the group together.
        head_size: Of the attention output.
        query_head_size: Of the query.
        dtype: Of the attention output.
        max_tokens: The largest batch.
    """

    heads: int
    head_size: int
    query_head_size: int
    dtype: torch.dtype
    max_tokens: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.heads} heads of {self.head_size}, queries of "
            f"{self.query_head_size}, {dtype}, up to {self.max_tokens} tokens"
        )

    def refusal(self) -> str | None:
        """Why no pool can have this geometry; None if one can."""
        if self.dtype not in DTYPES:
            return f"attention outputs of {self.dtype}; 16-bit ones are exchanged"
        if self.head_size % _PACK_ELEMENTS or self.query_head_size % _PACK_ELEMENTS:
            return (
                f"heads of {self.head_size} and {self.query_head_size} elements; "
                f"multiples of {_PACK_ELEMENTS} are exchanged"
            )
        return None

    def takes_partial(self, partial: torch.Tensor, lse: torch.Tensor) -> bool:
        """Whether parts of attention, ``[batch, heads, head_size]``, are combined."""
        return bool(
            partial.dtype == self.dtype
            and partial.dim() == 3
            and partial.shape[1:] == (self.heads, self.head_size)
            and self._takes_batch(partial)
            and _is_packed(partial)
            and lse.shape == partial.shape[:2]
            and lse.is_floating_point()
        )

    def takes_query(self, query: torch.Tensor, world: int) -> bool:
        """Whether a rank's query, ``[batch, its heads, query_head_size]``, is sent."""
        return bool(
            query.dim() == 3
            and query.shape[1:] == (self.heads // world, self.query_head_size)
            and self._takes_batch(query)
            and query.shape[2] * query.element_size() % PACK_BYTES == 0
            and begins_on_a_pack(query)
        )

    def _takes_batch(self, tensor: torch.Tensor) -> bool:
        return bool(0 < tensor.shape[0] <= self.max_tokens)


def _is_packed(tensor: torch.Tensor) -> bool:
    """Token after token, or head after head with room for more tokens between."""
    batch, heads, size = tensor.shape
    if not begins_on_a_pack(tensor):
        return False
    if tensor.is_contiguous():
        return True
    of_token, of_head, of_element = tensor.stride()
    return bool(
        of_element == 1
        and of_token == size
        and of_head >= batch * size
        and of_head % _PACK_ELEMENTS == 0
    )
