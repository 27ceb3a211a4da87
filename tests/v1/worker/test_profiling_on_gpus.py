# SPDX-License-Identifier: Apache-2.0
"""Profiling on GPUs over b12x: memory, names, surviving graphs, and lost ranks.

Two ranks, on one GPU or on two. The first tests capture real graphs around the
runner's own steps; the last ones start whole engines on tiny models.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import pytest
import torch
import torch.distributed as dist

from tests import engines, gpus
from tests.distributed import b12x_ranks
from vllm.distributed import parallel_state
from vllm.distributed.graph_channels.identity import (
    ChannelId,
    Owner,
    Phase,
)
from vllm.distributed.graph_channels.scope import owner_scope
from vllm.v1.executor.lost_ranks import end_process_if_ranks_are_lost
from vllm.v1.worker import graph_channels
from vllm.v1.worker.graph_channels import DisposableCapture
from vllm.v1.worker.graph_owners import GraphOwners

pytestmark = gpus.needs_gpu

WORLD = 2
DEADLINE = 240
ROUNDS = 20
MIB = 1 << 20
TOLERATED = 4 * MIB  # all ranks together, from the second round on
PROFILE = ChannelId(Owner.TARGET, Phase.PROFILE)
# Products of so few rows and so long sums are split, for which cuBLAS has a workspace.
SIZE, LENGTH = 64, 8192


def on_ranks(body, **environment):
    """What ``body(rank)`` gives on each rank, with b12x's channels in place."""

    def rank_body(rank, device):
        with b12x_ranks.tensor_parallel(WORLD, device) as here:
            _foresee(Owner.TARGET, Owner.DRAFT)
            return body(here)

    switches = b12x_ranks.SWITCHES | environment
    return gpus.values(WORLD, rank_body, DEADLINE, **switches)


def _foresee(*owners):
    """Stand in for the configuration that tells whose scopes will open."""
    foreseen = GraphOwners(communicating=frozenset(owners))
    graph_channels._owners = lambda runner, v2_runner: foreseen


def free_memory(device):
    """Free bytes of all GPUs in use, while every rank is idle."""
    torch.cuda.synchronize(device)
    dist.barrier()
    reports = [None] * WORLD
    dist.all_gather_object(reports, (device.index, torch.cuda.mem_get_info(device)[0]))
    dist.barrier()
    return sum(dict(reports).values())


class GraphWithProduct:
    """A matrix product and an all-reduce of it, captured in the open scope."""

    def __init__(self, here, stream):
        self.here = here
        self.numbers = torch.zeros(SIZE, LENGTH, device=here.device)
        parity = torch.arange(LENGTH * SIZE, device=here.device) % 2
        self.weight = parity.float().view(LENGTH, SIZE) + 1
        self._reduce()  # as vLLM warms up: on the scope's stream, before capture
        stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.total = self._reduce()

    def _reduce(self):
        return self.here.group.all_reduce(self.numbers @ self.weight)

    def is_right(self, turn):
        """Replay on other numbers; integers below 2**24, so the sum is exact."""
        column = torch.arange(LENGTH, device=self.here.device) % 7 + turn % 5
        base = column.repeat(SIZE, 1).float()
        self.numbers.copy_(base + self.here.rank)
        self.graph.replay()
        ranks_sum = WORLD * (WORLD - 1) // 2
        expected = (base * WORLD + ranks_sum) @ self.weight
        return torch.equal(self.total, expected)


@contextmanager
def capturing(here, channel_id, stream):
    context = parallel_state.GraphCaptureContext(stream)
    with parallel_state.graph_capture(here.device, context, channel_id=channel_id):
        yield


def profile(here, stream, between=lambda: None):
    """What the runner does around its throwaway captures, with real graphs."""
    disposable = DisposableCapture(None)
    graphs = []
    try:
        disposable.prepare()
        with capturing(here, PROFILE, stream):
            graphs.append(GraphWithProduct(here, stream))
            between()
            with owner_scope(Owner.DRAFT):
                graphs.append(GraphWithProduct(here, stream))
    finally:
        graphs.clear()
        disposable.roll_back()
        torch.cuda.synchronize(here.device)
        torch.cuda.empty_cache()


def test_nothing_stays_over_twenty_rounds():  # R-C2 # C13
    def body(here):
        stream, free, names = torch.cuda.Stream(), [], []
        for _ in range(ROUNDS):
            before = here.ledger.inventory()
            profile(here, stream)
            names.append(here.ledger.inventory() == before)
            free.append(free_memory(here.device))
        lost = max(free[1:]) - min(free[1:])
        return all(names), lost

    for names_are_equal, lost in on_ranks(body):
        assert names_are_equal
        assert lost <= TOLERATED, f"{lost / MIB:.1f} MiB"


