# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm.distributed.graph_channels doctor` says what an engine then does."""

import json
import os
import re
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import cpp_builder

from tests import ranks
from tests.distributed import test_b12x_gate
from tests.distributed.test_b12x_gate import Machine, decisions
from tests.distributed.test_channel_transports import _groups
from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import b12x_gate, host_library
from vllm.distributed.graph_channels import machine, switches, trial
from vllm.distributed.graph_channels.__main__ import main
from vllm.distributed.graph_channels.switches import Backend
from vllm.distributed.graph_channels.trial import Standing, try_backend
from vllm.utils import cpu_resource_utils
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

BACKEND = "VLLM_PCIE_ALLREDUCE_BACKEND"
CUTOFF = "VLLM_PCIE_ONESHOT_ALLREDUCE_MAX_SIZE"
DEADLINE = 120


CORES = "VLLM_CPU_OMP_THREADS_BIND"


@pytest.fixture(autouse=True)
def unbound(monkeypatch):
    """Workers share the cores: not every machine has a NUMA node for each."""
    monkeypatch.setenv(CORES, "nobind")


def engine(backend, world):
    """What vLLM's own tensor parallel group comes to with a backend."""

    def body(rank, store):
        try:
            with _groups(rank, world, store, **{BACKEND: backend.value}) as group:
                there = parallel_state._LEDGER.inventory()
                if backend is Backend.HOST:
                    assert bool(there) == (
                        group.device_communicator.host_channels is not None
                    )
                uses = bool(there) or backend is Backend.CPP
                return Standing.USES if uses else Standing.GOES_ON
        except ValueError:
            return Standing.ENDS

    (standing,) = set(ranks.values(world, body, DEADLINE))
    return standing


def no_library(monkeypatch, tmp_path):
    monkeypatch.setattr(host_library, "LIBRARY", tmp_path / "gone.so")
    host_library.library.cache_clear()


def no_cutoff(monkeypatch, tmp_path):
    monkeypatch.setenv(CUTOFF, "0")


def bad_cutoff(monkeypatch, tmp_path):
    monkeypatch.setenv(CUTOFF, "much")


def nothing(monkeypatch, tmp_path):
    pass


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize("fault", [nothing, no_library, no_cutoff, bad_cutoff])
def test_the_verdict_is_what_the_engine_does(backend, fault, monkeypatch, tmp_path):
    # R-F2 # R-E1
    fault(monkeypatch, tmp_path)
    try:
        found = try_backend(backend, 2)
        assert found.standing is engine(backend, 2)
    finally:
        host_library.library.cache_clear()
    assert bool(found.reason) == (found.standing is not Standing.USES)


def test_the_faults_make_a_difference(monkeypatch, tmp_path):  # else they prove little
    assert try_backend(Backend.HOST, 2).standing is Standing.USES
    no_cutoff(monkeypatch, tmp_path)
    assert "the cutoff is 0" in try_backend(Backend.HOST, 2).reason
    bad_cutoff(monkeypatch, tmp_path)
    assert "'much'" in try_backend(Backend.CPP, 2).reason


def healthy(machine):
    pass


def pretend_a_gpu():
    """What b12x's gate asks of a GPU, answered; in a process that ends."""
    seen = Machine()
    seen.install()
    os.environ["VLLM_GRAPH_CHANNELS_DEADLINE"] = "10"
    switches._demand_platform = lambda backend: None
    trial.current_platform = SimpleNamespace(dist_backend="gloo", is_cpu=lambda: False)
    trial._device = lambda rank, world: test_b12x_gate.DEVICE
    return seen


# b12x, with what a GPU would answer faked on both sides.
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (healthy, ""),
        *test_b12x_gate.FAULTS[:3],
        *[
            each
            for each in test_b12x_gate.FAULTS
            if each[0]
            in (
                test_b12x_gate.older_gpu,
                test_b12x_gate.small_gpu,
                test_b12x_gate.no_export,
                test_b12x_gate.no_open,
                test_b12x_gate.lacks_method,
            )
        ],
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_verdict_on_b12x_is_what_the_engine_does(fault, cause):  # R-F2 # R-E1
    def doctor(rank, store):
        fault(pretend_a_gpu())
        found = try_backend(Backend.B12X, 2)
        return found.standing, found.reason

    ((standing, reason),) = ranks.values(1, doctor, DEADLINE)
    labels = {label for label, *_ in decisions(fault, faulty=(0, 1))}
    assert (standing is Standing.USES) == (labels == {"b12x all-reduce of tp:0"})
    assert (standing is Standing.GOES_ON) == (labels == {None})
    assert cause in reason


