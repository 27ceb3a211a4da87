# SPDX-License-Identifier: Apache-2.0
"""What is asked of whole engines can fail: on answers made up by hand."""

import pytest

from tests.engines import Answer, Decoded
from tests.v1.owner_engines import EAGER, STEPS, TARGET, WORK, see_the_same

PROFILE = TARGET.replace("production", "profile")
AGAIN = f"{TARGET}:2"
DRAFT = TARGET.replace("target", "draft")
RIGHT = f"  {EAGER}  eager\n  {TARGET}  target\n"
ON_NCCL = {"recorded": {}, "table": None}


def _answer(table=None, *, mode="FULL_DECODE_ONLY", **changes):
    pieces = mode == "PIECEWISE"
    tokens = [[n] * length for n, length in enumerate(WORK.lengths)]
    made = {
        "tokens": tokens,
        "leads": [],
        "arrived": [[1] * STEPS],
        "served": [1 + n % 4 for n in range(STEPS)],
        "replayed": {TARGET: STEPS if pieces else STEPS - 13},
        "proposed": [[[0]]] * STEPS,
        "captured": {TARGET: 20 if pieces else 5},
        "recorded": {"b12x": {TARGET: 35}},
        "tables": [] if table is None else [table],
        **changes,
    }
    decoded = Decoded(*(made.pop(field) for field in Decoded._fields))
    return Answer(made=None, decoded=decoded, log=[], report=None, **made)


def _see(mode="FULL_DECODE_ONLY", **changes):
    """Both engines alike, but for what NCCL never has."""
    first = {"table": RIGHT} | changes
    b12x = [_answer(mode=mode, **first), _answer(mode=mode, **first | {"table": None})]
    nccl = [_answer(mode=mode, **changes | ON_NCCL)] * 2
    see_the_same(b12x, nccl, ["target"], mode)


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "PIECEWISE"])
def test_a_right_engine_passes(mode):
    _see(mode)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [[7] * length for length in WORK.lengths]},
        {"served": [4] * STEPS},
        {"served": [1, 2, 3, 4] * (STEPS // 4 - 1)},
        {"replayed": {}},
        {"replayed": {TARGET: 400}},
        {"replayed": {TARGET: STEPS, DRAFT: STEPS}},
        {"captured": {TARGET: 20}},
        {"recorded": {"b12x": {TARGET: 35, DRAFT: 1}}},
        {"recorded": {"b12x": {}}},
        {"table": f"  {EAGER}  eager\n"},
        {"table": f"{RIGHT}  {PROFILE}  target\n"},
        {"table": f"{RIGHT}  {AGAIN}  target\n"},
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_a_wrong_engine_does_not(changes):  # R-F1
    with pytest.raises(AssertionError):
        _see(**changes)


def test_pieces_that_are_whole_graphs_do_not():
    with pytest.raises(AssertionError):
        _see("PIECEWISE", captured={TARGET: 5})
    with pytest.raises(AssertionError):
        _see("PIECEWISE", replayed={TARGET: STEPS - 12})


@pytest.mark.parametrize(
    "change", [{"arrived": [[2] * STEPS]}, {"proposed": [[[1]]] * STEPS}], ids=min
)
def test_a_draft_that_is_accepted_or_proposes_otherwise_does_not(change):
    b12x = [_answer(RIGHT, **change), _answer(**change)]
    nccl = [_answer(**ON_NCCL)] * 2
    with pytest.raises(AssertionError):
        see_the_same(b12x, nccl, ["target"], "FULL_DECODE_ONLY")
