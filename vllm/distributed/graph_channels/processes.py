# SPDX-License-Identifier: Apache-2.0
"""Ranks on this machine, for a while: one forked process each, none of them left."""

import ctypes
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Generic, NamedTuple, TypeVar

import torch

Answered = TypeVar("Answered")

_PR_SET_PDEATHSIG = 1


class Answer(NamedTuple, Generic[Answered]):
    """What became of a rank.

    Attributes:
        value: What it answered; None if it gave no answer.
        error: Why it gave none; None if it did.
    """

    value: Answered | None
    error: str | None


def in_ranks(
    world: int, work: Callable[[int, str], Answered], seconds: float
) -> list[Answer[Answered]]:
    """Run a function as so many ranks. What is imported here is there in each.

    This process must not have initialised CUDA, which a fork cannot use.

    Args:
        world: How many.
        work: Called in each with its rank and the path of a file, not yet there,
            that a ``FileStore`` of all of them may use. Its answer is pickled.
        seconds: When ranks that still run are ended.

    Returns:
        By rank. Every process has ended.
    """
    context = multiprocessing.get_context("fork")
    until = time.monotonic() + seconds
    started = []
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        try:
            for rank in range(world):
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(
                    target=_work, args=(writer, work, rank, store), daemon=True
                )
                process.start()
                writer.close()
                started.append((process, reader))
            return [
                _receive(reader, rank, until, seconds)
                for rank, (_, reader) in enumerate(started)
            ]
        finally:
            # A rank that has answered has nothing left to do.
            for process, _ in started:
                process.kill()
            for process, _ in started:
                process.join()


def _work(
    writer: Connection, work: Callable[[int, str], Answered], rank: int, store: str
) -> None:
    # Ctrl-C is the parent's to answer, and a rank does not outlive it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    answer: Answer[Answered]
    try:
        answer = Answer(work(rank, store), None)
    except Exception as error:
        answer = Answer(None, f"{type(error).__name__}: {error}")
    writer.send(answer)


def _receive(
    reader: Connection, rank: int, until: float, seconds: float
) -> Answer[Answered]:
    try:
        if reader.poll(max(0.0, until - time.monotonic())):
            answer: Answer[Answered] = reader.recv()
            return answer
        return Answer(None, f"rank {rank} gave no answer in {seconds:g} s")
    except EOFError:
        return Answer(None, f"rank {rank} ended before its time")
