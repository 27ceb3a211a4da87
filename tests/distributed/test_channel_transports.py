# SPDX-License-Identifier: Apache-2.0
"""vLLM's own groups on the CPU, with and without channels: real ranks, real data."""

import os
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import vllm.envs as envs
from tests import ranks
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import channel_transports, host_library
from vllm.distributed.graph_channels.identity import EagerLane
from vllm.distributed.graph_channels.switches import (
    Backend,
    outdated_variables,
    read_switches,
)

COVERS = (
    "vllm/envs.py",
    "vllm/distributed/parallel_state.py",
    "vllm/distributed/device_communicators/cpu_communicator.py",
)

# Imports here, once, what every forked rank would import for itself.
VllmConfig()

BACKEND = "VLLM_PCIE_ALLREDUCE_BACKEND"
LANE = str(EagerLane.ALLREDUCE)
DEADLINE = 60


@contextmanager
def _groups(rank, size, store, **environment):
    """vLLM's model parallel groups of ``size`` tensor parallel ranks."""
    os.environ.update(environment)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=size
    )
    config = VllmConfig()
    config.parallel_config.tensor_parallel_size = size
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            size, rank, local_rank=rank, backend="gloo"
        )
        parallel_state.initialize_model_parallel(size, backend="gloo")
        try:
            yield parallel_state.get_tp_group()
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def _sums(group, sizes):
    """The sums of ``rank + 1 + index`` over the ranks, for tensors of some sizes."""
    results = []
    for size in sizes:
        tensor = torch.arange(size, dtype=torch.float32) + group.rank_in_group + 1
        results.append(group.all_reduce(tensor).tolist())
    return results


def _expected(world, sizes):
    ones = sum(range(1, world + 1))
    return [[float(world * i + ones) for i in range(size)] for size in sizes]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_tensor_parallel_group_reduces_on_its_lane(world):  # R-B8
    sizes = (1, 7, 4096, 16384, 16385, 50000)  # the cutoff is 64 KB

    def body(rank, store):
        with _groups(rank, world, store, **{BACKEND: "host"}) as group:
            transport = group.device_communicator.host_channels
            # R-B1: the other groups own none.
            owned = parallel_state._LEDGER.inventory()
            assert {name: list(own) for name, own in owned.items()} == {
                transport.label: [LANE]
            }
            reduced = []
            real = transport.all_reduce

            def counted(tensor, out):
                reduced.append(tensor.numel())
                return real(tensor, out=out)

            transport.all_reduce = counted
            return _sums(group, sizes), reduced

    for results, reduced in ranks.values(world, body, DEADLINE):
        assert results == _expected(world, sizes)
        assert reduced == [1, 7, 4096, 16384]  # R-E2: the rest go the other way


def test_without_the_switch_nothing_is_there():  # R-A5
    def body(rank, store):
        os.environ.pop(BACKEND, None)
        with _groups(rank, 2, store) as group:
            assert group.device_communicator.host_channels is None
            assert parallel_state._LEDGER.inventory() == {}
            assert parallel_state.get_graph_channels().checkpoint() is not None
            return _sums(group, (5,))

    assert ranks.values(2, body, DEADLINE) == [_expected(2, (5,))] * 2


def test_a_peer_that_compiles_is_waited_for_as_for_a_step():  # R-D2
    step = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "77"}

    def body(rank, store):
        with _groups(rank, 2, store, **{BACKEND: "host"}, **step) as group:
            return group.device_communicator.host_channels.deadline

    assert ranks.values(2, body, DEADLINE) == [77, 77]


def test_a_compiled_function_reduces_through_one_op():
    def body(rank, store):
        with _groups(rank, 2, store, **{BACKEND: "host"}) as group:

            @torch.compile(fullgraph=True, backend="aot_eager")
            def double_sum(tensor):
                return group.all_reduce(tensor * 2) + 1

            return double_sum(torch.full((8,), rank + 1.0)).tolist()

    assert ranks.values(2, body, DEADLINE) == [[7.0] * 8] * 2


def test_closing_comes_before_the_first_group_goes():  # R-D1 # C20
    def body(rank, store):
        events = []
        with _groups(rank, 2, store, **{BACKEND: "host"}) as group:
            transport = group.device_communicator.host_channels
            closed, destroyed = transport.close, group.destroy

            def close():
                events.append("close")
                closed()

            def destroy():
                events.append("destroy")
                destroyed()

            transport.close, group.destroy = close, destroy
        return events, parallel_state._LEDGER is None

    assert ranks.values(2, body, DEADLINE) == [(["close", "destroy"], True)] * 2


def test_groups_come_and_go(tmp_path):
    def body(rank, store):
        shm = set(os.listdir("/dev/shm"))
        results = []
        for turn in range(3):
            shared = torch.distributed.PrefixStore(str(turn), store)
            with _groups(rank, 2, shared, **{BACKEND: "host"}) as group:
                results += _sums(group, (3,))
        left = {name for name in os.listdir("/dev/shm") if name not in shm}
        return results, {name for name in left if "vllm" in name}

    for results, left in ranks.values(2, body, DEADLINE):
        assert results == _expected(2, (3,)) * 3
        assert left == set()


def test_one_rank_that_cannot_takes_all_of_them_off(monkeypatch, tmp_path):
    # R-E1 # C37: the library is missing on rank 1 alone.
    def body(rank, store):
        if rank == 1:
            monkeypatch.setattr(host_library, "LIBRARY", tmp_path / "gone.so")
            host_library.library.cache_clear()
        with _groups(rank, 2, store, **{BACKEND: "host"}) as group:
            demanded = parallel_state._LEDGER.names_demanded_by
            return demanded, parallel_state._LEDGER.inventory(), _sums(group, (5,))

    assert ranks.values(2, body, DEADLINE) == [(None, {}, _expected(2, (5,)))] * 2


