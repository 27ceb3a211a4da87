# SPDX-License-Identifier: Apache-2.0
"""The worker with faulty steps on a GPU, which several ranks may share."""

import os
from typing import Any

from tests import gpus
from tests.v1.executor.faulty_steps import FaultySteps
from tests.v1.executor.served_engine import RANKS
from vllm.v1.worker.gpu_worker import Worker


class FaultyGpuWorker(FaultySteps, Worker):
    """See ``FaultySteps``."""

    def __init__(
        self, vllm_config: Any, local_rank: int, rank: int, *args: Any, **options: Any
    ) -> None:
        os.environ.update(gpus.environment(rank, RANKS))
        super().__init__(vllm_config, local_rank % gpus.GPUS, rank, *args, **options)
