# SPDX-License-Identifier: Apache-2.0
"""What runner and worker do about graph channels while memory is measured.

The order, on every rank. Steps marked * wait for the others, under a deadline;
without a transport none of ours does anything:

1. the model is run for its peak memory; no graphs yet
2. V1 only: a checkpoint; channels for profiling *; graphs are captured and
   measured; graphs destroyed, their pools restored; devices idle, channels
   rolled back *; the profiling KV cache freed
3. channels for production *, and their bytes off what is left for the KV cache

The channels of step 3 are made outside any CuMem pool: what is made in one dies
when the engine sleeps.
"""

import gc
import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm.distributed.graph_channels.identity import ChannelId, Phase, catalogue
from vllm.distributed.graph_channels.ledger import Ledger, with_transports
from vllm.distributed.parallel_state import get_graph_channels, get_pp_group
from vllm.logger import init_logger
from vllm.model_executor.models.interfaces import supports_encoder_cudagraph
from vllm.v1.worker.graph_owners import GraphOwners, Stage, graph_owners

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

logger = init_logger(__name__)

# Of the memory for the KV cache; more is worth a second look at the cutoffs.
_LARGE_SHARE = 0.02


class DisposableCapture:
    """The channels of graphs that are captured to be measured and thrown away.

    Made before anything else changes; then ``prepare``, the captures, and
    ``roll_back`` in a ``finally``. All ranks of a group do so alike.

    Args:
        runner: The V1 runner that captures.

    Raises:
        RuntimeError: A capture scope is open.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        # An exception that the caller is handling is not the capture's.
        self._of_the_caller = sys.exception()
        self._ledger = with_transports(get_graph_channels())
        if self._ledger is not None:
            self._checkpoint = self._ledger.checkpoint()

    def prepare(self) -> None:
        """Make all channels for profiling, before memory is sampled. Collective.

        After the checkpoint, so that they go with it, and in one step, so that
        none is made between two samples.
        """
        if self._ledger is not None:
            owners = _owners(self._runner, v2_runner=False)
            _prepare(self._ledger, owners, Phase.PROFILE)

    def roll_back(self) -> None:
        """Free what was made since the checkpoint. Collective; call in ``finally``.

        The runner has let go of the graphs and restored their pools. After a
        return, waiting for the device is safe.

        Raises:
            BaseException: What the capture raised, if a rank did not come: a
                peer may be inside a kernel for ever, so the rest of the
                ``finally``, which waits for the device, must not run.
            GroupClosed, Refused, DeadlineMissed, Exception: The rollback failed,
                after a capture that did not.
        """
        if self._ledger is None:
            return
        failure = sys.exception()
        if failure is self._of_the_caller:
            failure = None
        self._destroy_graphs_of(failure)
        self._ledger.rollback(self._checkpoint, failure)
        if failure is not None and self._ledger.lost is not None:
            raise failure

    def _destroy_graphs_of(self, failure: BaseException | None) -> None:
        """Drop what still refers to graphs that the runner let go of.

        That is garbage in cycles, and the variables of the calls that a failed
        capture left, among them the graph that it was capturing.
        """
        while failure is not None and failure is not self._of_the_caller:
            traceback.clear_frames(failure.__traceback__)
            failure = failure.__context__
        gc.collect()


def reserves_graph_channels(
    determine: Callable[["Worker"], int],
) -> Callable[["Worker"], int]:
    """Let a worker make its channels when it has measured memory.

    What the decorated method returns, in whatever way, has their bytes taken off;
    the same on both runners. With ``kv_cache_memory_bytes`` too: as vLLM does
    with what its multimodal frontend reserves, the number given stands for the
    KV cache and for what is taken off it, so that memory use is what was asked for.

    A rank on which the method fails lets the others fail with its error, which
    would else wait for it when they make theirs.
    """

    @wraps(determine)
    def determine_and_reserve(worker: "Worker") -> int:
        ledger = with_transports(get_graph_channels())
        if ledger is None:
            return determine(worker)
        try:
            available = determine(worker)
        except BaseException as failure:
            _tell(ledger, worker, failure)
            raise
        owners = _owners(worker.model_runner, v2_runner=worker.use_v2_model_runner)
        channels = _prepare(ledger, owners, Phase.PRODUCTION)
        return available - _say_reserved(channels, available)

    return determine_and_reserve


def _owners(runner: Any, *, v2_runner: bool) -> GraphOwners:
    pipeline = get_pp_group()
    config = runner.vllm_config
    return graph_owners(
        config,
        Stage(is_first=pipeline.is_first_rank, is_last=pipeline.is_last_rank),
        v2_runner=v2_runner,
        encoder_has_graphs=bool(
            config.compilation_config.cudagraph_mm_encoder
            and runner.supports_mm_inputs
            and supports_encoder_cudagraph(runner.get_model())
        ),
    )


def _prepare(
    ledger: Ledger, owners: GraphOwners, phase: Phase
) -> Mapping[ChannelId, int]:
    """Make the channels of a phase; the bytes of each on this rank."""
    ledger.silence(owners.silent)
    channels = catalogue(owners.communicating, phase)
    if channels:
        ledger.prepare(channels)
    held = ledger.inventory().values()
    return {
        channel: sum(names.get(str(channel), 0) for names in held)
        for channel in channels
    }


def _tell(ledger: Ledger, worker: "Worker", failure: BaseException) -> None:
    """Tell the peers of a failure, at the step that they are about to take."""
    try:
        owners = _owners(worker.model_runner, v2_runner=worker.use_v2_model_runner)
        channels = catalogue(owners.communicating, Phase.PRODUCTION)
        if channels:  # else the others come to no step together
            ledger.refuse(channels, f"{type(failure).__name__}: {failure}")
    except Exception as error:
        failure.add_note(f"Other ranks could not be told: {error}")


def _say_reserved(channels: Mapping[ChannelId, int], available: int) -> int:
    total = sum(channels.values())
    if total:
        large = total > _LARGE_SHARE * available
        logger.log(
            logging.WARNING if large else logging.INFO,
            "Graph channels take %s of the %s for the KV cache, which leaves %s: %s",
            _mebibytes(total),
            _mebibytes(available),
            _mebibytes(available - total),
            ", ".join(f"{name} {_mebibytes(n)}" for name, n in channels.items()),
        )
    return total


def _mebibytes(count: int) -> str:
    return f"{count / (1 << 20):.2f} MiB"
