# SPDX-License-Identifier: Apache-2.0
"""Where each owner's captures ran, and the test that drives them.

``VLLM_LOGGING_LEVEL=ERROR python -m tests.v1.owner_table`` prints it as docs/owners.md;
tests/v1/worker/test_owner_table.py holds the document to it, and it to the tests.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from tests.v1.distributed import test_b12x_encoder as encoder
from tests.v1.owner_rows import (
    MEASURED_TARGETS,
    ROWS,
    SPECULATORS,
    TARGETS,
    V1_DRAFTS,
    V2_AUTOREGRESSIVE,
    V2_ONE_OWNER,
)
from tests.v1.spec_decode.test_speculator_owners import SPECULATORS as V2_RECORDED
from tests.v1.worker.test_v1_capture_loop import PROPOSERS as V1_RECORDED
from verification import receipt
from vllm.distributed.graph_channels.identity import Owner

_RECEIPTS = Path(__file__).parents[2] / "docs/receipts"

_WHERE = "tests/v1/distributed"
_OF_NCCL = "test_an_engine_gives_the_tokens_of_nccl"
TARGETS_TEST = f"{_WHERE}/test_b12x_engines.py::{_OF_NCCL}"
MEASURED_TEST = f"{_WHERE}/test_b12x_measured_engine.py::{_OF_NCCL}"
V1_DRAFTS_TEST = f"{_WHERE}/test_b12x_v1_drafts.py::{_OF_NCCL}_and_of_no_draft"
V2_AUTOREGRESSIVE_TEST = (
    f"{_WHERE}/test_b12x_v2_autoregressive.py::{_OF_NCCL}_and_of_no_draft"
)
V2_ONE_OWNER_TEST = f"{_WHERE}/test_b12x_v2_one_owner.py::{_OF_NCCL}_and_of_no_draft"
ENCODER_TEST = f"{_WHERE}/test_b12x_encoder.py::{_OF_NCCL}"
_TESTS = (
    (TARGETS, TARGETS_TEST),
    (MEASURED_TARGETS, MEASURED_TEST),
    (V1_DRAFTS, V1_DRAFTS_TEST),
    (V2_AUTOREGRESSIVE, V2_AUTOREGRESSIVE_TEST),
    (V2_ONE_OWNER, V2_ONE_OWNER_TEST),
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
        (
            "draft: EAGLE, EAGLE3, MTP, Step3.5 MTP, draft model, DFlash, Gemma4, "
            "extract_hidden_states"
        ),
        "`GPUModelRunner.capture_model` down to the proposer's `dummy_run`",
        (
            "tests/v1/worker/test_v1_capture_loop.py"
            "::test_a_draft_has_its_own_channel_beside_every_graph"
        ),
    ),
    (
        "V1",
        "encoder",
        "`EncoderCudaGraphManager.capture` in the runner's two loops",
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
        "`UBatchWrapper._capture_ubatches`, and replays on two host ranks",
        (
            "tests/distributed/test_stream_roles.py"
            "::test_micro_batches_of_a_graph_reduce_on_their_owners_channel"
        ),
    ),
    (
        "V2",
        "target, FULL, PIECEWISE and breakable PIECEWISE",
        "`CudaGraphManager.capture`, `ModelCudaGraphManager.capture`",
        ("tests/v1/worker/test_gpu_model_runner.py::test_v2_names_the_target"),
    ),
    (
        "V2",
        "draft_prefill, draft_decode: EAGLE, EAGLE3, MTP, Gemma4",
        "`AutoRegressiveSpeculator.capture`",
        (
            "tests/v1/spec_decode/test_speculator_owners.py"
            "::test_every_graph_of_a_v2_speculator_runs_on_its_channel"
        ),
    ),
    (
        "V2",
        "multi_module_mtp",
        "`MultiModuleMTPSpeculator.capture`",
        (
            "tests/v1/spec_decode/test_speculator_owners.py"
            "::test_every_graph_of_a_v2_speculator_runs_on_its_channel"
        ),
    ),
    (
        "V2",
        "draft_query: DFlash, DFlash2",
        "`DFlashSpeculator.capture`",
        (
            "tests/v1/spec_decode/test_speculator_owners.py"
            "::test_every_graph_of_a_v2_speculator_runs_on_its_channel"
        ),
    ),
    (
        "V2",
        "dspark",
        "`DSparkSpeculator.capture`",
        (
            "tests/v1/spec_decode/test_speculator_owners.py"
            "::test_every_graph_of_a_v2_speculator_runs_on_its_channel"
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

# Columns of the table of all combinations: vLLM's cudagraph_mode, and what makes its
# pieces.
MODES = (
    "FULL_DECODE_ONLY",
    "FULL",
    "breakable PIECEWISE",
    "breakable FULL_AND_PIECEWISE",
    "compiled PIECEWISE",
    "compiled FULL_AND_PIECEWISE",
)
NO_DRAFT = "no draft"
FAILED = "**failed**"

# What a cell says where no engine ran.
SAME, WANTING, SILENT, UNCAPTURED, EAGER, REFUSED = (
    f"not run, *{letter}*" for letter in "abcdef"
)
UNRECEIPTED = "no receipt"

_REASONS = """\
Recorders, on the CPU: whether the test above walks the class, in every mode and over
several sizes. Engines: **GPU** where a receipt says so, "no receipt" where none does of
an engine there is, and else why there is none:

