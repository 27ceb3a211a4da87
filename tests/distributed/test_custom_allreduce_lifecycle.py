# SPDX-License-Identifier: Apache-2.0
"""vLLM's own all-reduce and its CUDA communicator, beside b12x's and without it.

The patched classes are vLLM's; what stands around them writes down in one list what
is asked of it. What upstream does is asked of upstream's file, out of its wheel.
"""

import gc
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib.util import module_from_spec, spec_from_loader
from types import SimpleNamespace

import pytest
import torch

from series import upstream
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import (
    b12x_transports,
    base_device_communicator,
    cuda_communicator,
    custom_all_reduce,
    flashinfer_all_reduce,
    pynccl,
)
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
from vllm.distributed.graph_channels.identity import ChannelId, Owner, Phase

COVERS = (
    "vllm/distributed/device_communicators/custom_all_reduce.py",
    "vllm/distributed/device_communicators/cuda_communicator.py",
)

TARGET = ChannelId(Owner.TARGET, Phase.PRODUCTION)
BACKEND = "VLLM_PCIE_ALLREDUCE_BACKEND"
FOLDER = "vllm/distributed/device_communicators"
PACKAGE = FOLDER.replace("/", ".")


@cache
def source_of(path):
    """A file of vLLM as upstream has it."""
    return upstream.reader(upstream.locate(upstream.BASES["cpu"]))(path)


def upstreams(name):
    """A module as upstream has it, under another name."""
    path = f"{FOLDER}/{name}.py"
    source = source_of(path)
    module = module_from_spec(spec_from_loader(f"{PACKAGE}.upstreams_{name}", None))
    exec(compile(source, f"upstream {path}", "exec"), vars(module))
    return module


# vLLM's custom all-reduce: captures -----------------------------------------


def all_reduce_of(cls, events, *, disabled=False):
    """One that is whole, as far as captures look."""
    comm = object.__new__(cls)
    comm.disabled, comm._IS_CAPTURING, comm._ptr = disabled, False, 0
    comm.register_graph_buffers = lambda: events.append("register")
    return comm


@pytest.fixture
def events():
    """What was asked of the recorders, in order."""
    return []


@pytest.fixture
def comm(events):
    return all_reduce_of(CustomAllreduce, events)


def test_a_capture_registers_once_at_its_end(comm, events):  # R-A5
    with comm.capture(channel_id=TARGET):
        assert comm._IS_CAPTURING and events == []
    assert not comm._IS_CAPTURING and events == ["register"]


@pytest.mark.parametrize("failure", [MemoryError, KeyboardInterrupt, SystemExit])
def test_a_body_that_raises_makes_no_collective(comm, events, failure):
    # R-B5 # C40
    with pytest.raises(failure, match="^first$"), comm.capture():
        raise failure("first")
    assert events == [] and not comm._IS_CAPTURING
    with comm.capture():
        pass
    assert events == ["register"]


def test_a_registration_that_fails_is_what_leaves(comm):  # R-B5
    def fail():
        raise OSError("no handle")

    comm.register_graph_buffers = fail
    with pytest.raises(OSError, match="no handle"), comm.capture():
        pass
    assert not comm._IS_CAPTURING


def test_an_inner_capture_leaves_the_outers_flag(comm, events):  # R-B4 # C40
    with comm.capture():
        with comm.capture():
            pass
        assert comm._IS_CAPTURING
        with suppress(MemoryError), comm.capture():
            raise MemoryError
        assert comm._IS_CAPTURING
    assert not comm._IS_CAPTURING and events == ["register"] * 2


def test_a_disabled_one_registers_nothing(events):  # R-A5
    with all_reduce_of(CustomAllreduce, events, disabled=True).capture():
        pass
    assert events == []


def test_it_registers_as_often_as_upstreams(events):  # R-A5 # C14
    theirs = []
    for cls, noted in (
        (CustomAllreduce, events),
        (upstreams("custom_all_reduce").CustomAllreduce, theirs),
    ):
        comm = all_reduce_of(cls, noted)
        for _ in range(2):  # profile, production
            for _ in range(3):
                with comm.capture():
                    noted.append("body")
            with comm.capture(), comm.capture():
                noted.append("nested")
    assert events == theirs
    assert events.count("register") == 10


# vLLM's custom all-reduce: finalizers ---------------------------------------


@pytest.fixture
def unraisable(monkeypatch):
    """What finalizers let out, which pytest and Python would print."""
    said = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    return said


def test_a_half_built_one_goes_in_silence(unraisable):  # R-D3 # C24
    object.__new__(CustomAllreduce)
    assert unraisable == []


