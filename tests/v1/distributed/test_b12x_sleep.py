# SPDX-License-Identifier: Apache-2.0
"""Engines on b12x channels that sleep and wake up: their graphs reduce as before."""

import pytest

from tests import engines, gpus
from tests.distributed.b12x_ranks import SWITCHES
from tests.v1.owner_rows import V1, V2
from vllm.distributed import parallel_state

pytestmark = gpus.needs_gpu

CYCLES = 20
WORK = engines.Work(([1, 5, 9, 11], [7, 8]), (8, 5))


def _sleeps():
    """Watches what the engine answers after each sleep, and what its channels take."""

    def report(engine):
        ledger = parallel_state.get_graph_channels()
        seen = []
        for _ in range(CYCLES):
            engine.sleep()
            engine.wake_up()
            tokens = engines.decoded(engine.llm_engine, WORK).tokens
            seen.append((tokens, ledger.inventory()))
        return seen

    return report


@pytest.mark.parametrize("runner", [V1, V2], ids=["V1", "V2"])
def test_twenty_sleeps_leave_channels_and_graphs_as_they_are(runner):  # R-D5
    answers = engines.generate(
        2,
        engines.LLAMA,
        runner | SWITCHES,
        watch=_sleeps,
        work=WORK,
        enable_sleep_mode=True,
        attention_backend="TRITON_ATTN",
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "custom_ops": ["none"],
            "cudagraph_capture_sizes": [1, 2, 4],
        },
    )
    for answer in answers:
        (_, inventory), *_ = answer.report
        assert answer.report == [(answer.tokens, inventory)] * CYCLES
        (channels,) = inventory.values()
        assert "vllm:target:production" in channels