- *a*: the same methods open the same scopes in every mode, which only tells the sizes
  and the pieces that are captured in them; there is an engine in another mode.
- *b*: its target wants an image processor's files, or no tiny one was made.
- *c*: silent, it records no collective and has no channel. On V2 so are all drafts, but
  a prefill's, with PIECEWISE graphs alone.
- *d*: its proposals are captured by nobody; the target is as without a draft.
- *e*: a V1 draft has piecewise graphs or none, and has none here: its scope opens all
  the same, with a channel that no graph uses. (Gemma4 has graphs that choose tokens,
  captured as it loads, in no scope: they hold no collective.)
- *f*: vLLM 0.28.0's V2 runner refuses it.
"""

_V1_UNCAPTURED = {"n-gram", "n-gram on the GPU", "suffix", "Medusa", "custom class"}
_V2_FULL_ONLY = {"multi-module MTP", "DFlash", "DFlash2", "DSpark"}
_V2_REFUSED = "draft model"


def cell(runner: str, speculator: str, mode: str) -> str:
    """Where a combination ran, and why not on a GPU."""
    name = f"{_combination(runner, speculator)}, {mode}"
    if name in ran():
        return FAILED if ran()[name].startswith(FAILED) else "**GPU**"
    if name in ROWS:
        return UNRECEIPTED
    if runner == "V2":
        return _v2_reason(speculator, mode)
    if speculator in _V1_UNCAPTURED:
        return UNCAPTURED
    if speculator == "extract_hidden_states":
        return SILENT
    if speculator != NO_DRAFT and mode.startswith("FULL"):
        return EAGER
    return WANTING if speculator in ("Gemma4", "Step3.5 MTP") else SAME


def _v2_reason(speculator: str, mode: str) -> str:
    if speculator == _V2_REFUSED:
        return REFUSED
    if mode.endswith(" PIECEWISE") and speculator in _V2_FULL_ONLY:
        return SILENT
    return WANTING if speculator == "Gemma4" else SAME


def _combination(runner: str, speculator: str) -> str:
    return runner if speculator == NO_DRAFT else f"{runner}, {speculator}"


def combinations() -> Iterator[Sequence[str]]:
    """Runner, speculator, whether recorders ran, and a cell for each of ``MODES``."""
    walked = {cls.__name__ for cls in (*V1_RECORDED, *V2_RECORDED)}
    for runner, speculators in SPECULATORS.items():
        made = {NO_DRAFT: "", **speculators}
        if runner == "V2":
            made[_V2_REFUSED] = ""
        for name, cls in made.items():
            recorded = "yes" if name == NO_DRAFT or cls in walked else "no"
            yield runner, name, recorded, *(cell(runner, name, mode) for mode in MODES)


# Other combinations without an engine here, and why.
NO_ENGINE = (
    (
        "V1, DBO",
        "vLLM wants data parallelism, and DeepEP's or NIXL's kernels for experts",
    ),
    ("V2, multi-module MTP on MLA", "TRITON_MLA captures no graphs beside a draft"),
    (
        "V2, multi-module MTP, prompts of one token",
        "vLLM 0.28.0's own engine, on NCCL too, takes position -1 and ends",
    ),
    ("encoder graphs, other modes", "the target's mode does not touch the encoder's"),
    ("V2 on the CPU", "vLLM wants Triton for the V2 runner"),
)

# Owners without an engine, and why.
UNCAPTURED_OWNERS = {
    Owner.CONTEXT_KV: "vLLM 0.28.0 captures no graphs of context keys and values"
}


_BAD = {receipt.Outcome.FAILED, receipt.Outcome.HUNG}


@cache
def ran() -> dict[str, str]:
    """Engines that ran on somebody's GPUs: the last receipt that has each, and how.

    A row that has moved to another test ran only where that one did.
    """
    names = {f"{test}[{name}]": name for name, _, test in _driven()}
    found = {path: receipt.read(path) for path in _RECEIPTS.glob("*.json")}
    last: dict[str, str] = {}
    for path, made in sorted(found.items(), key=lambda item: item[1].started):
        where = f"[{made.started[:10]}](receipts/{path.name})"
        for test in made.tests:
            if test.id in names and test.outcome is receipt.Outcome.PASSED:
                last[names[test.id]] = where
            elif test.id in names and test.outcome in _BAD:
                last[names[test.id]] = f"{FAILED} {where}"
    return last


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
  that warms up and captures, or `with owner_scope(Owner.<NAME>, by=manager)` around the
  call, as V1's runner does for its encoder.

That is enough for a channel of its own, made when its scope opens. Tests import what is
installed: `make install` first, and `.venv/bin/python` for what follows. They then ask
for the rest, each where it is missing:

- Its name in `tests/distributed/test_graph_channels_identity.py`, which lists all.
- `vllm/v1/worker/graph_owners.py`, under the configurations that have it: channels
  listed there are made together, after memory was measured, and their bytes are taken
  off the KV cache's. `tests/v1/worker/test_graph_owners.py` looks at every speculator.
- A line in `RECORDED` of `tests/v1/owner_table.py`, and an engine in
  `tests/v1/owner_rows.py`; or, where none can run, a reason in `UNCAPTURED_OWNERS`.
- The patched file in some test's `COVERS`; then `python -m series check --update`
  writes the receipt and `python -m series patches` prints docs/patches.md, as
  `python -m tests.v1.owner_table` does this page.

No test asks for its line in docs/serving.md.

One test: `tests/v1/cudagraph/test_new_owner.py` is the pattern. It has the owner's own
`capture` run and asks which channel was entered. No test asks for it by itself:
`tests/v1/spec_decode/test_speculator_owners.py` walks V2's speculators and graph
managers and V1's proposers on the common base, and fails for one that it does not know;
proposers beside that base, such as Medusa's, it does not see.

## Two owners, one name

Their graphs would be in each other's buffers at replay, so the second is refused when
it captures, by an agreement of the ranks, which run the same code
(`tests/v1/distributed/test_owner_isolation.py`, on the host transport and on b12x's
pools). A rank that is alone with a second owner, where the others go on with the first,
is refused alone, and then misses their votes. A name is free again once a rollback has
freed its channel. An owner that captures anew while its first graphs live says so with
`ChannelId(owner, phase, generation=2)`. Inner owners come again and again within one
outer scope, once a batch size; there the object that captures is told from another's.
Where there is no transport, nothing is refused.

What only code can keep to, and a fork's or a plugin's must: an owner that opens no
scope inside another's is not seen. It records on the outer owner's channel, as a
proposer does that replaces `dummy_run` without the decorator (tests walk vLLM's own).
Blocks of `with owner_scope(...)` with the same `by`, or without any, are one claimant.

## Captures on the CPU

vLLM's own methods, with recorders for models, graphs and transports.
"""

