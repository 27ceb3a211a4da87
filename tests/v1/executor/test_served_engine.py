# SPDX-License-Identifier: Apache-2.0
"""How a served engine on the host transport ends: rows of docs/faults.md.

A row takes a minute or two, most of it to start the engine. Two are run always: a
stop in which workers return, and a rank that fails where another rank answers.
``EVERY_END=1`` runs them all.
"""

import os

import pytest

from tests.distributed.faults import SERVED, Blow, During
from tests.v1.executor.served_engine import demand_end

WORKERS = "tests.v1.executor.faulty_cpu_worker.FaultyCpuWorker"
OPTIONS = ("--dtype", "float32", "--enforce-eager")
ALWAYS = {(Blow.STOP, During.IDLE), (Blow.RAISES, During.REQUEST)}
LEFT = "Graph channels are left to the end of the process"

_all_rows = pytest.mark.skipif(
    "EVERY_END" not in os.environ, reason="takes minutes; set EVERY_END=1"
)


def _row(blow, during):
    marks = [] if (blow, during) in ALWAYS else [_all_rows]
    name = f"{blow.name.lower()} in {during.value}"
    return pytest.param(blow, during, id=name, marks=marks)


# R-D1 # R-D2 # R-D4 # C20 # C23 # C40
@pytest.mark.parametrize(("blow", "during"), [_row(*row) for row in SERVED])
def test_it_ends_as_documented(tmp_path, blow, during):
    cores = sorted(os.sched_getaffinity(0))
    environment = {
        "VLLM_PCIE_ALLREDUCE_BACKEND": "host",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
    }
    engine = demand_end(tmp_path, blow, during, WORKERS, OPTIONS, environment)
    if blow is Blow.STOP:
        assert not engine.says(LEFT)  # R-D4: they were closed, by all ranks
        assert not engine.says("is not closed")
