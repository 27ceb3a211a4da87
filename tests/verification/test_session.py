# SPDX-License-Identifier: Apache-2.0
"""What a run of test files makes of tests that pass, fail, hang, crash and leak."""

import os
import re
import signal
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from verification import __main__ as command
from verification import leftovers, receipt, session
from verification.leftovers import Marked, await_memory
from verification.receipt import Machine, Outcome
from verification.run import run, summary


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a test file, and stands where it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(leftovers, "_GRACE_SECONDS", 0.5)

    def write(body):
        Path("test_toy.py").write_text(textwrap.dedent(body))
        return "test_toy.py"

    return write


def run_file(file, deadline, marked=None):
    return session.run_file(file, marked or Marked(), deadline, threading.Event())


def outcomes(tests):
    return {test.id.partition("::")[2]: test.outcome for test in tests}


def test_each_test_ends_in_its_own_way(written):
    file = written("""
        import pytest
        def test_good(): pass
        @pytest.mark.parametrize("n", [2, 4])
        def test_some(n): assert n == 2, "only two"
        @pytest.mark.skip(reason="no such card")
        def test_skipped(): assert False
        @pytest.fixture
        def broken(): raise RuntimeError("no set-up")
        def test_without(broken): pass
    """)
    tests = run_file(file, 20)
    assert outcomes(tests) == {
        "test_good": Outcome.PASSED,
        "test_some[2]": Outcome.PASSED,
        "test_some[4]": Outcome.FAILED,
        "test_skipped": Outcome.SKIPPED,
        "test_without": Outcome.FAILED,
    }
    said = {test.id.partition("::")[2]: test.reason for test in tests}
    assert "only two" in said["test_some[4]"]
    assert said["test_skipped"] == "no such card"
    assert "no set-up" in said["test_without"]


def test_a_hanging_test_is_named_and_the_rest_still_runs(written):
    file = written("""
        import signal, time
        def test_before(): pass
        def test_deaf():
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
            time.sleep(1000)
        def test_after(): pass
    """)
    marked, began = Marked(), time.monotonic()
    tests = run_file(file, 8, marked)  # a busy machine starts slowly
    assert outcomes(tests) == {
        "test_before": Outcome.PASSED,
        "test_deaf": Outcome.HUNG,
        "test_after": Outcome.PASSED,
    }
    assert time.monotonic() - began < 60
    assert marked.alive() == []


def test_a_crash_is_a_failure_and_names_what_was_not_run(written):
    file = written("""
        import os
        def test_before(): pass
        def test_crash(): os._exit(3)
        def test_after(): pass
    """)
    tests = run_file(file, 20)
    assert outcomes(tests) == {
        "test_before": Outcome.PASSED,
        "test_crash": Outcome.NOT_RUN,
        "test_after": Outcome.NOT_RUN,
    }
    assert all("ended early" in test.reason for test in tests[1:])


@pytest.mark.parametrize("body", ["import nowhere_to_be_found", "x = 1"])
def test_a_file_without_tests_has_failed(written, body):
    (failed,) = run_file(written(body), 20)
    assert failed.id == "test_toy.py" and failed.outcome is Outcome.FAILED
    assert failed.reason


def test_what_a_test_leaves_is_found_killed_and_named(written):
    file = written(f"""
        import subprocess
        def test_leaks():
            subprocess.Popen(
                [{sys.executable!r}, "-c", "import time; time.sleep(999)"],
                start_new_session=True, stdout=subprocess.DEVNULL,
            )
    """)
    used = iter([[100, 7], *[[100 + (129 << 20), 7]] * 10_000])
    made = run(Path(), [file], Machine([], {}), lambda: next(used), deadline=20)
    (leak,) = made.leaks
    assert leak.file == file and len(leak.processes) == 1
    assert "time.sleep(999)" in leak.processes[0]
    assert leak.gpu_bytes == [129 << 20, 0]
    assert not made.green
    said = summary(made)
    assert "time.sleep(999)" in said and f"{129 << 20} bytes on GPU 0" in said
    assert "time.sleep(999)" not in " ".join(
        Path(f"/proc/{name}/cmdline").read_text()
        for name in os.listdir("/proc")
        if name.isdigit() and Path(f"/proc/{name}/cmdline").exists()
    )