def test_a_wrong_self_test_is_told_as_the_end_that_it_is():  # R-F2 # R-E4
    def doctor(rank, store):
        pretend_a_gpu()
        test_b12x_gate.Channel.all_reduce = lambda self, tensor: tensor * 3
        found = try_backend(Backend.B12X, 2)
        return found.standing, found.reason

    ((standing, reason),) = ranks.values(1, doctor, DEADLINE)
    assert standing is Standing.ENDS and "wrong sums" in reason and "ACS" in reason


def engine_without_a_model(world):
    """What vLLM's own executor says of the machine, before there are workers."""

    def body(rank, store):
        parallel = ParallelConfig(
            tensor_parallel_size=world, distributed_executor_backend="mp"
        )
        executor = object.__new__(MultiprocExecutor)
        executor.vllm_config = VllmConfig(parallel_config=parallel)
        executor.parallel_config = executor.vllm_config.parallel_config
        try:
            executor._init_executor()
        except (RuntimeError, AssertionError) as failure:
            return str(failure)

    (said,) = ranks.values(1, body, DEADLINE)
    return said


def small_shared_memory(monkeypatch):
    usage = SimpleNamespace(total=1 << 20, free=1 << 20)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage)
    return "Insufficient space in /dev/shm", "Increase /dev/shm"


def one_numa_node(monkeypatch):
    monkeypatch.setenv(CORES, "auto")
    monkeypatch.setattr(cpu_resource_utils, "get_visible_memory_node", lambda: [0])
    return "Not enough allowed NUMA nodes", f"{CORES} says how"


def bound_for_one(monkeypatch):
    monkeypatch.setenv(CORES, "0")
    return "doesn't match local world size 2", f"{CORES} says how"


@pytest.mark.parametrize("fault", [small_shared_memory, one_numa_node, bound_for_one])
def test_what_ends_an_engine_before_its_workers_is_told(fault, monkeypatch):  # R-F2
    cause, remedy = fault(monkeypatch)
    assert cause in engine_without_a_model(2)
    for backend in (Backend.CPP, Backend.HOST):
        found = try_backend(backend, 2)
        assert found.standing is Standing.ENDS
        assert cause in found.reason and remedy in found.reason
    # A switch that is refused is refused before that.
    assert "b12x reduces between CUDA GPUs" in try_backend(Backend.B12X, 2).reason


def test_a_rank_that_dies_is_told(monkeypatch):
    def die(*arguments):
        os._exit(3)

    monkeypatch.setattr(trial, "_open", die)
    found = try_backend(Backend.HOST, 2)
    assert found.standing is Standing.ENDS
    assert found.reason == "rank 0 ended before its time"


