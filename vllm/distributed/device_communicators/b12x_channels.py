# SPDX-License-Identifier: Apache-2.0
"""The life of a b12x pool's channels: prepared, captured on, freed.

What a ledger asks of a transport, for either kind of pool. b12x's own promises
are kept where they suffice; what it leaves open is done here: a pool takes an id
for capture once, accepts any checkpoint, and tells a channel by its stream.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vllm.distributed.graph_channels.identity import ChannelId, EagerLane
from vllm.distributed.graph_channels.scope import NoScopeError, demand_owner
from vllm.distributed.graph_channels.stream_roles import stream_role
from vllm.distributed.graph_channels.transport import Checkpoint, Checkpoints
from vllm.logger import init_logger

logger = init_logger(__name__)

Name = ChannelId | EagerLane

# Target and drafts, all replayed on one stream: one channel works at a time.
CONCURRENT_CHANNELS = 1


class Pool(Protocol):
    """What is used of b12x's ``OneshotAllReducePool`` and ``DcpAllToAllPool``."""

    def prepare_channels(self, channel_ids: Sequence[str]) -> None: ...
    def checkpoint_channels(self) -> tuple[Any, ...]: ...
    def rollback_channels(self, checkpoint: tuple[Any, ...]) -> None: ...
    def for_stream(self, stream: object = None, *, channel_id: str) -> Any: ...
    def capture(
        self, stream: object = None, *, channel_id: str
    ) -> AbstractContextManager[Any]: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class B12xChannel:
    """One channel of a pool, once it is used.

    Attributes:
        name: Whose it is.
        runtime: b12x's channel, which operations are launched on.
        stream: Handle of the one stream that it serves outside of physical
            captures; None where there are no streams.
        recorded: Operations that were recorded into graphs.
    """

    name: Name
    runtime: Any
    stream: int | None
    recorded: int = 0


@dataclass(frozen=True)
class _State:
    """What a checkpoint holds: b12x's own, and what was used by then."""

    pool: tuple[Any, ...]
    prepared: frozenset[Name]
    used: Mapping[Name, B12xChannel]


