# SPDX-License-Identifier: Apache-2.0
"""A worker whose peers are lost ends when it has reported its error."""

import os
from types import SimpleNamespace

import pytest

from vllm.distributed import parallel_state
from vllm.distributed.graph_channels.ledger import Ledger
from vllm.v1.executor.multiproc_executor import WorkerProc

COVERS = ("vllm/v1/executor/multiproc_executor.py",)


class _NoMoreWork(BaseException):
    """Ends a busy loop that would wait for its next call."""


class _Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def busy(monkeypatch):
    """A worker with one call to make, which fails; what happens is in ``events``."""

    def fail():
        raise RuntimeError("first error")

    def end(status):
        events.append(f"ends with {status}")
        raise _Ended

    calls = [("determine_available_memory", (), {}, None)]

    def dequeue(indefinite):
        if not calls:
            raise _NoMoreWork
        return calls.pop()

    worker = object.__new__(WorkerProc)
    worker.rank = 1
    worker.rpc_broadcast_mq = SimpleNamespace(dequeue=dequeue)
    worker.worker = SimpleNamespace(determine_available_memory=fail)
    events = worker.events = []
    worker.handle_output = lambda error: events.append(f"reports {error}")
    monkeypatch.setattr(os, "_exit", end)
    return worker


def test_it_reports_first_and_then_ends(busy, monkeypatch):  # R-D2 # C18
    ledger = Ledger(deadline=5, closing_deadline=5)
    ledger.abandon("rank 0 did not vote in time")
    monkeypatch.setattr(parallel_state, "_LEDGER", ledger)
    with pytest.raises(_Ended):
        busy.worker_busy_loop()
    assert busy.events == ["reports first error", "ends with 1"]


@pytest.mark.parametrize("ledger", [None, Ledger(deadline=5, closing_deadline=5)])
def test_after_any_other_error_it_works_on(busy, monkeypatch, ledger):  # R-A5
    monkeypatch.setattr(parallel_state, "_LEDGER", ledger)
    with pytest.raises(_NoMoreWork):
        busy.worker_busy_loop()
    assert busy.events == ["reports first error"]
