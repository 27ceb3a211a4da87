# SPDX-License-Identifier: Apache-2.0
"""How multiprocess executors and their workers end: in order, or alone and in time.

The executor, the busy loop and the teardown are vLLM's; what they call writes down
in one list what was done.
"""

import ctypes
import os
import signal
from collections import deque
from contextlib import suppress
from types import SimpleNamespace

import pytest

from tests import ranks
from tests.distributed.recording_transport import RecordingTransport, alone
from vllm.distributed import parallel_state
from vllm.distributed.graph_channels.ledger import Ledger
from vllm.v1.executor import lost_ranks, multiproc_executor, worker_teardown
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.executor.orderly_stop import RETURN_FROM_WORK, let_workers_return

COVERS = ("vllm/v1/executor/multiproc_executor.py",)

BACKEND = "VLLM_PCIE_ALLREDUCE_BACKEND"
STEPS = sorted(lost_ranks._STEPS)


class _NoMoreWork(BaseException):
    """Ends a busy loop that would wait for its next call."""


class _Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def events():
    """What was done, in order."""
    return []


@pytest.fixture
def ledger(events, monkeypatch):
    """The process's ledger, with one transport."""
    made = Ledger(deadline=5, closing_deadline=5)
    made.register(RecordingTransport("channels", events), alone())
    monkeypatch.setattr(parallel_state, "_LEDGER", made)
    return made


@pytest.fixture(autouse=True)
def process(events, monkeypatch):
    """The end of this process, and how soon it is to come, are events."""

    def end(status):
        events.append(f"ends with {status}")
        raise _Ended

    monkeypatch.setattr(os, "_exit", end)
    for module in (lost_ranks, worker_teardown):
        monkeypatch.setattr(
            module, "end_process_in", lambda s: events.append(f"ends in {s:.0f} s")
        )


def _lose_a_rank(ledger):
    (group,) = ledger._groups
    group._lost = "rank 0 did not vote in time"


# The busy loop ----------------------------------------------------------------


def _busy(events, *calls, fails=True, answers=None):
    """A worker of rank 1 with some calls to make, which a rank answers, or all do."""
    left = deque(calls)

    def dequeue(indefinite):
        if not left:
            raise _NoMoreWork
        return left.popleft(), (), {}, answers

    def work():
        if fails:
            raise RuntimeError("first error")

    worker = object.__new__(WorkerProc)
    worker.rank = 1
    worker.rpc_broadcast_mq = SimpleNamespace(dequeue=dequeue)
    worker.worker = SimpleNamespace(**dict.fromkeys((*STEPS, "list_loras"), work))
    worker.handle_output = lambda output: events.append(f"reports {output}")
    return worker


@pytest.mark.parametrize("step", STEPS)
def test_it_reports_and_then_ends(events, ledger, step):  # R-D2 # C18 # C40
    with pytest.raises(_NoMoreWork):
        _busy(events, step).worker_busy_loop()
    assert events == ["ends in 2 s", "reports first error"]


def test_it_ends_too_where_another_rank_answers(events, ledger):  # R-D2 # C40
    with pytest.raises(_NoMoreWork):
        _busy(events, "execute_model", answers=0).worker_busy_loop()
    assert events == ["ends in 2 s"]


def test_after_an_error_beside_the_steps_it_works_on(events, ledger):  # R-A5
    with pytest.raises(_NoMoreWork):
        _busy(events, "list_loras").worker_busy_loop()
    assert events == ["reports first error"]


def test_after_any_error_with_a_rank_lost_it_ends(events, ledger):  # R-D2
    _lose_a_rank(ledger)
    with pytest.raises(_NoMoreWork):
        _busy(events, "list_loras").worker_busy_loop()
    assert events == ["ends in 2 s", "reports first error"]


@pytest.mark.parametrize("without", [None, Ledger(deadline=5, closing_deadline=5)])
def test_without_a_transport_it_works_on(events, monkeypatch, without):  # R-A5
    monkeypatch.setattr(parallel_state, "_LEDGER", without)
    with pytest.raises(_NoMoreWork):
        _busy(events, "execute_model").worker_busy_loop()
    assert events == ["reports first error"]


def test_it_returns_when_it_is_asked_to(events):  # R-D4
    worker = _busy(events, "list_loras", RETURN_FROM_WORK, "list_loras", fails=False)
    worker.worker_busy_loop()
    assert events == ["reports None", "reports None"]  # the second is the answer


@pytest.mark.parametrize("seconds", [0, 0.3])
def test_a_process_that_is_stuck_in_native_code_ends(monkeypatch, seconds):
    # R-D2 # R-D4
    def body(rank, store):
        monkeypatch.undo()
        lost_ranks.end_process_in(seconds)
        # a call that keeps the interpreter's lock, so that no thread can run
        ctypes.PyDLL(None).sleep(30)

    (ended,) = ranks.run(1, body, deadline=20)
    assert ended.status == -signal.SIGALRM and not ended.late


# The teardown of a worker -----------------------------------------------------


