# SPDX-License-Identifier: Apache-2.0
"""Workers of which the last rank may raise in one step, before it takes part in it."""

import os
from typing import Any

import torch

from tests.distributed.faults import FIRST_ERROR, During
from tests.v1.executor.served_engine import FAULT, RANKS
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerBase


class _Faulty(WorkerBase):
    """Mixed in before a worker."""

    def determine_available_memory(self, *args: Any) -> Any:
        self._come_to(During.PROFILING)
        return super().determine_available_memory(*args)

    def compile_or_warm_up_model(self, *args: Any) -> Any:
        self._come_to(During.CAPTURE)
        return super().compile_or_warm_up_model(*args)

    def execute_model(self, *args: Any) -> Any:
        self._come_to(During.REQUEST)
        return super().execute_model(*args)

    def _come_to(self, step: During) -> None:
        if os.environ[FAULT] == step.name and self.rank == RANKS - 1:
            raise RuntimeError(FIRST_ERROR)


class FaultyCpuWorker(_Faulty, CPUWorker):
    """On the CPU."""


class FaultyGpuWorker(_Faulty, Worker):
    """On a GPU, which several ranks may share."""

    def __init__(
        self, vllm_config: Any, local_rank: int, rank: int, *args: Any, **options: Any
    ) -> None:
        gpus = torch.cuda.device_count()
        if gpus < RANKS:
            # To NCCL, which takes one rank a GPU and host, they are other hosts.
            os.environ.update(
                NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1"
            )
        super().__init__(vllm_config, local_rank % gpus, rank, *args, **options)
