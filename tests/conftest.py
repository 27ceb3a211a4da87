# SPDX-License-Identifier: Apache-2.0
"""Recorders that stand where a GPU's communicators and streams would."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import MagicMock

import pytest


class RecordingCommunicator:
    """Stands for a group's custom all-reduce and notes what captures reach it."""

    def __init__(self) -> None:
        self.names: list[str | None] = []
        self.depth = 0

    @contextmanager
    def capture(self, channel_id: object = None) -> Iterator[None]:
        self.names.append(None if channel_id is None else str(channel_id))
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


@pytest.fixture
def communicator(monkeypatch: pytest.MonkeyPatch) -> RecordingCommunicator:
    """The tensor parallel group's communicator, behind the real graph_capture.

    vLLM's own GroupCoordinators for TP and PP are in place, without processes:
    TP's device communicator holds the recorder, PP has none, as on a GPU.
    """
    import torch

    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.cuda_communicator import (
        CudaCommunicator,
    )

    recorder = RecordingCommunicator()
    device_communicator = object.__new__(CudaCommunicator)
    device_communicator.ca_comm = recorder
    for group, held in (("_TP", device_communicator), ("_PP", None)):
        coordinator = object.__new__(parallel_state.GroupCoordinator)
        coordinator.device_communicator = held
        coordinator.rank, coordinator.ranks = 0, [0]
        monkeypatch.setattr(parallel_state, group, coordinator)

    stream = MagicMock(name="stream")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    for name, given in {
        "synchronize": None,
        "empty_cache": None,
        "get_memory_info": (1 << 30, 1 << 31),
    }.items():
        monkeypatch.setattr(torch.accelerator, name, lambda given=given: given)
    return recorder


@pytest.fixture
def channels(communicator: RecordingCommunicator, monkeypatch: pytest.MonkeyPatch):
    """The transport of the process's ledger, behind the real graph_capture.

    A recorder (tests/distributed/recording_transport.py), on a group of one rank.
    """
    from tests.distributed.recording_transport import RecordingTransport, alone
    from vllm.distributed import parallel_state
    from vllm.distributed.graph_channels.identity import EagerLane
    from vllm.distributed.graph_channels.ledger import Ledger

    ledger = Ledger(deadline=5, closing_deadline=5, names_demanded_by="a test")
    transport = RecordingTransport("tp", [])
    ledger.register(transport, alone(), lanes=(EagerLane.ALLREDUCE,))
    transport.events.clear()
    monkeypatch.setattr(parallel_state, "_LEDGER", ledger)
    return transport


@pytest.fixture
def heard():
    """What vLLM's loggers say; they do not propagate."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    source = logging.getLogger("vllm")
    source.addHandler(handler)
    yield records
    source.removeHandler(handler)
