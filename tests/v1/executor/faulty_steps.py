# SPDX-License-Identifier: Apache-2.0
"""A worker whose last rank may raise in one step, before it takes part in it."""

import os
from typing import Any

from tests.distributed.faults import FIRST_ERROR, During
from tests.v1.executor.served_engine import FAULT, RANKS
from vllm.v1.worker.worker_base import WorkerBase


class FaultySteps(WorkerBase):
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
