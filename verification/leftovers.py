# SPDX-License-Identifier: Apache-2.0
"""Processes and GPU memory that are still there after tests have ended.

Processes are told by a variable in the environment that they were started with:
neither a session of their own nor a dead parent hides them.
"""

import os
import time
from collections.abc import Callable, Mapping
from uuid import uuid4

import psutil

_VARIABLE = "GRAPH_CHANNELS_TEST_RUN"
# The driver frees a dead process's memory a moment after its end.
_GRACE_SECONDS = 10.0
# What a driver may keep for itself, a GPU, or an MPS server: 76 MiB on an H200. A
# process that is still there holds a context, of several times this.
_TOLERATED_BYTES = 128 << 20


class Marked:
    """Processes of one run, and whatever they started."""

    def __init__(self) -> None:
        self._mark = uuid4().hex

    def environment(self) -> Mapping[str, str]:
        """For a process of the run."""
        return os.environ | {_VARIABLE: self._mark}

    def alive(self) -> list[psutil.Process]:
        """Those that have not ended; zombies have."""
        return [process for process in psutil.process_iter() if self._is_alive(process)]

    def kill(self) -> list[str]:
        """Kill all of them; their command lines."""
        killed = []
        while found := self.alive():  # some may have started others meanwhile
            for process in found:
                try:
                    killed.append(" ".join(process.cmdline()) or process.name())
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(found, timeout=1)
        return killed

    def _is_alive(self, process: psutil.Process) -> bool:
        try:
            ours = process.environ().get(_VARIABLE) == self._mark
            return bool(ours and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.Error:
            return False  # it has ended, or belongs to another user


def await_end(marked: Marked, seconds: float = _GRACE_SECONDS) -> list[str]:
    """Wait for the processes of a run to end; kill and name what has not."""
    _poll(lambda: not marked.alive(), seconds)
    return marked.kill()


def await_memory(
    used: Callable[[], list[int]],
    before: list[int],
    seconds: float = _GRACE_SECONDS,
) -> list[int]:
    """Wait for GPU memory to come back; bytes a GPU that did not, [] if all did."""

    def missing() -> list[int]:
        return [max(0, now - then) for now, then in zip(used(), before, strict=True)]

    _poll(lambda: max(missing(), default=0) <= _TOLERATED_BYTES, seconds)
    lost = missing()
    return lost if max(lost, default=0) > _TOLERATED_BYTES else []


def _poll(done: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.1)