@pytest.fixture
def main(events, monkeypatch):
    """Runs ``worker_main`` with a busy loop that ends in some way."""
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(
        multiproc_executor, "set_worker_net_device", lambda *given: None
    )
    monkeypatch.setattr(
        multiproc_executor, "maybe_init_worker_tracer", lambda **given: None
    )
    monkeypatch.setattr(
        worker_teardown, "destroy_leftover_graphs", lambda: events.append("leftovers")
    )
    for name in ("_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB", "_NODE_COUNT"):
        monkeypatch.setattr(parallel_state, name, None)
    for name, said in (("_TP", "groups"), ("_WORLD", "world")):
        group = SimpleNamespace(destroy=lambda said=said: events.append(said))
        monkeypatch.setattr(parallel_state, name, group)

    def run(busy_loop):
        queue = SimpleNamespace(
            shutdown=lambda: None, export_handle=str, wait_until_ready=lambda: None
        )

        def build(self, **given):
            self.rank = 0
            self.peer_response_handles = []
            self.rpc_broadcast_mq = self.worker_response_mq = queue
            self.worker = SimpleNamespace(shutdown=lambda: events.append("runner"))

        monkeypatch.setattr(WorkerProc, "__init__", build)
        monkeypatch.setattr(WorkerProc, "worker_busy_loop", lambda self: busy_loop())
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(
                assigned_physical_gpu_ids=None, numa_bind=False
            )
        )
        pipe = SimpleNamespace(send=lambda message: None, close=lambda: None)
        WorkerProc.worker_main(vllm_config=config, ready_pipe=pipe)

    return run


def test_a_worker_that_returned_tears_down_in_order(main, events, ledger):
    # R-D1 # R-D4 # C20
    main(lambda: None)
    assert events == [
        *("ends in 5 s", "leftovers", "runner", "channels close", "groups", "world")
    ]
    assert parallel_state._LEDGER is None


@pytest.mark.parametrize("error", [RuntimeError("cancelled"), SystemExit()])
def test_a_worker_that_was_interrupted_closes_nothing(main, events, ledger, error):
    # R-D1 # R-D4 # C23
    def fail():
        raise error

    with suppress(SystemExit):
        main(fail)
    assert events == ["ends in 5 s", "leftovers", "runner", "groups", "world"]
    assert ledger.inventory()  # ownership is kept


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_was_signalled_ends_in_time(
    main, events, ledger, monkeypatch, number
):  # R-D1 # R-D4 # C20
    handlers = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)

    def go_on():
        with suppress(SystemExit):  # as a step may that calls Python from native code
            handlers[number](number, None)
        events.append("goes on")

    main(go_on)
    assert events[:2] == ["ends in 5 s", "goes on"]


@pytest.mark.parametrize("returns", [True, False])
def test_a_worker_that_lost_a_rank_takes_no_step(main, events, ledger, returns):
    # R-D2 # R-D4
    _lose_a_rank(ledger)

    def end():
        if not returns:
            raise RuntimeError("cancelled")

    with pytest.raises(_Ended):
        main(end)
    assert events == ["ends with 1"]


def test_a_worker_that_loses_a_rank_in_the_close_destroys_no_group(
    main, events, ledger
):  # R-D2
    (member,) = ledger._members
    member.transport.close = lambda: _lose_a_rank(ledger)
    with pytest.raises(_Ended):
        main(lambda: None)
    assert events == ["ends in 5 s", "leftovers", "runner", "ends with 1"]


def test_a_worker_without_channels_tears_down_as_before(main, events, monkeypatch):
    # R-A5
    monkeypatch.setattr(parallel_state, "_LEDGER", None)
    main(lambda: None)
    assert events == ["runner", "groups", "world"]


# The executor ------------------------------------------------------------------


@pytest.fixture
def executor(events, monkeypatch):
    """One with idle workers."""
    monkeypatch.setenv(BACKEND, "host")
    made = object.__new__(MultiprocExecutor)
    made.is_failed, made.futures_queue = False, deque()
    made.collective_rpc = lambda method, timeout: events.append(f"asks {method}")
    pipe = SimpleNamespace(close=lambda: events.append("interrupts"))
    made.workers = [
        SimpleNamespace(death_writer=pipe, proc=None, worker_response_mq=None)
    ]
    made._ensure_worker_termination = lambda procs: None
    return made


def test_workers_return_before_they_are_interrupted(executor, events):  # R-D4
    executor.shutdown()
    executor.shutdown()
    assert events == [f"asks {RETURN_FROM_WORK}", "interrupts"]


def test_an_engine_that_stops_lets_its_workers_return(executor, events):  # R-D4
    # it raises SystemExit when it has nothing left to do
    with suppress(SystemExit):
        try:
            raise SystemExit
        finally:
            executor.shutdown()
    assert events == [f"asks {RETURN_FROM_WORK}", "interrupts"]


def test_workers_that_do_not_answer_are_interrupted(executor, events):  # R-D4
    def time_out(method, timeout):
        raise TimeoutError

    executor.collective_rpc = time_out
    executor.shutdown()
    assert events == ["interrupts"]


@pytest.mark.parametrize("why", ["off", "failed", "busy", "error", "unready"])
def test_workers_are_not_asked_when_all_is_not_well(
    executor, events, monkeypatch, why
):  # R-A5 # R-D4
    match why:
        case "off":
            monkeypatch.setenv(BACKEND, "cpp")
        case "failed":
            executor.is_failed = True
        case "busy":
            executor.futures_queue.append("a step")
        case "unready":
            del executor.futures_queue
    try:
        if why == "error":
            raise RuntimeError("first error")
        let_workers_return(executor)
    except RuntimeError:
        let_workers_return(executor)
    assert events == []


def test_the_message_is_no_method_of_a_worker():
    from vllm.v1.worker.gpu_worker import Worker

    assert not hasattr(Worker, RETURN_FROM_WORK)