def test_more_ranks_than_gpus_end_the_engine(monkeypatch):
    cuda = SimpleNamespace(is_cuda=lambda: True, is_cpu=lambda: False)
    monkeypatch.setattr(trial, "current_platform", cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = try_backend(Backend.CPP, 3)
    assert found.standing is Standing.ENDS
    assert "3 ranks want a GPU each and 2 can be seen" in found.reason


def test_a_group_of_one_uses_vllms_own():
    found = try_backend(Backend.HOST, 1)
    assert (found.standing, found.reason) == (
        Standing.GOES_ON,
        "one rank has nobody to reduce with",
    )
    assert try_backend(Backend.CPP, 1).standing is Standing.USES


# What is printed ------------------------------------------------------------


def switches_set():
    """vLLM's; b12x's packages set others when they are imported."""
    return {name: v for name, v in os.environ.items() if name.startswith("VLLM_")}


def test_it_ends_with_the_backend_and_says_why_not_the_others(capfd):  # R-F2
    before = switches_set()
    assert main(["doctor"]) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[-1] == (
        f"{BACKEND} is not set: this machine would use cpp (vLLM's own)"
    )
    cpp, b12x, host = said[-4:-1]
    assert "can be used" in cpp and "can be used" in host
    assert "b12x reduces between CUDA GPUs" in b12x
    assert switches_set() == before


def test_a_backend_that_is_none_is_told_with_those_there_are(monkeypatch, capfd):
    monkeypatch.setenv(BACKEND, "HOST")
    assert main(["doctor"]) == 1
    expected = f"{BACKEND}='HOST': expected one of cpp, b12x, host"
    assert capfd.readouterr().out.splitlines().count(expected) == 1


def test_for_programs(capfd, monkeypatch):  # R-F2
    monkeypatch.setenv(BACKEND, "host")
    monkeypatch.setenv("VLLM_PCIE_DMA_MIN_BYTES", "1")
    assert main(["doctor", "--json", "--ranks", "3"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["ranks"], found["chosen"], found["used"]) == (3, "host", "host")
    assert found["backends"]["b12x"]["standing"] == "ends"
    assert found["facts"]["torch"].startswith(torch.__version__)
    assert "VLLM_PCIE_DMA_MIN_BYTES is not read" in found["notes"][0]


@pytest.mark.parametrize("value", ["flashinfer-ipc", "HOST", "b12x"])
def test_what_is_chosen_and_refused_is_a_failure(monkeypatch, capfd, value):
    monkeypatch.setenv(BACKEND, value)
    assert main(["doctor"]) == 1
    said = capfd.readouterr().out.splitlines()
    assert "would not start an engine" in said[-1] and f"{BACKEND}={value}" in said[-1]
    assert "can be used" in said[-2]  # the host transport, all the same
    assert any(re.search(f"{BACKEND}='?{value}", line) for line in said[:-1])


def test_what_goes_on_without_is_a_failure(monkeypatch, capfd, tmp_path):
    monkeypatch.setenv(BACKEND, "host")
    no_cutoff(monkeypatch, tmp_path)
    assert main(["doctor"]) == 1
    said = capfd.readouterr().out.splitlines()
    assert said[-1].endswith("this machine would use cpp (vLLM's own)")


def test_a_fact_that_cannot_be_had_is_unknown(monkeypatch):
    def gone(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(machine.shutil, "disk_usage", gone)
    monkeypatch.setattr(machine.os, "sched_getaffinity", gone)
    monkeypatch.setattr(machine, "_RECEIPT", machine.Path("/nowhere/receipt.json"))
    facts = machine.facts()
    for subject in ("/dev/shm", "system", "vLLM"):
        assert facts[subject].startswith("unknown: FileNotFoundError: ")
    assert facts["torch"].startswith(torch.__version__)


@pytest.mark.parametrize(("free", "told"), [(1 << 20, True), (4 << 30, False)])
def test_a_small_shared_memory_is_told_with_what_to_do(monkeypatch, free, told):
    usage = SimpleNamespace(free=free, total=8 << 30)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage)
    said = machine.facts()["/dev/shm"]
    assert said.startswith(f"{free >> 20} of 8192 MiB free")
    assert ("--shm-size=4g" in said) == told


@pytest.mark.parametrize(
    ("there", "told"), [(True, "g++"), (False, "none, and torch.compile wants one")]
)
def test_the_facts_say_whether_there_is_a_compiler(monkeypatch, tmp_path, there, told):
    if there:
        (tmp_path / "g++").write_text("#!/bin/sh\n")
        (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    cpp_builder.cpp_compiler_search.cache_clear()
    with cpp_builder.config.patch({"cpp.cxx": (None, "g++")}):
        said = machine.facts()["C++ compiler"]
    cpp_builder.cpp_compiler_search.cache_clear()
    assert said.startswith(told)


def test_the_facts_say_what_a_library_lacks(monkeypatch, tmp_path):
    no_library(monkeypatch, tmp_path)
    said = machine.facts()["host library"]
    host_library.library.cache_clear()
    assert said.startswith("the host transport needs the library")


def test_the_facts_say_what_b12x_lacks(monkeypatch):
    monkeypatch.setattr(b12x_gate, "version", lambda package: "1.2.3")
    assert "b12x 1.2.3 is installed; from 1.2.4" in machine.facts()["b12x"]


def test_the_facts_of_gpus(monkeypatch):
    def run():
        Machine().install()
        torch.cuda.get_device_properties = lambda index: SimpleNamespace(
            name="A GPU",
            major=12,
            minor=0,
            multi_processor_count=188,
            total_memory=96 << 30,
        )
        torch.cuda.device_count = lambda: 2
        torch.cuda.can_device_access_peer = lambda one, other: False
        return machine.facts()

    (facts,) = ranks.values(1, lambda rank, store: run(), DEADLINE)
    line = "A GPU, compute capability 12.0, 188 multiprocessors, 98304 MiB"
    assert facts["GPUs"] == f"0: {line}\n1: {line}"
    assert facts["peer access"] == "none between 0 and 1"