def test_survivors_with_products_replay_when_a_profile_is_gone():  # C50 # C13
    def body(here):
        stream = torch.cuda.Stream()
        with capturing(here, b12x_ranks.TARGET, stream):
            survivor = GraphWithProduct(here, stream)
        for _ in range(3):
            profile(here, stream)
        # and production goes on, on the same stream
        with capturing(here, b12x_ranks.DRAFT, stream):
            later = GraphWithProduct(here, stream)
        wrong = 0
        for turn in range(1000):
            wrong += not survivor.is_right(turn)
            wrong += not later.is_right(turn)
        del survivor.graph, later.graph
        return wrong

    assert on_ranks(body) == [0] * WORLD


def test_all_ranks_raise_and_a_second_profile_works():  # R-C1 # C18
    def fail():
        raise RuntimeError("first error")

    def body(here):
        stream, before = torch.cuda.Stream(), here.ledger.inventory()
        with pytest.raises(RuntimeError, match="first error"):
            profile(here, stream, fail)
        assert here.ledger.inventory() == before
        profile(here, stream)
        return here.ledger.inventory() == before

    assert on_ranks(body) == [True] * WORLD


@gpus.not_over_mps
def test_a_rank_whose_peer_spins_in_a_kernel_ends_in_time():
    # R-C1 # R-D2 # C18 # C49
    def rank_body(rank, device):
        with b12x_ranks.tensor_parallel(WORLD, device) as here:
            _foresee(Owner.TARGET, Owner.DRAFT)
            stream = torch.cuda.Stream()

            def fault():
                if rank == 1:
                    raise RuntimeError("first error")
                here.group.all_reduce(torch.ones(SIZE, SIZE, device=device))
                torch.cuda.synchronize(device)  # for ever

            began = time.monotonic()
            try:
                profile(here, stream, fault)
            except RuntimeError as error:
                seconds = time.monotonic() - began
                notes = " ".join(getattr(error, "__notes__", []))
                in_time = seconds < 20 and "did not vote in time" in notes
                if str(error) == "first error" and in_time:
                    end_process_if_ranks_are_lost()
            os._exit(7)

    environment = b12x_ranks.SWITCHES | {"VLLM_GRAPH_CHANNELS_DEADLINE": "10"}
    spinning, failed = gpus.run(WORLD, rank_body, 120, **environment)
    assert failed.status == 1 and not failed.late
    assert spinning.late  # SIGKILL ended it, and nothing else would have


# Whole engines -----------------------------------------------------------------


def _watched():
    """Make the V1 runner profile many times, and note memory, names and sizes."""
    # Their imports use CUDA, which a process that forks ranks must not.
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu_worker import Worker

    report = {"free": [], "names": []}
    runner_class = gpu_model_runner.GPUModelRunner
    profile_once = runner_class.profile_cudagraph_memory

    def profile_often(runner):
        for _ in range(ROUNDS):
            before = parallel_state.get_graph_channels().inventory()
            estimate = profile_once(runner)
            after = parallel_state.get_graph_channels().inventory()
            report["names"].append(before == after)
            report["free"].append(free_memory(runner.device))
        return estimate

    runner_class.profile_cudagraph_memory = profile_often
    _capture_on_one_stream(gpu_model_runner)
    measure = Worker.determine_available_memory.__wrapped__

    def noted(function, key):
        def determine(worker):
            report[key] = function(worker)
            return report[key]

        return determine

    reserve = graph_channels.reserves_graph_channels(noted(measure, "measured"))
    Worker.determine_available_memory = noted(reserve, "returned")
    return lambda engine: report


def _capture_on_one_stream(gpu_model_runner):
    """Let profiles and production capture on the same stream.

    Else each has a new one, for which torch keeps another cuBLAS workspace.
    """
    capture, contexts = gpu_model_runner.graph_capture, []

    def on_one_stream(device, graph_capture_context=None, **named):
        if not contexts:
            stream = torch.cuda.Stream(device)
            contexts.append(parallel_state.GraphCaptureContext(stream))
        return capture(device, contexts[0], **named)

    gpu_model_runner.graph_capture = on_one_stream


def _engine(environment, **options):
    return engines.generate(
        WORLD,
        engines.LLAMA,
        environment | {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"},
        attention_backend="TRITON_ATTN",
        **engines.MEASURED,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "custom_ops": ["none"],
            "cudagraph_capture_sizes": [1, 2, 4, 8, 12],
        },
        **options,
    )


