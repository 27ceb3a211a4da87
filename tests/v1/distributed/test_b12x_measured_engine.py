# SPDX-License-Identifier: Apache-2.0
"""A whole engine on b12x channels that has measured memory, by throwaway graphs too."""

import pytest

from tests import gpus
from tests.v1.owner_engines import compare
from tests.v1.owner_rows import MEASURED_TARGETS

pytestmark = gpus.needs_gpu


@pytest.mark.parametrize("row", MEASURED_TARGETS.values(), ids=MEASURED_TARGETS)
def test_an_engine_gives_the_tokens_of_nccl(row):
    # R-B1 # R-C5 # R-F1
    compare(row)
