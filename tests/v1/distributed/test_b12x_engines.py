# SPDX-License-Identifier: Apache-2.0
"""Whole engines without a draft on b12x channels: NCCL's tokens, and one owner."""

import pytest

from tests import gpus
from tests.v1.owner_engines import compare
from tests.v1.owner_rows import TARGETS

pytestmark = gpus.needs_gpu


@pytest.mark.parametrize("row", TARGETS.values(), ids=TARGETS)
def test_an_engine_gives_the_tokens_of_nccl(row):
    # R-B1 # R-F1 # C35
    compare(row)
