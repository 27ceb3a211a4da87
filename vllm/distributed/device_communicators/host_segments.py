# SPDX-License-Identifier: Apache-2.0
"""The memory of one host channel, as one rank has it mapped.

Segments have no name in any file system. They are memfds, sealed at their size,
which the group's first rank makes and passes to the others; the last mapping to
go, in whatever way its process ends, takes the memory with it.
"""

import ctypes
import fcntl
import mmap
import os
import struct

from vllm.distributed.device_communicators.host_library import (
    ChannelRecord,
    FaultRecord,
    Status,
    function_of,
    library,
)
from vllm.distributed.device_communicators.host_operations import (
    HostOperation,
    described,
)

# Without these, a peer could cut the segment short under our feet.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_HEADER = struct.Struct("=8sIIQ")


class HostChannelError(RuntimeError):
    """A host channel could not do what was asked; its message names the rank."""


class HostChannelTimeout(HostChannelError):
    """A peer was missing at the deadline."""


def create_segment(name: str, world: int, slot_bytes: int) -> int:
    """Make a sealed and formatted segment.

    Args:
        name: What /proc shows it as; nothing can be opened by it.
        world: How many ranks will attach.
        slot_bytes: The largest message of a rank.

    Returns:
        A file descriptor, which the caller closes.
    """
    size = library().hc_segment_bytes(world, slot_bytes)
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        with mmap.mmap(fd, size) as memory:
            view = ctypes.c_char.from_buffer(memory)
            library().hc_format(ctypes.addressof(view), world, slot_bytes)
            del view  # lets go of the memory, so that it can be unmapped
    except BaseException:
        os.close(fd)
        raise
    return fd


class HostChannel:
    """One rank's end of a channel.

    Dropping it unmaps the memory, as ``release`` does; neither tells the peers.

    Args:
        name: The channel's, for messages.
        fd: The segment, which stays the caller's. It is checked before use.
        rank: Of this end.
        world: How many ranks there are.
        slot_bytes: The largest message of a rank.

    Raises:
        HostChannelError: The segment is not what this rank expects.
    """

    def __init__(
        self, name: str, fd: int, rank: int, world: int, slot_bytes: int
    ) -> None:
        self.name = name
        self.rank = rank
        self.bytes: int = library().hc_segment_bytes(world, slot_bytes)
        self._demand_segment(fd)
        self._record = ChannelRecord()
        self._memory = mmap.mmap(fd, self.bytes)
        # keeps release() from pulling the memory away under the library
        self._view: ctypes.c_char | None = ctypes.c_char.from_buffer(self._memory)
        status = library().hc_attach(
            self._record, ctypes.addressof(self._view), world, rank, slot_bytes
        )
        if status != Status.OK:
            magic, version, *shape = _HEADER.unpack_from(self._memory)
            self.release()
            raise HostChannelError(
                f"rank {rank} was passed a segment for {name} that it cannot use "
                f"({Status(status).name}): its header says {magic!r}, version "
                f"{version}, world and slot bytes {shape}, expected are {world} and "
                f"{slot_bytes}; run the same build with the same settings on all ranks"
            )

    def run(self, operation: HostOperation, deadline: float) -> None:
        """Do an operation together with the other ranks.

        Args:
            operation: Every rank runs an equal one.
            deadline: Seconds to wait for them.

        Raises:
            HostChannelTimeout: A peer did not come; the channel is poisoned.
            HostChannelError: A peer does something else, which poisons the channel
                too; or the channel was poisoned, or freed, before.
        """
        fault = FaultRecord()
        function = function_of(operation.kind)
        status = function(self._record, *operation.arguments, deadline, fault)
        if status != Status.OK:
            raise self._failure(Status(status), operation, deadline, fault)

    def retire(self, deadline: float) -> None:
        """Refuse operations from now on, once the running one has ended.

        Raises:
            HostChannelTimeout: It had not at the deadline; nothing changed.
        """
        if library().hc_close(self._record, deadline) != Status.OK:
            raise HostChannelTimeout(
                f"rank {self.rank} cannot free {self.name}: an operation of another "
                f"thread still ran after {deadline} s; end what uses the channel first"
            )

    def release(self) -> None:
        """Unmap the memory; ``retire`` comes first."""
        self._view = None
        self._memory.close()

    def _demand_segment(self, fd: int) -> None:
        found = os.fstat(fd)
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:  # no memfd at all
            seals = 0
        expected = (os.geteuid(), self.bytes, _SEALS)
        actual = (found.st_uid, found.st_size, seals & _SEALS)
        if actual != expected:
            raise HostChannelError(
                f"rank {self.rank} was passed a segment for {self.name} whose owner, "
                f"bytes and seals are {actual}, not {expected}; give all ranks the "
                "same user and the same settings"
            )

    def _failure(
        self,
        status: Status,
        operation: HostOperation,
        deadline: float,
        fault: FaultRecord,
    ) -> HostChannelError:
        here = f"{self.name} (generation {fault.generation})"
        peers = [str(rank) for rank in range(32) if fault.peers >> rank & 1]
        named = f"rank{'s'[: len(peers) > 1]} {', '.join(peers)}"
        me = f"rank {self.rank}"
        match status:
            case Status.LATE:
                return HostChannelTimeout(
                    f"{me} waited {deadline} s for {named} on {here}, in "
                    f"{operation}; see what became of {named}"
                )
            case Status.MISMATCH:
                return HostChannelError(
                    f"{me} is in {operation} on {here} while {named} is in "
                    f"{described(fault.theirs)}; give each graph owner its own channel"
                )
            case Status.BUSY:
                return HostChannelTimeout(
                    f"{me} waited {deadline} s for another of its threads to leave "
                    f"{self.name} to {operation}; give each thread its own channel"
                )
            case Status.POISONED:
                why = "an operation on it failed before, so ranks no longer agree"
            case Status.CLOSED:
                why = "it was rolled back or closed; prepare it and record again"
            case _:
                why = f"the library says {status.name}"
        return HostChannelError(f"{me} cannot use {self.name}: {why}")
