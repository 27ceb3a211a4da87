# SPDX-License-Identifier: Apache-2.0
"""An API server ends when it is told to while it starts; the server is vLLM's."""

import asyncio
import signal

import pytest

from vllm.entrypoints.openai import api_server
from vllm.utils import network_utils

COVERS = ("vllm/entrypoints/openai/api_server.py",)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture
def start(monkeypatch):
    """Runs a server that gets a signal while it waits for its engine core."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    monkeypatch.setattr(api_server, "decorate_logs", lambda *_, **__: None)
    monkeypatch.setattr(api_server, "setup_server", lambda *_, **__: ("", None))
    ended = []

    def run(number):
        async def serve(*_):
            with network_utils.zmq_socket_ctx("ipc:///tmp/none", 1, bind=False):
                try:
                    signal.raise_signal(number)
                finally:
                    signal.raise_signal(number)  # the end is not interrupted
                    ended.append("engine core")
            return "serves"

        monkeypatch.setattr(api_server, "run_server_worker", serve)
        asyncio.run(api_server.run_server(None))
        return ended

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_server_that_starts(start, monkeypatch, number):
    # R-D1 # R-D4 # C20
    monkeypatch.setenv("VLLM_PCIE_ALLREDUCE_BACKEND", "host")
    with pytest.raises(SystemExit) as end:
        start(number)
    assert end.value.code == 128 + number


def test_without_channels_handlers_are_as_before(monkeypatch):  # R-A5
    monkeypatch.setenv("VLLM_PCIE_ALLREDUCE_BACKEND", "cpp")
    before = [signal.getsignal(number) for number in SIGNALS]
    api_server.end_start_at_signals()
    assert [signal.getsignal(number) for number in SIGNALS] == before
