# SPDX-License-Identifier: Apache-2.0
"""Calls with a deadline: what they return, raise, and leave behind."""

import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback

import pytest

from vllm.distributed.graph_channels import deadline
from vllm.distributed.graph_channels.deadline import DeadlineMissed, run_with_deadline


def test_it_gives_what_the_function_returns():  # R-D2
    assert run_with_deadline(lambda: 42, 10, "a call") == 42


def test_an_error_arrives_with_its_traceback():  # R-D2
    def broken_call():
        raise KeyError("reason")

    with pytest.raises(KeyError, match="reason") as caught:
        run_with_deadline(broken_call, 10, "a call")
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert "broken_call" in [frame.name for frame in frames]


@pytest.mark.parametrize("error", [TimeoutError, SystemExit, KeyboardInterrupt])
def test_no_error_of_the_function_is_taken_for_a_missed_deadline(error):  # R-D2
    def call():
        raise error("its own")

    with pytest.raises(error, match="its own") as caught:
        run_with_deadline(call, 10, "a call")
    assert type(caught.value) is error


def test_a_call_that_blocks_is_left_behind_on_a_daemon_thread():  # R-D2
    release = threading.Event()
    start = time.monotonic()
    with pytest.raises(DeadlineMissed) as missed:
        run_with_deadline(release.wait, 0.1, "the close of tp:0")
    assert 0.1 <= time.monotonic() - start < 5
    assert str(missed.value) == "the close of tp:0 did not end within 0.1 s"
    assert (missed.value.what, missed.value.seconds) == ("the close of tp:0", 0.1)
    assert isinstance(missed.value, TimeoutError)
    assert str(pickle.loads(pickle.dumps(missed.value))) == str(missed.value)

    (left,) = (t for t in threading.enumerate() if t.name == "the close of tp:0")
    assert left.daemon
    release.set()
    left.join(10)
    assert not left.is_alive()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_the_caller_leaves_at_once(error):
    def interrupt(*_):
        raise error

    release = threading.Event()
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    start = time.monotonic()
    try:
        with pytest.raises(error):
            run_with_deadline(release.wait, 60, "a call")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        release.set()
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e300])
def test_a_deadline_is_positive_and_finite(seconds):
    with pytest.raises(ValueError, match="seconds"):
        run_with_deadline(lambda: pytest.fail("ran"), seconds, "a call")


def test_a_call_left_behind_does_not_keep_the_process():  # R-D2
    code = """
import runpy, sys, time
module = runpy.run_path(sys.argv[1])
try:
    module["run_with_deadline"](lambda: time.sleep(600), 0.1, "a call")
except module["DeadlineMissed"]:
    print("missed")
"""
    command = [sys.executable, "-c", code, deadline.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "missed"), done.stderr
