# SPDX-License-Identifier: Apache-2.0
"""graph_capture hands the owner's name to the communicators."""

import inspect

import pytest
import torch

import vllm.distributed.device_communicators
import vllm.distributed.stateless_coordinator
from tests.utils import import_all, with_subclasses
from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
from vllm.distributed.graph_channels.identity import ChannelId, Owner, Phase
from vllm.distributed.graph_channels.scope import active_channel
from vllm.distributed.parallel_state import (
    GraphCaptureContext,
    GroupCoordinator,
    graph_capture,
)

COVERS = (
    "vllm/distributed/parallel_state.py",
    "vllm/distributed/device_communicators/custom_all_reduce.py",
)

TARGET = ChannelId(Owner.TARGET, Phase.PRODUCTION)
ENCODER = ChannelId(Owner.ENCODER, Phase.PRODUCTION)
DEVICE = torch.device("cpu")


def test_the_communicator_is_given_the_name_and_the_scope_is_open(communicator):
    with graph_capture(device=DEVICE, channel_id=TARGET):
        assert communicator.names == ["vllm:target:production"]
        assert communicator.depth == 1
        assert active_channel() == TARGET
    assert communicator.depth == 0
    assert active_channel() is None


def test_a_caller_that_passes_nothing_works_as_before(communicator):  # R-A5
    with graph_capture(device=DEVICE) as context:
        assert isinstance(context, GraphCaptureContext)
        assert communicator.names == [None]
        assert active_channel() is None


def test_a_given_context_is_the_one_yielded(communicator):  # R-A5
    given = GraphCaptureContext(torch.cuda.Stream())
    with graph_capture(DEVICE, given, TARGET) as context:
        assert context is given


def test_the_pipeline_group_is_entered_without_a_name(communicator, monkeypatch):
    # R-B1: stages of a pipeline may differ in their owners.
    given = []
    entered = GroupCoordinator.graph_capture

    def record(self, *args, **kwargs):
        given.append(kwargs)
        return entered(self, *args, **kwargs)

    monkeypatch.setattr(GroupCoordinator, "graph_capture", record)
    with graph_capture(device=DEVICE, channel_id=TARGET):
        pass
    assert given == [{"channel_id": TARGET}, {}]


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failing_body_leaves_no_scope_open(communicator, failure):  # R-B5
    with pytest.raises(failure), graph_capture(device=DEVICE, channel_id=TARGET):
        raise failure
    assert communicator.depth == 0
    assert active_channel() is None


def test_captures_nest(communicator):  # R-B4
    with graph_capture(device=DEVICE, channel_id=TARGET):
        with graph_capture(device=DEVICE, channel_id=ENCODER):
            assert active_channel() == ENCODER
        assert active_channel() == TARGET
    assert communicator.names == ["vllm:target:production", "vllm:encoder:production"]


@pytest.mark.parametrize("channel_id", [None, TARGET])
def test_vllms_own_all_reduce_takes_the_name_and_ignores_it(channel_id):  # R-A5
    registered = []
    communicator = object.__new__(CustomAllreduce)
    communicator._IS_CAPTURING = False
    communicator._ptr = 0
    communicator.disabled = False
    communicator.register_graph_buffers = lambda: registered.append(1)
    with communicator.capture(channel_id=channel_id):
        assert communicator._IS_CAPTURING
        assert registered == []
    assert not communicator._IS_CAPTURING
    assert registered == [1]


@pytest.mark.parametrize(
    ("base", "method"),
    [(GroupCoordinator, "graph_capture"), (CustomAllreduce, "capture")],
)
def test_every_override_takes_the_name(base, method):  # R-A4 # C07
    import_all(vllm.distributed.device_communicators)
    assert vllm.distributed.stateless_coordinator.StatelessGroupCoordinator in (
        with_subclasses(GroupCoordinator)
    )
    for cls in with_subclasses(base):
        assert "channel_id" in inspect.signature(getattr(cls, method)).parameters, cls