def test_ranks_with_different_switches_go_without(monkeypatch):  # R-F3, R-E1
    def body(rank, store):
        size = {"VLLM_PCIE_ONESHOT_ALLREDUCE_MAX_SIZE": f"{rank + 1}KB"}
        with _groups(rank, 2, store, **{BACKEND: "host"}, **size) as group:
            demanded = parallel_state._LEDGER.names_demanded_by
            return demanded, parallel_state._LEDGER.inventory(), _sums(group, (5,))

    assert ranks.values(2, body, DEADLINE) == [(None, {}, _expected(2, (5,)))] * 2


def test_a_cutoff_of_zero_is_off_on_all_ranks(monkeypatch):  # R-F3 # R-E1 # C47
    lines = []
    logger = SimpleNamespace(error=lambda text, *given: lines.append(text % given))
    monkeypatch.setattr(channel_transports, "logger", logger)

    def body(rank, store):
        size = {"VLLM_PCIE_ONESHOT_ALLREDUCE_MAX_SIZE": "0" if rank else "64KB"}
        with _groups(rank, 2, store, **{BACKEND: "host"}, **size) as group:
            return lines, parallel_state._LEDGER.inventory(), _sums(group, (5,))

    (first, *without), (second, *alike) = ranks.values(2, body, DEADLINE)
    (line,) = first
    assert "up to 0 bytes" in line and line.endswith("the cutoff is 0")
    assert second == []
    assert without == alike == [{}, _expected(2, (5,))]


# Switches -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("65536", 1 << 16), ("64KB", 1 << 16), ("1 mb", 1 << 20), ("7B", 7)],
)
def test_sizes_are_read(monkeypatch, text, size):  # R-F3
    monkeypatch.setenv("VLLM_PCIE_ONESHOT_ALLREDUCE_MAX_SIZE", text)
    assert read_switches().all_reduce_bytes == size


@pytest.mark.parametrize(
    ("name", "text", "form"),
    [
        (BACKEND, "B12X", "expected one of cpp, b12x, host"),
        (BACKEND, "", "expected one of"),
        (BACKEND, "flashinfer-ipc", "is not part of this build"),
        ("VLLM_B12X_ALLOW_UNVALIDATED_DEVICE", "yes", "expected 0 or 1"),
        ("VLLM_PCIE_ONESHOT_FUSED_ADD_RMS_NORM_MAX_SIZE", "84K", "64KB or 1MB"),
        ("VLLM_PCIE_ONESHOT_ALLREDUCE_MAX_SIZE", "64 kilobytes", "64KB or 1MB"),
        ("VLLM_PCIE_ONESHOT_ALLREDUCE_MAX_SIZE", "-1", "64KB or 1MB"),
        ("VLLM_PCIE_ONESHOT_ALLREDUCE_MAX_SIZE", "2GB", "at most 1GB"),
        ("VLLM_PCIE_ONESHOT_ALLREDUCE_MAX_SIZE", "", "64KB or 1MB"),
        ("VLLM_GRAPH_CHANNELS_DEADLINE", "soon", "seconds above 0"),
        ("VLLM_GRAPH_CHANNELS_DEADLINE", "0", "seconds above 0"),
        ("VLLM_GRAPH_CHANNELS_DEADLINE", "nan", "seconds above 0"),
        ("VLLM_GRAPH_CHANNELS_DEADLINE", "inf", "at most 3600"),
    ],
)
def test_bad_values_are_refused_with_the_form(monkeypatch, name, text, form):  # R-F3
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=form) as caught:
        read_switches()
    assert name in str(caught.value)
    assert repr(text) in str(caught.value)


def test_defaults(monkeypatch):  # R-F3
    for name in os.environ:
        if name.startswith(("VLLM_PCIE_", "VLLM_B12X_", "VLLM_GRAPH_")):
            monkeypatch.delenv(name)
    switches = read_switches()
    assert (switches.backend, switches.all_reduce_bytes) == (Backend.CPP, 64 << 10)
    assert (switches.fused_bytes, switches.allow_unvalidated) == (84 << 10, False)
    assert (switches.startup_seconds, switches.shutdown_seconds) == (30, 1)


def test_a_backend_that_this_machine_cannot_is_refused_at_start(monkeypatch):  # R-F3
    monkeypatch.setenv(BACKEND, "b12x")
    with pytest.raises(ValueError, match="b12x reduces between CUDA GPUs"):
        parallel_state.start_graph_channels()
    assert parallel_state._LEDGER is None


def test_variables_of_community_builds_are_named_once(monkeypatch):  # R-F3
    assert outdated_variables() == []
    monkeypatch.setenv("VLLM_ENABLE_PCIE_ALLREDUCE", "1")
    monkeypatch.setenv("VLLM_PCIE_DMA_MIN_BYTES", "1048576")
    enable, dma = outdated_variables()
    assert "VLLM_ENABLE_PCIE_ALLREDUCE is not read" in enable
    assert "large reductions take NCCL" in dma


def test_only_the_backend_enters_the_compile_cache_key():  # R-F3
    ours = {"VLLM_PCIE_ONESHOT_ALLREDUCE_MAX_SIZE", "VLLM_GRAPH_CHANNELS_DEADLINE"}
    factors = envs.compile_factors()
    assert BACKEND in factors
    assert not ours & factors.keys()
    assert ours <= envs.environment_variables.keys()
