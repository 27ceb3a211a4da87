# SPDX-License-Identifier: Apache-2.0
"""Sums made wrong on purpose in one owner's graphs: whole engines tell, of each owner.

That other engines give NCCL's tokens in the same steps says something only if these
do not.
"""

from functools import cache, partial

import pytest

from tests import gpus
from tests.engines import unwatched
from tests.v1.owner_engines import on_b12x, on_nccl, production
from tests.v1.owner_rows import V2_AUTOREGRESSIVE
from vllm.distributed.device_communicators.b12x_pcie_all_reduce import B12xAllReduce
from vllm.distributed.graph_channels.scope import active_channel

pytestmark = gpus.needs_gpu

ROW = V2_AUTOREGRESSIVE["V2, EAGLE, FULL_DECODE_ONLY"]


def _wrong_in(owner):
    """Lose every other number of the sums in an owner's graphs, on each rank alike."""
    (channel,) = production([owner])
    all_reduce = B12xAllReduce.all_reduce

    def lossy(transport, tensor):
        total = all_reduce(transport, tensor)
        if str(active_channel()) == channel:
            total[..., ::2] = 0
        return total

    B12xAllReduce.all_reduce = lossy
    return unwatched()


_right = cache(partial(on_nccl, ROW))


@pytest.mark.parametrize("owner", sorted(ROW.owners))
def test_a_wrong_sum_is_seen(owner):  # R-B1 # R-F1
    for answer, right in zip(on_b12x(ROW, partial(_wrong_in, owner)), _right()):
        assert answer.captured == right.captured
        assert answer.decoded.replayed.keys() == right.decoded.replayed.keys()
        assert answer.decoded.proposed != right.decoded.proposed
        # which decides how soon the target's tokens come, and nothing else
        same = all(
            one[: len(other)] == other[: len(one)]
            for one, other in zip(answer.tokens, right.tokens, strict=True)
        )
        assert same is (owner != "target")
