# SPDX-License-Identifier: Apache-2.0
"""Whole engines on b12x channels, over 500 steps in which requests come and go.

Beside each the same engine on NCCL: the same tokens, which came in the same steps, by
replays of the same owners' graphs. With a draft, also the tokens of an engine that has
neither drafts nor graphs.
"""

import json
from collections.abc import Callable, Iterable

from tests.distributed.b12x_ranks import SWITCHES
from tests.engines import Answer, Made, Report, Work, generate, unwatched
from tests.v1.owner_rows import DRAFTED, SIZES, SPECULATORS, Row
from vllm.distributed.device_communicators.b12x_pcie_all_reduce import B12xAllReduce
from vllm.distributed.graph_channels.scope import active_channel

STEPS = 500
# More requests than places, of all lengths: batches shrink as some end and grow as
# others come. The first lasts all steps, even if all that is drafted were right.
# No prompt is a single token: one that joins others is padded with drafts, and when
# those are rejected vLLM 0.28.0's multi-module MTP computes position -1 anew.
WORK = Work(
    [[n + 1 + 4 * place for place in range(2 + n % 3)] for n in range(16)],
    (STEPS * (1 + DRAFTED), *(20 + 53 * n % 130 for n in range(15))),
    STEPS,
)
LIMITS = {"max_model_len": 1536, "work": WORK, "deadline": 400}
TARGET = "vllm:target:production"
EAGER, ENCODER = "vllm:eager:allreduce", "vllm:encoder:production"


def production(owners):
    """The channels of these owners."""
    return {f"vllm:{owner}:production" for owner in owners}


def wrong_sums(owner: str) -> Report:
    """A watch that loses every other number of the sums in an owner's graphs."""
    (channel,) = production([owner])
    all_reduce = B12xAllReduce.all_reduce

    def lossy(transport, tensor):
        total = all_reduce(transport, tensor)
        if str(active_channel()) == channel:
            total[..., ::2] = 0  # on each rank alike
        return total

    B12xAllReduce.all_reduce = lossy
    return unwatched()


def see_the_same(b12x, nccl, owners, mode):
    """Have an engine on channels do what it does on NCCL, by graphs of these owners.

    Args:
        b12x, nccl: What their ranks answered.
        owners: Values of exactly those whose graphs communicate.
        mode: vLLM's cudagraph_mode.
    """
    pieces = mode.endswith("PIECEWISE")
    # Without pieces, steps with a prompt are eager; with them, only the first few, in
    # which prompts together are larger than any graph.
    every = STEPS - (len(WORK.prompts) // 2 if pieces else 2 * len(WORK.prompts))
    expected = production(owners)
    for answer, other in zip(b12x, nccl, strict=True):
        # also all that a draft proposed: little of it is accepted, and shows in tokens
        assert answer.decoded == other.decoded
        assert answer.decoded.steps == STEPS
        assert expected == set(answer.decoded.replayed)
        for channel, steps in answer.decoded.replayed.items():
            assert steps >= (1 if channel == ENCODER else every), channel
        # several pieces a size, or one graph
        assert (answer.captured[TARGET] > len(SIZES)) is pieces
        assert answer.captured == other.captured
        (recorded,) = answer.recorded.values()
        assert set(recorded) == expected
        # batches of one, of as many as there are places, and between
        assert {1, 4} < set(answer.decoded.served) - {0}
    # of wrong sums it would not be told if all prompts had the same tokens
    shortest = min(WORK.lengths)
    assert len({tuple(tokens[:shortest]) for tokens in nccl[0].tokens}) > 1
    assert b12x[0].channels() == expected | {EAGER}
    assert [answer.tables for answer in b12x[1:]] == [[]] * (len(b12x) - 1)
    assert [answer.tables for answer in nccl] == [[]] * len(nccl)  # R-A5


def see_made(row: Row, answers: Iterable[Answer]) -> None:
    """Have vLLM make what a row is called after."""
    modules = {
        "V1": "vllm.v1.worker.gpu_model_runner",
        "V2": "vllm.v1.worker.gpu.model_runner",
    }
    speculator = row.speculator and SPECULATORS[row.runner][row.speculator]
    for answer in answers:
        assert answer.made == Made(modules[row.runner], speculator)


def see_lossless(drafted: Iterable[Answer], plain: Iterable[list[list[int]]]) -> None:
    """Have engines with a draft give the tokens of those without, by rank, sooner."""
    for answer, without in zip(drafted, plain, strict=True):
        for tokens, wanted in zip(answer.tokens, without, strict=True):
            # a draft gets further in as many steps
            assert wanted
            assert tokens[: len(wanted)] == wanted
        assert len(answer.decoded.proposed) > STEPS / 2
        assert answer.decoded.accepted > 0


def compare(row: Row) -> None:
    """Run a row on NCCL, on b12x channels, and with neither draft nor graphs."""
    nccl = on_nccl(row)
    b12x = on_b12x(row)
    see_the_same(b12x, nccl, row.owners, row.cudagraph_mode)
    see_made(row, (*b12x, *nccl))
    if row.speculator is not None:
        see_lossless(b12x, _plain_tokens(row))


def on_b12x(row: Row, watch: Callable[[], Report] = unwatched) -> list[Answer]:
    """What a row's engine answers on channels, by rank."""
    return _generate(row, row.environment | SWITCHES, row.engine(), watch=watch)


def on_nccl(row: Row) -> list[Answer]:
    """What it answers on NCCL."""
    return _generate(row, row.environment, row.engine(), disable_custom_all_reduce=True)


def _generate(row, environment, options, **more):
    return generate(2, row.target, environment, **LIMITS, **options, **more)


# Tokens of engines with neither draft nor graphs; rows share them.
_plain: dict[str, list] = {}


def _plain_tokens(row):
    options = row.plain() | {"disable_custom_all_reduce": True}
    key = json.dumps([row.plain_environment, row.target, options], sort_keys=True)
    if key not in _plain:
        answers = _generate(row, row.plain_environment, options)
        _plain[key] = [answer.tokens for answer in answers]
    return _plain[key]
