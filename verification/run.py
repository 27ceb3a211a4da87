# SPDX-License-Identifier: Apache-2.0
"""Runs files of GPU tests, and looks at what each leaves."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from verification import leftovers, session
from verification.machine import tree_digest
from verification.receipt import Leak, Machine, Outcome, Receipt, Test


def run(
    root: Path,
    files: Sequence[str],
    machine: Machine,
    used_bytes: Callable[[], list[int]],
    *,
    required_gpus: int = 0,
    deadline: float = 300.0,
    at_once: int = 1,
) -> Receipt:
    """Run files of tests.

    Args:
        root: Of the repository; the working directory too.
        files: As pytest takes them, relative to ``root``.
        machine: For the receipt.
        used_bytes: Memory in use on each GPU.
        required_gpus: How many GPUs there must be; with fewer nothing is run.
        deadline: Seconds that a test may take.
        at_once: How many files run beside each other. Memory that is not back when
            all of those have ended is said to be left by each.

    Returns:
        The receipt, whether all was well or not; after Ctrl-C, with what had run.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    digest = tree_digest(root)
    tests: list[Test] = []
    leaks: list[Leak] = []
    unrun = ""
    if len(machine.gpus) < required_gpus:
        unrun = f"{required_gpus} GPUs are required, {len(machine.gpus)} found"
    stop = threading.Event()
    for first in range(0, len(files), at_once):
        several = files[first : first + at_once]
        if unrun:
            tests += [Test(file, Outcome.NOT_RUN, 0.0, unrun) for file in several]
            continue
        before = used_bytes()
        results = _together(several, deadline, stop)
        gpu_bytes = _not_back(used_bytes, before, stop)
        for file, (ended, processes) in zip(several, results, strict=True):
            tests += ended
            if processes or gpu_bytes:
                leaks.append(Leak(file, processes, gpu_bytes))
        if stop.is_set():
            unrun = session.INTERRUPTED
    return Receipt(started, digest, machine, required_gpus, tests, leaks)


def _together(
    files: Sequence[str], deadline: float, stop: threading.Event
) -> list[tuple[list[Test], list[str]]]:
    """Run files at once: of each the tests, and the processes that it left."""

    def run_one(file: str) -> tuple[list[Test], list[str]]:
        marked = leftovers.Marked()
        tests = session.run_file(file, marked, deadline, stop)
        if stop.is_set():
            marked.kill()
            return tests, []
        return tests, leftovers.await_end(marked)

    with ThreadPoolExecutor(len(files)) as threads:
        running = [threads.submit(run_one, file) for file in files]
        _await(running, stop)
        return [one.result() for one in running]


def _await(running: Sequence[Future[Any]], stop: threading.Event) -> None:
    """Wait for threads to end; Ctrl-C, however often, makes them stop first."""
    while True:
        try:
            wait(running)
            return
        except KeyboardInterrupt:
            stop.set()


def _not_back(
    used_bytes: Callable[[], list[int]], before: list[int], stop: threading.Event
) -> list[int]:
    """Bytes a GPU that files left; none are looked for where the run is stopped."""
    if stop.is_set():
        return []
    try:
        return leftovers.await_memory(used_bytes, before)
    except KeyboardInterrupt:
        stop.set()
        return []


def summary(receipt: Receipt) -> str:
    """What a person wants to know first: counts, and whatever was not well."""
    count = {kind: 0 for kind in Outcome}
    for test in receipt.tests:
        count[test.outcome] += 1
    lines = [", ".join(f"{n} {kind.value}" for kind, n in count.items() if n)]
    lines += [
        f"{test.outcome.value}: {test.id}: {test.reason}"
        for test in receipt.tests
        if test.outcome is not Outcome.PASSED
    ]
    for leak in receipt.leaks:
        lines += [f"left by {leak.file}: process {name}" for name in leak.processes]
        lines += [
            f"left by {leak.file}: {count} bytes on GPU {n}"
            for n, count in enumerate(leak.gpu_bytes)
            if count
        ]
    return "\n".join([*lines, "green" if receipt.green else "NOT green"])
