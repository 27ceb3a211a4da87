# SPDX-License-Identifier: Apache-2.0
"""May b12x run here? Every gate shut in turn, on one rank of two: both go without.

The ranks are processes with real votes, and gloo stands for NCCL. What a GPU would
answer is faked, and so is b12x's pool, which counts how often it is made.
"""

import os
import sys
from contextlib import nullcontext, suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError
from time import monotonic, sleep
from types import SimpleNamespace

import b12x.comm
import pytest
import torch
import torch.distributed as dist
from b12x.comm.pcie import pcie_oneshot
from hypothesis import given
from hypothesis import strategies as st

from tests import ranks
from tests.distributed.test_b12x_pools import FakeChannel
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import (
    b12x_gate,
    b12x_peers,
    channel_transports,
)
from vllm.distributed.device_communicators.b12x_gate import local_refusal
from vllm.distributed.device_communicators.b12x_pcie_all_reduce import (
    WORLD_SIZES,
    needs,
)
from vllm.distributed.device_communicators.b12x_peers import PeerRecord
from vllm.distributed.device_communicators.b12x_transports import b12x_all_reduce
from vllm.distributed.graph_channels.ledger import Ledger

DEADLINE = 60
BACKEND = "VLLM_PCIE_ALLREDUCE_BACKEND"
DEVICE = torch.device("cpu", 0)
NEEDS = needs(allow_unvalidated=False)


class Channel(FakeChannel):
    """A channel that reduces over gloo."""

    def all_reduce(self, tensor):
        summed = tensor.clone()
        dist.all_reduce(summed)
        return summed


class Pool(pcie_oneshot.PCIeOneshotAllReducePool):
    """b12x's pool without a GPU; it counts how often it is made."""

    made = 0

    def __init__(
        self,
        *,
        rank,
        world_size,
        device,
        exchange_group,
        eager_buffer_bytes,
        max_size,
        rank_data_bytes,
        max_concurrent_channels,
    ):
        type(self).made += 1
        super().__init__(
            rank=rank,
            world_size=world_size,
            device="cpu",
            eager_buffer_bytes=eager_buffer_bytes,
            max_size=max_size,
            channel_factory=lambda stream: Channel(),
        )


class Runtime:
    """What is used of the CUDA runtime; it counts what it has given out.

    As with the real one, what fails is the thread's last error until somebody asks.
    """

    exports = imports = last_error = 0
    lib = SimpleNamespace(
        cudaIpcCloseMemHandle=lambda pointer: Runtime._count(-1),
        cudaGetLastError=lambda: setattr(Runtime, "last_error", 0),
    )

    @staticmethod
    def _count(change):
        Runtime.imports += change
        return 0

    def cudaSetDevice(self, index):
        assert index == 0

    def cudaMalloc(self, size):
        Runtime.exports += 1
        return 4096

    def cudaFree(self, pointer):
        assert pointer == 4096
        Runtime.exports -= 1

    def cudaIpcGetMemHandle(self, pointer):
        return bytes(b12x_peers._HANDLE_BYTES)

    def cudaIpcOpenMemHandle(self, handle):
        Runtime._count(1)
        return 8192

    def CUDART_CHECK(self, result):
        assert result == 0


class Machine:
    """What this rank sees; a fault changes it on one rank."""

    def __init__(self):
        self.gpu = SimpleNamespace(
            name="A GPU",
            major=12,
            minor=0,
            multi_processor_count=188,
            uuid="one",
        )
        self.access = True

    def install(self):
        """Let vLLM see this machine, in a process that ends after the test."""
        torch.cuda.device = lambda device: nullcontext()
        torch.cuda.get_device_properties = lambda device: self.gpu
        torch.cuda.device_count = lambda: 1
        torch.cuda.can_device_access_peer = lambda device, peer: self.access
        b12x_peers.CudaRTLibrary = Runtime
        b12x_gate.version = lambda package: "1.2.6"
        use_package(Pool)


