# SPDX-License-Identifier: Apache-2.0
"""Calls that may block for good, with a deadline on the host."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import TIMEOUT_MAX, Thread
from typing import TypeVar

Result = TypeVar("Result")


class DeadlineMissed(TimeoutError):
    """A call has not returned in time; it may still be running."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(what, seconds)
        self.what, self.seconds = what, seconds

    def __str__(self) -> str:
        return f"{self.what} did not end within {self.seconds:.3g} s"


def demand_seconds(seconds: float) -> None:
    """Raise a ValueError unless a deadline can be so many seconds away."""
    if not 0 < seconds <= TIMEOUT_MAX:  # which a NaN fails as well
        raise ValueError(f"a deadline is a number of seconds above 0, not {seconds!r}")


def run_with_deadline(
    function: Callable[[], Result],
    seconds: float,
    what: str,
) -> Result:
    """Call a function on a thread of its own, and wait for it only so long.

    A call into NCCL or a socket cannot be cancelled. One that misses its deadline
    stays behind on a daemon thread; what it returns or raises later is dropped.
    A native call that returns while the interpreter shuts down aborts the process:
    whoever left one behind had better end with ``os._exit``.

    Args:
        function: What to call.
        seconds: How long to wait.
        what: Names the call, in the error and the thread's name.

    Raises:
        DeadlineMissed: The function has not returned in time.
        ValueError: The deadline is not a positive, finite number of seconds.
        BaseException: Whatever it raised, with its traceback. An interrupt of the
            waiting thread leaves at once, and the call behind.
    """
    demand_seconds(seconds)
    call: Future[Result] = Future()

    def work() -> None:
        try:
            call.set_result(function())
        except BaseException as error:
            call.set_exception(error)

    Thread(target=work, name=what, daemon=True).start()
    wait((call,), seconds)
    if not call.done():
        raise DeadlineMissed(what, seconds)
    return call.result()
