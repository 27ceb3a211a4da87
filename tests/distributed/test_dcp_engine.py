# SPDX-License-Identifier: Apache-2.0
"""A whole engine with DCP 2 on GPUs: the same tokens over b12x as over NCCL."""

import json
import os

from tests import gpus
from tests.distributed.b12x_ranks import SWITCHES, TARGET
from tests.engines import DEEPSEEK

pytestmark = gpus.needs_gpu

DEADLINE = 280
PROMPTS = [[1, 5, 9, 11], [7, 8], [3] * 20]
GRAPHS = [1, 2, 4]
# Direct workspaces want one GPU a rank, and would be the other engine's way.
PLAIN = {"VLLM_USE_DIRECT_DCP_A2A": "0", "VLLM_USE_DIRECT_DCP_Q_GATHER": "0"}


def generate(folder, rank, device, **options):
    """What an engine answers, and what its decode graphs recorded."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(device.index),
        WORLD_SIZE="2",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    from vllm import LLM, SamplingParams
    from vllm.distributed import parallel_state

    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        seed=0,
        max_model_len=256,
        max_num_seqs=4,
        tensor_parallel_size=2,
        decode_context_parallel_size=2,
        dcp_comm_backend="a2a",
        distributed_executor_backend="external_launcher",
        gpu_memory_utilization=0.1,
        attention_backend="TRITON_MLA",
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "custom_ops": ["none"],
            "cudagraph_capture_sizes": GRAPHS,
        },
        **options,
    )
    answers = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(max_tokens=16, temperature=0, detokenize=False),
    )
    usages = parallel_state._LEDGER.usage()
    recorded = [
        usage.recorded.get(TARGET, 0) for usage in usages if "DCP" in usage.label
    ]
    return [list(answer.outputs[0].token_ids) for answer in answers], recorded


def test_decode_graphs_over_b12x_give_nccls_tokens(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))

    def body(rank, device):
        return generate(tmp_path, rank, device)

    def without(rank, device):
        return generate(tmp_path, rank, device, disable_custom_all_reduce=True)

    plain = gpus.values(2, without, DEADLINE, **PLAIN)
    over_b12x = gpus.values(2, body, DEADLINE, **SWITCHES)
    # a query and a combine for each layer of each graph
    counted = [2 * DEEPSEEK["num_hidden_layers"] * len(GRAPHS)]
    for (tokens, nothing), (same, recorded) in zip(plain, over_b12x, strict=True):
        assert nothing == []
        assert recorded == counted
        assert same == tokens and len(set(tokens[0])) > 1
