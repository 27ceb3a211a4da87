# SPDX-License-Identifier: Apache-2.0
"""Whole vLLM engines with dummy weights on GPUs, one fresh process a rank.

They use vLLM's external launcher: each rank runs an engine of its own in one
process, and the ranks of one test are all that there is to clean up.

The process is fresh because vLLM reads some switches as it is imported: breakable
graphs break at attention only if their switch is set before.
"""

import json
import logging
import os
import re
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from PIL.Image import Image

from tests import gpus, ranks
from tests.proposals import Proposals
from tests.replays import Replays

_DENSE = {
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
LLAMA = _DENSE | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# DeepSeek-V2 in miniature, without experts: MLA, which TRITON_MLA serves anywhere.
DEEPSEEK = _DENSE | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 2,
    "moe_layer_freq": 1,
}


class Work(NamedTuple):
    """What an engine is asked for.

    Attributes:
        prompts: Token ids of each.
        lengths: How many tokens to generate for each.
        steps: After how many steps it stops, whatever is done by then.
        images: One for each prompt, or none at all.
        leads: Whether to note by how much the best token of each step led.
    """

    prompts: Sequence[Sequence[int]]
    lengths: Sequence[int]
    steps: int = 10_000
    images: Sequence[Image] = ()
    leads: bool = False

    def requests(self) -> list[dict[str, Any]]:
        """The prompts as vLLM takes them."""
        requests = [{"prompt_token_ids": list(prompt)} for prompt in self.prompts]
        if not self.images:
            return requests
        return [
            request | {"multi_modal_data": {"image": image}}
            for request, image in zip(requests, self.images, strict=True)
        ]


Report = Callable[[Any], Any]


def unwatched() -> Report:
    """The watch that reports nothing."""
    return _nothing


def _nothing(engine: Any) -> None:
    pass


# Options of an engine that profiles memory, for which nothing else may use its GPU.
MEASURED = {"kv_cache_memory_bytes": None}

# Of different lengths, so that batches shrink while they are decoded.
SHORT = Work(([1, 5, 9, 11], [7, 8], [3, 4, 5, 6, 7, 8, 9]), (12, 30, 21))


class Decoded(NamedTuple):
    """What an engine generated.

    Attributes:
        tokens: By prompt.
        leads: By prompt, of each token, if they were asked for: its log-probability
            less that of the second best.
        arrived: By prompt: how many tokens came at once, in turn.
        served: By step: for how many prompts tokens came.
        replayed: By channel: in how many of them graphs of it were replayed.
        proposed: By step, by request in the batch: the tokens that a draft proposed.
    """

    tokens: list[list[int]]
    leads: list[list[float]]
    arrived: list[list[int]]
    served: list[int]
    replayed: dict[str, int]
    proposed: list[list[list[int]]]

    @property
    def steps(self) -> int:
        """How many steps it took."""
        return len(self.served)

    @property
    def accepted(self) -> int:
        """How many tokens came of drafts."""
        return sum(n - 1 for counts in self.arrived for n in counts)


class Made(NamedTuple):
    """What an engine consists of.

    Attributes:
        runner: The module of its runner.
        drafter: The class of its speculator or proposer, None without a draft.
    """

    runner: str
    drafter: str | None


class Answer(NamedTuple):
    """What one rank's engine did.

    Attributes:
        made: What it is.
        decoded: What it generated, and how.
        captured: Graphs by channel, each piece counted.
        recorded: Launches recorded into graphs, by transport and channel.
        tables: What it logged as the table of graph channels.
        log: Every other line of vLLM's loggers at INFO and above.
        report: What the watch returned.
    """

    made: Made
    decoded: Decoded
    captured: dict[str, int]
    recorded: dict[str, dict[str, int]]
    tables: list[str]
    log: list[str]
    report: Any

    @property
    def tokens(self) -> list[list[int]]:
        """By prompt."""
        return self.decoded.tokens

    def channels(self) -> set[str]:
        """The names in its one table of graph channels, whatever they are of."""
        (table,) = self.tables
        return set(re.findall(r"vllm:\S+", table))


def generate(
    world: int,
    model: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    deadline: float = 240,
    watch: Callable[[], Report] = unwatched,
    work: Work = SHORT,
    tokenizer: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[Answer]:
    """What an engine of ``world`` tensor parallel ranks answers, by rank.

    Args:
        world: How many ranks.
        model: The model's ``config.json``.
        environment: Of each rank, beside what several ranks on a GPU need.
        deadline: Seconds after which the ranks are killed.
        watch: Called on each rank before its engine is made; what it returns is
            called with the engine when that has answered, and gives the report. A
            function of a module, as it is looked up in another process.
        work: The prompts, and how many tokens of each.
        tokenizer: The model's ``tokenizer.json``, which one that takes images wants.
        options: For ``vllm.LLM``. A draft's model may be a ``config.json`` too.
    """
    files = {"config.json": model}
    if tokenizer is not None:
        files["tokenizer.json"] = tokenizer
    # held, so that no other test gets the port before the ranks listen on it
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]

        def body(rank: int, store: object) -> Answer:
            os.environ.update(
                gpus.environment(rank, world),
                RANK=str(rank),
                LOCAL_RANK=str(rank % gpus.GPUS),
                WORLD_SIZE=str(world),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                VLLM_ENABLE_V1_MULTIPROCESSING="0",
                **environment,
            )
            given = rank, world, files, watch, work, options
            answer: Answer = ranks.in_fresh_process(_answer, *given)
            return answer

        return ranks.values(world, body, deadline)