def use_package(pool, channel=pcie_oneshot.PCIeOneshotAllReduce):
    """Let b12x have these classes, whether or not the machine can import its own."""
    package = SimpleNamespace(OneshotAllReducePool=pool, OneshotAllReduce=channel)
    b12x.comm.pcie = sys.modules["b12x.comm.pcie"] = package


def communicator_of(rank, world, store):
    """A CUDA communicator of the ranks, over gloo, and the process's ledger."""
    os.environ.update({BACKEND: "b12x", "VLLM_GRAPH_CHANNELS_DEADLINE": "10"})
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=20),
    )
    parallel_state._LEDGER = Ledger(
        deadline=10, closing_deadline=5, names_demanded_by="b12x"
    )
    return SimpleNamespace(
        unique_name="tp:0",
        ranks=list(range(world)),
        rank_in_group=rank,
        world_size=world,
        device=DEVICE,
        device_group=dist.group.WORLD,
    )


def recorded_errors():
    """The errors that are logged about groups, as they will be read."""
    errors = []
    channel_transports.logger = SimpleNamespace(
        error=lambda text, *parts: errors.append(text % parts),
        info=lambda *parts: None,
    )
    return errors


def decisions(fault, *, world=2, faulty=(1,)):
    """What each rank decides if a fault is on some: (pool, lines, what is left)."""

    def body(rank, store):
        machine = Machine()
        machine.install()
        communicator = communicator_of(rank, world, store)
        errors = recorded_errors()
        if rank in faulty:
            fault(machine)
        transport = b12x_all_reduce(communicator, custom_all_reduce=True)
        dist.barrier()  # the next collective is one that all ranks come to
        left = Pool.made, Runtime.exports, Runtime.imports
        assert Runtime.last_error == 0  # torch would raise it at the next kernel
        demanded = parallel_state._LEDGER.names_demanded_by
        return transport and transport.label, errors, left, demanded

    return ranks.values(world, body, DEADLINE)


def demand_all_go_without(found, *causes):
    """No rank has a pool or made one, one line says why, and nothing is mapped."""
    assert [label for label, *_ in found] == [None] * len(found)
    assert [left for _, _, left, _ in found] == [(0, 0, 0)] * len(found)
    assert [demanded for *_, demanded in found] == [None] * len(found)
    lines = [line for _, errors, *_ in found for line in errors]
    assert len(lines) == 1 and found[0][1] == lines, lines
    assert "tp:0 goes on without graph channels" in lines[0]
    for cause in causes:
        assert cause in lines[0]


@pytest.mark.parametrize("world", WORLD_SIZES)
def test_ranks_that_can_all_make_one_pool_and_leave_nothing_open(world):
    # R-E1 # R-E4 # C27
    found = decisions(lambda machine: None, world=world)
    in_use = ("b12x all-reduce of tp:0", [], (1, 0, 0), "b12x")
    assert found == [in_use] * world


# Faults ---------------------------------------------------------------------


def no_package(machine):
    def version(package):
        raise PackageNotFoundError(package)

    b12x_gate.version = version


def released(number):
    def fault(machine):
        b12x_gate.version = lambda package: number

    return fault


def lacks_method(machine):
    use_package(type("Pool", (Pool,), {"rollback_channels": None}))


def lacks_keyword(machine):
    def capture(self, stream=None):
        raise AssertionError("not to be entered")

    use_package(type("Pool", (Pool,), {"capture": capture}))


def lacks_size(machine):
    def init(self, *, rank, world_size, device, exchange_group, max_size, **others):
        raise AssertionError("not to be made")

    use_package(type("Pool", (Pool,), {"__init__": init}))


def lacks_operation(machine):
    channel = pcie_oneshot.PCIeOneshotAllReduce
    fused = {"all_reduce_fused_add_rms_norm": None}
    use_package(Pool, type("Channel", (channel,), fused))


def import_raises(error):
    class Broken:
        def __getattr__(self, name):
            raise error

    def fault(machine):
        b12x.comm.pcie = sys.modules["b12x.comm.pcie"] = Broken()

    return fault


def older_gpu(machine):
    machine.gpu.major = 9


def small_gpu(machine):
    machine.gpu.multi_processor_count = 35


