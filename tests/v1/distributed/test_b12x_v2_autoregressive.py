# SPDX-License-Identifier: Apache-2.0
"""The V2 runner's drafts with a prefill and decode steps, in whole engines."""

import pytest

from tests import gpus
from tests.v1.owner_engines import compare
from tests.v1.owner_rows import V2_AUTOREGRESSIVE

pytestmark = gpus.needs_gpu


@pytest.mark.parametrize("row", V2_AUTOREGRESSIVE.values(), ids=V2_AUTOREGRESSIVE)
def test_an_engine_gives_the_tokens_of_nccl_and_of_no_draft(row):
    # R-A3 # R-F1 # C07
    compare(row)
