# SPDX-License-Identifier: Apache-2.0
"""What may be done on a host channel: one collective, with the buffers it uses.

An operation is checked when it is made, so that one which would be refused is
refused before any rank writes anything, and when recorded rather than replayed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm.distributed.device_communicators.host_library import (
    Kind,
    OperationRecord,
    library,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_WORDS = {
    Kind.ALL_REDUCE: "all-reduce",
    Kind.LSE_REDUCE_SCATTER: "LSE-weighted reduce-scatter",
    Kind.GATHER_HEADS: "gather of heads",
}


class HostOperation(NamedTuple):
    """One collective on given buffers, to be run on a channel once or often.

    Attributes:
        kind: Which collective.
        extents: The sizes that all ranks agree on.
        arguments: What the library's function takes between channel and deadline.
        buffers: The tensors behind those arguments, which it keeps alive: the
            input, the output, and what else there is.
    """

    kind: Kind
    extents: tuple[int, ...]
    arguments: tuple[int | None, ...]
    buffers: tuple[torch.Tensor, ...]

    def __str__(self) -> str:
        code = _CODES[self.buffers[0].dtype] if self.buffers else 0
        return _words(self.kind, self.extents, code)


def described(record: OperationRecord) -> str:
    """In words, what a peer says it is doing; the record may hold anything."""
    if record.kind not in list(Kind) or record.dtype >= len(DTYPES):
        return f"an unknown operation ({record.kind}, {record.dtype})"
    kind = Kind(record.kind)
    used = 1 if kind is Kind.ALL_REDUCE else 3
    words = _words(kind, record.extents[:used], record.dtype)
    return words + (" (LSE to base 2)" if record.flags else "")


def all_reduce(tensor: torch.Tensor, out: torch.Tensor | None) -> HostOperation:
    """The sum over ranks of ``tensor``; ``out`` may be ``tensor``."""
    _demand("all_reduce", tensor)
    out = _output(out, tensor, tensor.shape)
    count = tensor.numel()
    arguments = (tensor.data_ptr(), out.data_ptr(), count, _CODES[tensor.dtype])
    return HostOperation(Kind.ALL_REDUCE, (count,), arguments, (tensor, out))


def lse_reduce_scatter(
    partial: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor | None,
    lse_out: torch.Tensor | None,
    world: int,
    base_two: bool,
) -> HostOperation:
    """Attention over parts of the context, ``[batch, heads, width]``, combined."""
    extents = batch, heads, width = _extents("dcp_lse_reduce_scatter", partial)
    if heads % world:
        raise ValueError(
            f"dcp_lse_reduce_scatter shares out heads among {world} ranks evenly, "
            f"which cannot be done with {heads} (shape {tuple(partial.shape)})"
        )
    share = heads // world
    out = _output(out, partial, (batch, share, width))
    _demand_like("lse", lse, (batch, heads), torch.float32)
    if lse_out is not None:
        _demand_like("lse_out", lse_out, (batch, share), torch.float32)
    return HostOperation(
        Kind.LSE_REDUCE_SCATTER,
        extents,
        (
            partial.data_ptr(),
            lse.data_ptr(),
            out.data_ptr(),
            None if lse_out is None else lse_out.data_ptr(),
            *extents,
            _CODES[partial.dtype],
            int(base_two),
        ),
        (partial, out, lse) if lse_out is None else (partial, out, lse, lse_out),
    )


def gather_heads(
    tensor: torch.Tensor, out: torch.Tensor | None, world: int
) -> HostOperation:
    """Every rank's ``[batch, heads, width]``, as ``[batch, world * heads, width]``."""
    batch, heads, width = extents = _extents("gather_heads", tensor)
    out = _output(out, tensor, (batch, world * heads, width))
    pointers = (tensor.data_ptr(), out.data_ptr())
    arguments = (*pointers, *extents, _CODES[tensor.dtype])
    return HostOperation(Kind.GATHER_HEADS, extents, arguments, (tensor, out))


def message_bytes(operation: HostOperation) -> int:
    """What a rank puts into its slot for an operation."""
    if operation.kind is Kind.LSE_REDUCE_SCATTER:
        partial = operation.buffers[0]
        return lse_reduce_bytes(partial.shape, partial.dtype)
    return operation.buffers[0].nbytes if operation.buffers else 0


def lse_reduce_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """What a slot must hold for parts of ``[batch, heads, width]`` and their LSEs."""
    return int(library().hc_lse_reduce_bytes(*shape, _CODES[dtype]))


def refusal(tensor: torch.Tensor) -> str | None:
    """Why no operation takes a tensor; None if one does.

    Answers alike for tensors of equal device, dtype and strides.
    """
    if not tensor.is_cpu:
        return f"on {tensor.device}, not on the CPU"
    if tensor.dtype not in _CODES:
        return f"of {tensor.dtype}, not of {', '.join(map(str, DTYPES))}"
    if not tensor.is_contiguous():
        return f"not contiguous: shape {tuple(tensor.shape)}, strides {tensor.stride()}"
    return None


def _words(kind: Kind, extents: Sequence[int], code: int) -> str:
    sizes = " x ".join(map(str, extents))
    dtype = str(DTYPES[code]).removeprefix("torch.")
    return f"{_WORDS[kind]} of {sizes} {dtype}"


def _demand(what: str, tensor: torch.Tensor) -> None:
    if reason := refusal(tensor):
        raise ValueError(
            f"{what} of the host transport takes contiguous CPU tensors; this one "
            f"is {reason}"
        )


def _demand_like(
    what: str, tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype
) -> None:
    _demand(what, tensor)
    if tensor.shape != tuple(shape) or tensor.dtype != dtype:
        raise ValueError(
            f"{what} must be {dtype} of shape {tuple(shape)}, not {tensor.dtype} of "
            f"shape {tuple(tensor.shape)}"
        )


def _extents(what: str, tensor: torch.Tensor) -> tuple[int, int, int]:
    """Batch, heads and width of a tensor that has these dimensions."""
    _demand(what, tensor)
    if tensor.dim() != 3:
        raise ValueError(
            f"{what} takes [batch, heads, width], not shape {tuple(tensor.shape)}"
        )
    batch, heads, width = tensor.shape
    return batch, heads, width


def _output(
    out: torch.Tensor | None, tensor: torch.Tensor, shape: Sequence[int]
) -> torch.Tensor:
    """The output that was given, checked; new memory if none was."""
    if out is None:
        return tensor.new_empty(shape)
    _demand_like("out", out, shape, tensor.dtype)
    return out
