# SPDX-License-Identifier: Apache-2.0
"""Teardown of vLLM's own groups over the host transport: real ranks, real data."""

import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed import PrefixStore

from tests import ranks
from tests.host import TARGET, descriptors
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.graph_channels.identity import EagerLane
from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm.v1.worker import gpu_worker

# Imports here, once, what every forked rank would import for itself.
VllmConfig()

WORLD, CYCLES, DEADLINE = 2, 20, 120
CLOSING_SECONDS = 1.0


def initialize(rank, store):
    """vLLM's groups, with channels; the tensor parallel one."""
    os.environ["VLLM_PCIE_ALLREDUCE_BACKEND"] = "host"
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD
    )
    parallel_state.init_distributed_environment(
        WORLD, rank, local_rank=rank, backend="gloo"
    )
    parallel_state.initialize_model_parallel(WORLD, backend="gloo")
    return parallel_state.get_tp_group()


def destroy():
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@contextmanager
def configuration():
    config = VllmConfig()
    config.parallel_config.tensor_parallel_size = WORLD
    with set_current_vllm_config(config):
        yield


def demand_sum(group):
    """Reduce over the eager lane, or the open scope's channel, exactly."""
    numbers = torch.arange(9.0) + group.rank_in_group
    assert torch.equal(group.all_reduce(numbers), torch.arange(9.0) * WORLD + 1)


def mapped_segments():
    """How many channels this process has mapped; vLLM's queues are in /dev/shm."""
    return Path("/proc/self/maps").read_text().count("/memfd:vllm:")


def on_ranks(body, deadline=DEADLINE):
    """What ``body(group)`` gives on each rank; it tears down, or does not."""

    def rank_body(rank, store):
        with configuration():
            return body(initialize(rank, store))

    return ranks.run(WORLD, rank_body, deadline)


def test_twenty_lives_of_the_groups_leave_nothing():  # R-D5 # C20
    def body(rank, store):
        held = []
        with configuration():
            for cycle in range(CYCLES):
                group = initialize(rank, PrefixStore(f"cycle {cycle}", store))
                ledger = parallel_state.get_graph_channels()
                ledger.prepare([TARGET])
                with ledger.scope(TARGET):
                    demand_sum(group)
                (inventory,) = ledger.inventory().values()
                destroy()
                assert parallel_state.get_graph_channels() is None
                held.append((inventory, mapped_segments(), descriptors()))
        # the first one opens what a process keeps
        return [entry[:2] for entry in held], {entry[2] for entry in held[2:]}

    for held, files in ranks.values(WORLD, body, DEADLINE):
        assert held == [held[0]] * CYCLES
        assert list(held[0][0]) == [str(EagerLane.ALLREDUCE), str(TARGET)]
        assert held[0][1] == 0
        assert max(files) - min(files) <= 2  # sockets of a store that is closing


def test_twenty_sleeps_leave_channels_as_they_are(monkeypatch):  # R-D5
    accelerator = SimpleNamespace(
        synchronize=lambda: None, get_memory_info=lambda: (1 << 30, 1 << 31)
    )

    def body(group):
        monkeypatch.setattr(torch, "accelerator", accelerator)
        worker = object.__new__(gpu_worker.Worker)
        worker.model_runner = MagicMock()
        worker._sleep_saved_buffers = worker._sleep_saved_draft_buffers = {}
        worker._get_sleep_mode_backend = MagicMock()
        ledger = parallel_state.get_graph_channels()
        ledger.prepare([TARGET])
        seen = []
        with ledger.scope(TARGET):
            demand_sum(group)
        for _ in range(CYCLES):
            worker.sleep()
            worker.wake_up()
            demand_sum(group)
            seen.append((ledger.inventory(), mapped_segments()))
        destroy()
        return seen

    for outcome in on_ranks(body):
        assert outcome.error is None
        assert outcome.value == [outcome.value[0]] * CYCLES
        assert outcome.value[0][1] == 2  # the lane and the target's channel


def test_a_rank_that_is_gone_is_not_waited_for():  # R-D2 # C20
    def body(group):
        demand_sum(group)
        if group.rank_in_group == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        destroy()
        seconds = time.monotonic() - began
        assert parallel_state.ranks_are_lost()
        assert parallel_state.get_graph_channels().inventory()
        assert parallel_state._TP is not None
        return seconds

    survivor, killed = on_ranks(body)
    assert killed.status == -signal.SIGKILL
    assert survivor.error is None
    assert survivor.value < CLOSING_SECONDS + 1


@pytest.mark.parametrize("rank_with_it", [0, 1])
def test_a_close_that_failed_on_a_rank_is_tried_again(rank_with_it):  # R-D1 # C38
    def body(group):
        transport = group.device_communicator.host_channels
        real, transport.close = transport.close, lambda: None

        def fail():
            transport.close = real
            raise RuntimeError("not unmapped")

        transport.close = fail if group.rank_in_group == rank_with_it else real
        parallel_state.close_graph_channels()
        kept = list(parallel_state.get_graph_channels().inventory())
        destroy()  # closes again, and then destroys
        return kept, parallel_state.get_graph_channels() is None, mapped_segments()

    for outcome in on_ranks(body):
        assert outcome.error is None
        assert outcome.value == (["host all-reduce of tp:0"], True, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_a_capture_leaves_without_a_collective(number):  # R-D4 # C23
    def body(group):
        begun = []
        ledger = parallel_state.get_graph_channels()
        for step in ("agree", "together"):
            for each in ledger._groups:
                real = getattr(each, step)
                setattr(
                    each,
                    step,
                    lambda *given, r=real, **n: begun.append(1) or r(*given, **n),
                )

        def handler(signum, frame):  # as worker_main's
            begun.clear()
            raise SystemExit

        signal.signal(number, handler)
        worker = object.__new__(WorkerProc)
        worker.rpc_broadcast_mq = worker.worker_response_mq = None
        worker.worker = SimpleNamespace(shutdown=lambda: None)
        try:
            with ledger.scope(TARGET):
                demand_sum(group)
                os.kill(os.getpid(), number)
                time.sleep(60)
        except SystemExit:
            began = time.monotonic()
            worker.shutdown()
        return begun, time.monotonic() - began, bool(ledger.inventory())

    for outcome in on_ranks(body):
        assert outcome.error is None
        begun, seconds, owned = outcome.value
        assert begun == [] and owned
        assert seconds < CLOSING_SECONDS + 2