def hidden_multiprocessors(text):
    def fault(machine):
        os.environ["B12X_PCIE_TEST_VISIBLE_SM_COUNT"] = text

    return fault


def _fail(error):
    def fail(*arguments, **named):
        raise error

    return fail


def _fail_in_cuda(text):
    def fail(*arguments):
        Runtime.last_error = 1
        raise RuntimeError(text)

    return fail


def no_export(machine):
    Runtime.cudaIpcGetMemHandle = _fail_in_cuda("operation not supported")


def no_runtime(machine):
    b12x_peers.CudaRTLibrary = _fail(AssertionError("libcudart is not loaded"))


def old_runtime(machine):
    b12x_peers.CudaRTLibrary = _fail(AttributeError("undefined symbol"))


def other_host(machine):
    b12x_peers._host = lambda: bytes(range(16))


def no_access(machine):
    # The other rank's GPU is one that this rank sees, and cannot reach.
    machine.access = False
    real = b12x_peers._gpu
    shared, machine.gpu.uuid = real(0), "another"
    own = real(0)
    asked = iter([own])
    b12x_peers._gpu = lambda index: next(asked, shared)


def no_open(machine):
    Runtime.cudaIpcOpenMemHandle = _fail_in_cuda("invalid device context")


def garbled_record(machine):
    PeerRecord.pack = lambda self: "zz" * 10


FAULTS = [
    (no_package, "is not installed; pip install 'b12x==1.2.6'"),  # C41
    (released("1.2.3"), "b12x 1.2.3 is installed; from 1.2.4"),  # C11
    (released("1.3.0"), "not including, 1.3 is served"),
    (released("nonsense"), "a check failed: InvalidVersion"),
    (lacks_method, "b12x 1.2.6 lacks OneshotAllReducePool.rollback_channels"),
    (lacks_keyword, "lacks OneshotAllReducePool.capture(channel_id)"),
    (lacks_size, "OneshotAllReducePool.__init__(eager_buffer_bytes)"),
    (lacks_operation, "lacks OneshotAllReduce.all_reduce_fused_add_rms_norm"),
    (import_raises(ImportError("no cutlass")), "cannot be used: ImportError: no cu"),
    (import_raises(TypeError("bad call")), "cannot be used: TypeError: bad call"),
    (import_raises(AttributeError("gone")), "cannot be used: AttributeError: gone"),
    (older_gpu, "VLLM_B12X_ALLOW_UNVALIDATED_DEVICE=1"),  # R-E5
    (small_gpu, "shows 35 multiprocessors, and 36 are needed"),  # C29
    (hidden_multiprocessors("20"), "shows 20 multiprocessors"),  # C29
    (hidden_multiprocessors("few"), "a check failed: ValueError"),
    (no_export, "exports no memory to other processes: operation not supported"),
    (no_runtime, "libcudart is not loaded"),
    (old_runtime, "undefined symbol"),
    (other_host, "memory is out of reach: it is on another machine"),
    (no_access, "has no peer access to its GPU"),
    (no_open, "memory is out of reach: invalid device context"),
    (garbled_record, "no record of a peer"),
]


@pytest.mark.parametrize(
    ("fault", "cause"), FAULTS, ids=[cause[-28:] for _, cause in FAULTS]
)
def test_one_rank_that_cannot_takes_both_to_nccl(fault, cause):
    # R-E1 # R-F1 # C28 # C37 # C47
    demand_all_go_without(decisions(fault), cause, "rank 1: ")


@pytest.mark.parametrize("fault", [no_package, older_gpu, no_export])
def test_ranks_that_all_cannot_say_so_once(fault):  # R-F1 # C47
    found = decisions(fault, faulty=(0, 1))
    demand_all_go_without(found, "rank 0: ", "rank 1: ")


def test_three_ranks_go_without_and_are_told_which_sizes_there_are():  # C27
    found = decisions(lambda machine: None, world=3)
    demand_all_go_without(found, "groups of 2, 4, 6, 8 ranks, not of 3")


