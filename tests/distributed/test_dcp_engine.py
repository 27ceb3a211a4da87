# SPDX-License-Identifier: Apache-2.0
"""A whole engine with DCP 2 on GPUs: the same tokens over b12x as over NCCL."""

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
# Direct workspaces want one GPU a rank, and would be the other engine's way.
PLAIN = {"VLLM_USE_DIRECT_DCP_A2A": "0", "VLLM_USE_DIRECT_DCP_Q_GATHER": "0"}


def test_decode_graphs_over_b12x_give_nccls_tokens():
    nccl = engines.generate(
        2, engines.DEEPSEEK, PLAIN, disable_custom_all_reduce=True, **OPTIONS
    )
    b12x = engines.generate(2, engines.DEEPSEEK, SWITCHES, **OPTIONS)

    assert [answer.tokens for answer in b12x] == [answer.tokens for answer in nccl]
    assert len(set(nccl[0].tokens[0])) > 1
    # a query and a combine for each layer of each graph
    counted = 2 * engines.DEEPSEEK["num_hidden_layers"] * len(GRAPHS)
    for plain, answer in zip(nccl, b12x, strict=True):
        assert plain.recorded == {}
        (exchanged,) = [
            launches for label, launches in answer.recorded.items() if "DCP" in label
        ]
        assert exchanged == {str(TARGET): counted}
