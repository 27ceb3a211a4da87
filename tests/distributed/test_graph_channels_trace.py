# SPDX-License-Identifier: Apache-2.0
"""Scopes, rollbacks, closes and votes under their names, in a profiler and the log."""

import logging
from contextlib import contextmanager

import pytest
import torch
from torch.distributed import PrefixStore
from torch.profiler import ProfilerActivity, profile

import vllm.v1.utils
from tests import ranks
from tests.host import PROFILE, TARGET, host_channels
from vllm.distributed.graph_channels import trace
from vllm.distributed.graph_channels.identity import EagerLane, Owner
from vllm.distributed.graph_channels.ledger import Ledger
from vllm.distributed.graph_channels.scope import owner_scope
from vllm.distributed.graph_channels.together import Group
from vllm.distributed.graph_channels.vote import Electorate

RANGES = "VLLM_CUSTOM_SCOPES_FOR_PROFILING"
DEADLINE = 60
PREFIX = "graph channels: "


def live(rank, store):
    """A short life on the host transport: profile, roll back, capture, close."""
    ledger = Ledger(deadline=20, closing_deadline=20, names_demanded_by="a test")
    group = Group("tp:0", Electorate(PrefixStore("votes", store), rank, 2, "tp:0"))
    ledger.register(host_channels(rank, 2, store), group, lanes=(EagerLane.ALLREDUCE,))
    checkpoint = ledger.checkpoint()
    with ledger.scope(PROFILE), owner_scope(Owner.ENCODER):
        pass
    ledger.rollback(checkpoint)
    with ledger.scope(TARGET):
        pass
    ledger.close()


EXPECTED = [
    "scope vllm:target:profile",
    "scope vllm:encoder:profile",
    "tp:0: capture on vllm:target:profile",
    "vote of tp:0: capture on vllm:target:profile",
    "vote of tp:0: capture on vllm:target:profile: done",
    "tp:0: prepare vllm:eager:allreduce",
    "roll back vllm:encoder:profile, vllm:target:profile",
    "tp:0: roll back",
    "scope vllm:target:production",
    "close vllm:eager:allreduce, vllm:target:production",
    "tp:0: close host tp:0",
]


@contextmanager
def logged(level):
    """What the module logs at a level, as it will be read."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    source = trace.logger
    before = source.level
    source.setLevel(level)
    source.addHandler(handler)
    yield lines
    source.removeHandler(handler)
    source.setLevel(before)


def profiled(rank, store):
    """The names of our ranges that torch's profiler sees."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        live(rank, store)
    return [event.name for event in found.events() if event.name.startswith(PREFIX)]


def test_ranges_have_the_names_of_channels(monkeypatch):
    monkeypatch.setenv(RANGES, "1")
    monkeypatch.setattr(vllm.v1.utils, "_PROFILER_FUNC", None)
    for names in ranks.values(2, profiled, DEADLINE):
        missing = {PREFIX + name for name in EXPECTED} - set(names)
        assert not missing, names


def test_a_range_lasts_as_long_as_its_scope(monkeypatch):
    monkeypatch.setenv(RANGES, "1")
    monkeypatch.setattr(vllm.v1.utils, "_PROFILER_FUNC", None)
    with profile(activities=[ProfilerActivity.CPU]) as found, trace.span("scope %s", 1):
        torch.ones(3).add(1)
    spans = {event.name: event.time_range for event in found.events()}
    ours, inner = spans[PREFIX + "scope 1"], spans["aten::add"]
    assert ours.start <= inner.start and inner.end <= ours.end


def test_without_a_switch_there_is_nothing(monkeypatch):  # R-A5
    monkeypatch.delenv(RANGES, raising=False)
    monkeypatch.setattr(vllm.v1.utils, "_PROFILER_FUNC", None)

    def body(rank, store):
        with logged(logging.INFO) as lines:
            return profiled(rank, store), lines

    assert ranks.values(2, body, DEADLINE) == [([], [])] * 2
    assert trace.span("scope %s", TARGET) is trace.span("close %s", TARGET)


def test_at_debug_level_each_is_logged_with_its_duration():
    def body(rank, store):
        with logged(logging.DEBUG) as lines:
            live(rank, store)
        return lines

    for lines in ranks.values(2, body, DEADLINE):
        said = [line.removeprefix(PREFIX).rpartition(": ") for line in lines]
        assert set(EXPECTED) <= {name for name, _, _ in said}
        assert all(float(took.removesuffix(" ms")) >= 0 for _, _, took in said)


def test_what_raises_is_logged_all_the_same():
    with logged(logging.DEBUG) as lines, pytest.raises(KeyError), trace.span("a step"):
        raise KeyError
    (line,) = lines
    assert line.startswith(PREFIX + "a step: ")


def test_the_other_kind_of_range_is_vllms_choice(monkeypatch):
    begun = []

    @contextmanager
    def annotate(name):
        begun.append(name)
        yield

    monkeypatch.setenv("VLLM_NVTX_SCOPES_FOR_PROFILING", "1")
    monkeypatch.setattr(vllm.v1.utils, "_PROFILER_FUNC", annotate)
    with trace.span("scope %s", TARGET):
        assert begun == [PREFIX + "scope vllm:target:production"]
