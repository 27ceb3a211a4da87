# SPDX-License-Identifier: Apache-2.0
"""What becomes of the ranks when one of them fails: the table, as data.

``python -m tests.distributed.faults`` prints it as docs/faults.md;
test_fault_matrix.py makes every fault happen and holds the table against it.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from signal import SIGINT, SIGTERM
from typing import NamedTuple


class Step(Enum):
    """What a worker does with its channels, in this order."""

    CHECKPOINT = "checkpoint"
    PREPARE = "prepare"
    ENTRY = "scope entry"
    WARM_UP = "warm-up"
    CAPTURE = "capture"
    EXIT = "scope exit"
    ROLLBACK = "rollback"
    REPLAY = "replay"
    CLOSE = "close"


class Fault(Enum):
    """What happens to a rank."""

    EXCEPTION = "exception"
    KEYBOARD_INTERRUPT = "KeyboardInterrupt"
    SYSTEM_EXIT = "SystemExit"
    SIGTERM = "SIGTERM"
    SIGKILL = "SIGKILL"
    STALL = "stall"


class How(Enum):
    """What a rank meets with first."""

    NOTHING = "no error"
    RAISES = "raises it"
    DIES = "dies of it"
    WAITS = "waits for it in vain"
    ABANDONED = "vote abandoned"
    REFUSED = "is refused"
    MISSED = "misses the deadline"
    KEPT = "says what it keeps"


class Then(Enum):
    """What becomes of its channels."""

    GOES_ON = "goes on"
    ROLLS_BACK = "rolls back, ends"
    CLOSES = "closes"
    KEEPS = "keeps them, ends"
    GONE = "gone"


class Ending(NamedTuple):
    """How a rank ends."""

    how: How
    then: Then

    def __str__(self) -> str:
        return f"{self.how.value}; {self.then.value}"


class Row(NamedTuple):
    """How the rank with the fault ends, and how the others do."""

    it: Ending
    others: Ending


_EXCEPTION = (Fault.EXCEPTION,)
_INTERRUPT = (Fault.KEYBOARD_INTERRUPT, Fault.SYSTEM_EXIT)
_KILL = (Fault.SIGTERM, Fault.SIGKILL)
_STALL = (Fault.STALL,)


def _row(it: How, it_then: Then, others: How, others_then: Then) -> Row:
    return Row(Ending(it, it_then), Ending(others, others_then))


# Each rank does its part of the step alone, and all say in a vote how it went.
_ALONE = {
    _EXCEPTION: _row(How.RAISES, Then.CLOSES, How.REFUSED, Then.CLOSES),
    _INTERRUPT: _row(How.RAISES, Then.KEEPS, How.ABANDONED, Then.KEEPS),
    _KILL: _row(How.DIES, Then.GONE, How.ABANDONED, Then.KEEPS),
    _STALL: _row(How.MISSED, Then.KEEPS, How.ABANDONED, Then.KEEPS),
}
# All come to the vote on the rollback, unless one is dead or late.
_RECORDING = {
    _EXCEPTION: _row(How.RAISES, Then.GOES_ON, How.NOTHING, Then.GOES_ON),
    _INTERRUPT: _row(How.RAISES, Then.ROLLS_BACK, How.ABANDONED, Then.ROLLS_BACK),
    _KILL: _row(How.DIES, Then.GONE, How.ABANDONED, Then.KEEPS),
    _STALL: _row(How.ABANDONED, Then.KEEPS, How.ABANDONED, Then.KEEPS),
}

_TABLE = {
    Step.CHECKPOINT: {
        _EXCEPTION: _row(How.RAISES, Then.KEEPS, How.ABANDONED, Then.KEEPS),
        _INTERRUPT: _row(How.RAISES, Then.KEEPS, How.ABANDONED, Then.KEEPS),
        _KILL: _row(How.DIES, Then.GONE, How.ABANDONED, Then.KEEPS),
        _STALL: _row(How.ABANDONED, Then.KEEPS, How.ABANDONED, Then.KEEPS),
    },
    # The ranks exchange what they allocate, so the others wait in that.
    Step.PREPARE: {
        _EXCEPTION: _row(How.RAISES, Then.CLOSES, How.WAITS, Then.CLOSES),
        _INTERRUPT: _row(How.RAISES, Then.KEEPS, How.WAITS, Then.KEEPS),
        _KILL: _row(How.DIES, Then.GONE, How.WAITS, Then.KEEPS),
        _STALL: _row(How.MISSED, Then.KEEPS, How.WAITS, Then.KEEPS),
    },
    Step.ENTRY: _ALONE,
    Step.WARM_UP: {
        _EXCEPTION: _row(How.RAISES, Then.GOES_ON, How.WAITS, Then.GOES_ON),
        _INTERRUPT: _row(How.RAISES, Then.ROLLS_BACK, How.WAITS, Then.ROLLS_BACK),
        _KILL: _row(How.DIES, Then.GONE, How.WAITS, Then.KEEPS),
        _STALL: _row(How.ABANDONED, Then.KEEPS, How.WAITS, Then.KEEPS),
    },
    Step.CAPTURE: _RECORDING,
    Step.EXIT: _RECORDING,
    Step.ROLLBACK: _ALONE,
    Step.REPLAY: {
        _EXCEPTION: _row(How.RAISES, Then.KEEPS, How.WAITS, Then.KEEPS),
        _INTERRUPT: _row(How.RAISES, Then.KEEPS, How.WAITS, Then.KEEPS),
        _KILL: _row(How.DIES, Then.GONE, How.WAITS, Then.KEEPS),
        _STALL: _row(How.WAITS, Then.KEEPS, How.WAITS, Then.KEEPS),
    },
    Step.CLOSE: {
        _EXCEPTION: _row(How.KEPT, Then.CLOSES, How.KEPT, Then.CLOSES),
        _INTERRUPT: _row(How.RAISES, Then.KEEPS, How.KEPT, Then.KEEPS),
        _KILL: _row(How.DIES, Then.GONE, How.KEPT, Then.KEEPS),
        _STALL: _row(How.KEPT, Then.KEEPS, How.KEPT, Then.KEEPS),
    },
}


def expected(step: Step, fault: Fault) -> Row:
    """How the ranks end, whichever of them has the fault, and however many."""
    (row,) = (row for faults, row in _TABLE[step].items() if fault in faults)
    return row


class Blow(Enum):
    """What happens to a served engine, or to one of its processes."""

    STOP = "SIGTERM, `--shutdown-timeout 12`"
    TERM = "SIGTERM"
    INTERRUPT = "Ctrl-C"
    WORKER = "SIGKILL of a worker"
    ENGINE = "SIGKILL of the engine core"
    RAISES = "exception on one rank"


class During(Enum):
    """What the engine does meanwhile."""

    IDLE = "idle"
    REQUEST = "request"
    PROFILING = "profiling"
    CAPTURE = "capture"


class ServedEnd(NamedTuple):
    """How a served engine ends.

    Attributes:
        first: What its log says first.
        status: The server's exit status.
    """

    first: str
    status: int


_TRIGGERED = "[shutdown] API server: shutdown triggered"
_TERMINATED = "[shutdown] API server: SIGTERM before it was ready"
_INTERRUPTED = "[shutdown] API server: SIGINT before it was ready"
# What follows is the exit code, which its executor may not know yet.
_WORKER_DIED = "Worker proc VllmWorker-1 died unexpectedly"
_ENGINE_DIED = "engine core exited unexpectedly"
FIRST_ERROR = "first error, of rank 1"

SERVED = {
    (Blow.STOP, During.IDLE): ServedEnd(_TRIGGERED, 0),
    (Blow.TERM, During.IDLE): ServedEnd(_TRIGGERED, 0),
    (Blow.TERM, During.REQUEST): ServedEnd(_TRIGGERED, 0),
    (Blow.TERM, During.PROFILING): ServedEnd(_TERMINATED, 128 + SIGTERM),
    (Blow.TERM, During.CAPTURE): ServedEnd(_TERMINATED, 128 + SIGTERM),
    (Blow.INTERRUPT, During.IDLE): ServedEnd(_TRIGGERED, 0),
    (Blow.INTERRUPT, During.REQUEST): ServedEnd(_TRIGGERED, 0),
    (Blow.INTERRUPT, During.PROFILING): ServedEnd(_INTERRUPTED, 128 + SIGINT),
    (Blow.INTERRUPT, During.CAPTURE): ServedEnd(_INTERRUPTED, 128 + SIGINT),
    (Blow.WORKER, During.IDLE): ServedEnd(_WORKER_DIED, 0),
    (Blow.WORKER, During.REQUEST): ServedEnd(_WORKER_DIED, 0),
    (Blow.WORKER, During.PROFILING): ServedEnd(_WORKER_DIED, 1),
    (Blow.WORKER, During.CAPTURE): ServedEnd(_WORKER_DIED, 1),
    (Blow.ENGINE, During.IDLE): ServedEnd(_ENGINE_DIED, 0),
    (Blow.ENGINE, During.REQUEST): ServedEnd(_ENGINE_DIED, 0),
    (Blow.RAISES, During.REQUEST): ServedEnd(FIRST_ERROR, 0),
    (Blow.RAISES, During.PROFILING): ServedEnd(FIRST_ERROR, 1),
    (Blow.RAISES, During.CAPTURE): ServedEnd(FIRST_ERROR, 1),
}

_SERVED_INTRODUCTION = """
## When a served engine ends

