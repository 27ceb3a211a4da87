# SPDX-License-Identifier: Apache-2.0
"""What becomes of the ranks when one of them fails: the table, as data.

``python -m tests.distributed.faults`` prints it as docs/faults.md;
test_fault_matrix.py makes every fault happen and holds the table against it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
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


class Then(Enum):
    """What becomes of its channels."""

    GOES_ON = "goes on"
    GIVES_BACK = "rolls back, then ends"
    CLOSES = "closes"
    KEEPS = "keeps them to its end"
    GONE = "they are gone"


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
