# SPDX-License-Identifier: Apache-2.0
"""Whole engines with drafts on b12x channels: each owner on its own, all at once.

For every row of tests/v1/owner_rows.py, on a GPU, over 500 steps in which requests
come and go: the tokens of NCCL, those of the engine without the draft, and a table
of exactly these owners.
"""

import json
import re

import pytest

from tests import engines, gpus
from tests.distributed.b12x_ranks import SWITCHES
from tests.v1.owner_rows import DRAFTED, ROWS

STEPS = 500
# More requests than places, of all lengths: batches shrink as some end and grow as
# others come. The first lasts all steps, even if all that is drafted were right.
# No prompt is a single token: one that joins others is padded with drafts, and when
# those are rejected vLLM 0.28.0's multi-module MTP computes position -1 anew.
WORK = engines.Work(
    [[n + 1 + 4 * place for place in range(2 + n % 3)] for n in range(16)],
    (STEPS * (1 + DRAFTED), *(20 + 53 * n % 130 for n in range(15))),
    STEPS,
)
LIMITS = {"max_model_len": 1536, "work": WORK, "deadline": 400}

pytestmark = gpus.needs_gpu
rows = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


def _nccl(row, options):
    return engines.generate(
        2,
        row.target,
        row.environment,
        disable_custom_all_reduce=True,
        **LIMITS,
        **options,
    )


# Tokens of engines without a draft; rows share them.
_plain: dict[str, list] = {}


def _undrafted(row):
    options = row.undrafted()
    key = json.dumps([row.environment, row.target, options])
    if key not in _plain:
        _plain[key] = [answer.tokens for answer in _nccl(row, options)]
    return _plain[key]


@rows
def test_an_engine_gives_the_tokens_of_nccl_and_of_no_draft(row):
    # R-A3 # R-B4 # R-F1 # C07
    options = row.engine()
    nccl = _nccl(row, options)
    b12x = engines.generate(
        2,
        row.target,
        {**row.environment, **SWITCHES},
        **LIMITS,
        **options,
    )
    assert [answer.tokens for answer in b12x] == [answer.tokens for answer in nccl]
    assert [answer.tables for answer in nccl] == [[], []]  # R-A5
    for answer, plain in zip(b12x, _undrafted(row), strict=True):
        for drafted, tokens in zip(answer.tokens, plain, strict=True):
            # a draft gets further in as many steps
            assert drafted[: len(tokens)] == tokens
            assert tokens
    assert [answer.steps for answer in b12x] == [STEPS, STEPS]

    expected = {f"vllm:{owner}:production" for owner in row.owners}
    for answer in b12x:
        (recorded,) = answer.recorded.values()
        assert set(recorded) == expected
    (table,) = b12x[0].tables
    assert set(re.findall(r"vllm:\S+:production", table)) == expected
