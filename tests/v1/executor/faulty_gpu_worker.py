# SPDX-License-Identifier: Apache-2.0
"""The worker with faulty steps on a GPU, which several ranks may share."""

import os
from typing import Any

import torch

from tests import gpus
from tests.v1.executor.faulty_steps import FaultySteps
from tests.v1.executor.served_engine import RANKS
from vllm.v1.worker.gpu_worker import Worker


class FaultyGpuWorker(FaultySteps, Worker):
    """See ``FaultySteps``. It dwells in the middle of a capture, in an open scope."""

    def __init__(
        self, vllm_config: Any, local_rank: int, rank: int, *args: Any, **options: Any
    ) -> None:
        os.environ.update(gpus.environment(rank, RANKS))
        super().__init__(vllm_config, local_rank % gpus.GPUS, rank, *args, **options)

    def init_device(self) -> None:
        """Also let other engines on the GPU come and go while this one profiles."""
        super().init_device()
        # vLLM refuses to profile if less memory is in use afterwards than before.
        self.init_snapshot.free_memory = self.init_snapshot.total_memory

    def load_model(self, *args: Any, **options: Any) -> None:
        """Also make the model dwell."""
        super().load_model(*args, **options)
        self.get_model().register_forward_pre_hook(self._dwell_in_capture)

    def _dwell_in_capture(self, *_: object) -> None:
        if torch.cuda.is_current_stream_capturing():
            self.dwell()
