# SPDX-License-Identifier: Apache-2.0
"""How a served engine on b12x ends: rows of docs/faults.md, and memory that is back."""

import json
import time

import pytest

from tests import gpus
from tests.distributed.b12x_ranks import SWITCHES
from tests.distributed.faults import SERVED, Blow, During
from tests.v1.executor.served_engine import (
    RANKS,
    READY_SECONDS,
    ServedEngine,
    demand_end,
)
from verification.machine import opened

pytestmark = [gpus.needs_gpu, gpus.not_over_mps]

WORKERS = "tests.v1.executor.faulty_gpu_worker.FaultyGpuWorker"
_COMPILATION = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "custom_ops": ["none"],
    "cudagraph_capture_sizes": [1, 2, 4],
}
MEASURED = (
    # Little is taken of what is there, since other tests may take some meanwhile.
    *("--gpu-memory-utilization", "0.5", "--num-gpu-blocks-override", "64"),
    *("--attention-backend", "TRITON_ATTN"),
    *("--compilation-config", json.dumps(_COMPILATION)),
)
# An engine that measures memory cannot bear that others free some meanwhile.
OPTIONS = (*MEASURED, "--kv-cache-memory-bytes", str(256 << 20))
# V2 captures nothing while it profiles.
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
MIB = 1 << 20
TOLERATED = 64 * MIB
# For processes that run other tests of this file on the same GPUs.
OTHERS_SECONDS = 60.0


def _used():
    """Bytes in use on all GPUs, without a CUDA context in this process."""
    with opened() as machine:
        return sum(machine.used_bytes())


@pytest.fixture(scope="module", autouse=True)
def used_before():
    """The memory in use before this file; after its last test it is back.

    Not after each: several processes may run tests of this file side by side.
    """
    before = _used()
    yield before
    end = time.monotonic() + OTHERS_SECONDS
    while (left := _used() - before) > TOLERATED:
        assert time.monotonic() < end, f"{left / MIB:.0f} MiB are left"
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("blow", "during"),
    [
        pytest.param(*row, id=f"{row[0].name.lower()} in {row[1].value}")
        for row in SERVED
    ],
)
def test_it_ends_as_documented(tmp_path, blow, during):
    # R-D1 # R-D2 # R-D4 # C20 # C21 # C23 # C40
    profiles = during is During.PROFILING
    options = MEASURED if profiles else OPTIONS
    environment = SWITCHES | (V1 if profiles else {})
    demand_end(tmp_path, blow, during, WORKERS, options, environment)


def test_memory_is_back_after_everything_was_killed(tmp_path, used_before):
    # R-D4 # C49
    with ServedEngine(tmp_path, WORKERS, OPTIONS, SWITCHES) as engine:
        engine.await_that(engine.ready, READY_SECONDS)
        assert _used() > used_before + TOLERATED
    # The context has killed all of its processes; the fixture demands the rest.


# vLLM's own all-reduce asks CUDA for a way between GPUs, which ranks on one have not.
_NCCL = () if gpus.GPUS >= RANKS else ("--disable-custom-all-reduce",)


@pytest.mark.parametrize(
    ("backend", "options"),
    [pytest.param("cpp", _NCCL, id="cpp"), pytest.param("b12x", (), id="b12x")],
)
def test_workers_need_no_five_seconds_to_stop(tmp_path, backend, options):
    # R-D1 # C21
    # NCCL waited for graphs: now they are gone by then, with channels or without
    environment = SWITCHES | {"VLLM_PCIE_ALLREDUCE_BACKEND": backend}
    options = (*OPTIONS, "--shutdown-timeout", "12", *options)
    with ServedEngine(tmp_path, WORKERS, options, environment) as engine:
        engine.await_that(engine.ready, READY_SECONDS)
        engine.strike(Blow.STOP)
        seconds = engine.seconds_to_end(30)
    print(f"{backend}: {seconds:.1f} s")
    assert not engine.says("sending SIGTERM count")