def _taken(answer):
    """Bytes of the channels that the KV cache goes without, as the log says too."""
    returned = answer.report["returned"]
    taken = answer.report["measured"] - returned
    (line,) = [line for line in answer.log if line.startswith("Graph channels take")]
    assert f"take {taken / MIB:.2f} MiB" in line
    assert f"leaves {returned / MIB:.2f} MiB" in line
    return taken


def test_an_engine_with_a_draft_profiles_twenty_times_and_serves():
    # R-C2 # R-C5 # R-C6 # C13
    v1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    draft = {
        "method": "draft_model",
        "model": engines.LLAMA,
        "num_speculative_tokens": 2,
    }
    nccl = _engine(v1, disable_custom_all_reduce=True, speculative_config=draft)
    b12x = _engine(v1 | b12x_ranks.SWITCHES, watch=_watched, speculative_config=draft)
    assert [answer.tokens for answer in b12x] == [answer.tokens for answer in nccl]
    for answer in b12x:
        (recorded,) = answer.recorded.values()
        assert set(recorded) == {"vllm:target:production", "vllm:draft:production"}
        assert answer.report["names"] == [True] * ROUNDS
        free = answer.report["free"]
        lost = max(free[1:]) - min(free[1:])
        assert lost <= TOLERATED, [count / MIB for count in free]
        assert _taken(answer) > 0
    for answer in nccl:
        assert not [line for line in answer.log if "raph channels" in line]  # R-A5


def test_an_engine_of_the_v2_runner_subtracts_its_channels():  # R-C6 # C46
    v2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    for answer in _engine(v2 | b12x_ranks.SWITCHES, watch=_watched):
        assert answer.report["names"] == []  # nothing is captured to be thrown away
        assert _taken(answer) > 0
        (recorded,) = answer.recorded.values()
        assert set(recorded) == {"vllm:target:production"}


# An executor, whose limits count ------------------------------------------------

CHANNEL_DEADLINE = 10
# Start-up of an engine of two ranks on one GPU, which took up to 70 s when seen.
START_UP = 240
# What the executor grants its workers before it kills them, and some room.
EXECUTOR_LIMIT = 30


def _start_faulty(folder, fault):
    """Start an engine with a fault: its output, and the seconds from fault to end."""
    (folder / "config.json").write_text(json.dumps(engines.LLAMA))
    environment = os.environ | b12x_ranks.SWITCHES
    environment |= {
        "VLLM_GRAPH_CHANNELS_DEADLINE": str(CHANNEL_DEADLINE),
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-m", "tests.v1.worker.faulty_worker", folder, fault]
    engine = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    alarm = threading.Timer(START_UP, os.killpg, (engine.pid, signal.SIGKILL))
    alarm.start()
    lines, profiling = [], None
    try:
        for line in engine.stdout:  # ends when the last process of it has
            lines.append(line)
            if profiling is None and "Profiling CUDA graph memory" in line:
                profiling = time.monotonic()
        engine.wait()
    finally:
        alarm.cancel()
        with suppress(ProcessLookupError):
            os.killpg(engine.pid, signal.SIGKILL)
    assert profiling is not None, "".join(lines)
    return engine, lines, time.monotonic() - profiling


@gpus.not_over_mps
@pytest.mark.parametrize(
    "fault, lost",
    [
        ("all raise", None),
        ("one raises", None),
        ("one raises and its peer spins", "rank 0"),
        ("one never comes", "rank 1"),
    ],
)
def test_an_engine_with_a_fault_ends_within_its_limits(tmp_path, fault, lost):
    # R-C1 # R-C3 # R-D2 # C18 # C49
    engine, lines, seconds = _start_faulty(tmp_path, fault)
    output = "".join(lines)
    assert engine.returncode > 0, output  # by itself, and not by the alarm
    assert seconds < CHANNEL_DEADLINE + EXECUTOR_LIMIT, output
    # A worker that is told to end leaves its channels too; a lost rank is named.
    kept = [n for n, line in enumerate(lines) if "left to the end of" in line]
    missed = [lines[n] for n in kept if "did not vote in time" in lines[n]]
    if lost is None:
        assert not missed, output
    else:
        assert f"{lost} did not vote in time" in missed[0], output
    first = "first error" if fault != "one never comes" else "did not vote in time"
    told = [n for n, line in enumerate(lines) if first in line]
    assert kept and told[-1] > kept[-1], output
