# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group come to map the same segments, all or none of them.

The first rank listens on an abstract Unix socket, which no file system knows,
and publishes its address and a random token in the group's store. The others
call. Either side hangs up on another user's process, and the first rank on one
that does not know the token. Segments travel as file descriptors; only when
every rank has mapped all of them does the first rank say that they may be used.
"""

import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Protocol

from vllm.distributed.device_communicators.host_records import (
    TOKEN_BYTES,
    Record,
    RecordError,
    digest,
)
from vllm.distributed.device_communicators.host_segments import (
    HostChannel,
    HostChannelError,
    HostChannelTimeout,
    create_segment,
)

_CREDENTIALS = struct.Struct("iII")


class Store(Protocol):
    """What is needed of a torch.distributed Store."""

    def set(self, key: str, value: bytes) -> None:
        """Publish a value."""

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Return when the keys are there; raise RuntimeError if they never are."""

    def get(self, key: str) -> bytes:
        """A value that is there."""


class Exchange:
    """One collective creation of channels, as one rank takes part in it.

    Args:
        rank: This rank.
        world: How many ranks take part.
        slot_bytes: The largest message of a rank.
        names: The channels, alike on all ranks.
        deadline: Seconds for all of it.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        slot_bytes: int,
        names: Sequence[str],
        deadline: float,
    ) -> None:
        self._rank = rank
        self._world = world
        self._slot_bytes = slot_bytes
        self._names = names
        self._digest = digest(names, world, slot_bytes)
        self._deadline = deadline
        self._end = time.monotonic() + deadline

    def run(self, store: Store, key: str) -> list[HostChannel]:
        """Create the channels, with the other ranks.

        Args:
            store: Shared by the ranks.
            key: Used by no other exchange.

        Returns:
            This rank's ends, in the order of the names.

        Raises:
            HostChannelError: A rank failed, is missing, or wants other channels;
                none of the channels stays mapped here.
        """
        channels: list[HostChannel] = []
        try:
            if self._rank == 0:
                self._serve(store, key, channels)
            else:
                self._call(store, key, channels)
        except BaseException as error:
            for channel in channels:
                channel.release()
            if isinstance(error, OSError | RecordError):
                raise HostChannelError(f"{self._me}: {error}") from error
            raise
        return channels

    @property
    def _me(self) -> str:
        return f"rank {self._rank} cannot prepare {', '.join(self._names)}"

    def _serve(self, store: Store, key: str, channels: list[HostChannel]) -> None:
        """The first rank's part: make the segments and pass them on."""
        address, token = (secrets.token_bytes(TOKEN_BYTES) for _ in range(2))
        with ExitStack() as sockets:
            listener = sockets.enter_context(_socket())
            listener.bind(b"\0" + address)
            listener.listen()
            store.set(key, Record.ADDRESS.pack(address, token))
            peers: dict[int, socket.socket] = {}
            while missing := [r for r in range(1, self._world) if r not in peers]:
                caller = sockets.enter_context(self._accept(listener, missing))
                if hello := self._hello(caller, token, missing):
                    peers[self._demand_alike(*hello, missing)] = caller
                else:
                    caller.close()
            self._pass_segments(peers, channels)
            for rank, peer in peers.items():
                self._receive(peer, Record.READY, [rank])
            for rank, peer in peers.items():
                self._send(peer, rank, Record.READY.pack())

    def _accept(self, listener: socket.socket, missing: list[int]) -> socket.socket:
        self._limit(listener, missing)
        try:
            return listener.accept()[0]
        except TimeoutError:
            raise self._late(missing) from None

    def _hello(
        self, caller: socket.socket, token: bytes, missing: list[int]
    ) -> tuple[int, bytes] | None:
        """The rank of a caller and what it wants; None if it is a stranger."""
        if not _is_ours(caller):
            return None
        try:
            found, rank, wanted = self._receive(caller, Record.HELLO, missing)
        except (RecordError, _HungUp):
            return None
        return (rank, wanted) if hmac.compare_digest(found, token) else None

    def _demand_alike(self, rank: int, wanted: bytes, missing: list[int]) -> int:
        """The rank, which is one of the missing and wants what this one does."""
        if rank not in missing:
            raise HostChannelError(
                f"{self._me}: a process called as rank {rank}, while missing are "
                f"{missing}; give every process a rank of its own"
            )
        if wanted != self._digest:
            raise HostChannelError(
                f"{self._me}: rank {rank} prepares other channels, or with another "
                "world or size; call prepare() alike on all ranks"
            )
        return rank

    def _pass_segments(
        self, peers: dict[int, socket.socket], channels: list[HostChannel]
    ) -> None:
        for index, name in enumerate(self._names):
            fd = create_segment(name, self._world, self._slot_bytes)
            try:
                channels.append(self._attach(name, fd))
                for rank, peer in peers.items():
                    self._send(peer, rank, Record.SEGMENT.pack(index), fd)
            finally:
                os.close(fd)

    def _call(self, store: Store, key: str, channels: list[HostChannel]) -> None:
        """The other ranks' part: ask for the segments and map them."""
        try:
            store.wait([key], timedelta(seconds=self._deadline))
        except RuntimeError as error:
            raise self._late([0]) from error
        address, token = Record.ADDRESS.unpack(store.get(key))
        with _socket() as server:
            self._limit(server, [0])
            server.connect(b"\0" + address)
            if not _is_ours(server):
                raise HostChannelError(f"{self._me}: another user answers for rank 0")
            self._send(server, 0, Record.HELLO.pack(token, self._rank, self._digest))
            for index, name in enumerate(self._names):
                channels.append(self._receive_segment(server, index, name))
            self._send(server, 0, Record.READY.pack())
            self._receive(server, Record.READY, [0])

    def _receive_segment(
        self, server: socket.socket, index: int, name: str
    ) -> HostChannel:
        fds: list[int] = []
        try:
            found = self._receive(server, Record.SEGMENT, [0], fds)
            if found != (index,) or len(fds) != 1:
                raise RecordError(f"{len(fds)} segments of number {found} for {name}")
            return self._attach(name, fds[0])
        finally:
            for fd in fds:
                os.close(fd)

    def _attach(self, name: str, fd: int) -> HostChannel:
        return HostChannel(name, fd, self._rank, self._world, self._slot_bytes)

    def _send(self, peer: socket.socket, rank: int, record: bytes, *fds: int) -> None:
        try:
            socket.send_fds(peer, [record], fds)
        except ConnectionError:
            raise _HungUp(f"{self._me}: rank {rank} gave up") from None

    def _receive(
        self,
        peer: socket.socket,
        kind: Record,
        ranks: Sequence[int],
        fds: list[int] | None = None,
    ) -> tuple[Any, ...]:
        """The fields of the next record; descriptors beside it are added to fds."""
        self._limit(peer, ranks)
        room = kind.length + 1  # for a longer record to show that it is
        try:
            data, passed, _, _ = socket.recv_fds(
                peer, room, 0 if fds is None else 1, socket.MSG_CMSG_CLOEXEC
            )
        except TimeoutError:
            raise self._late(ranks) from None
        except ConnectionError:
            data, passed = b"", []
        if fds is not None:
            fds.extend(passed)
        if not data:
            raise _HungUp(f"{self._me}: {_named(ranks)} gave up")
        return kind.unpack(data)

    def _limit(self, peer: socket.socket, ranks: Sequence[int]) -> None:
        """Let the next use of a socket end at the deadline."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise self._late(ranks)
        peer.settimeout(left)

    def _late(self, ranks: Sequence[int]) -> HostChannelTimeout:
        return HostChannelTimeout(
            f"{self._me}: waited {self._deadline} s for {_named(ranks)}; see what "
            f"became of {_named(ranks)}"
        )


class _HungUp(HostChannelError):
    """The other end closed its socket."""


def _socket() -> socket.socket:
    """A Unix socket that keeps records apart."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _is_ours(peer: socket.socket) -> bool:
    """Whether the other end is a process of this user."""
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(found)
    return bool(uid == os.geteuid())


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks))}"