@pytest.mark.parametrize("world", [1, 3, 5, 7, 10, 12, 16])
def test_other_sizes_are_refused_before_anything_is_looked_at(world):  # C27
    said = local_refusal(world, DEVICE, NEEDS)
    assert f"groups of 2, 4, 6, 8 ranks, not of {world}" in said


def test_the_override_admits_other_gpus_and_nothing_else():  # R-E5
    def allowed(machine):
        older_gpu(machine)
        os.environ["VLLM_B12X_ALLOW_UNVALIDATED_DEVICE"] = "1"

    def allowed_and_small(machine):
        allowed(machine)
        small_gpu(machine)

    label, *_ = decisions(allowed, faulty=(0, 1))[0]
    assert label == "b12x all-reduce of tp:0"
    found = decisions(allowed_and_small, faulty=(0, 1))
    demand_all_go_without(found, "shows 35 multiprocessors")


def test_a_switch_turns_it_off_before_any_vote():  # R-E3
    def body(rank, store):
        communicator = communicator_of(rank, 2, store)
        errors = recorded_errors()
        made = b12x_all_reduce(communicator, custom_all_reduce=False)
        dist.barrier()  # else a rank may end while gloo still connects on the other
        return made, errors, parallel_state._LEDGER.names_demanded_by

    off = "tp:0 goes on without graph channels: custom all-reduce is switched off"
    found = ranks.values(2, body, DEADLINE)
    assert found == [(None, [off], None), (None, [], None)]


@pytest.mark.parametrize("name", ["dcp:0", "pp:0", "dp:0", "ep:0", "world"])
def test_other_groups_are_not_asked(name):  # R-B1
    def body(rank, store):
        communicator = communicator_of(0, 1, store)
        communicator.unique_name = name
        return b12x_all_reduce(communicator, custom_all_reduce=False)

    assert ranks.values(1, body, DEADLINE) == [None]


# Where nothing can go on ----------------------------------------------------


def failures(fault, *, seconds="10", comes=lambda rank: True):
    """(error, seconds, exports not freed, lost) of each rank that comes."""

    def body(rank, store):
        Machine().install()
        communicator = communicator_of(rank, 2, store)
        os.environ["VLLM_GRAPH_CHANNELS_DEADLINE"] = seconds
        recorded_errors()
        fault(rank)
        if not comes(rank):
            sleep(float(seconds) + 1)
            return None
        begun = monotonic()
        with pytest.raises(RuntimeError) as caught:
            b12x_all_reduce(communicator, custom_all_reduce=True)
        seconds_taken, lost = monotonic() - begun, parallel_state.ranks_are_lost()
        return str(caught.value), seconds_taken, Runtime.exports, lost

    return ranks.values(2, body, DEADLINE)


def demand_nccl_is_named(said):
    assert "NCCL_P2P_DISABLE=1" in said and "ACS" in said


def test_nccl_that_fails_on_one_rank_is_an_error_on_both():  # R-E1
    def fault(rank):
        if rank == 1:
            dist.all_reduce = _fail(RuntimeError("unhandled system error"))
        else:
            dist.all_reduce = lambda tensor, group: tensor.fill_(2)

    for said, *_ in failures(fault):
        demand_nccl_is_named(said)
        assert "unhandled system error" in said


def test_nccl_that_adds_wrongly_is_an_error():  # R-E1
    def fault(rank):
        dist.all_reduce = lambda tensor, group: None

    for said, *_ in failures(fault):
        demand_nccl_is_named(said)
        assert "ones of all ranks add up to 1" in said


def test_a_rank_that_does_not_come_is_named_in_time():  # R-E1 # C37
    there, gone = failures(lambda rank: None, seconds="2", comes=lambda rank: rank == 0)
    assert gone is None
    said, took, *_ = there
    assert "rank 1 did not vote in time" in said and took < 5
    # NCCL was not called: it may be another backend, and is not broken
    assert f"{BACKEND} has to be the same on all ranks" in said and "ACS" not in said


def test_nccl_that_hangs_is_left_and_no_call_waits_for_the_device():  # R-D2 # C49
    def fault(rank):
        if rank == 1:
            dist.all_reduce = lambda tensor, group: sleep(30)

    for said, took, exports, lost in failures(fault, seconds="2"):
        demand_nccl_is_named(said)
        # cudaFree would wait for the reduction, so the buffer stays
        assert took < 8 and exports == 1
        assert lost  # nor are NCCL's groups destroyed


