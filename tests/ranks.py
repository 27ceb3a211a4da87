# SPDX-License-Identifier: Apache-2.0
"""Runs a function as N forked ranks, under a deadline, and tells how each ended.

    def body(rank: int, store: Store) -> int: ...

    assert ranks.values(2, body, deadline=10) == [3, 3]
    survivor, killed = ranks.run(2, body_that_kills_rank_1, deadline=10)
    assert killed.status == -signal.SIGKILL

Ranks are forked, so what the parent imported is there at once and the function
may be a closure. Each rank leads a process group of its own, and all of them
are killed when the deadline passes or the parent is interrupted, stopped ranks
included. No rank runs the parent's exit handlers.
"""

import math
import multiprocessing
import os
import pickle
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import FileStore, Store

Body = Callable[[int, Store], Any]

# Whoever waits for a rank that has failed has a while to say so, and no more.
_PATIENCE_SECONDS = 40.0


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes:
        value: What the function returned; None if it did not return.
        error: What it raised, the rank's traceback added as a note; else None.
        status: As subprocess has it: 0, an exit status, or minus the signal.
        late: It was still running at the deadline and was killed.
        returned: The function did, and its value is what came of it.
    """

    value: Any
    error: BaseException | None
    status: int
    late: bool
    returned: bool


def run(
    count: int, body: Body, deadline: float, patience: float = math.inf
) -> list[Outcome]:
    """Run ``body(rank, store)`` in ``count`` processes and wait for all of them.

    Args:
        count: How many ranks.
        body: Called in each of them. What it returns or raises is pickled; an
            error that cannot be is replaced by a RuntimeError of its text.
        deadline: Seconds after which the ranks still running are killed.
        patience: Seconds that the others have once a rank has failed.

    Returns:
        One outcome a rank, in their order. No process is left.
    """
    # in memory: a busy disk can hold a store up for longer than a vote waits
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = os.path.join(folder, "store")
        started: list[tuple[int, int]] = []
        try:
            for rank in range(count):
                started.append(_start(rank, count, body, path))
            reports = _read_all([pipe for _, pipe in started], deadline, patience)
        finally:
            statuses = [_end(pid) for pid, _ in started]
            for _, pipe in started:
                os.close(pipe)
    return [_outcome(*ended) for ended in zip(reports, statuses)]


def values(count: int, body: Body, deadline: float) -> list[Any]:
    """``run`` for ranks that all should return: their values, in order of rank.

    Raises:
        BaseException: What the lowest failing rank raised.
        AssertionError: A rank was late, or ended without returning.
    """
    outcomes = run(count, body, deadline, _PATIENCE_SECONDS)
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None:
            outcome.error.add_note(f"(raised on rank {rank})")
            raise outcome.error
    for rank, outcome in enumerate(outcomes):
        # one that was late may have waited for another that ended
        ended = outcome.late or outcome.status == 0
        assert ended, f"rank {rank} ended with {outcome.status}"
    for rank, outcome in enumerate(outcomes):
        assert not outcome.late, f"rank {rank} still ran after {deadline} s"
        assert outcome.returned, f"rank {rank} ended without returning"
    return [outcome.value for outcome in outcomes]


def _start(rank: int, count: int, body: Body, path: str) -> tuple[int, int]:
    """Fork one rank: its process id and the pipe that its report comes from."""
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            # the parent's OpenMP threads do not live here, a pool would hang
            torch.set_num_threads(1)
            # with one name on all ranks vLLM would, on CPUs with AVX-512, share memory
            # of its own, which stays behind when a process ends as these do
            os.environ["VLLM_DIST_IDENT"] = f"test-{os.getpid()}"
            # a shell that runs tests in the background has SIGINT ignored
            signal.signal(signal.SIGINT, signal.default_int_handler)
            report, status = _call(body, rank, FileStore(path, count))
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(report)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)
    os.setpgid(pid, pid)
    os.close(writer)
    return pid, reader


def _call(function: Callable[..., Any], *given: Any) -> tuple[bytes, int]:
    """The pickled (value, error) of one call, and the exit status to end with."""
    try:
        return pickle.dumps((function(*given), None)), 0
    except BaseException as error:  # also what ends a process; it is the outcome
        error.add_note(traceback.format_exc())
        try:
            report = pickle.dumps((None, error))
            pickle.loads(report)
        except Exception:
            report = pickle.dumps((None, RuntimeError(traceback.format_exc())))
        return report, 1


def in_fresh_process(function: Callable[..., Any], *given: Any) -> Any:
    """Call a function in a process that has not imported what this one has.

    For a rank whose environment must be there before vLLM is imported. The process
    is in the rank's group and ends with it.

    Args:
        function: Of a module; it is looked up there.
        given: What it is called with; pickled, as what it returns or raises is.

    Raises:
        BaseException: What it raised.
        RuntimeError: The process ended before that.
    """
    spawn = multiprocessing.get_context("spawn")
    reader, writer = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_report, args=(writer, function, *given))
    process.start()
    writer.close()  # the other end is the process's alone
    try:
        value, error = pickle.loads(reader.recv_bytes())
    except EOFError:
        process.join()
        raise RuntimeError(
            f"{function.__name__} did not return: its process ended with "
            f"{process.exitcode}"
        ) from None
    if error is not None:
        raise error
    return value


def _report(pipe: Connection, function: Callable[..., Any], *given: Any) -> None:
    report, _ = _call(function, *given)
    pipe.send_bytes(report)


def _read_all(pipes: list[int], deadline: float, patience: float) -> list[bytes | None]:
    """What each rank wrote before it closed its pipe; None where it never did."""
    end = time.monotonic() + deadline
    chunks: dict[int, list[bytes]] = {pipe: [] for pipe in pipes}
    with selectors.DefaultSelector() as waiting:
        for pipe in pipes:
            waiting.register(pipe, selectors.EVENT_READ)
        while waiting.get_map() and time.monotonic() < end:
            for key, _ in waiting.select(end - time.monotonic()):
                chunks[key.fd].append(os.read(key.fd, 1 << 16))
                if not chunks[key.fd][-1]:
                    waiting.unregister(key.fd)
                    if _tells_failure(b"".join(chunks[key.fd])):
                        end = min(end, time.monotonic() + patience)
        late = {key.fd for key in waiting.get_map().values()}
    return [None if pipe in late else b"".join(chunks[pipe]) for pipe in pipes]


def _tells_failure(report: bytes) -> bool:
    return not report or pickle.loads(report)[1] is not None


def _end(pid: int) -> int:
    """Kill what is left of a rank's process group, and reap the rank."""
    for _ in range(100):  # one that closed its pipe is about to end by itself
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        time.sleep(0.001)
    # not reaped yet, so that the number cannot be another group's by now
    os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _outcome(report: bytes | None, status: int) -> Outcome:
    value, error = pickle.loads(report) if report else (None, None)
    returned = bool(report) and error is None
    return Outcome(value, error, status, late=report is None, returned=returned)
