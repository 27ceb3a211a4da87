# SPDX-License-Identifier: Apache-2.0
"""An engine of two ranks, one of which has a fault while memory is profiled.

    python -m tests.v1.worker.faulty_worker MODEL FAULT

ends with an error, and every process of the engine with it.
"""

import itertools
import os
import sys
import time

import torch

from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu_worker import Worker

FAULT = "PROFILING_FAULT"
WORLD = 2


def _raise() -> None:
    raise RuntimeError("first error")


def _spin(worker: Worker) -> None:
    """Wait for a peer in a kernel, and for that kernel on the host."""
    get_tp_group().all_reduce(torch.ones(64, 64, device=worker.device))
    torch.cuda.synchronize(worker.device)


# The runner profiles two of the sizes of a mode, and the engine has one mode.
CAPTURES = 2
# By fault: what rank 0 does after the last of them, and what rank 1 does.
FAULTS = {
    "all raise": (lambda worker: _raise(), lambda worker: _raise()),
    "one raises": (lambda worker: None, lambda worker: _raise()),
    "one raises and its peer spins": (_spin, lambda worker: _raise()),
    "one never comes": (lambda worker: None, lambda worker: time.sleep(3600)),
}


class FaultyWorker(Worker):
    """Its rank has its part in a fault; several ranks may share a GPU."""

    def __init__(self, vllm_config, local_rank, rank, *args, **kwargs):
        gpus = torch.cuda.device_count()
        if gpus < WORLD:
            # To NCCL, which takes one rank a GPU and host, they are other hosts.
            os.environ.update(
                NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1"
            )
        super().__init__(vllm_config, local_rank % gpus, rank, *args, **kwargs)

    def determine_available_memory(self):
        """Profile, with the fault after the captures: no peer is in a launch then."""
        capture = self.model_runner._warmup_and_capture
        fault = FAULTS[os.environ[FAULT]][self.rank]
        captures = itertools.count(1)

        def capture_and_fail(*args, **kwargs):
            capture(*args, **kwargs)
            if next(captures) == CAPTURES:
                fault(self)

        self.model_runner._warmup_and_capture = capture_and_fail
        return super().determine_available_memory()


def main(model: str, fault: str) -> None:
    """Start the engine."""
    from vllm import LLM

    os.environ[FAULT] = fault
    LLM(
        model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=4,
        tensor_parallel_size=WORLD,
        distributed_executor_backend="mp",
        worker_cls=f"{__spec__.name}.FaultyWorker",
        gpu_memory_utilization=0.1,
        attention_backend="TRITON_ATTN",
        compilation_config=dict(
            mode=0,
            cudagraph_mode="FULL_DECODE_ONLY",
            custom_ops=["none"],
            cudagraph_capture_sizes=[1, 2, 4],
        ),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