_ENGINES = """
## Whole engines

Two ranks, dummy weights, b12x on channels. Over 500 steps, in which 16 requests come
and go, each is compared with the same engine on NCCL: the same tokens in the same
steps, and all that its draft proposed, accepted or not (some was, of every kind);
graphs of exactly these owners replayed, in nearly all steps (an encoder's, with every
image); a table of exactly their channels and the eager lane. Drafts also give the
tokens of an engine with neither drafts nor graphs. Other tests make the sums wrong in
the graphs of one owner, and ask for other tokens or proposals (test_b12x_wrong_sums.py;
for the encoder, test_b12x_encoder.py). That owners are apart is shown by what was
recorded on each channel, and by replays at once in test_b12x_fused_all_reduce.py, not
by tokens.

Where one ran, the receipt says on what, and of which sources (`tree`). What
2026-12-03-h200-owners.json says was left is the MPS server's own memory, as was seen
after the run. "V1, compiled FULL_AND_PIECEWISE" measures memory, and failed in the
receipt before, of that day too, because others ran beside it. It has a file of its own
since, and passed by itself, in a run whose machine was lost before it wrote a receipt.
"""

_COMBINATIONS = """
Runner, speculator and graph mode together:
"""

_MISSING = """
Beside these:

| combination | why |
|---|---|
"""