def test_an_eager_lane_that_one_rank_cannot_prepare_ends_both():  # R-E1
    def fault(rank):
        def prepare_channels(self, channel_ids):
            raise RuntimeError("out of memory")

        if rank == 1:
            Pool.prepare_channels = prepare_channels

    for said, *_ in failures(fault):
        assert "b12x all-reduce of tp:0 cannot prepare" in said
        assert "out of memory" in said and "unset b12x to do without" in said


def test_a_wrong_self_test_ends_both():  # R-E4 # C30
    def fault(rank):
        if rank == 1:
            Channel.all_reduce = lambda self, tensor: tensor * 2
        else:
            Channel.all_reduce = lambda self, tensor: tensor * 2 + 1

    for said, *_ in failures(fault):
        assert "wrong sums" in said and "ACS" in said
        assert f"{BACKEND}=cpp turns b12x off" in said


def test_kernels_that_do_not_compile_end_both_with_what_to_do():  # R-E4
    def fault(rank):
        if rank == 1:
            Channel.all_reduce = _fail(TypeError("no such kernel"))
        else:
            Channel.all_reduce = lambda self, tensor: tensor * 2 + 1

    for said, *_ in failures(fault):
        assert f"{BACKEND}=cpp turns b12x off" in said
        assert "no such kernel" in said


# The pool -------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, ValueError, TypeError, ImportError])
def test_a_pool_that_one_rank_cannot_make_is_made_by_none(error):  # R-E1 # C38
    def fault(machine):
        def init(self, **sizes):
            raise error("not here")

        Pool.__init__ = init
        b12x_gate._lacking = lambda needs: []  # it has the right parameters

    found = decisions(fault)
    assert [label for label, *_ in found] == [None, None]
    assert [demanded for *_, demanded in found] == [None, None]
    (line,) = found[0][1]
    assert "rank 1: " in line and f"{error.__name__}: not here" in line
    assert found[1][1] == []


def test_a_pool_that_one_rank_waits_in_is_an_error_on_both():  # R-D2 # R-E1
    def fault(rank):
        def init(self, **sizes):
            if rank == 1:
                raise ValueError("not here")
            sleep(30)

        Pool.__init__ = init
        b12x_gate._lacking = lambda needs: []

    for said, took, exports, lost in failures(fault, seconds="2"):
        assert f"{BACKEND}=cpp turns b12x off" in said
        assert took < 8 and exports == 0 and lost


# Records --------------------------------------------------------------------

IDS = st.binary(min_size=16, max_size=16)
HANDLES = st.binary(min_size=128, max_size=128)


@given(IDS, IDS, st.none() | HANDLES)
def test_records_come_back_as_they_were(host, gpu, handle):  # R-G2
    record = PeerRecord(host, gpu, handle)
    assert PeerRecord.unpack(record.pack().encode()) == record
    assert len(record.pack()) == len(PeerRecord(host, gpu, None).pack())


@given(st.binary(max_size=400))
def test_garbage_is_no_record(garbage):  # R-G2
    with pytest.raises(ValueError):
        PeerRecord.unpack(garbage)


@given(IDS, IDS, st.integers(0, 162), st.integers(1, 255))
def test_a_changed_byte_is_read_as_itself_or_refused(host, gpu, place, change):
    # R-G2: two records are never read as one
    record = PeerRecord(host, gpu, None)
    changed = bytearray.fromhex(record.pack())
    changed[place] ^= change
    with suppress(ValueError):
        assert PeerRecord.unpack(changed.hex().encode()) != record


@pytest.mark.parametrize(
    "change", [str.upper, lambda text: f" {text}", lambda t: t[2:]]
)
def test_another_spelling_of_a_record_is_refused(change):  # R-G2
    record = PeerRecord(b"\xab" * 16, b"\xcd" * 16, None)
    with pytest.raises(ValueError):
        PeerRecord.unpack(change(record.pack()).encode())
