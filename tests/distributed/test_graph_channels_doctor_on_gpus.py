# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of b12x on GPUs is what ranks then do.

In a file of its own: the doctor's other tests are for the CPU, and this one is for a
process that has not used CUDA.
"""

import os

import torch

from tests import gpus
from tests.distributed.b12x_ranks import SWITCHES, tensor_parallel
from vllm.distributed.graph_channels import trial
from vllm.distributed.graph_channels.switches import Backend
from vllm.distributed.graph_channels.trial import Standing, try_backend

pytestmark = gpus.needs_gpu

DEADLINE = 120
WORLD = 2


def test_the_verdict_is_what_the_engine_does(monkeypatch):  # R-F2
    for name, value in SWITCHES.items():
        monkeypatch.setenv(name, value)

    def shared(rank, world):
        os.environ.update(gpus.environment(rank, world))
        return torch.device("cuda", rank % gpus.GPUS)

    monkeypatch.setattr(trial, "_device", shared)
    found = try_backend(Backend.B12X, WORLD)

    def body(rank, device):
        with tensor_parallel(WORLD, device) as here:
            return here.group.device_communicator.b12x_comm is not None

    uses = gpus.values(WORLD, body, DEADLINE, **SWITCHES)
    assert uses == [found.standing is Standing.USES] * WORLD, found.reason
    assert not torch.cuda.is_initialized()
