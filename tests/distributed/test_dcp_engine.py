# SPDX-License-Identifier: Apache-2.0
"""A whole engine with DCP 2 on GPUs: the same tokens over b12x as over NCCL.

Both ways combine the parts of attention in float32, each in an order of its own, and
round to bfloat16. So a token that leads by less than that may make room for another.
"""

from tests import engines, gpus
from tests.distributed.b12x_ranks import SWITCHES, TARGET

pytestmark = gpus.needs_gpu

GRAPHS = [1, 2, 4]
OPTIONS = {
    "decode_context_parallel_size": 2,
    "dcp_comm_backend": "a2a",
    "attention_backend": "TRITON_MLA",
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "custom_ops": ["none"],
        "cudagraph_capture_sizes": GRAPHS,
    },
}
# Every step of a request builds on its tokens so far: many short ones tell more.
WORK = engines.Work(
    [[7 * n + k for k in range(1, 4 + 3 * n)] for n in range(12)], (8,) * 12, leads=True
)
ROUNDED = 0.25  # a few units in the last place of a logit
# Direct workspaces want one GPU a rank, and would be the other engine's way.
PLAIN = {"VLLM_USE_DIRECT_DCP_A2A": "0", "VLLM_USE_DIRECT_DCP_Q_GATHER": "0"}


def _equal_tokens(found, wanted, leads):
    """How many there are up to the first that differs, which may not have led."""
    for n, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if one != other:
            assert leads[n] < ROUNDED, f"{found}, {wanted}, {leads}"
            return n
    return len(wanted)


def test_decode_graphs_over_b12x_give_nccls_tokens():
    nccl = engines.generate(
        2,
        engines.DEEPSEEK,
        PLAIN,
        work=WORK,
        disable_custom_all_reduce=True,
        **OPTIONS,
    )
    b12x = engines.generate(2, engines.DEEPSEEK, SWITCHES, work=WORK, **OPTIONS)

    for one, other in zip(b12x, nccl, strict=True):
        equal = sum(map(_equal_tokens, one.tokens, other.tokens, other.decoded.leads))
        assert equal > sum(WORK.lengths) / 2
    # a query and a combine for each layer of each graph
    counted = 2 * engines.DEEPSEEK["num_hidden_layers"] * len(GRAPHS)
    for plain, answer in zip(nccl, b12x, strict=True):
        assert plain.recorded == {}
        (exchanged,) = [
            launches for label, launches in answer.recorded.items() if "DCP" in label
        ]
        assert exchanged == {str(TARGET): counted}