class B12xChannels:
    """A ``Transport`` over one b12x pool; which ranks call what is said there.

    Args:
        label: What messages call this transport.
        pool: Made by all ranks together, and closed by this object.
        device: The device of this rank.
        channel_bytes: What a channel takes of this rank's memory.

    Attributes:
        label: As given.
    """

    def __init__(
        self, label: str, pool: Pool, device: torch.device, channel_bytes: int
    ) -> None:
        self.label = label
        self._pool = pool
        self._device = device
        self._channel_bytes = channel_bytes
        self._closed = False
        self._prepared: dict[Name, None] = {}
        self._used: dict[Name, B12xChannel] = {}
        self._scopes: list[B12xChannel] = []
        self._checkpoints = Checkpoints[_State]()

    def prepare(self, channels: Sequence[Name]) -> None:
        """Allocate channels; those that exist are left alone. Collective.

        Raises:
            RuntimeError: A rank failed or prepares others; none is added.
        """
        self._demand_open()
        new = [name for name in dict.fromkeys(channels) if name not in self._prepared]
        if new:
            with self._on_device():
                self._pool.prepare_channels([str(name) for name in new])
            self._prepared |= dict.fromkeys(new)

    def capture(self, channel_id: ChannelId) -> AbstractContextManager[None]:
        """Make a channel the one that operations use, for a ``with`` block.

        To be asked for on the thread whose current stream the scope works on.
        Collective when an id is entered for the first time; prepared ones may be
        entered in any order.

        Raises:
            TypeError: No name is given.
            RuntimeError: A rank enters what is not prepared, and others do not;
                or the id was entered on another stream.
        """
        self._demand_open()
        if not isinstance(channel_id, ChannelId):
            raise TypeError(
                f"{self.label}: a capture scope needs its owner's ChannelId, not "
                f"{channel_id!r}; pass channel_id to graph_capture()"
            )
        return self._scope(channel_id, _current_stream(self._device))

    def checkpoint(self) -> Checkpoint[object]:
        """Note which channels there are. Local.

        Raises:
            RuntimeError: A capture scope is open, or the transport is closed.
        """
        self._demand_open()
        self._demand_no_scope("checkpoint")
        state = _State(
            self._pool.checkpoint_channels(),
            frozenset(self._prepared),
            dict(self._used),
        )
        return self._checkpoints.take(state)  # type: ignore[return-value]

    def rollback(self, checkpoint: Checkpoint[object]) -> None:
        """Free what was prepared since a checkpoint. Collective.

        A channel that was there before, and was first captured on since, serves
        that stream only ever after: b12x does not release it. So what is
        captured on to be thrown away is prepared after the checkpoint.

        Raises:
            CheckpointError: Another transport's, or spent; nothing is touched.
            RuntimeError: A capture scope is open, the transport is closed, or a
                rank could not unmap; then nothing is freed.
        """
        self._demand_open()
        self._demand_no_scope("rollback")
        self._checkpoints.demand(checkpoint)  # type: ignore[arg-type]
        state = checkpoint.state
        assert isinstance(state, _State)
        with self._on_device():
            self._pool.rollback_channels(state.pool)
        self._checkpoints.spend(checkpoint)  # type: ignore[arg-type]
        self._prepared = {n: None for n in self._prepared if n in state.prepared}
        self._used = dict(state.used)

    def synchronize(self) -> None:
        """Return when this rank's device has finished what it was given. Local."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Free everything. Collective; the second time it does nothing.

        Raises:
            RuntimeError: A rank could not unmap; nothing is freed, and close()
                may be called again.
        """
        if self._closed:
            return
        with self._on_device():
            self._pool.close()
        self._closed = True
        self._prepared.clear()
        self._used.clear()

    def inventory(self) -> Mapping[Name, int]:
        """The channels there are, with the bytes that each takes on this rank."""
        return dict.fromkeys(self._prepared, self._channel_bytes)

    def recorded(self) -> Mapping[Name, int]:
        """Operations recorded into graphs, by channel; those with none are absent."""
        return {n: used.recorded for n, used in self._used.items() if used.recorded}

    def channel(self, lane: EagerLane, what: str) -> B12xChannel:
        """The channel that an operation is launched on, here and now. Local.

        Within a scope it is the scope's; else the lane's. During a physical
        capture it serves whichever stream records, otherwise only its own.

        Args:
            lane: What to use outside any scope.
            what: The operation, for the errors.

        Raises:
            NoScopeError: A graph is being captured, and no scope is open.
            RuntimeError: The channel serves another stream.
        """
        capturing = is_capturing(self._device)
        if self._scopes:
            channel = self._scopes[-1]
            demand_owner(channel.name, f"{self.label}: {what}")
        elif capturing:
            raise NoScopeError(
                f"{self.label}: {what} is captured into a graph, and no scope names "
                "the graph's owner; capture inside vllm.distributed.parallel_state."
                "graph_capture(device, channel_id=...)"
            )
        else:
            channel = self._used.get(lane) or self._eager(lane)
        if capturing:
            channel.recorded += 1
        else:
            self._demand_stream(channel, what)
        return channel

    def on_main_stream(self) -> bool:
        """Whether what is launched here may use a channel; alike on all ranks.

        Outside of physical captures a stream beside the main one may not.
        """
        role = stream_role()
        if role is None or is_capturing(self._device):
            return True
        logger.info_once("%s: %s takes NCCL outside of graphs", self.label, role)
        return False

    @contextmanager
    def _scope(self, channel_id: ChannelId, stream: Any) -> Iterator[None]:
        channel = self._used.get(channel_id)
        if channel is None:
            channel = self._first_entry(channel_id, stream)
        elif channel.stream != _handle(stream):
            raise RuntimeError(
                f"{self.label}: {channel_id} was captured on another stream before; "
                "graphs of an owner that still live keep its channel, so a recapture "
                "is named ChannelId(owner, phase, generation=2)"
            )
        depth = len(self._scopes)
        self._scopes.append(channel)
        try:
            yield
        finally:
            del self._scopes[depth:]

    def _first_entry(self, channel_id: ChannelId, stream: Any) -> B12xChannel:
        """The pool is asked once for an id's channel, and its own scope left again.

        A pool takes an id only once, while an owner may be entered many times;
        what is launched on the channel itself needs no scope of the pool.
        """
        asked = self._pool.capture(stream, channel_id=str(channel_id))
        with self._on_device(), asked as runtime:
            channel = B12xChannel(channel_id, runtime, _handle(stream))
        self._prepared |= {channel_id: None}
        self._used[channel_id] = channel
        return channel

    def _eager(self, lane: EagerLane) -> B12xChannel:
        if lane not in self._prepared:
            raise RuntimeError(
                f"{self.label}: {lane} is not prepared; call prepare() with it on "
                "every rank first"
            )
        runtime = self._pool.for_stream(channel_id=str(lane))
        channel = B12xChannel(lane, runtime, _handle(_current_stream(self._device)))
        self._used[lane] = channel
        return channel

    def _demand_stream(self, channel: B12xChannel, what: str) -> None:
        stream = _handle(_current_stream(self._device))
        if channel.stream != stream:
            raise RuntimeError(
                f"{self.label}: {what} on stream {stream:#x}, while {channel.name} "
                f"serves stream {channel.stream:#x}; one lane serves one stream. "
                "Mark the code that changes streams with auxiliary_stream() of "
                "vllm.distributed.graph_channels.stream_roles"
            )

    def _on_device(self) -> AbstractContextManager[object]:
        # Collectives run on threads of their own, which begin on device 0.
        on_cuda = self._device.type == "cuda"
        return torch.cuda.device(self._device) if on_cuda else nullcontext()

    def _demand_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"{self.label} was closed; make a new transport")

    def _demand_no_scope(self, what: str) -> None:
        if self._scopes:
            raise RuntimeError(
                f"{self.label}: {what} inside the capture scope of "
                f"{self._scopes[-1].name}; leave all scopes first"
            )


def is_capturing(device: torch.device) -> bool:
    """Whether this thread's current stream is recording a graph."""
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _handle(stream: Any) -> int | None:
    return None if stream is None else int(stream.cuda_stream)