`vllm serve` on two ranks. Every row leaves no process after 15 s, no file in
/dev/shm, no error of a finalizer and none of a group that has gone. The host
transport's rows are made to happen by `tests/v1/executor/test_served_engine.py`: two
always, all with `EVERY_END=1`; b12x's by `test_served_engine_on_gpus.py` beside it. The
exit status is vLLM's own, but for a signal before the server is ready, which counts as
in a shell.

The rows with profiling and capture, but for those of an exception, come upon ranks that
have been in that step for a moment, and would be for longer than the 15 s.

A worker closes its channels with the others only if it returned from its loop,
which the executor asks idle workers for. By default the API server grants no time
for that: it kills all processes right after SIGTERM, and channels go with them.
After anything else a worker begins nothing collective and ends within
VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS of being told, or of the death of the engine
core. A rank that fails in a step that its peers may be waiting in ends two seconds
later, and the executor ends the others.

vLLM's HTTP server waits for clients that wait for an answer: the rows with a
request are of clients that give up after five seconds.
"""

_INTRODUCTION = """\
# When a rank fails

<!-- Written by `python -m tests.distributed.faults > docs/faults.md`. -->

Every row is made to happen, on the first and on the last of two ranks, and SIGKILL
and the stall on those of four too, by `tests/distributed/test_fault_matrix.py`.
Ranks profile, roll back, capture for production, replay and close over the host
transport. The fault comes right before a rank does its part of a step. No rank
hangs: each ends within its deadlines, and its error names the rank with the fault.