def _answer(
    rank: int,
    world: int,
    files: Mapping[str, Any],
    watch: Callable[[], Report],
    work: Work,
    options: dict[str, Any],
) -> Answer:
    from vllm import LLM
    from vllm.distributed import parallel_state

    _make_sums_matter(rank)
    report, replays = watch(), Replays()
    lines = _Lines()
    logger = logging.getLogger("vllm")
    logger.addHandler(lines)
    logger.setLevel(lines.level)  # whatever VLLM_LOGGING_LEVEL says
    with tempfile.TemporaryDirectory() as folder:
        engine = LLM(
            _written(files, folder, "model"),
            load_format="dummy",
            skip_tokenizer_init="tokenizer.json" not in files,
            seed=0,
            max_num_seqs=4,
            tensor_parallel_size=world,
            distributed_executor_backend="external_launcher",
            gpu_memory_utilization=0.1,
            **{
                "max_model_len": 256,
                "kv_cache_memory_bytes": 1 << 28,
                **_with_draft_written(options, folder),
            },
        )
        (runner,) = engine.collective_rpc(_runner)
        drafter = _drafter(runner)
        proposals = None if drafter is None else Proposals(drafter)
        answers = decoded(engine.llm_engine, work, replays, proposals)
    ledger = parallel_state._LEDGER
    usages = [] if ledger is None else ledger.usage()
    answer = Answer(
        Made(type(runner).__module__, drafter and type(drafter).__name__),
        answers,
        dict(replays.captured),
        {
            usage.label: {str(name): n for name, n in usage.recorded.items()}
            for usage in usages
        },
        [line for line in lines.said if line.startswith("Graph channels: ")],
        [line for line in lines.said if not line.startswith("Graph channels: ")],
        report(engine),
    )
    # a draft still computes when the last tokens are there; a process that ends with
    # kernels in flight may take along every other one that shares its GPU over MPS.
    # One that fails tells why at once: its peer may wait in a kernel for it.
    engine.llm_engine.engine_core.shutdown()
    return answer


def _runner(worker: Any) -> Any:
    return worker.model_runner


def _drafter(runner: Any) -> Any:
    """V2's speculator, or V1's proposer; None without a draft."""
    return getattr(runner, "speculator", None) or getattr(runner, "drafter", None)


def _make_sums_matter(rank: int) -> None:
    """Have this process make dummy weights with which a wrong sum changes tokens.

    As small as vLLM makes them, what a layer adds to its input is lost in rounding;
    and all shards of a weight are equal, so that a rank need not hear of another's.
    A weight that ranks have whole is the same on all of them: what a draft chooses
    by such alone must be chosen everywhere.
    """
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        VocabParallelEmbedding,
    )
    from vllm.model_executor.model_loader import dummy_loader, weight_utils

    sharded = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)

    # called for every module, a model's before those in it
    def initialize(module: Any, config: Any) -> None:
        seed = 1 + rank if isinstance(module, sharded) and module.tp_size > 1 else 0
        weight_utils.initialize_dummy_weights(
            module, config, low=-0.5, high=0.5, seed=seed
        )

    dummy_loader.initialize_dummy_weights = initialize


def _written(files: Mapping[str, Any], folder: str, name: str) -> str:
    """The path of a model that consists of these files, each of JSON."""
    path = os.path.join(folder, name)
    os.mkdir(path)
    for file_name, content in files.items():
        with open(os.path.join(path, file_name), "w") as file:
            json.dump(content, file)
    return path


def _with_draft_written(options: dict[str, Any], folder: str) -> dict[str, Any]:
    draft = options.get("speculative_config", {})
    if "model" not in draft:
        return options
    model = _written({"config.json": draft["model"]}, folder, "draft")
    return options | {"speculative_config": {**draft, "model": model}}


def decoded(
    engine: Any,
    work: Work,
    replays: Replays | None = None,
    proposals: Proposals | None = None,
) -> Decoded:
    """What an engine makes of its work; what is to be noted beside it is given."""
    from vllm import SamplingParams

    requests = work.requests()
    for n, (request, length) in enumerate(zip(requests, work.lengths, strict=True)):
        engine.add_request(
            str(n),
            request,
            SamplingParams(
                max_tokens=length,
                temperature=0,
                detokenize=False,
                ignore_eos=True,
                logprobs=2 if work.leads else None,
            ),
        )
    tokens: list[list[int]] = [[] for _ in requests]
    leads: list[list[float]] = [[] for _ in requests]
    arrived: list[list[int]] = [[] for _ in requests]
    replayed: Counter[str] = Counter()
    served: list[int] = []
    while engine.has_unfinished_requests() and len(served) < work.steps:
        outputs = engine.step()
        served.append(len(outputs))
        for output in outputs:
            (completion,) = output.outputs
            n = int(output.request_id)
            arrived[n].append(len(completion.token_ids) - len(tokens[n]))
            tokens[n] = list(completion.token_ids)
            leads[n] = [*map(_lead, completion.logprobs or ())]
        if replays is not None:
            replayed.update(replays.take())
    proposed = [] if proposals is None else proposals.take()
    return Decoded(tokens, leads, arrived, served, dict(replayed), proposed)


def _lead(candidates: Mapping[int, Any]) -> float:
    # where tokens tie, there may be a third
    best, second, *_ = sorted(
        (one.logprob for one in candidates.values()), reverse=True
    )
    return float(best - second)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
