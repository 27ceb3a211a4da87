# SPDX-License-Identifier: Apache-2.0
"""A worker that may raise in one step, or stay in one until something happens."""

import os
import time
from typing import Any

from tests.distributed.faults import FIRST_ERROR, During
from tests.v1.executor.served_engine import (
    DWELL,
    DWELL_SECONDS,
    FAULT,
    RANKS,
    dwells,
)
from vllm.v1.worker.worker_base import WorkerBase


class FaultySteps(WorkerBase):
    """Mixed in before a worker.

    Its last rank raises before it takes part in the step that ``FAULT`` names. All
    ranks stay in the step that ``DWELL`` names, where the worker has ``dwell``.
    """

    step: During | None = None
    serves = False

    def determine_available_memory(self, *args: Any) -> Any:
        self.come_to(During.PROFILING)
        return super().determine_available_memory(*args)

    def compile_or_warm_up_model(self, *args: Any) -> Any:
        self.come_to(During.CAPTURE)
        took = super().compile_or_warm_up_model(*args)
        self.serves = True
        return took

    def execute_model(self, *args: Any) -> Any:
        if self.serves:  # V2's runner executes the model to warm up, too
            self.come_to(During.REQUEST)
        return super().execute_model(*args)

    def come_to(self, step: During) -> None:
        """Begin a step, or raise."""
        self.step = step
        if os.environ[FAULT] == step.name and self.rank == RANKS - 1:
            raise RuntimeError(FIRST_ERROR)

    def dwell(self) -> None:
        """Stay here for a while, and say so, in the step that is asked for."""
        if self.step is not None and os.environ[DWELL] == self.step.name:
            print(dwells(self.rank, self.step), flush=True)
            time.sleep(DWELL_SECONDS)
