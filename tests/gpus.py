# SPDX-License-Identifier: Apache-2.0
"""Ranks on GPUs: one a GPU where there are enough, else several on each.

NCCL refuses two ranks on one GPU of one host, so ranks that share one say that
they are on different hosts, and NCCL talks over the loopback device.

The parent never initialises CUDA: its forked ranks could not use it then.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import Store

from tests import ranks
from verification.machine import mps_serves
from vllm.platforms import current_platform

# vLLM built for the CPU uses none, whatever the machine has.
GPUS = torch.cuda.device_count() if current_platform.is_cuda() else 0

needs_gpu = pytest.mark.skipif(not GPUS, reason="no NVIDIA GPU that vLLM uses")
# Of tests where a rank ends while its kernels run.
not_over_mps = pytest.mark.skipif(
    mps_serves(), reason="over NVIDIA's MPS every client of the GPU would end with it"
)

# How many ranks to test: on one GPU two and four, since more take turns for too long.
WORLDS = [2, 4, *(count for count in (6, 8) if count <= GPUS)]

Body = Callable[[int, torch.device], Any]


def values(count: int, body: Body, deadline: float, **switches: str) -> list[Any]:
    """What ``body(rank, device)`` returns on each rank, in order of rank.

    Each rank has its CUDA device set and a process group on NCCL.
    """
    return ranks.values(count, _with_nccl(count, body, switches), deadline)


def run(
    count: int, body: Body, deadline: float, **switches: str
) -> list[ranks.Outcome]:
    """The same, for ranks of which some may fail."""
    return ranks.run(count, _with_nccl(count, body, switches), deadline)


def sharing(device: torch.device, count: int) -> int:
    """How many of ``count`` ranks are on this GPU."""
    return len(range(device.index, count, GPUS))


def environment(rank: int, count: int) -> dict[str, str]:
    """What NCCL has to be told where ``count`` ranks share fewer GPUs."""
    if count <= GPUS:
        return {}
    return {
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


def _with_nccl(
    count: int, body: Body, switches: dict[str, str]
) -> Callable[[int, Store], Any]:
    def rank_body(rank: int, store: Store) -> Any:
        os.environ.update(environment(rank, count), **switches)
        device = torch.device("cuda", rank % GPUS)
        torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl",
            store=store,
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=60),
            device_id=device,
        )
        return body(rank, device)

    return rank_body
