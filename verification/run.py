# SPDX-License-Identifier: Apache-2.0
"""Runs files of GPU tests one after another, and looks at what each leaves."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

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
) -> Receipt:
    """Run files of tests.

    Args:
        root: Of the repository; the working directory too.
        files: As pytest takes them, relative to ``root``.
        machine: For the receipt.
        used_bytes: Memory in use on each GPU.
        required_gpus: How many GPUs there must be; with fewer nothing is run.
        deadline: Seconds that a test may take.

    Returns:
        The receipt, whether all was well or not; after Ctrl-C, with what had run.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    tests: list[Test] = []
    leaks: list[Leak] = []
    unrun = ""
    if len(machine.gpus) < required_gpus:
        unrun = f"{required_gpus} GPUs are required, {len(machine.gpus)} found"
    for file in files:
        if unrun:
            tests.append(Test(file, Outcome.NOT_RUN, 0.0, unrun))
            continue
        marked, before = leftovers.Marked(), used_bytes()
        try:
            tests += session.run_file(file, marked, deadline)
            processes = leftovers.await_end(marked)
            gpu_bytes = leftovers.await_memory(used_bytes, before)
            if processes or gpu_bytes:
                leaks.append(Leak(file, processes, gpu_bytes))
        except session.Interrupted as stopped:
            tests += stopped.tests
            unrun = session.INTERRUPTED
        except KeyboardInterrupt:  # its tests had all ended
            marked.kill()
            unrun = session.INTERRUPTED
    digest = tree_digest(root)
    return Receipt(started, digest, machine, required_gpus, tests, leaks)


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
