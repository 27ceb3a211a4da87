# SPDX-License-Identifier: Apache-2.0
"""What the tests of the host transport share."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from torch.distributed import HashStore, PrefixStore, Store

from vllm.distributed.device_communicators.host_channels import HostChannels
from vllm.distributed.graph_channels.identity import ChannelId, Owner, Phase

TARGET = ChannelId(Owner.TARGET, Phase.PRODUCTION)
ENCODER = ChannelId(Owner.ENCODER, Phase.PRODUCTION)
PROFILE = ChannelId(Owner.TARGET, Phase.PROFILE)


def host_channels(
    rank: int,
    world: int,
    store: Store | None,
    max_bytes: int = 1 << 20,
    deadline: float = 5,
) -> HostChannels:
    """One rank's transport, with nothing prepared; without a store, it is alone."""
    return HostChannels(
        "host tp:0",
        rank,
        world,
        PrefixStore("tp:0", store or HashStore()),
        max_bytes=max_bytes,
        deadline=deadline,
    )


def descriptors() -> int:
    """How many files this process has open."""
    return len(os.listdir("/proc/self/fd"))


def mapped_segments() -> int:
    """How many channels this process has mapped; all of them must be nameless."""
    maps = Path("/proc/self/maps").read_text()
    assert "/dev/shm" not in maps
    return maps.count("/memfd:vllm:")


class Stream:
    """What a CUDA stream is to its launches: they run in order, on a thread."""

    def __init__(self) -> None:
        self._launched: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._finished: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def launch(self, work: Callable[[], None]) -> None:
        """Run something, after what was launched before; returns at once."""
        self._launched.put(work)

    def synchronize(self) -> None:
        """Wait for one launch, and raise what it raised."""
        error = self._finished.get()
        if error is not None:
            raise error

    def end(self) -> None:
        """Let the thread end."""
        self._launched.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (work := self._launched.get()) is not None:
            try:
                work()
                self._finished.put(None)
            except BaseException as error:
                self._finished.put(error)
