# SPDX-License-Identifier: Apache-2.0
"""Does a backend serve a group of ranks on this machine? Tried, as an engine would.

Ranks are forked that call what an engine's workers call, in the same order and
with the switches that are set here; so they come to what an engine comes to.
"""

import inspect
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, unique

import torch
import torch.distributed as dist
from torch.distributed import FileStore, ProcessGroup

import vllm.envs as envs
from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import b12x_gate
from vllm.distributed.device_communicators.b12x_transports import open_b12x_all_reduce
from vllm.distributed.device_communicators.channel_transports import (
    asked_for,
    open_host_all_reduce,
)
from vllm.distributed.device_communicators.shm_broadcast import (
    MessageQueue,
    check_shm_free_space,
)
from vllm.distributed.graph_channels.processes import in_ranks
from vllm.distributed.graph_channels.switches import Backend, read_switches
from vllm.distributed.graph_channels.together import Refused
from vllm.platforms import current_platform
from vllm.utils.ompmultiprocessing import OMPProcessManager

_SWITCH = "VLLM_PCIE_ALLREDUCE_BACKEND"
# A trial is a few steps, each with the deadline of start-up; CUDA and NCCL start
# before the first, which takes longer than either on a busy machine.
_STEPS, _STARTING_SECONDS = 6, 60.0


@unique
class Standing(Enum):
    """What an engine does if it is told to use a backend."""

    USES = "uses it"
    GOES_ON = "goes on without graph channels"
    ENDS = "ends with an error"


@dataclass(frozen=True)
class Trial:
    """What became of a backend.

    Attributes:
        backend: Which.
        standing: What an engine does with it.
        reason: Why not; empty if it is used.
    """

    backend: Backend
    standing: Standing
    reason: str = ""


@dataclass
class _Communicator:
    """What transports are made from, of a group of all ranks there are."""

    ranks: Sequence[int]
    rank_in_group: int
    world_size: int
    device: torch.device
    device_group: ProcessGroup
    unique_name: str = "tp:0"


def try_backend(backend: Backend, world: int) -> Trial:
    """Let ranks of their own open a backend's all-reduce, self-test included.

    Args:
        backend: What the switch would say; the other switches stay as they are.
        world: How many ranks, one a GPU where the platform has GPUs.
    """
    with _chosen(backend):
        try:
            seconds = _STEPS * read_switches().startup_seconds + _STARTING_SECONDS
        except ValueError as refusal:
            return Trial(backend, Standing.ENDS, str(refusal))
        answers = in_ranks(
            world, lambda rank, store: _open(backend, rank, world, store), seconds
        )
    for answer in answers:
        if answer.value is None:
            return Trial(backend, Standing.ENDS, answer.error or "")
    trials = [answer.value for answer in answers if answer.value is not None]
    unlike = [trial for trial in trials if trial.standing is not Standing.USES]
    return max(
        unlike, key=lambda trial: trial.standing is Standing.ENDS, default=trials[0]
    )


@contextmanager
def _chosen(backend: Backend) -> Iterator[None]:
    """Have the switch say so, for the ranks that are forked meanwhile."""
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = backend.value
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = before


def _open(backend: Backend, rank: int, world: int, store: str) -> Trial:
    """What one rank comes to. All ranks call it."""
    logging.disable()  # what is found out is said once, by whoever asks
    try:
        parallel_state.start_graph_channels()
        _demand_room(world)
        device = _device(rank, world)
        if backend is not Backend.CPP and world > 1:
            _open_all_reduce(backend, rank, world, device, store)
    except (Refused, b12x_gate.Unavailable) as refusal:
        return Trial(backend, Standing.GOES_ON, str(refusal))
    except (RuntimeError, ValueError) as failure:
        return Trial(backend, Standing.ENDS, str(failure))
    if backend is not Backend.CPP and world == 1:
        return Trial(backend, Standing.GOES_ON, "one rank has nobody to reduce with")
    return Trial(backend, Standing.USES)


def _demand_room(world: int) -> None:
    """Ask for what an executor makes before there are groups: queues, bound threads.

    Raises:
        RuntimeError: Shared memory is too small for a queue, or there are not the
            cores that the workers would be bound to.
    """
    on_cpu = current_platform.is_cpu()
    if world > 1 or on_cpu:  # else the one worker is the engine's own process
        queue = inspect.signature(MessageQueue).parameters
        chunk = queue["max_chunk_bytes"].default  # of answers; the other way a switch
        chunk = max(chunk, envs.VLLM_MQ_MAX_CHUNK_BYTES_MB << 20)
        check_shm_free_space(chunk * queue["max_chunks"].default)
    if on_cpu:
        _demand_cores(world)


def _demand_cores(world: int) -> None:
    """Divide the cores among workers, as an executor on the CPU does."""
    parallel = ParallelConfig(
        tensor_parallel_size=world, distributed_executor_backend="mp"
    )
    try:
        OMPProcessManager(VllmConfig(parallel_config=parallel))
    except AssertionError as failure:
        raise RuntimeError(
            f"{failure} VLLM_CPU_OMP_THREADS_BIND says how, as '0|1' does for two ranks"
        ) from failure


def _open_all_reduce(
    backend: Backend, rank: int, world: int, device: torch.device, store: str
) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        current_platform.dist_backend,
        store=FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=_STARTING_SECONDS),
    )
    group = dist.group.WORLD
    communicator = _Communicator(list(range(world)), rank, world, device, group)
    place = asked_for(communicator, backend)
    assert place is not None  # this rank has just been told to use it
    if backend is Backend.HOST:
        open_host_all_reduce(place)
    else:
        open_b12x_all_reduce(communicator, place)


def _device(rank: int, world: int) -> torch.device:
    """Where an engine puts a rank: on a GPU of its own.

    Raises:
        RuntimeError: There are not as many.
    """
    if current_platform.is_cuda() and world > (there := torch.cuda.device_count()):
        raise RuntimeError(
            f"{world} ranks want a GPU each and {there} can be seen; ask for fewer "
            "ranks, or see what CUDA_VISIBLE_DEVICES leaves out"
        )
    return torch.device(current_platform.device_type, rank)
