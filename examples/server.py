# SPDX-License-Identifier: Apache-2.0
"""Start `vllm serve`, ask it for embeddings, and stop it without a trace."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

_SHARED_MEMORY = Path("/dev/shm")
_ANSWER_SECONDS = 60.0
# It takes a second or two, but while it starts it does not listen.
_STOP_SECONDS = 10.0
_KILL_SECONDS = 15.0
_LOG_LINES = 25


class HasSession(Protocol):
    """A server whose processes are all in one session."""

    @property
    def session(self) -> int: ...


class ServerError(Exception):
    """The server did not start, answer, or leave as it should."""


class Server:
    """One `vllm serve` process with all its children, as a context manager.

    Args:
        model: The folder of the weights.
        ranks: The tensor-parallel size.
        log: Where to write what the server says.
        settings: Environment variables beside this process's own.
    """

    def __init__(
        self, model: Path, ranks: int, log: Path, settings: Mapping[str, str]
    ) -> None:
        self.ranks = ranks
        self._log = log
        self._port = _free_port()
        self._command = [
            str(Path(sys.executable).with_name("vllm")),
            *("serve", str(model), "--served-model-name", "demo"),
            *("--runner", "pooling", "--dtype", "float32"),
            *("--tensor-parallel-size", str(ranks)),
            *("--host", "127.0.0.1", "--port", str(self._port)),
        ]
        self._environment = {**os.environ, **settings}

    def __enter__(self) -> Self:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as sink:
            # A session of its own: Ctrl-C reaches this process alone, which then
            # stops the server in order, and every child can be found again.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def session(self) -> int:
        """The session that every process of the server is in."""
        return self._process.pid

    def ready(self) -> bool:
        """Whether it answers yet.

        Raises:
            ServerError: It ended.
        """
        if self._process.poll() is not None:
            raise self.failure(f"ended with status {self._process.returncode}")
        try:
            with urllib.request.urlopen(self._url("health"), timeout=5):
                return True
        except OSError:
            return False

    def embed(self, sentences: Sequence[str]) -> list[list[float]]:
        """The embedding of each sentence, over HTTP.

        Raises:
            ServerError: It gave no answer, or a refusal.
        """
        body = json.dumps({"model": "demo", "input": list(sentences)}).encode()
        request = urllib.request.Request(
            self._url("v1/embeddings"), body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
                data = json.load(answer)["data"]
        except (OSError, ValueError, KeyError) as error:
            raise self.failure(f"gave no embeddings: {error}") from error
        return [row["embedding"] for row in sorted(data, key=lambda row: row["index"])]

    def stop(self) -> None:
        """End the server and every process of its session, whatever state it is in."""
        with _uninterrupted():
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
            deadline = time.monotonic() + _STOP_SECONDS
            while self._alive() and time.monotonic() < deadline:
                time.sleep(0.1)
            self._kill()

    def log_lines(self) -> list[str]:
        """What the server and its workers have said so far."""
        return self._log.read_text(errors="replace").splitlines()

    def failure(self, what: str) -> ServerError:
        """An error with the log's last lines in it."""
        said = "\n".join(f"  | {line}" for line in self.log_lines()[-_LOG_LINES:])
        return ServerError(
            f"the server of {self.ranks} rank(s) {what}; its last lines:\n{said}\n"
            f"the whole log: {os.path.relpath(self._log)}"
        )

    def _alive(self) -> list[int]:
        self._process.poll()
        return list(_session_members(self.session))

    def _kill(self) -> None:
        """The last resort. A tracker is spared: it frees what the killed left."""
        deadline = time.monotonic() + _KILL_SECONDS
        while alive := self._alive():
            for pid in alive:
                if time.monotonic() > deadline or not _is_tracker(pid):
                    _send(pid, signal.SIGKILL)
            time.sleep(0.1)

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._port}/{path}"


class SharedMemoryWatch:
    """Knows the files in shared memory that servers use, and no one else's."""

    def __init__(self) -> None:
        self._theirs: set[str] = set()

    def note(self, servers: Sequence[HasSession]) -> None:
        """Remember what the servers' processes have mapped or opened now."""
        for server in servers:
            for pid in _session_members(server.session):
                self._theirs |= set(_shared_files(pid))

    def left(self, seconds: float = 10.0) -> list[str]:
        """Those that are still there after a while."""
        deadline = time.monotonic() + seconds
        while left := sorted(f for f in self._theirs if (_SHARED_MEMORY / f).exists()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return left


def wait_until_ready(servers: Sequence[Server], seconds: float) -> None:
    """Wait for all of them, with a line that shows how far they are.

    Raises:
        ServerError: One of them ended, or was not ready in time.
    """
    began = time.monotonic()
    shown = 0.0
    while waiting := [server for server in servers if not server.ready()]:
        passed = time.monotonic() - began
        if passed > seconds:
            raise waiting[0].failure(f"was not ready after {seconds:.0f} s")
        # A terminal shows one line that moves; a log gets one now and then.
        if sys.stdout.isatty() or passed >= shown + 10:
            shown = passed
            ranks = " and ".join(str(server.ranks) for server in waiting)
            _show(f"  {passed:3.0f} s, still starting: the server of {ranks} rank(s)")
        time.sleep(1)
    _show(f"  {time.monotonic() - began:3.0f} s, every server answers")
    print()


def _show(line: str) -> None:
    moving = sys.stdout.isatty()
    print(f"\r{line:<72}" if moving else line, end="" if moving else "\n", flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _session_members(session: int) -> Iterator[int]:
    """Every process of a session that is not merely waiting to be collected."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name stands in brackets and may hold anything.
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        state, member_of = fields[0], int(fields[3])
        if member_of == session and state not in "ZX":
            yield int(stat.parent.name)


def _is_tracker(pid: int) -> bool:
    """Whether a process is multiprocessing's resource tracker."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _shared_files(pid: int) -> Iterator[str]:
    """The files in shared memory that a process has mapped or opened."""
    process = Path(f"/proc/{pid}")
    with suppress(OSError):
        for line in (process / "maps").read_text().splitlines():
            yield from _below_shared_memory(line.partition("/")[2])
        for link in (process / "fd").iterdir():
            with suppress(FileNotFoundError):
                yield from _below_shared_memory(os.readlink(link).removeprefix("/"))


def _below_shared_memory(path: str) -> Iterator[str]:
    folder, _, name = path.rpartition("/")
    if f"/{folder}" == str(_SHARED_MEMORY) and not name.endswith(" (deleted)"):
        yield name


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Keep a second Ctrl-C from leaving half of the work undone."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
