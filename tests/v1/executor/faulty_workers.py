# SPDX-License-Identifier: Apache-2.0
"""Workers of which the last rank has a fault in one step of its work.

``SERVING_FAULT=STEP`` names the step. The rank raises there, before it takes part;
with ``SERVING_FAULT=STEP:pause`` all ranks say that they are there, and wait.
"""

import os
import time
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import WorkerBase

FAULT = "SERVING_FAULT"
PAUSED = "the rank is paused in"
FIRST_ERROR = "first error, of rank 1"


class _Faulty(WorkerBase):
    """Mixed in before a worker."""

    def determine_available_memory(self, *args: Any) -> Any:
        self._fault("determine_available_memory")
        return super().determine_available_memory(*args)

    def compile_or_warm_up_model(self, *args: Any) -> Any:
        self._fault("compile_or_warm_up_model")
        return super().compile_or_warm_up_model(*args)

    def execute_model(self, *args: Any) -> Any:
        self._fault("execute_model")
        return super().execute_model(*args)

    def _fault(self, step: str) -> None:
        where, _, what = os.environ.get(FAULT, "").partition(":")
        if where != step:
            return
        if what == "pause":
            print(PAUSED, step, flush=True)
            time.sleep(60)
        elif self.rank == self.parallel_config.world_size - 1:
            raise RuntimeError(FIRST_ERROR)


class FaultyCpuWorker(_Faulty, CPUWorker):
    """On the CPU."""
