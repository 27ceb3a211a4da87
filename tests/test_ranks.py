# SPDX-License-Identifier: Apache-2.0
"""What became of ranks is told so that the cause comes first."""

import importlib
import os
import sys
import time

import pytest

from tests import ranks

DEADLINE = 60


def test_a_failure_is_told_before_who_waited_for_it(monkeypatch):
    monkeypatch.setattr(ranks, "_PATIENCE_SECONDS", 0.5)

    def body(rank, store):
        if rank == 1:
            raise ValueError("the cause")
        time.sleep(DEADLINE)

    begun = time.monotonic()
    with pytest.raises(ValueError, match="the cause"):
        ranks.values(2, body, DEADLINE)
    assert time.monotonic() - begun < DEADLINE / 2


def test_a_rank_that_ended_is_told_before_who_waited_for_it(monkeypatch):
    monkeypatch.setattr(ranks, "_PATIENCE_SECONDS", 0.5)

    def body(rank, store):
        if rank == 1:
            os._exit(7)
        time.sleep(DEADLINE)

    with pytest.raises(AssertionError, match="rank 1 ended with 7"):
        ranks.values(2, body, DEADLINE)


def test_who_does_not_fail_has_until_the_deadline():
    def body(rank, store):
        time.sleep(rank)
        return rank

    assert ranks.values(2, body, DEADLINE) == [0, 1]
    with pytest.raises(AssertionError, match="rank 1 still ran after 0.5 s"):
        ranks.values(2, body, 0.5)


def test_a_rank_that_ends_without_returning_is_no_value():
    def body(rank, store):
        if rank == 1:
            os._exit(0)

    with pytest.raises(AssertionError, match="rank 1 ended without returning"):
        ranks.values(2, body, DEADLINE)
    returned, ended = ranks.run(2, body, DEADLINE)
    assert (returned.returned, ended.returned) == (True, False)
    assert returned.value is ended.value is None


def _imported(module):
    return os.environ.get("SET_BEFORE"), module in sys.modules


def _killed():
    os._exit(3)


def _failing(cause):
    raise ValueError(cause)


def test_a_fresh_process_has_the_environment_and_not_the_imports():
    def body(rank, store):
        os.environ["SET_BEFORE"] = str(rank)
        return ranks.in_fresh_process(_imported, "vllm.distributed.parallel_state")

    before = set(os.listdir("/dev/shm"))
    importlib.import_module("vllm.distributed.parallel_state")
    assert ranks.values(2, body, DEADLINE) == [("0", False), ("1", False)]
    left = set(os.listdir("/dev/shm")) - before
    assert not {name for name in left if name.startswith("sem.")}


def test_what_a_fresh_process_raises_is_raised():
    with pytest.raises(ValueError, match="the cause"):
        ranks.values(1, lambda *_: ranks.in_fresh_process(_failing, "the cause"), 60)


def test_a_fresh_process_that_ends_is_told():
    with pytest.raises(RuntimeError, match="_killed did not return: .* with 3"):
        ranks.values(1, lambda *_: ranks.in_fresh_process(_killed), DEADLINE)