@pytest.mark.parametrize("lacking", ["_ptr", "meta_ptrs", "buffer_ptrs", "rank"])
def test_one_that_lacks_a_part_goes_in_silence(lacking, unraisable, monkeypatch):
    # R-D3 # C24
    monkeypatch.setattr(custom_all_reduce, "ops", None)
    comm = whole_one()
    delattr(comm, lacking)
    del comm
    assert unraisable == []


def whole_one():
    """One with memory, as far as a close looks."""
    comm = object.__new__(CustomAllreduce)
    comm.disabled, comm._ptr, comm.rank = False, 7, 0
    comm.meta_ptrs, comm.buffer_ptrs = [1], [2]
    return comm


class Ops:
    """vLLM's C++ operations, as far as a close calls them."""

    def __init__(self, events, failure=None):
        self._events, self._failure = events, failure

    def dispose(self, pointer):
        self._events.append(f"dispose {pointer}")
        if self._failure is not None:
            raise self._failure

    def free_shared_buffer(self, pointer):
        self._events.append(f"free {pointer}")


FREED = ["dispose 7", "free 1", "free 2"]


def test_a_dropped_one_frees_its_own_memory_and_no_more(
    events, unraisable, monkeypatch
):  # R-D3 # C24
    monkeypatch.setattr(custom_all_reduce, "ops", Ops(events))
    forbid_collectives(monkeypatch)
    whole_one()
    assert events == FREED and unraisable == []


def test_one_that_was_closed_frees_nothing_again(events, unraisable, monkeypatch):
    # R-D1
    monkeypatch.setattr(custom_all_reduce, "ops", Ops(events))
    comm = whole_one()
    comm.close()
    comm.close()
    del comm
    assert events == FREED and unraisable == []


def test_a_finalizer_that_fails_does_not_hide_the_first_error(
    events, unraisable, monkeypatch
):  # R-D3 # C24
    monkeypatch.setattr(custom_all_reduce, "ops", Ops(events, RuntimeError("gone")))

    def start():
        comm = whole_one()
        raise MemoryError(f"the first error, of rank {comm.rank}")

    with pytest.raises(MemoryError, match="the first error") as caught:
        start()
    del caught
    gc.collect()
    assert events == ["dispose 7"] and unraisable == []


def forbid_collectives(monkeypatch):
    def refuse(*arguments, **named):
        raise AssertionError("a collective")

    for name in ("barrier", "all_gather_object", "broadcast_object_list"):
        monkeypatch.setattr(custom_all_reduce.dist, name, refuse)


# The CUDA communicator: dispatch --------------------------------------------


class Recorder:
    """A backend that takes what it is told to, and writes down what it did."""

    disabled = False
    world_size = 4

    def __init__(self, name, events, takes=True):
        self.name, self.events, self.takes = name, events, takes

    def _should(self, *tensors):
        return self.takes

    should_all_reduce = should_custom_ar = should_fuse_add_rms_norm = _should

    def _reduce(self, tensor, *others):
        self.events.append(f"{self.name} reduces")
        return (tensor, *others[:1]) if others else tensor

    all_reduce = custom_all_reduce = all_reduce_add_rms_norm = _reduce

    def close(self):
        self.events.append(f"{self.name} close")

    def destroy(self):
        self.events.append(f"{self.name} destroy")


ABSENT = ("qr_comm", "fi_ar_comm", "aiter_ar_comm", "symm_mem_comm", "all2all_manager")


def communicator_with(cls=CudaCommunicator, **backends):
    """A communicator of four ranks with some backends, and none of the others."""
    communicator = object.__new__(cls)
    for name in (*ABSENT, "b12x_comm", "ca_comm", "pynccl_comm"):
        setattr(communicator, name, backends.get(name))
    communicator.world_size, communicator.unique_name = 4, "tp:0"
    return communicator


@pytest.mark.parametrize(
    ("b12x", "custom", "who"),
    [
        (True, True, "b12x"),
        (False, True, "custom"),
        (False, False, "nccl"),
        (None, True, "custom"),
        (None, False, "nccl"),
    ],
)
def test_b12x_is_asked_first_and_what_it_refuses_goes_on(events, b12x, custom, who):
    # R-E2 # C35
    communicator = communicator_with(
        b12x_comm=None if b12x is None else Recorder("b12x", events, b12x),
        ca_comm=Recorder("custom", events, custom),
        pynccl_comm=Recorder("nccl", events),
    )
    tensor = torch.ones(8)
    assert communicator.all_reduce(tensor) is tensor
    assert events == [f"{who} reduces"]


