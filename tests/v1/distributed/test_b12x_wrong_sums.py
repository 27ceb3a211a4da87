# SPDX-License-Identifier: Apache-2.0
"""Sums made wrong on purpose in one owner's graphs: whole engines tell.

That other engines give NCCL's tokens in the same steps, and propose what NCCL's draft
does, says something only if these do not.
"""

from functools import cache, partial

import pytest

from tests import gpus
from tests.v1.owner_engines import on_b12x, on_nccl, wrong_sums
from tests.v1.owner_rows import ROWS

pytestmark = gpus.needs_gpu

# Each owner but the encoder, and the target on either runner.
WRONG = [
    ("V1, MTP, breakable PIECEWISE", "target"),
    ("V1, MTP, breakable PIECEWISE", "draft"),
    ("V2, MTP, FULL_DECODE_ONLY", "target"),
    ("V2, MTP, FULL_DECODE_ONLY", "draft_prefill"),
    ("V2, MTP, FULL_DECODE_ONLY", "draft_decode"),
    ("V2, multi-module MTP, FULL_DECODE_ONLY", "multi_module_mtp"),
    ("V2, DFlash, FULL_DECODE_ONLY", "draft_query"),
    ("V2, DSpark, FULL_DECODE_ONLY", "dspark"),
]

_right = cache(lambda name: on_nccl(ROWS[name]))


@pytest.mark.parametrize(("name", "owner"), WRONG, ids=lambda word: word)
def test_a_wrong_sum_is_seen(name, owner):  # R-B1 # R-F1
    row = ROWS[name]
    assert owner in row.owners
    wrong = on_b12x(row, partial(wrong_sums, owner))
    for answer, right in zip(wrong, _right(name), strict=True):
        assert answer.captured == right.captured
        assert answer.decoded.replayed.keys() == right.decoded.replayed.keys()
        assert answer.decoded.proposed != right.decoded.proposed
        # which decides how soon the target's tokens come, and nothing else
        same = all(
            one[: len(other)] == other[: len(one)]
            for one, other in zip(answer.tokens, right.tokens, strict=True)
        )
        assert same is (owner != "target")
