# SPDX-License-Identifier: Apache-2.0
"""The V1 runner's drafts in whole engines: a channel beside the target's, at once."""

import pytest

from tests import gpus
from tests.v1.owner_engines import compare
from tests.v1.owner_rows import V1_DRAFTS

pytestmark = gpus.needs_gpu


@pytest.mark.parametrize("row", V1_DRAFTS.values(), ids=V1_DRAFTS)
def test_an_engine_gives_the_tokens_of_nccl_and_of_no_draft(row):
    # R-A3 # R-B4 # R-F1 # C07
    compare(row)
