# SPDX-License-Identifier: Apache-2.0
"""What one run of the GPU tests found out, as a JSON file that can be handed in.

``receipt.schema.json`` is its form; whatever is read or written is held against it.
"""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import jsonschema

VERSION = 1
_SCHEMA = json.loads(Path(__file__).with_name("receipt.schema.json").read_text())


class Outcome(StrEnum):
    """How a test ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    HUNG = "hung"  # and was ended at its deadline
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Test:
    """One test.

    Attributes:
        id: As pytest names it: file, function, parameters.
        outcome: How it ended.
        seconds: Set-up, call and teardown together.
        reason: Of everything but a pass: the last line of the error, why it was
            skipped, or why it was not run.
    """

    __test__ = False  # not one that pytest should collect

    id: str
    outcome: Outcome
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Leak:
    """What was still there after a file's tests.

    Attributes:
        file: The test file.
        processes: Command lines of processes that it had started; they were killed.
        gpu_bytes: Memory that was taken on each GPU beyond what had been before.
    """

    file: str
    processes: list[str]
    gpu_bytes: list[int]


@dataclass(frozen=True)
class Gpu:
    """One GPU: its name, bytes of memory, and compute capability as "12.0"."""

    name: str
    memory_bytes: int
    capability: str


@dataclass(frozen=True)
class Machine:
    """Where the tests ran.

    Attributes:
        gpus: Those that ranks were put on.
        versions: By the name of what they are of.
        mps: Whether processes shared a GPU through NVIDIA's Multi-Process Service,
            so that kernels of several ranks ran at once; they take turns otherwise.
    """

    gpus: list[Gpu]
    versions: dict[str, str]
    mps: bool = False


@dataclass(frozen=True)
class Receipt:
    """A whole run.

    Attributes:
        started: UTC, as ISO 8601 with seconds.
        tree: sha256 over the sources that were tested.
        machine: Where.
        required_gpus: How many the caller demanded; 0 for whatever is there.
        tests: Each test of each file that was asked for, run or not.
        leaks: What files left behind.
    """

    started: str
    tree: str
    machine: Machine
    required_gpus: int
    tests: list[Test]
    leaks: list[Leak]

    @property
    def green(self) -> bool:
        """Whether something passed, nothing failed or hung, and nothing was left."""
        outcomes = {test.outcome for test in self.tests}
        bad = {Outcome.FAILED, Outcome.HUNG, Outcome.NOT_RUN}
        return Outcome.PASSED in outcomes and not outcomes & bad and not self.leaks


class BadReceipt(ValueError):
    """A file that is no receipt; the message says where and why."""


def write(receipt: Receipt, path: Path) -> None:
    """Write a receipt as JSON."""
    text = json.dumps({"version": VERSION} | asdict(receipt), indent=1)
    parse(text, path)  # what is handed in can be read again
    path.write_text(text + "\n")


def read(path: Path) -> Receipt:
    """Read a receipt.

    Raises:
        BadReceipt: It is no JSON, of another version, or not of the schema's form.
        OSError: It cannot be read.
    """
    return parse(path.read_text(), path)


def parse(text: str, source: Path) -> Receipt:
    """``read`` of a text; ``source`` is for the words of an error."""
    try:
        found = json.loads(text)
        jsonschema.validate(found, _SCHEMA)
    except ValueError as error:
        raise BadReceipt(f"{source} is no JSON: {error}") from error
    except jsonschema.ValidationError as error:
        raise BadReceipt(f"{source}: {error.json_path}: {error.message}") from error
    return _receipt(found)


def _receipt(found: dict[str, Any]) -> Receipt:
    machine = found["machine"]
    return Receipt(
        found["started"],
        found["tree"],
        Machine(
            [Gpu(**gpu) for gpu in machine["gpus"]],
            machine["versions"],
            machine["mps"],
        ),
        found["required_gpus"],
        [
            Test(**test | {"outcome": Outcome(test["outcome"])})
            for test in found["tests"]
        ],
        [Leak(**leak) for leak in found["leaks"]],
    )
