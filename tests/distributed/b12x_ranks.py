# SPDX-License-Identifier: Apache-2.0
"""A rank with b12x's all-reduce on channels, as a vLLM process on a GPU has it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tests import gpus
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.b12x_pcie_all_reduce import B12xAllReduce
from vllm.distributed.graph_channels.identity import ChannelId, Owner, Phase
from vllm.distributed.graph_channels.ledger import Ledger
from vllm.platforms import current_platform

SWITCHES = {"VLLM_PCIE_ALLREDUCE_BACKEND": "b12x"}
if not current_platform.is_device_capability_family(120):
    SWITCHES["VLLM_B12X_ALLOW_UNVALIDATED_DEVICE"] = "1"

TARGET = ChannelId(Owner.TARGET, Phase.PRODUCTION)
DRAFT = ChannelId(Owner.DRAFT, Phase.PRODUCTION)


@dataclass(frozen=True)
class Rank:
    """What a test sees of a rank.

    Attributes:
        rank: Its number.
        world: How many there are.
        device: Its GPU.
        group: vLLM's tensor parallel group.
    """

    rank: int
    world: int
    device: torch.device
    group: parallel_state.GroupCoordinator

    @property
    def comm(self) -> B12xAllReduce:
        """The transport; an AssertionError if the gate said no."""
        comm = self.group.device_communicator.b12x_comm
        assert comm is not None, (
            "b12x is not used here: `python -m vllm.distributed.graph_channels doctor` "
            "says why"
        )
        return comm

    @property
    def ledger(self) -> Ledger:
        """The process's ledger."""
        assert parallel_state._LEDGER is not None
        return parallel_state._LEDGER

    def numbers(self, shape: tuple[int, ...], turn: int = 0) -> torch.Tensor:
        """Small integers, other ones on each rank and in each turn."""
        count = torch.Size(shape).numel()
        base = torch.arange(count, device=self.device) % 7 + turn % 5
        return (base + self.rank).reshape(shape).bfloat16()

    def total(self, shape: tuple[int, ...], turn: int = 0) -> torch.Tensor:
        """The sum of ``numbers`` over all ranks; exact in bfloat16."""
        count = torch.Size(shape).numel()
        base = torch.arange(count, device=self.device) % 7 + turn % 5
        ranks = self.world * (self.world - 1) // 2
        return (base * self.world + ranks).reshape(shape).bfloat16()


def channel_memory(here: Rank, count: int) -> tuple[int, int]:
    """What channels of all ranks on this GPU ask for, and what the driver takes.

    All ranks call it.

    Args:
        here: The rank.
        count: How many channels a rank makes.

    Returns:
        Bytes requested, as the table has them, and bytes reserved.
    """
    names = [ChannelId(Owner.TARGET, Phase.PROFILE, n) for n in range(1, count + 2)]
    here.ledger.prepare(names[:1])  # and what comes with the first one
    before = _free(here)
    here.ledger.prepare(names)
    sharing = gpus.sharing(here.device, here.world)
    requested = count * sharing * here.comm.inventory()[names[0]]
    return requested, before - _free(here)


def _free(here: Rank) -> int:
    torch.distributed.barrier()
    free, _ = torch.cuda.mem_get_info(here.device)
    torch.distributed.barrier()
    return int(free)


@contextmanager
def tensor_parallel(world: int, device: torch.device) -> Iterator[Rank]:
    """vLLM's groups over the default process group, torn down afterwards."""
    rank = torch.distributed.get_rank()
    config = VllmConfig()
    config.parallel_config.tensor_parallel_size = world
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            world, rank, local_rank=device.index, backend="nccl"
        )
        parallel_state.initialize_model_parallel(world, backend="nccl")
        try:
            yield Rank(rank, world, device, parallel_state.get_tp_group())
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