def test_an_error_of_b12x_is_no_fallback(events):  # R-E2 # C34
    comm = Recorder("b12x", events)

    def fail(tensor):
        raise RuntimeError("on this rank alone")

    comm.all_reduce = fail
    communicator = communicator_with(
        b12x_comm=comm, pynccl_comm=Recorder("nccl", events)
    )
    with pytest.raises(RuntimeError, match="on this rank alone"):
        communicator.all_reduce(torch.ones(8))
    assert events == []


def test_fused_is_none_where_no_backend_takes_it(events):  # R-A5 # R-E2
    tensor, weight = torch.ones(2, 8), torch.ones(8)
    for comm in (None, Recorder("b12x", events, takes=False)):
        communicator = communicator_with(b12x_comm=comm)
        given = communicator.all_reduce_add_rms_norm(tensor, tensor, weight, 1e-6)
        assert given is None
    assert events == []
    communicator = communicator_with(b12x_comm=Recorder("b12x", events))
    normed, _ = communicator.all_reduce_add_rms_norm(tensor, tensor, weight, 1e-6)
    assert normed is tensor and events == ["b12x reduces"]


# The CUDA communicator: the end ---------------------------------------------


def test_it_closes_in_order(events):  # R-D1 # C20
    communicator = communicator_with(
        b12x_comm=Recorder("b12x", events),
        ca_comm=Recorder("custom", events),
        pynccl_comm=Recorder("nccl", events),
        fi_ar_comm=Recorder("flashinfer", events),
    )
    communicator.destroy()
    # b12x's channels are the ledger's to close, and were before
    assert events == ["custom close", "nccl destroy", "flashinfer destroy"]
    assert communicator.b12x_comm is communicator.ca_comm is None
    assert communicator.pynccl_comm is None
    communicator.destroy()
    assert len(events) == 3


def test_one_without_custom_all_reduce_ends_as_before(events):  # R-A5 # R-D1
    communicator = communicator_with(pynccl_comm=Recorder("nccl", events))
    communicator.destroy()
    assert events == ["nccl destroy"]


# The CUDA communicator: what is made, and what is said -----------------------


def said_by(module, communicator, monkeypatch):
    """The line that names the backends."""
    lines = []
    monkeypatch.setattr(
        module,
        "logger",
        SimpleNamespace(
            info_once=lambda text, *given, **scope: lines.append(text % given)
        ),
    )
    communicator._log_all_reduce_backend_selection()
    (line,) = lines
    return line


def test_the_line_names_b12x_first(events, monkeypatch):  # R-F1 # C35
    communicator = communicator_with(
        b12x_comm=Recorder("b12x", events), pynccl_comm=Recorder("nccl", events)
    )
    line = said_by(cuda_communicator, communicator, monkeypatch)
    assert "Using ['B12X_PCIE', 'PYNCCL'] all-reduce backends" in line
    assert "potential backends: ['B12X_PCIE', 'NCCL_SYMM_MEM'," in line


@pytest.mark.parametrize("disabled", [False, True])
def test_without_b12x_the_line_is_upstreams(events, monkeypatch, disabled):
    # R-A5 # C35: disabled is what PCIe alone makes of four ranks
    custom = Recorder("custom", events)
    custom.disabled = disabled
    backends = {"ca_comm": custom, "pynccl_comm": Recorder("nccl", events)}
    ours = communicator_with(**backends)
    line = said_by(cuda_communicator, ours, monkeypatch)
    module = upstreams("cuda_communicator")
    theirs = communicator_with(module.CudaCommunicator, **backends)
    assert line == said_by(module, theirs, monkeypatch)
    assert ("'CUSTOM'" in line.split("out of")[0]) == (not disabled)


@pytest.fixture
def made(events, monkeypatch):
    """Makes a communicator of four ranks; its backends are recorders."""

    def base(self, cpu_group, device, device_group, unique_name, *others, **named):
        self.cpu_group, self.device, self.device_group = cpu_group, device, device_group
        self.unique_name, self.world_size = unique_name, 4
        self.use_all2all, self.all2all_manager = False, None

    def backend(name):
        def make(**named):
            events.append(f"make {name}")
            return Recorder(name, events)

        return make

    monkeypatch.setattr(
        base_device_communicator.DeviceCommunicatorBase, "__init__", base
    )
    monkeypatch.setattr(pynccl, "PyNcclCommunicator", backend("nccl"))
    monkeypatch.setattr(flashinfer_all_reduce, "FlashInferAllReduce", backend("fi"))
    monkeypatch.setattr(custom_all_reduce, "CustomAllreduce", backend("custom"))
    monkeypatch.setattr(parallel_state, "_ENABLE_CUSTOM_ALL_REDUCE", True)

    def make(cls=CudaCommunicator, name="tp:0"):
        return cls(None, torch.device("cpu"), None, name)

    return make