def test_files_run_at_once_and_share_what_is_lost(written):
    # each waits for the other's sign
    for name, other in ("one", "two"), ("two", "one"):
        Path(f"test_{name}.py").write_text(
            textwrap.dedent(f"""
                import pathlib, time
                def test_{name}():
                    pathlib.Path("{name}").touch()
                    end = time.monotonic() + 60
                    while not pathlib.Path("{other}").exists():
                        assert time.monotonic() < end
                        time.sleep(0.1)
            """)
        )
    files = ["test_one.py", "test_two.py", written("def test_alone(): pass")]
    used = iter([[0], *[[129 << 20]] * 10_000])
    made = run(
        Path(), files, Machine([], {}), lambda: next(used), deadline=90, at_once=2
    )
    assert outcomes(made.tests) == {
        "test_one": Outcome.PASSED,
        "test_two": Outcome.PASSED,
        "test_alone": Outcome.PASSED,
    }
    assert [(leak.file, leak.gpu_bytes) for leak in made.leaks] == [
        (file, [129 << 20]) for file in files[:2]
    ]


def test_memory_that_comes_back_late_is_none_that_is_lost():
    used = iter([[130 << 20], [130 << 20], [1 << 20], [1 << 20]])
    assert await_memory(lambda: next(used), [0], 5) == []


def test_too_few_gpus_fail_without_running_anything(written):
    file = written("def test_never(): open('it ran', 'w')")
    made = run(Path(), [file], Machine([], {}), lambda: [], required_gpus=2)
    (test,) = made.tests
    assert test.outcome is Outcome.NOT_RUN and not made.green
    assert test.reason == "2 GPUs are required, 0 found"
    assert not Path("it ran").exists()


def test_a_run_that_is_stopped_leaves_no_process_and_a_receipt(written, monkeypatch):
    file = written(f"""
        import os, signal, time
        def test_before(): pass
        def test_during():
            for _ in range(2):  # an impatient user
                os.kill({os.getpid()}, signal.SIGTERM)
                time.sleep(0.05)
            time.sleep(999)
        def test_after(): pass
    """)
    Path("test_next.py").write_text("def test_never(): pass")
    beside = """
        import time
        def test_beside(): time.sleep(999)
    """
    Path("test_beside.py").write_text(textwrap.dedent(beside))
    names = (file, "test_beside.py", "test_next.py")
    files = [str(Path(name).absolute()) for name in names]

    @contextmanager
    def opened():
        yield SimpleNamespace(used_bytes=lambda: [0])

    marked = Marked()
    monkeypatch.setattr(leftovers, "Marked", lambda: marked)
    monkeypatch.setattr(command, "opened", opened)
    monkeypatch.setattr(command, "described", lambda gpus: Machine([], {}))
    out, before = Path().absolute() / "out", signal.getsignal(signal.SIGTERM)
    try:
        assert command.main(["run", *files, "--at-once=2", "--out", str(out)]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    found = receipt.read(out / "receipt.json")
    assert [(test.outcome, test.reason) for test in found.tests] == [
        (Outcome.PASSED, ""),
        *[(Outcome.NOT_RUN, session.INTERRUPTED)] * 4,
    ]
    assert found.tests[-1].id == files[-1]
    assert marked.alive() == [] and found.leaks == []


def test_a_run_that_is_stopped_between_files_leaves_a_receipt(written):
    file = written("def test_good(): pass")

    def used():
        yield [0]
        raise KeyboardInterrupt

    asked = used()
    made = run(Path(), [file, "test_next.py"], Machine([], {}), lambda: next(asked))
    assert [(test.outcome, test.reason) for test in made.tests] == [
        (Outcome.PASSED, ""),
        (Outcome.NOT_RUN, session.INTERRUPTED),
    ]
    assert not made.green


def test_cuda_counts_gpus_as_the_receipt_does(written):
    file = written("""
        import os
        def test_order(): assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    """)
    tests = run_file(file, 20)
    assert outcomes(tests) == {"test_order": Outcome.PASSED}


def test_the_gpu_tests_are_found():
    root = Path(__file__).parents[2]
    found = session.test_files(root)
    assert "tests/distributed/test_b12x_fused_all_reduce.py" in found
    assert "tests/v1/distributed/test_b12x_engines.py" in found
    assert "tests/distributed/test_host_graphs.py" not in found


def test_a_file_with_tests_for_gpus_has_no_other_tests():
    root = Path(__file__).parents[2]
    # they would run there too, on a vLLM that is not the CPU's
    for file in session.test_files(root):
        text = Path(root, file).read_text()
        assert re.search(r"^pytestmark = \[?\s*gpus\.needs_gpu", text, re.M), file
