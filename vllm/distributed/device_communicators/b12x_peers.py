# SPDX-License-Identifier: Apache-2.0
"""Can the GPUs of a group map each other's memory? Tried before b12x tries it.

Every rank exports a small buffer and publishes a record of fixed length: which
host, which GPU, the buffer's IPC handle. It then opens what its peers exported,
and closes it again, so that nothing stays mapped.
"""

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from socket import gethostname
from typing import NamedTuple, Self

import torch

from vllm.distributed.device_communicators.cuda_wrapper import (
    CudaRTLibrary,
    cudaIpcMemHandle_t,
)
from vllm.distributed.graph_channels.together import Refused
from vllm.distributed.graph_channels.vote import Store

_VERSION = 1
_ID_BYTES, _HANDLE_BYTES = 16, ctypes.sizeof(cudaIpcMemHandle_t)
_RECORD = struct.Struct(f"<H{_ID_BYTES}s{_ID_BYTES}s?{_HANDLE_BYTES}s")
_BUFFER_BYTES = 256
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class PeerRecord(NamedTuple):
    """What a rank says of its GPU.

    Attributes:
        host: The machine it is in.
        gpu: Which GPU; ranks that share one say the same.
        handle: Of a buffer there; None if it could not be exported.
    """

    host: bytes
    gpu: bytes
    handle: bytes | None

    def pack(self) -> str:
        """The record as it stands in a store."""
        handle = self.handle or b""
        exported = self.handle is not None
        return _RECORD.pack(_VERSION, self.host, self.gpu, exported, handle).hex()

    @classmethod
    def unpack(cls, stored: bytes) -> Self:
        """Read what ``pack`` made.

        Raises:
            ValueError: It is something else.
        """
        try:
            fields = _RECORD.unpack(bytes.fromhex(stored.decode()))
        except (ValueError, struct.error) as error:
            raise ValueError("no record of a peer") from error
        version, host, gpu, exported, handle = fields
        if version != _VERSION:
            raise ValueError(f"a peer's record of version {version}, not {_VERSION}")
        record = cls(host, gpu, handle if exported else None)
        if record.pack().encode() != stored:
            raise ValueError("a peer's record whose fields contradict each other")
        return record


@contextmanager
def published(store: Store, rank: int, device: torch.device) -> Iterator[str | None]:
    """Export a buffer and publish this rank's record, for a ``with`` block. Local.

    Peers may open the buffer until the block ends. If it ends with anything but a
    refusal, to which all ranks came, the buffer stays: cudaFree waits for the
    device, which a reduction that hangs keeps busy for ever.

    Yields:
        Why nothing could be exported; None if it was.
    """
    runtime, pointer, handle, error = None, None, None, None
    try:
        runtime = CudaRTLibrary()
        runtime.cudaSetDevice(device.index)
        pointer = runtime.cudaMalloc(_BUFFER_BYTES)
        handle = bytes(runtime.cudaIpcGetMemHandle(pointer))
    except Exception as failure:  # also a library that lacks a function
        error = f"{device} exports no memory to other processes: {failure}"
        if runtime is not None:
            _forget_error(runtime)
    record = PeerRecord(_host(), _gpu(device.index), handle)
    store.compare_set(_key(rank), "", record.pack())
    refused = None
    try:
        yield error
    except Refused as refusal:
        refused = refusal
    if runtime is not None and pointer is not None:
        runtime.cudaFree(pointer)
    if refused is not None:
        raise refused


def peer_refusal(
    store: Store, rank: int, world: int, device: torch.device
) -> str | None:
    """Why this rank cannot use a peer's memory; None if it can use everyone's.

    Local, after every rank has published. Ranks that share a GPU are peers.
    """
    own = PeerRecord.unpack(store.get(_key(rank)))
    for peer in range(world):
        if peer != rank:
            record = PeerRecord.unpack(store.get(_key(peer)))
            if reason := _refusal(own, record, device):
                return f"rank {peer}'s memory is out of reach: {reason}"
    return None


def _refusal(own: PeerRecord, peer: PeerRecord, device: torch.device) -> str | None:
    if peer.host != own.host:
        return "it is on another machine"
    if peer.handle is None:
        return "it exports none"
    if peer.gpu != own.gpu and not _has_access(device.index, peer.gpu):
        return (
            f"{device} has no peer access to its GPU; see `nvidia-smi topo -p2p r` "
            "and the BIOS settings of ACS and IOMMU"
        )
    try:
        _open_and_close(peer.handle)
    except (OSError, RuntimeError) as failure:
        return str(failure)
    return None


def _has_access(device: int, gpu: bytes) -> bool:
    """Whether a device reaches a GPU; one that is not visible here is not judged."""
    visible = [n for n in range(torch.cuda.device_count()) if _gpu(n) == gpu]
    return all(torch.cuda.can_device_access_peer(device, n) for n in visible)


def _open_and_close(handle: bytes) -> None:
    runtime = CudaRTLibrary()
    exported = cudaIpcMemHandle_t.from_buffer_copy(handle)
    try:
        pointer = runtime.cudaIpcOpenMemHandle(exported)
        # vLLM's wrapper opens handles and closes none.
        runtime.CUDART_CHECK(runtime.lib.cudaIpcCloseMemHandle(pointer))
    except RuntimeError:
        _forget_error(runtime)
        raise


def _forget_error(runtime: CudaRTLibrary) -> None:
    """Have this thread's last error not raised by torch, at its next kernel launch."""
    runtime.lib.cudaGetLastError()


def _key(rank: int) -> str:
    return f"peer/{rank}"


def _host() -> bytes:
    try:
        name = _BOOT_ID.read_bytes()
    except OSError:  # a sandbox may hide it
        name = gethostname().encode()
    return sha256(name).digest()[:_ID_BYTES]


def _gpu(index: int) -> bytes:
    uuid = torch.cuda.get_device_properties(index).uuid
    return sha256(str(uuid).encode()).digest()[:_ID_BYTES]
