# SPDX-License-Identifier: Apache-2.0
"""Whole engines whose vision encoder has graphs, on b12x channels of its own.

Requests come and go, each with its own image after the same words, so that encoder
graphs are replayed between those of the target.
"""

from functools import cache, partial

import pytest

from tests import engines, gpus
from tests.distributed.b12x_ranks import SWITCHES
from tests.v1 import owner_engines
from tests.v1 import tiny_vision_model as model
from tests.v1.owner_engines import see_the_same, wrong_sums
from tests.v1.owner_rows import SIZES, V1, V2

pytestmark = gpus.needs_gpu

# The runners, and the owners whose graphs record launches on either.
ENGINES = {"V1, encoder graphs": V1, "V2, encoder graphs": V2}
OWNERS = ("target", "encoder")

# Graphs for one image, and for two.
BUDGETS = [model.TOKENS, 2 * model.TOKENS]
# Images come together at first, then one by one.
WORK = owner_engines.WORK._replace(
    prompts=[[9, model.IMAGE, 10]] * len(owner_engines.WORK.prompts),
    images=model.images(len(owner_engines.WORK.prompts)),
)

OPTIONS = {
    **owner_engines.LIMITS,
    "work": WORK,
    "tokenizer": model.TOKENIZER,
    "dtype": "float32",
    "attention_backend": "TRITON_ATTN",
    "compilation_config": {
        "mode": 0,
        "custom_ops": ["none"],
        "cudagraph_capture_sizes": SIZES,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_mm_encoder": True,
        "encoder_cudagraph_token_budgets": BUDGETS,
        "encoder_cudagraph_max_vision_items_per_batch": 2,
    },
}


def _encoded():
    """Watches how many images the encoder's graphs took, and how many they did not."""
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    execute = EncoderCudaGraphManager.execute
    counts = {}

    def noted(manager, mm_kwargs):
        features = execute(manager, mm_kwargs)
        counts.update(hits=manager.graph_hits, misses=manager.graph_misses)
        return features

    EncoderCudaGraphManager.execute = noted
    return lambda engine: counts


def _generate(environment, watch=_encoded, **options):
    return engines.generate(
        2, model.CONFIG, environment, watch=watch, **OPTIONS, **options
    )


_nccl = cache(lambda name: _generate(ENGINES[name], disable_custom_all_reduce=True))


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_gives_the_tokens_of_nccl(name):  # R-A3 # R-B4 # R-F1
    b12x = _generate(ENGINES[name] | SWITCHES)

    see_the_same(b12x, _nccl(name), OWNERS, "FULL_DECODE_ONLY")
    # Their tokens differ, and nothing but the images does in the prompts.
    for answer in b12x:
        assert answer.report == {"hits": len(WORK.prompts), "misses": 0}
        (recorded,) = answer.recorded.values()
        # After attention and after the MLP, in each layer of each graph.
        launches = 2 * model.LAYERS * len(BUDGETS)
        assert recorded["vllm:encoder:production"] == launches


@pytest.mark.parametrize("name", ENGINES)
def test_a_wrong_sum_is_seen(name):  # R-B1 # R-F1
    wrong = _generate(ENGINES[name] | SWITCHES, partial(wrong_sums, "encoder"))
    for answer, right in zip(wrong, _nccl(name), strict=True):
        assert answer.decoded.replayed.keys() == right.decoded.replayed.keys()
        assert answer.tokens != right.tokens
