# SPDX-License-Identifier: Apache-2.0
"""Runs one test file under pytest, with a deadline for each test.

pytest runs in a process of its own, which tells each step as it goes (``reporter``).
If it tells nothing for longer than the deadline, every process of the run is
killed: also one that hears no signal, as a process whose thread waits for a kernel
does not. The test in progress has hung, and another pytest runs the rest of the file.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from verification.leftovers import Marked
from verification.receipt import Outcome, Test

# Importing torch and vLLM, and collecting; nothing of a test's own.
_START_SECONDS = 180.0
_DRAIN_SECONDS = 0.2
# CUDA counts GPUs as NVML does, which tells of the machine and watches its memory.
_IN_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
# Why a test was not run, where somebody stopped the run.
INTERRUPTED = "interrupted"


@dataclass
class _Progress:
    """What one pytest has told so far.

    Attributes:
        collected: Ids in the order in which they run; None before that is known.
        ended: The tests that have ended.
        errors: What went wrong outside any test.
    """

    collected: list[str] | None = None
    ended: dict[str, Test] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    _steps: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def take(self, step: dict[str, Any]) -> None:
        """Learn from one line."""
        if "error" in step:
            self.errors.append(step["error"])
        elif "collected" in step:
            self.collected = step["collected"]
        else:
            steps = self._steps.setdefault(step["id"], [])
            steps.append(step)
            if step["when"] == "teardown":
                self.ended[step["id"]] = _ended(step["id"], steps)

    def waiting(self) -> list[str]:
        """The tests that have not ended; the first has begun or is about to."""
        return [id for id in self.collected or [] if id not in self.ended]


def run_file(
    file: str, marked: Marked, deadline: float, stop: threading.Event
) -> list[Test]:
    """Run the tests of a file, each under a deadline in seconds.

    What pytest says goes to stdout. Several threads may run a file each.

    Args:
        file: As pytest takes it.
        marked: What the processes are known by.
        deadline: Longest time that a test, or its set-up or teardown, may take.
        stop: Ends the run when it is set; no process of it is left.

    Returns:
        Every test of the file, run or not. If it could not be collected: one that
        failed, with the file for an id.
    """
    results: dict[str, Test] = {}
    while True:
        progress = _Progress()
        hung, said = _run_pytest(file, marked, deadline, list(results), progress, stop)
        if stop.is_set():
            return _interrupted(file, progress, results)
        results |= progress.ended
        waiting = progress.waiting()
        if not (hung and waiting):
            return _whole(file, progress, results, hung, said)
        reason = f"still running after {deadline:.0f} s; killed"
        results[waiting[0]] = Test(waiting[0], Outcome.HUNG, deadline, reason)
        if not waiting[1:]:
            return list(results.values())


def _interrupted(
    file: str, progress: _Progress, results: dict[str, Test]
) -> list[Test]:
    """The results, and what has not ended."""
    waiting = [file] if progress.collected is None else progress.waiting()
    unrun = [Test(id, Outcome.NOT_RUN, 0.0, INTERRUPTED) for id in waiting]
    return [*(results | progress.ended).values(), *unrun]


def _whole(
    file: str, progress: _Progress, results: dict[str, Test], hung: bool, said: str
) -> list[Test]:
    """The results, and what else went wrong, as a failure of the file."""
    errors = list(progress.errors)
    if hung:
        errors.append(f"nothing was collected in {_START_SECONDS:.0f} s; killed")
    for id in progress.waiting():
        results[id] = Test(id, Outcome.NOT_RUN, 0.0, f"pytest ended early: {said}")
    if not results and not errors:
        errors.append(said)
    failed = [Test(file, Outcome.FAILED, 0.0, error) for error in errors]
    return [*results.values(), *failed]


def _run_pytest(
    file: str,
    marked: Marked,
    deadline: float,
    done: list[str],
    progress: _Progress,
    stop: threading.Event,
) -> tuple[bool, str]:
    """Run what is not done yet, with progress: whether it hung, its last line."""
    with TemporaryDirectory() as folder:
        steps, output = Path(folder, "steps"), Path(folder, "output")
        steps.touch()
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", file]
        command += ["-p", "verification.reporter", f"--steps-to={steps}"]
        command += [f"--deselect={id}" for id in done]
        with (
            steps.open() as lines,
            output.open("w") as told,
            output.open(errors="replace") as said,
        ):
            pytest = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=told,
                stderr=subprocess.STDOUT,
                env=dict(marked.environment()) | _importable() | _IN_ORDER,
                start_new_session=True,
            )
            try:
                hung = _watch(pytest, lines, said, progress, deadline, stop)
            finally:
                if pytest.poll() is None:
                    marked.kill()
                    pytest.wait()
        return hung, _last_words(output)


def _importable() -> dict[str, str]:
    """Lets pytest find the reporter, wherever it runs."""
    before = os.environ.get("PYTHONPATH")
    paths = [os.fspath(Path(__file__).parents[1]), *([before] if before else [])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def _watch(
    pytest: subprocess.Popen[bytes],
    lines: IO[str],
    said: IO[str],
    progress: _Progress,
    deadline: float,
    stop: threading.Event,
) -> bool:
    """Follow a pytest, which is heard, until it ends or has to: whether it hangs."""
    heard = time.monotonic()
    while True:
        ended = stop.is_set() or pytest.poll() is not None
        if _learn(lines, said, progress):
            heard = time.monotonic()
        if ended:
            return False
        patience = _START_SECONDS if progress.collected is None else deadline
        if time.monotonic() - heard > patience:
            return True
        time.sleep(_DRAIN_SECONDS)


def _learn(lines: IO[str], said: IO[str], progress: _Progress) -> bool:
    """Take the steps that have come since, show what was said: whether any came."""
    sys.stdout.write(said.read())
    sys.stdout.flush()
    steps = list(_new(lines))
    for step in steps:
        progress.take(step)
    return bool(steps)


def _new(lines: IO[str]) -> Iterator[dict[str, Any]]:
    """Whole lines that have come since; a half one is left for the next time."""
    while True:
        place = lines.tell()
        line = lines.readline()
        if not line.endswith("\n"):
            lines.seek(place)
            return
        yield json.loads(line)


def _ended(id: str, steps: list[dict[str, Any]]) -> Test:
    seconds = sum(step["seconds"] for step in steps)
    for outcome in (Outcome.FAILED, Outcome.SKIPPED):
        for step in steps:
            if step["outcome"] == outcome:
                return Test(id, outcome, seconds, step["reason"])
    return Test(id, Outcome.PASSED, seconds)


def _last_words(output: Path) -> str:
    lines = output.read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")


def test_files(root: Path) -> list[str]:
    """Files with tests that need a GPU, which are those that say so."""
    found = sorted(Path(root, "tests").rglob("test_*.py"))
    return [
        os.fspath(path.relative_to(root))
        for path in found
        if "gpus.needs_gpu" in path.read_text()
    ]
