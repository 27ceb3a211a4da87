# SPDX-License-Identifier: Apache-2.0
"""What is asked of whole engines can fail: on answers made up by hand."""

import pytest
import torch

from tests.engines import Answer, Decoded, Made
from tests.proposals import Proposals
from tests.replays import Replays
from tests.v1.owner_engines import (
    EAGER,
    STEPS,
    TARGET,
    WORK,
    see_lossless,
    see_made,
    see_the_same,
    wrong_sums,
)
from tests.v1.owner_rows import ROWS
from vllm.distributed.device_communicators.b12x_pcie_all_reduce import B12xAllReduce
from vllm.distributed.graph_channels.identity import ChannelId, Owner, Phase
from vllm.distributed.graph_channels.scope import channel_scope, owner_scope

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


def _see(mode="FULL_DECODE_ONLY", owners=("target",), **changes):
    """Both engines alike, but for what NCCL never has."""
    first = {"table": RIGHT} | changes
    b12x = [_answer(mode=mode, **first), _answer(mode=mode, **first | {"table": None})]
    nccl = [_answer(mode=mode, **changes | ON_NCCL)] * 2
    see_the_same(b12x, nccl, owners, mode)


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


@pytest.mark.parametrize("steps", [STEPS, 1])
def test_the_graphs_of_each_owner_replay_in_nearly_all_steps(steps):  # R-F1
    drafted = {
        "owners": ("target", "draft"),
        "table": f"{RIGHT}  {DRAFT}  draft\n",
        "recorded": {"b12x": {TARGET: 35, DRAFT: 5}},
        "replayed": {TARGET: STEPS, DRAFT: steps},
    }
    if steps == STEPS:
        _see(**drafted)
        return
    with pytest.raises(AssertionError):
        _see(**drafted)


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


def test_a_table_elsewhere_does_not():  # R-A5
    for b12x, nccl in (
        ([_answer(RIGHT), _answer(RIGHT)], [_answer(**ON_NCCL)] * 2),
        ([_answer(RIGHT), _answer()], [_answer(recorded={}, table=RIGHT)] * 2),
    ):
        with pytest.raises(AssertionError):
            see_the_same(b12x, nccl, ["target"], "FULL_DECODE_ONLY")


def test_other_graphs_than_on_nccl_do_not():
    b12x = [_answer(RIGHT, captured={TARGET: 4}), _answer(captured={TARGET: 4})]
    with pytest.raises(AssertionError):
        see_the_same(b12x, [_answer(**ON_NCCL)] * 2, ["target"], "FULL_DECODE_ONLY")


PLAIN = [[n] * length for n, length in enumerate(WORK.lengths)]


def test_a_draft_that_changes_nothing_passes():
    see_lossless([_answer(arrived=[[2] * STEPS])], [PLAIN])
    # those without are not as far
    see_lossless([_answer(arrived=[[2] * STEPS])], [[one[:5] for one in PLAIN]])


@pytest.mark.parametrize(
    ("plain", "changes"),
    [
        ([[*one[:5], 99] for one in PLAIN], {}),
        ([[] for _ in PLAIN], {}),
        ([[*one, 1] for one in PLAIN], {}),
        (PLAIN[1:], {}),
        (PLAIN, {"proposed": [[[0]]] * (STEPS // 2)}),
        (PLAIN, {"arrived": [[1] * STEPS]}),
    ],
    ids=["other tokens", "none", "fewer", "fewer prompts", "unproposed", "unaccepted"],
)
def test_a_draft_that_changes_tokens_or_does_nothing_does_not(plain, changes):
    with pytest.raises((AssertionError, ValueError)):
        see_lossless([_answer(**{"arrived": [[2] * STEPS]} | changes)], [plain])


def test_an_engine_has_to_be_what_its_row_is_called():
    row = ROWS["V2, DFlash2, FULL_DECODE_ONLY"]
    runner = "vllm.v1.worker.gpu.model_runner"
    right = _answer()._replace(made=Made(runner, "DFlash2Speculator"))
    see_made(row, [right, right])
    for wrong in (
        Made(runner, "DFlashSpeculator"),
        Made(runner, None),
        Made("vllm.v1.worker.gpu_model_runner", "DFlash2Speculator"),
    ):
        with pytest.raises(AssertionError):
            see_made(row, [right, right._replace(made=wrong)])


def test_proposals_are_what_they_were():
    class Drafter:
        tokens = torch.zeros(2, 2, dtype=torch.int64)

        def propose(self, batch, scale=1):
            self.tokens += scale
            return self.tokens[:batch]

    drafter = Drafter()
    proposals = Proposals(drafter)
    drafter.propose(2)
    drafter.propose(1, scale=2)
    assert proposals.take() == [[[1, 1], [1, 1]], [[3, 3]]]
    assert proposals.take() == []


def test_replays_are_told_by_the_innermost_scope_of_their_capture(monkeypatch):
    class Graph:
        def capture_begin(self, pool=None):
            pass

        def replay(self):
            pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    replays = Replays()
    graphs = [Graph() for _ in range(4)]
    with channel_scope(ChannelId(Owner.TARGET, Phase.PRODUCTION)):
        graphs[0].capture_begin()
        with owner_scope(Owner.DRAFT):
            graphs[1].capture_begin(pool=1)
            graphs[2].capture_begin()
    graphs[3].capture_begin()
    assert replays.captured == {TARGET: 1, DRAFT: 2, "None": 1}
    graphs[1].replay()
    graphs[1].replay()
    assert replays.take() == {DRAFT}
    graphs[0].replay()
    graphs[3].replay()
    assert replays.take() == {TARGET, "None"}
    assert replays.take() == set()


def test_sums_are_made_wrong_for_one_owner(monkeypatch):
    monkeypatch.setattr(B12xAllReduce, "all_reduce", lambda self, total: total.clone())
    wrong_sums("draft")
    transport, ones = object.__new__(B12xAllReduce), torch.ones(2, 4)
    with channel_scope(ChannelId(Owner.TARGET, Phase.PRODUCTION)):
        assert torch.equal(transport.all_reduce(ones), ones)
        with owner_scope(Owner.DRAFT):
            assert transport.all_reduce(ones).tolist() == [[0, 1, 0, 1]] * 2
    assert torch.equal(transport.all_reduce(ones), ones)