KeyboardInterrupt is what SIGINT raises, and SystemExit what a worker's handler of
SIGTERM raises, as vLLM's does; the rows with SIGTERM are those of a rank that has no
such handler. A stall outlasts every deadline. A rank that ends after an error
abandons its ledger first, and closes nothing.

An operation gives up before a vote does, here. Where it does not, a rank that waits
in an operation of the warm-up misses the vote on the rollback; then nothing is rolled
back, and the ranks end.
"""

_MEANING = {
    How.NOTHING: "the step went well here",
    How.RAISES: "the fault is the error that leaves; a rollback that fails is its note",
    How.DIES: "at once; the memory goes with the process",
    How.WAITS: "an operation gives up at its deadline, and names the rank",
    How.ABANDONED: "a rank did not come to a vote in time; what it was on is not begun",
    How.REFUSED: "all ranks came, and one could not",
    How.MISSED: "its own part did not end; a daemon thread stays in it",
    How.KEPT: "a close raises nothing; one line of the log says why",
    Then.GOES_ON: "after a rollback all ranks capture, replay and reduce, with exact "
    "sums, and close; no segment and no thread is left",
    Then.ROLLS_BACK: "the throwaway channels are freed, and the next step ends it",
    Then.CLOSES: "nothing but a close is begun, and that frees everything",
    Then.KEEPS: "nothing collective is begun any more; the process takes the memory",
}


def _endings() -> Iterator[Sequence[str]]:
    yield "step", "fault", "the rank itself", "the others"
    for step, rows in _TABLE.items():
        for faults, (it, others) in rows.items():
            happens = ", ".join(fault.value for fault in faults)
            yield step.value, happens, str(it), str(others)


def _served() -> Iterator[Sequence[str]]:
    yield "what happens", "while", "the log says first", "exit status"
    for (blow, during), (first, status) in SERVED.items():
        yield blow.value, during.value, first, str(status)


def _words() -> Iterator[Sequence[str]]:
    yield "words", "meaning"
    for word, meaning in _MEANING.items():
        yield word.value, meaning


def _table(rows: Iterable[Sequence[str]]) -> str:
    first, *others = (f"| {' | '.join(row)} |\n" for row in rows)
    return f"\n{first}{'|---' * (first.count('|') - 1)}|\n{''.join(others)}"


def document() -> str:
    """docs/faults.md."""
    ranks = _INTRODUCTION + _table(_endings()) + _table(_words())
    return ranks + _SERVED_INTRODUCTION + _table(_served())


if __name__ == "__main__":
    print(document(), end="")
