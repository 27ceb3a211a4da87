# SPDX-License-Identifier: Apache-2.0
"""What `make run` demands of the log: the table of channels, once."""

from types import SimpleNamespace

import pytest

from examples.serve_two_ranks import WrongAnswer, check_lane
from vllm.distributed.graph_channels.identity import EagerLane
from vllm.distributed.graph_channels.membership import Usage
from vllm.distributed.graph_channels.report import table

LANE = EagerLane.ALLREDUCE


def log(*usages):
    """A server of two ranks, with its log as vLLM's formatter writes it."""
    lines = ["(Worker_TP0 pid=7) INFO 12-02 07:01:13 [other.py:1] vllm:eager:allreduce"]
    for usage in usages:
        lines += [
            f"(Worker_TP0 pid=7) INFO 12-02 07:01:13 [report.py:25] {line}"
            for line in table(usage).splitlines()
        ]
    return SimpleNamespace(ranks=2, log_lines=lambda: lines)


def usage(label="host all-reduce of tp:0", ranks=2, channels=(LANE,)):
    return Usage(label, 0, ranks, dict.fromkeys(channels, 266240), {})


def test_the_table_is_shown(capsys):  # R-F1
    check_lane(log(usage()))
    shown = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in shown[1:]] == [
        line.strip() for line in table(usage()).splitlines()
    ]


@pytest.mark.parametrize(
    "usages",
    [
        (),
        (usage(), usage()),
        (usage(ranks=3),),
        (usage(label="another of tp:0"),),
        (usage(channels=()),),
    ],
    ids=["none", "twice", "other ranks", "another transport", "no lane"],
)
def test_anything_else_is_a_wrong_answer(usages):  # R-F1
    with pytest.raises(WrongAnswer, match="there once"):
        check_lane(log(*usages))
