# SPDX-License-Identifier: Apache-2.0
"""The one table of channels: what it says, who says it, and when."""

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed import HashStore

from tests.distributed.recording_transport import RecordingTransport
from vllm.config.compilation import CompilationMode
from vllm.distributed import parallel_state
from vllm.distributed.graph_channels import report
from vllm.distributed.graph_channels.identity import (
    ChannelId,
    EagerLane,
    Owner,
    Phase,
)
from vllm.distributed.graph_channels.ledger import Ledger
from vllm.distributed.graph_channels.membership import Usage
from vllm.distributed.graph_channels.together import Group
from vllm.distributed.graph_channels.vote import Electorate
from vllm.v1.worker import gpu_worker

COVERS = ("vllm/v1/worker/gpu_worker.py", "vllm/v1/worker/cpu_worker.py")

LANE = EagerLane.ALLREDUCE
TARGET, DRAFT = (
    ChannelId(owner, Phase.PRODUCTION) for owner in (Owner.TARGET, Owner.DRAFT)
)


def usage(rank=0, **others):
    """What a transport of three channels holds."""
    channels = {LANE: 322944, TARGET: 322944, DRAFT: 1000}
    given = {"channels": channels, "recorded": {TARGET: 12, DRAFT: 3}} | others
    return Usage("b12x all-reduce of tp:0", rank, 4, **given)


@pytest.fixture
def lines(monkeypatch):
    """What is logged, as it is read."""
    said = []
    logger = SimpleNamespace(info=lambda text, *given: said.append(text % given))
    monkeypatch.setattr(report, "logger", logger)
    return said


@pytest.fixture
def holds(monkeypatch):
    """Lets the process's ledger hold transports of these usages."""

    def hold(*usages):
        ledger = SimpleNamespace(usage=lambda: usages)
        monkeypatch.setattr(parallel_state, "_LEDGER", ledger)

    return hold


# The table ------------------------------------------------------------------


def test_the_table_has_each_channel_and_the_totals():  # R-F1
    title, head, *rows, total = report.table(usage()).splitlines()
    assert title == "Graph channels: b12x all-reduce of tp:0, 4 ranks"
    assert head.split("  ")[1:2] == ["channel"] and "launches recorded" in head
    assert [row.split() for row in rows] == [
        ["vllm:eager:allreduce", "eager", "322,944", "0"],
        ["vllm:target:production", "target", "322,944", "12"],
        ["vllm:draft:production", "draft", "1,000", "3"],
    ]
    assert total.split() == ["total", "a", "rank", "646,888", "15"]


def test_its_columns_are_aligned():  # R-F1
    _, *lines = report.table(usage()).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_a_transport_without_channels_has_a_total_of_nothing():  # R-F1
    said = report.table(usage(channels={}, recorded={}))
    assert said.splitlines()[-1].split() == ["total", "a", "rank", "0", "0"]


# Who says it ----------------------------------------------------------------


def test_who_is_first_in_all_groups_says_each_table_once(holds, lines):  # R-F1 # C47
    holds(usage(), usage(rank=0))
    report.report_graph_channels()
    assert len(lines) == 2 and lines[0].startswith("Graph channels: b12x")


@pytest.mark.parametrize("ranks", [(1,), (3,), (1, 1), (2, 0)])
def test_the_other_ranks_say_nothing(holds, lines, ranks):  # R-F1
    # the last is first in a DCP group, of which its tensor parallel group has two
    holds(*(usage(rank=rank) for rank in ranks))
    report.report_graph_channels()
    assert lines == []


def test_without_channels_nothing_is_said(holds, lines, monkeypatch):  # R-A5 # R-F1
    holds()
    report.report_graph_channels()
    monkeypatch.setattr(parallel_state, "_LEDGER", None)
    report.report_graph_channels()
    assert lines == []


def test_it_says_what_a_real_ledger_holds(lines, monkeypatch):  # R-F1
    ledger = Ledger(deadline=5, closing_deadline=5)
    transport = RecordingTransport("b12x tp:0", [])
    group = Group("tp:0", Electorate(HashStore(), 0, 1, "tp:0"))
    ledger.register(transport, group, lanes=(LANE,))
    ledger.prepare([TARGET])
    monkeypatch.setattr(parallel_state, "_LEDGER", ledger)
    report.report_graph_channels()
    (said,) = lines
    for name, size in transport.inventory().items():
        assert str(name) in said and f"{size:,}" in said
    ledger.close()


# When -----------------------------------------------------------------------


def _noted(monkeypatch, module):
    """What a worker of a module does, as far as it matters here, in order."""
    noted = []
    monkeypatch.setattr(module, "report_graph_channels", lambda: noted.append("report"))
    monkeypatch.setattr(module, "set_random_seed", lambda seed: None)
    return noted


@pytest.mark.parametrize("caches", [[], ["a cache"]])
def test_the_cpu_worker_reports_once_after_its_warm_up(caches, monkeypatch):  # R-F1
    if torch.cuda.is_available():
        pytest.skip("the CPU's worker replaces parts of torch.cuda for good")
    from vllm.v1.worker import cpu_worker

    events = _noted(monkeypatch, cpu_worker)
    worker = object.__new__(cpu_worker.CPUWorker)
    worker.model_config = worker.compilation_config = MagicMock()
    worker.model_runner = SimpleNamespace(
        kv_caches=caches, warming_up_model=lambda: events.append("warm up")
    )
    worker.compile_or_warm_up_model()
    assert events == (["report"] if caches else ["warm up", "report"])


@pytest.mark.parametrize("second_runner", [False, True])
@pytest.mark.parametrize("eager", [False, True])
def test_the_gpu_worker_reports_once_after_its_captures(
    monkeypatch, second_runner, eager
):  # R-F1
    events = _noted(monkeypatch, gpu_worker)
    worker = object.__new__(gpu_worker.Worker)
    worker.vllm_config = worker.scheduler_config = worker.cache_config = MagicMock()
    worker.scheduler_config.max_num_seqs = 4
    worker.scheduler_config.max_num_batched_tokens = 8
    worker.compilation_config = SimpleNamespace(
        mode=CompilationMode.NONE, compilation_time=0.0, encoder_compilation_time=0.0
    )
    worker.model_config = SimpleNamespace(enforce_eager=eager, seed=0)
    worker.use_v2_model_runner = second_runner
    runner = worker.model_runner = MagicMock()
    runner.capture_model = lambda: events.append("capture") or 0
    runner._dummy_run = lambda *given, **named: events.append("run") or (None, None)
    worker.execute_model = worker.sample_tokens = None
    worker.observability_config = MagicMock()
    # the worker imports it where it calls it
    monitor = SimpleNamespace(activate=lambda **modes: None)
    monkeypatch.setitem(sys.modules, "vllm.utils.jit_monitor", monitor)
    monkeypatch.setattr(gpu_worker, "kernel_warmup", lambda worker: None)
    monkeypatch.setattr(
        gpu_worker, "warmup_kernels", lambda *given: events.append("run")
    )
    monkeypatch.setattr(
        gpu_worker, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True)
    )
    worker.compile_or_warm_up_model()
    captures = [] if eager else ["capture"]
    assert events == [*captures, "run", "report"]