_LEFT = """
## Known limits

- Models without a KV cache never measure memory: their channels are made when scopes
  open, and not counted.
- A channel that is prepared before a checkpoint and captured on after it serves that
  stream for good, also after the rollback.
- `auxiliary_stream` marks vanish from what `torch.compile` traces; a test watches the
  one marked model that might be compiled.
"""


def engines() -> Iterator[Sequence[str]]:
    """Of each whole engine: its name, its owners, where it ran, and its test."""
    for name, owners, test in _driven():
        where = ran().get(name, UNRECEIPTED)
        yield name, ", ".join(sorted(owners)), where, f"`{test}`"


def _driven() -> Iterator[tuple[str, Iterable[str], str]]:
    for rows, test in _TESTS:
        for name, row in rows.items():
            yield name, row.owners, test
    for name in encoder.ENGINES:
        yield name, encoder.OWNERS, ENCODER_TEST


def _table(*rows: Sequence[str]) -> str:
    first, *others = (f"| {' | '.join(row)} |\n" for row in rows)
    return f"{first}{'|---' * len(rows[0])}|\n{''.join(others)}"


def document() -> str:
    """docs/owners.md."""
    recorded = [(*cells, f"`{test}`") for *cells, test in RECORDED]
    owners = [(owner.value, why) for owner, why in UNCAPTURED_OWNERS.items()]
    missing = "".join(f"| {name} | {why} |\n" for name, why in (*owners, *NO_ENGINE))
    return "".join(
        [
            _INTRODUCTION,
            "\n",
            _table(("runner", "owner", "captured by", "test"), *recorded),
            _ENGINES,
            "\n",
            _table(("engine", "owners", "ran", "test"), *engines()),
            _COMBINATIONS,
            "\n",
            _table(("runner", "speculator", "recorders", *MODES), *combinations()),
            "\n",
            _REASONS,
            _MISSING,
            missing,
            _LEFT,
        ]
    )


if __name__ == "__main__":
    print(document(), end="")
