# SPDX-License-Identifier: Apache-2.0
"""The packs of 16 bytes in which b12x's kernels read and write tensors."""

import torch

PACK_BYTES = 16


def begins_on_a_pack(tensor: torch.Tensor) -> bool:
    """Whether a tensor begins where a pack of its memory does. Local.

    b12x does not look. Allocations begin on one, so the offset in its storage
    tells, which is the same on all ranks.
    """
    start: int = tensor.storage_offset() * tensor.element_size()
    return start % PACK_BYTES == 0