def test_with_b12x_nothing_of_the_custom_one_is_made(made, events, monkeypatch):
    # R-E1 # C14
    def b12x_all_reduce(communicator, *, custom_all_reduce):
        events.append(f"make b12x {custom_all_reduce}")
        return Recorder("b12x", events)

    monkeypatch.setenv(BACKEND, "b12x")
    monkeypatch.setattr(b12x_transports, "b12x_all_reduce", b12x_all_reduce)
    communicator = made()
    # before NCCL's first collective, which has no deadline
    assert events == ["make b12x True", "make nccl"]
    assert communicator.ca_comm is None and communicator.use_custom_allreduce


def test_b12x_that_is_refused_leaves_nccl(made, events, monkeypatch):  # R-E1 # C14
    monkeypatch.setenv(BACKEND, "b12x")
    monkeypatch.setattr(
        b12x_transports, "b12x_all_reduce", lambda communicator, **given: None
    )
    communicator = made()
    assert communicator.b12x_comm is communicator.ca_comm is None
    assert events == ["make nccl"]


@pytest.mark.parametrize("switched_on", [True, False])
def test_the_switch_of_custom_all_reduce_is_passed_on(
    made, events, monkeypatch, switched_on
):  # R-E3
    given = []
    monkeypatch.setenv(BACKEND, "b12x")
    monkeypatch.setattr(parallel_state, "_ENABLE_CUSTOM_ALL_REDUCE", switched_on)
    monkeypatch.setattr(
        b12x_transports,
        "b12x_all_reduce",
        lambda communicator, **named: given.append(named),
    )
    made()
    assert given == [{"custom_all_reduce": switched_on}]


@pytest.mark.parametrize("backend", [None, "cpp"])
@pytest.mark.parametrize("name", ["tp:0", "dcp:0", "pp:0", "ep:0"])
def test_without_b12x_the_same_is_made_as_by_upstream(
    made, events, monkeypatch, backend, name
):  # R-A5
    monkeypatch.delenv(BACKEND, raising=False)
    if backend is not None:
        monkeypatch.setenv(BACKEND, backend)

    def forbidden(*given, **named):
        raise AssertionError("b12x was asked for")

    monkeypatch.setattr(b12x_transports, "b12x_all_reduce", forbidden)
    ours = vars(made(name=name)).keys()
    made_by_us = events[:]
    events.clear()
    theirs = vars(made(upstreams("cuda_communicator").CudaCommunicator, name)).keys()
    assert made_by_us == events
    assert ours - theirs == {"b12x_comm"} and theirs <= ours


ALONE = """
import sys
import vllm.distributed.device_communicators.cuda_communicator
import vllm.distributed.parallel_state
import vllm.distributed.graph_channels.report
from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

loaded = [name for name in sys.modules if "b12x" in name]
assert not loaded, loaded
kept = object.__new__(CustomAllreduce)
kept.disabled, kept._ptr, kept.meta_ptrs = False, 7, [1]
kept.itself = kept
raise SystemExit(3)
"""


def test_a_process_without_b12x_imports_none_and_ends_in_silence():
    # R-A5 # R-D3 # C24: one custom all-reduce, half-built, lives until then
    ended = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 3, ended.stderr[-2000:]
    assert "Exception ignored" not in ended.stderr and "__del__" not in ended.stderr


# A capture scope on both runners' way ----------------------------------------


def graph_capture_over(communicator, monkeypatch):
    """The tensor parallel group holds this communicator; the pipeline's, none."""
    for group, held in (("_TP", communicator), ("_PP", None)):
        coordinator = object.__new__(parallel_state.GroupCoordinator)
        coordinator.device_communicator = held
        monkeypatch.setattr(parallel_state, group, coordinator)


@pytest.mark.parametrize(("b12x", "registered"), [(True, 0), (False, 2)])
def test_a_capture_registers_buffers_only_without_b12x(
    events, monkeypatch, communicator, b12x, registered
):  # C14
    custom = None if b12x else all_reduce_of(CustomAllreduce, events)
    group = communicator_with(
        ca_comm=custom, b12x_comm=Recorder("b12x", events) if b12x else None
    )
    graph_capture_over(group, monkeypatch)
    for phase in (Phase.PROFILE, Phase.PRODUCTION):
        with parallel_state.graph_capture(
            torch.device("cpu"), channel_id=ChannelId(Owner.TARGET, phase)
        ):
            pass
    assert events.count("register") == registered
