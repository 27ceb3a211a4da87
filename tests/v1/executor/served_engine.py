# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` on two ranks, to be ended in one way or another, and watched.

The engine has a tiny Llama with random weights. A fault can be put into its ranks
(``tests.v1.executor.faulty_steps``).
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from examples.server import SharedMemoryWatch
from tests.distributed.faults import FIRST_ERROR, SERVED, Blow, During
from tests.engines import LLAMA

RANKS = 2
# The names of steps, for the workers.
FAULT, DWELL = "SERVING_FAULT", "SERVING_DWELL"
# Steps before an engine is ready.
STARTING = (During.PROFILING, During.CAPTURE)
# From the blow to the end of the last process, and from the start to readiness.
GONE_SECONDS, READY_SECONDS = 15.0, 300.0
# So long that an engine which waits for the step to end is found out.
DWELL_SECONDS = 2 * GONE_SECONDS
# What a finalizer, or a step after its group has gone, would print.
UNWELCOME = ("Exception ignored", "Process group", "terminate called")


def dwells(rank: int, during: During) -> str:
    """What a rank says when it begins to dwell in a step."""
    return f"rank {rank} dwells in {during.value}"


class ServedEngine:
    """One server with all its processes, as a context manager; it leaves none.

    Args:
        folder: Where its model and its log go.
        workers: The class of its workers.
        options: More arguments of ``vllm serve``.
        environment: Variables beside this process's own.
    """

    def __init__(
        self,
        folder: Path,
        workers: str,
        options: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        self._log = folder / "log"
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(LLAMA))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
            *("--served-model-name", "tiny", "--load-format", "dummy"),
            *("--skip-tokenizer-init", "--max-model-len", "256", "--max-num-seqs", "4"),
            *("--tensor-parallel-size", str(RANKS)),
            *("--distributed-executor-backend", "mp", "--worker-cls", workers),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *options,
        ]
        self._environment = {
            **os.environ,
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_PLUGINS": "",
            "HF_HUB_OFFLINE": "1",
            FAULT: "",
            DWELL: "",
            **environment,
        }

    def __enter__(self) -> Self:
        self._shared_memory = SharedMemoryWatch()
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # by which all of its processes are found
                # a shell that runs tests in the background has SIGINT ignored
                preexec_fn=lambda: signal.signal(
                    signal.SIGINT, signal.default_int_handler
                ),
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    @property
    def session(self) -> int:
        """The session that every process of the server is in."""
        return self._process.pid

    def ready(self) -> bool:
        """Whether it answers yet."""
        try:
            with urllib.request.urlopen(self._url("health"), timeout=5):
                return True
        except OSError:
            return False

    def says(self, text: str) -> bool:
        """Whether the log has a text."""
        return text in self.log()

    def log(self) -> str:
        """What its processes have said."""
        return self._log.read_text(errors="replace")

    def await_that(self, what: object, seconds: float) -> None:
        """Wait until a function returns true; it may also be a text in the log.

        Raises:
            AssertionError: The server ended, or it took too long.
        """
        end = time.monotonic() + seconds
        there = (lambda: self.says(what)) if isinstance(what, str) else what
        while not there():
            status = self._process.poll()
            assert status is None, f"ended with {status}:\n{self.log()[-20_000:]}"
            assert time.monotonic() < end, f"{what} never came:\n{self.log()[-20_000:]}"
            time.sleep(0.2)

    def complete(self, tokens: int, seconds: float = 60) -> list[int]:
        """The tokens that follow a prompt."""
        body = {
            "model": "tiny",
            "prompt": [1, 5, 9, 11],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            self._url("v1/completions"),
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            tokens_of_answer: list[int] = json.load(answer)["choices"][0]["token_ids"]
            return tokens_of_answer

    def be_asked(self) -> None:
        """Ask without end, on threads, until there is no answer for a while.

        vLLM's HTTP server stays for as long as a client waits for an answer.
        """

        def ask() -> None:
            with suppress(OSError, ValueError, KeyError):
                while True:
                    self.complete(200, seconds=5)

        for _ in range(2):
            threading.Thread(target=ask, daemon=True).start()

    def processes(self) -> list[psutil.Process]:
        """All that have not ended yet."""
        found = []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and os.getsid(process.pid) == self.session:
                    found.append(process)
        return found

    def signal(self, number: signal.Signals, *, all_processes: bool = False) -> None:
        """Send a signal to the server; or to all, as a terminal's Ctrl-C does."""
        self._shared_memory.note([self])
        if all_processes:
            os.killpg(self.session, number)
        else:
            self._process.send_signal(number)

    def strike(self, blow: Blow) -> None:
        """Let something happen to it."""
        match blow:
            case Blow.STOP | Blow.TERM:
                self.signal(signal.SIGTERM)
            case Blow.INTERRUPT:
                self.signal(signal.SIGINT, all_processes=True)
            case Blow.WORKER:
                self._shared_memory.note([self])
                self._named("Worker_TP1").kill()
            case Blow.ENGINE:
                self._shared_memory.note([self])
                self._named("EngineCore").kill()
            case Blow.RAISES:
                self.await_that(FIRST_ERROR, READY_SECONDS)

    def seconds_to_end(self, limit: float) -> float:
        """How long it takes from now until no process is left.

        Raises:
            AssertionError: Some are there after ``limit``.
        """
        began = time.monotonic()
        while left := self.processes():
            self._process.poll()
            said = self.log()[-4000:]
            assert time.monotonic() - began < limit, f"left: {left}:\n{said}"
            time.sleep(0.05)
        return time.monotonic() - began

    def status(self) -> int:
        """The exit status of the server, which has ended."""
        return self._process.wait(5)

    def left_in_shared_memory(self) -> list[str]:
        """The files in /dev/shm that its processes had and that are still there."""
        return self._shared_memory.left()

    def _named(self, title: str) -> psutil.Process:
        """The process whose title ends so."""
        (found,) = (p for p in self.processes() if p.cmdline()[0].endswith(title))
        return found

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._port}/{path}"


def _trouble(blow: Blow, during: During) -> dict[str, str]:
    """What the workers are told, so that they do their part of a row."""
    if blow is Blow.RAISES:
        return {FAULT: during.name}
    return {DWELL: during.name} if during in STARTING else {}


def demand_end(
    folder: Path,
    blow: Blow,
    during: During,
    workers: str,
    options: Sequence[str],
    environment: Mapping[str, str],
) -> ServedEngine:
    """Start an engine, bring a row of the table about, and hold it against that.

    Returns:
        The engine, which has ended.
    """
    trouble = _trouble(blow, during)
    with ServedEngine(
        folder,
        workers,
        [*options, *(["--shutdown-timeout", "12"] if blow is Blow.STOP else [])],
        {**environment, **trouble},
    ) as engine:
        if during not in STARTING:
            engine.await_that(engine.ready, READY_SECONDS)
        if during is During.REQUEST:
            engine.be_asked()
            time.sleep(2)  # in the middle of one
        if DWELL in trouble:
            for rank in range(RANKS):
                engine.await_that(dwells(rank, during), READY_SECONDS)
        engine.strike(blow)
        seconds = engine.seconds_to_end(3 * GONE_SECONDS)
        row = SERVED[blow, during]
        said = engine.log()
        print(f"{blow.name} in {during.name}: gone after {seconds:.1f} s")
        assert seconds < GONE_SECONDS, f"{seconds:.0f} s:\n{said[-4000:]}"
        assert engine.status() == row.status, said[-4000:]
        assert row.first in said, said[-4000:]
        assert not [text for text in UNWELCOME if text in said]
        assert engine.left_in_shared_memory() == []
    return engine
