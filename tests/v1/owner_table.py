# SPDX-License-Identifier: Apache-2.0
"""Where each owner's captures ran, and the test that drives them.

``VLLM_LOGGING_LEVEL=ERROR python -m tests.v1.owner_table`` prints it as docs/owners.md;
tests/v1/worker/test_owner_table.py holds the document to it, and it to the tests.
"""

from collections.abc import Iterable, Iterator, Sequence

from tests.v1.distributed import test_b12x_encoder as encoder
from tests.v1.distributed.test_b12x_engines import ENGINES
from tests.v1.owner_rows import ROWS

ENGINES_TEST = (
    "tests/v1/distributed/test_b12x_engines.py::test_an_engine_gives_the_tokens_of_nccl"
)
ROWS_TEST = (
    "tests/v1/distributed/test_b12x_owners.py"
    "::test_an_engine_gives_the_tokens_of_nccl_and_of_no_draft"
)

ENCODER_TEST = (
    "tests/v1/distributed/test_b12x_encoder.py::test_an_engine_gives_the_tokens_of_nccl"
)

# What is captured by which of vLLM's methods, and the test that calls it.
RECORDED = (
    (
        "V1",
        "target",
        "`GPUModelRunner.profile_cudagraph_memory`, `capture_model`",
        (
            "tests/v1/worker/test_gpu_model_runner.py"
            "::test_v1_profile_and_production_differ"
        ),
    ),
    (
        "V1",
        "draft: EAGLE, EAGLE3, MTP, draft model, DFlash, Gemma4",
        "`GPUModelRunner.capture_model` down to the proposer's `dummy_run`",
        (
            "tests/v1/worker/test_v1_capture_loop.py"
            "::test_a_draft_has_its_own_channel_beside_every_graph"
        ),
    ),
    (
        "V1",
        "encoder",
        "`EncoderCudaGraphManager.capture`",
        (
            "tests/v1/worker/test_encoder_runner.py"
            "::test_on_v1_it_captures_inside_the_targets_scope"
        ),
    ),
    (
        "V1",
        "target, breakable graphs",
        "`BreakableCUDAGraphWrapper` in `capture_model`",
        (
            "tests/v1/cudagraph/test_breakable_cudagraph.py"
            "::test_production_captures_anew_and_keeps_its_graphs"
        ),
    ),
    (
        "V1",
        "target, DBO micro-batches",
        "`UBatchWrapper._capture_ubatches`",
        (
            "tests/distributed/test_stream_roles.py"
            "::test_micro_batches_are_marked_in_both_ways_to_run"
        ),
    ),
    (
        "V2",
        "target, FULL, PIECEWISE and breakable PIECEWISE",
        "`CudaGraphManager.capture`, `ModelCudaGraphManager.capture`",
        (
            "tests/v1/cudagraph/test_cudagraph_manager.py"
            "::test_warm_up_and_capture_run_in_the_owners_scope"
        ),
    ),
    (
        "V2",
        "draft_prefill, draft_decode: EAGLE, EAGLE3, MTP, Gemma4",
        "`AutoRegressiveSpeculator.capture`",
        (
            "tests/v1/spec_decode/test_speculator_owners.py"
            "::test_a_v2_speculators_graphs_are_its_own"
        ),
    ),
    (
        "V2",
        "multi_module_mtp",
        "`MultiModuleMTPSpeculator.capture`",
        (
            "tests/v1/spec_decode/test_speculator_owners.py"
            "::test_a_v2_speculators_graphs_are_its_own"
        ),
    ),
    (
        "V2",
        "draft_query: DFlash, DFlash2",
        "`DFlashSpeculator.capture`",
        (
            "tests/v1/spec_decode/test_dflash_cudagraph_lifetime.py"
            "::test_v2_graphs_are_captured_once_and_stay"
        ),
    ),
    (
        "V2",
        "dspark",
        "`DSparkSpeculator.capture`",
        (
            "tests/v1/spec_decode/test_dflash_cudagraph_lifetime.py"
            "::test_v2_graphs_are_captured_once_and_stay"
        ),
    ),
    (
        "V2",
        "encoder",
        "`EncoderRunner.capture`",
        (
            "tests/v1/worker/test_encoder_runner.py"
            "::test_on_v2_it_opens_a_scope_of_its_own"
        ),
    ),
    (
        "V2",
        "context_kv, of a made-up speculator",
        "`CudaGraphManager.capture`, and replays on two ranks of the host transport",
        (
            "tests/v1/cudagraph/test_new_owner.py"
            "::test_its_graphs_replay_beside_others_in_any_order"
        ),
    ),
)

# Combinations without an engine here, and why.
NO_ENGINE = (
    ("V1, DBO", "wants data parallelism and experts"),
    ("V1, Gemma4; V2, Gemma4", "its target wants an image processor's files"),
    ("V1, extract_hidden_states", "silent: it records no collective, has no channel"),
    ("V2, multi-module MTP on MLA", "TRITON_MLA captures no graphs beside a draft"),
    (
        "V2, multi-module MTP, prompts of one token",
        "vLLM 0.28.0's own engine, on NCCL too, takes position -1 and ends",
    ),
    ("V2, draft model", "vLLM 0.28.0's V2 runner refuses it"),
    ("V2, drafts with PIECEWISE graphs alone", "silent, but for the prefill"),
    ("V2 on the CPU", "vLLM wants Triton for the V2 runner"),
)

