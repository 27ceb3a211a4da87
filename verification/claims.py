# SPDX-License-Identifier: Apache-2.0
"""What the README says of GPUs, and which machines have shown it: docs/verified.md.

A claim is shown by tests. A receipt shows it if the tests of the claim are in it and
passed, every one, and their files left nothing behind; what was skipped or not run
shows nothing. One in which a test failed shows that it does not hold, until a newer one
shows that it does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from verification.receipt import Gpu, Machine, Outcome, Receipt

_ALL_REDUCE = "tests/distributed/test_b12x_fused_all_reduce.py::*"
_DCP = "tests/distributed/test_b12x_dcp_a2a.py::*"
_ENGINES = "tests/v1/distributed/test_b12x_engines.py::*"
_MEASURED = "tests/v1/distributed/test_b12x_measured_engine.py::*"
_WRONG_SUMS = "tests/v1/distributed/test_b12x_wrong_sums.py::*"
_PROFILING = "tests/v1/worker/test_profiling_on_gpus.py::"


@dataclass(frozen=True)
class Claim:
    """Something that holds, by the ids of the tests that show it (shell patterns)."""

    says: str
    tests: tuple[str, ...]


CLAIMS = (
    Claim("b12x's all-reduce on channels, eager and in graphs", (_ALL_REDUCE,)),
    Claim("b12x's DCP all-to-all on channels", (_DCP,)),
    Claim(
        "a DCP engine gives NCCL's tokens", ("tests/distributed/test_dcp_engine.py::*",)
    ),
    Claim(
        "engines of both runners give NCCL's tokens, and others when sums are wrong",
        (_ENGINES, _WRONG_SUMS),
    ),
    Claim("an engine that has measured memory gives NCCL's tokens", (_MEASURED,)),
    Claim(
        "each kind of draft, and an encoder, has its channel in an engine",
        (
            "tests/v1/distributed/test_b12x_v1_drafts.py::*",
            "tests/v1/distributed/test_b12x_v2_autoregressive.py::*",
            "tests/v1/distributed/test_b12x_v2_one_owner.py::*",
            "tests/v1/distributed/test_b12x_encoder.py::*",
        ),
    ),
    Claim(
        "engines sleep and wake, and reduce as before",
        ("tests/v1/distributed/test_b12x_sleep.py::*",),
    ),
    Claim(
        "engines on vLLM's own all-reduce give NCCL's tokens",
        ("tests/v1/distributed/test_custom_allreduce_engine.py::*",),
    ),
    Claim(
        "profiling leaves nothing, over 20 rounds",
        (f"{_PROFILING}*nothing_stays*", f"{_PROFILING}*profiles_twenty_times*"),
    ),
    Claim(
        "an engine that fails while it profiles ends in time",
        (f"{_PROFILING}*raise*", f"{_PROFILING}*spins*", f"{_PROFILING}*fault*"),
    ),
    Claim(
        "a served engine ends as docs/faults.md says, and its memory is back",
        ("tests/v1/executor/test_served_engine_on_gpus.py::*",),
    ),
    Claim(
        "the doctor says of b12x what ranks then do",
        ("tests/distributed/test_graph_channels_doctor_on_gpus.py::*",),
    ),
)

# Where a claim may have been shown.
_PLACES: Mapping[str, Callable[[list[Gpu]], bool]] = {
    "one GPU": lambda gpus: len(gpus) == 1,
    "several GPUs": lambda gpus: len(gpus) > 1,
    "SM120": lambda gpus: all(gpu.capability.startswith("12.") for gpu in gpus),
}


def page(receipts: Mapping[str, Receipt], claims: tuple[Claim, ...] = CLAIMS) -> str:
    """docs/verified.md.

    Args:
        receipts: By the path that the page links to.
        claims: The rows.
    """
    newest = sorted(receipts.items(), key=lambda item: item[1].started, reverse=True)
    lines = [
        "# What was verified, and where",
        "",
        "`python -m verification page` makes this from the [receipts](receipts/) that",
        "`make test-gpu` wrote on somebody's GPUs. Tests have two ranks, four or more;",
        "where there are fewer GPUs, ranks share them. The receipt says what was left",
        "behind; of a claim that has none, the README says whether it ran.",
        "",
        f"| claim | {' | '.join(_PLACES)} |",
        "|---|" + "---|" * len(_PLACES),
    ]
    for claim in claims:
        cells = [
            _cell([item for item in newest if here(item[1].machine.gpus)], claim)
            for here in _PLACES.values()
        ]
        lines.append(f"| {claim.says} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(newest: list[tuple[str, Receipt]], claim: Claim) -> str:
    for path, receipt in newest:
        if (found := verdict(receipt, claim)) is not None:
            where = f"[{receipt.started[:10]}]({path}), {_named(receipt.machine)}"
            return f"{found}{where}"
    return "no receipt"


class Verdict(StrEnum):
    """What a receipt says of a claim, as the page has it before the receipt."""

    SHOWN = ""
    LEFT = "passed, **left something** "
    FAILED = "**failed** "


def verdict(receipt: Receipt, claim: Claim) -> Verdict | None:
    """What a receipt says of a claim, None if it says nothing."""
    outcomes = [
        {test.outcome for test in receipt.tests if fnmatchcase(test.id, pattern)}
        for pattern in claim.tests
    ]
    if any(found & {Outcome.FAILED, Outcome.HUNG} for found in outcomes):
        return Verdict.FAILED
    if any(found != {Outcome.PASSED} for found in outcomes):
        return None
    files = {pattern.partition("::")[0] for pattern in claim.tests}
    left = any(leak.file in files for leak in receipt.leaks)
    return Verdict.LEFT if left else Verdict.SHOWN


def _named(machine: Machine) -> str:
    names = sorted({gpu.name for gpu in machine.gpus})
    shared = " with MPS" if machine.mps else ""
    return f"{len(machine.gpus)} × {' and '.join(names)}{shared}"
