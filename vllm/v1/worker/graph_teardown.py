# SPDX-License-Identifier: Apache-2.0
"""The first step of a teardown: no graph is left that uses a communicator.

Channels may be closed only when no graph uses them, and NCCL waits, for seconds,
for the last graph that a communicator's operations were captured into.
"""

import gc
from collections.abc import Iterator
from typing import Any

import torch

from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.logger import init_logger
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu_ubatch_wrapper import UBatchWrapper

logger = init_logger(__name__)

# What a runner of either kind holds that may hold graphs, beside itself.
_PARTS = ("drafter", "speculator", "encoder_runner")


def drop_graphs(runner: Any) -> None:
    """Drop the graphs of all owners: the target, drafts and encoder. Local.

    They are taken out of what holds them, for something else may hold that: a
    caught exception's frames hold the runner.

    Args:
        runner: Of either kind, whole or half-built.
    """
    # As models and drafts may be compiled in pieces, nobody else knows these.
    CUDAGraphWrapper.clear_all_graphs()
    BreakableCUDAGraphWrapper.clear_all_graphs()
    for held in _held_by(runner):
        match held:
            case CudaGraphManager():
                held.graphs.clear()
            case EncoderCudaGraphManager():
                held.clear()
            case UBatchWrapper():
                held.clear_graphs()


def destroy_leftover_graphs() -> None:
    """Destroy the graphs that somebody still refers to. Local.

    Such as the frames of a failed capture. For a process that is a worker and
    nothing else: it destroys every graph that there is.
    """
    gc.unfreeze()  # the worker has frozen what it had when it was ready
    gc.collect()
    for found in gc.get_objects():
        if issubclass(type(found), torch.cuda.CUDAGraph):
            try:
                found.reset()
            except RuntimeError as error:  # the device may be in error for good
                logger.debug("A graph was not destroyed: %s", error)


def _held_by(runner: Any) -> Iterator[object]:
    state = getattr(runner, "model_state", None)
    for owner in (runner, state):
        for part in (owner, *(getattr(owner, name, None) for name in _PARTS)):
            yield from getattr(part, "__dict__", {}).values()
