# SPDX-License-Identifier: Apache-2.0
"""The V2 runner's drafts that are one owner, in whole engines."""

import pytest

from tests import gpus
from tests.v1.owner_engines import compare
from tests.v1.owner_rows import V2_ONE_OWNER

pytestmark = gpus.needs_gpu


@pytest.mark.parametrize("row", V2_ONE_OWNER.values(), ids=V2_ONE_OWNER)
def test_an_engine_gives_the_tokens_of_nccl_and_of_no_draft(row):
    # R-A3 # R-F1 # C07
    compare(row)
