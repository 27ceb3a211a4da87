# SPDX-License-Identifier: Apache-2.0
"""The worker with faulty steps on the CPU; its imports are for no other platform."""

from tests.distributed.faults import During
from tests.v1.executor.faulty_steps import FaultySteps
from vllm.v1.worker.cpu_worker import CPUWorker


class FaultyCpuWorker(FaultySteps, CPUWorker):
    """See ``FaultySteps``. It captures nothing: it dwells as a step begins."""

    def come_to(self, step: During) -> None:
        """Begin a step, or raise."""
        super().come_to(step)
        self.dwell()