_ON_GPU = "GPU: NCCL's tokens, these owners"
_DRAFTS = "GPU: NCCL's tokens and those of no draft, these owners"
# Where the engines ran.
RAN = {
    "V1, FULL decode": _ON_GPU,
    "V2, FULL decode": _ON_GPU,
    "V1, breakable piecewise, draft model": _ON_GPU,
    "V2, breakable piecewise": _ON_GPU,
    "V1, compiled, profiled": _ON_GPU,
    "V1, EAGLE, breakable PIECEWISE": _DRAFTS,
    "V1, EAGLE3, breakable PIECEWISE": _DRAFTS,
    "V1, draft model, breakable PIECEWISE": _DRAFTS,
    "V2, EAGLE, FULL_DECODE_ONLY": _DRAFTS,
    "V2, EAGLE3, breakable FULL_AND_PIECEWISE": _DRAFTS,
    "V2, MTP, FULL_DECODE_ONLY": _DRAFTS,
    "V2, multi-module MTP, FULL_DECODE_ONLY": _DRAFTS,
    "V2, DFlash, FULL_DECODE_ONLY": _DRAFTS,
    "V2, DFlash2, FULL_DECODE_ONLY": _DRAFTS,
    "V2, DSpark, FULL_DECODE_ONLY": _DRAFTS,
    "V1, encoder graphs": _ON_GPU,
    "V2, encoder graphs": _ON_GPU,
}

_INTRODUCTION = """\
# Owners of graphs

<!-- Written by
`VLLM_LOGGING_LEVEL=ERROR python -m tests.v1.owner_table > docs/owners.md`. -->

An owner is who captures graphs; the graphs of one communicate on a channel that no
other's use. `Owner` in `vllm/distributed/graph_channels/identity.py` lists them.

## A new owner

One line in `Owner`, and its name where its graphs are captured, in a patch of
`series/patches/`:

- In a scope of its own, as V2's managers do:
  `manager.capture(..., channel_id=ChannelId(Owner.<NAME>, Phase.PRODUCTION))`.
- Inside another's scope, as V1's drafts do: `@owner_scope(Owner.<NAME>)` on the method
  that warms up and captures.

That is enough for a channel of its own, made when its scope opens. Tests import what is
installed: `make install` first, and `.venv/bin/python` for what follows. They then ask
for the rest, each where it is missing:

- Its name in `tests/distributed/test_graph_channels_identity.py`, which lists all.
- `vllm/v1/worker/graph_owners.py`, under the configurations that have it: channels
  listed there are made together, after memory was measured, and their bytes are taken
  off the KV cache's. `tests/v1/worker/test_graph_owners.py` looks at every speculator.
- A line in `RECORDED` of `tests/v1/owner_table.py` and an engine in
  `tests/v1/owner_rows.py`.
- The patched file in some test's `COVERS`; then `python -m series check --update`
  writes the receipt and `python -m series patches` prints docs/patches.md.

No test asks for its line in docs/serving.md.

One test: `tests/v1/cudagraph/test_new_owner.py` is the pattern. It has the owner's own
`capture` run and asks which channel was entered.
`tests/v1/spec_decode/test_speculator_owners.py` walks all speculators and graph
managers, and fails for one that it does not know.

## Two owners, one name

Their graphs would be in each other's buffers at replay, so the second is refused when
it captures, on every rank (`tests/v1/distributed/test_owner_isolation.py`, on the host
transport and on b12x's pools). A name is free again once a rollback has freed its
channel. An owner that captures anew while its first graphs live says so with
`ChannelId(owner, phase, generation=2)`. Inner owners come again and again within one
outer scope, once a batch size, so two of them under one name are not told apart at run
time; a test counts them instead.

## Captures on the CPU

vLLM's own methods, with recorders for models, graphs and transports.
"""

_ENGINES = """
## Whole engines

Two ranks on one H200, most over MPS, dummy weights, b12x on channels; each is compared
with the same engine on NCCL, and its table of channels with the owners. Those with
drafts also take 500 steps and are compared with the engine without a draft. Those with
encoder graphs are asked about images, and their graphs take every one.

What ran was seen by whoever ran it and is written down by hand; those runs that left a
receipt are in [verified.md](verified.md).
"""

_MISSING = """
No engine:

| combination | why |
|---|---|
"""

_LEFT = """
## Known limits

- Elastic expert parallelism, and models without a KV cache, never measure memory: their
  channels are made when scopes open, and not counted.
- A channel that is prepared before a checkpoint and captured on after it serves that
  stream for good, also after the rollback.
- `auxiliary_stream` marks vanish from what `torch.compile` traces; a test watches the
  one marked model that might be compiled.
"""


def engines() -> Iterator[Sequence[str]]:
    """Of each whole engine: its name, its owners, where it ran, and its test."""
    for name, (_, _, owners) in ENGINES.items():
        yield _engine(name, (owner.split(":")[1] for owner in owners), ENGINES_TEST)
    for name, row in ROWS.items():
        yield _engine(name, row.owners, ROWS_TEST)
    for name in encoder.ENGINES:
        yield _engine(name, encoder.OWNERS, ENCODER_TEST)


def _engine(name: str, owners: Iterable[str], test: str) -> Sequence[str]:
    return name, ", ".join(sorted(owners)), RAN.get(name, "not run"), f"`{test}`"


def _table(*rows: Sequence[str]) -> str:
    first, *others = (f"| {' | '.join(row)} |\n" for row in rows)
    return f"{first}{'|---' * len(rows[0])}|\n{''.join(others)}"


def document() -> str:
    """docs/owners.md."""
    recorded = [(*cells, f"`{test}`") for *cells, test in RECORDED]
    missing = "".join(f"| {name} | {why} |\n" for name, why in NO_ENGINE)
    return "".join(
        [
            _INTRODUCTION,
            "\n",
            _table(("runner", "owner", "captured by", "test"), *recorded),
            _ENGINES,
            "\n",
            _table(("engine", "owners", "ran", "test"), *engines()),
            _MISSING,
            missing,
            _LEFT,
        ]
    )


if __name__ == "__main__":
    print(document(), end="")
