# SPDX-License-Identifier: Apache-2.0
"""Recorders that stand where a GPU's communicators and streams would."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
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
        monkeypatch.setattr(parallel_state, group, coordinator)

    stream = MagicMock(name="stream")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    accelerator = SimpleNamespace(
        synchronize=lambda: None,
        empty_cache=lambda: None,
        get_memory_info=lambda: (1 << 30, 1 << 31),
    )
    monkeypatch.setattr(torch, "accelerator", accelerator)
    return recorder
