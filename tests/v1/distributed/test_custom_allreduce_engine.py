# SPDX-License-Identifier: Apache-2.0
"""A whole engine on vLLM's own custom all-reduce, whose capture the series changes."""

import pytest

from tests import engines, gpus
from tests.v1.owner_engines import LIMITS
from tests.v1.owner_rows import TARGETS

pytestmark = [
    gpus.needs_gpu,
    pytest.mark.skipif(gpus.GPUS < 2, reason="vLLM's own wants a GPU for each rank"),
]


def _in_use():
    """Report whether the tensor parallel group has vLLM's own all-reduce."""

    def report(engine):
        from vllm.distributed.parallel_state import get_tp_group

        own = get_tp_group().device_communicator.ca_comm
        return own is not None and not own.disabled

    return report


@pytest.mark.parametrize("name", ["V1, FULL_DECODE_ONLY", "V2, FULL_DECODE_ONLY"])
def test_it_gives_the_tokens_of_nccl(name):  # R-A5
    row = TARGETS[name]
    shared = LIMITS | row.engine()
    own = engines.generate(2, row.target, row.environment, watch=_in_use, **shared)
    if not all(answer.report for answer in own):
        pytest.skip("vLLM's own all-reduce does not take these GPUs")
    nccl = engines.generate(
        2, row.target, row.environment, disable_custom_all_reduce=True, **shared
    )
    assert [answer.decoded for answer in own] == [answer.decoded for answer in nccl]
    assert [answer.tables for answer in own] == [[], []]
