# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm.distributed.graph_channels demo` says what happened."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm.distributed.graph_channels import demo
from vllm.distributed.graph_channels.__main__ import main


def shared_memory():
    """Files there that say to be vLLM's; other tests of this machine have theirs."""
    return {name for name in os.listdir("/dev/shm") if "vllm" in name}


@pytest.mark.parametrize("world", [2, 3, 5])
def test_the_whole_life_goes_well(world, capfd):  # R-B1, R-C2, R-D1, R-F2
    before = shared_memory()
    assert main(["demo", "--ranks", str(world), "--rounds", "50"]) == 0
    printed = capfd.readouterr().out
    assert "names and bytes are as before" in printed
    rows = [line.split() for line in printed.splitlines() if line.startswith("  vllm:")]
    assert [(row[0], row[3], row[4]) for row in rows] == [
        (name, "50", "0")
        for name in (
            "vllm:eager:allreduce",
            "vllm:draft:production",
            "vllm:encoder:production",
            "vllm:target:production",
        )
    ]
    assert "every sum was right, nothing is left" in printed
    assert shared_memory() <= before


def test_a_wrong_sum_is_told(capfd, monkeypatch):
    value = demo._Rank._value
    monkeypatch.setattr(
        demo._Rank, "_value", lambda self, weight, turn: value(self, weight, turn) + 1
    )
    assert demo.run(2, 10) == 1
    assert "NOT as it should be" in capfd.readouterr().out


def test_a_rank_that_dies_is_told(capfd, monkeypatch):
    def die(self):
        if self.rank == 1:
            os._exit(3)

    monkeypatch.setattr(demo._Rank, "profile", die)
    monkeypatch.setattr(demo, "_DEADLINE", 1.0)
    assert demo.run(2, 10) == 1
    said = capfd.readouterr()
    assert "rank 1 ended before its time" in said.err
    assert "rank 0: " in said.err
    assert "NOT as it should be" in said.out


def _ranks_of(parent):
    """The processes that a process has started."""
    return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()


@pytest.mark.parametrize(
    ("ending", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)],
)
def test_no_rank_outlives_an_ended_demo(ending, status):
    command = [sys.executable, "-m", "vllm.distributed.graph_channels", "demo"]
    started = subprocess.Popen(
        [*command, "--rounds", "1000000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    until = time.monotonic() + 120
    while len(ranks := _ranks_of(started.pid)) < 2:
        assert time.monotonic() < until
        time.sleep(0.1)
    time.sleep(1)
    started.send_signal(ending)
    _, said = started.communicate(timeout=30)
    assert started.returncode == status
    assert "Traceback" not in said
    while any(_alive(rank) for rank in ranks):
        assert time.monotonic() < until
        time.sleep(0.1)


def _alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_what_stays_allocated_is_told(capfd, monkeypatch):
    monkeypatch.setattr("vllm.distributed.graph_channels.ledger.Ledger.close", id)
    assert demo.run(2, 10) == 1
    assert "NOT as it should be" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--ranks", "1"], "invalid choice"),
        (["demo", "--ranks", "9"], "invalid choice"),
        (["demo", "--rounds", "0"], "'0' is not a number from 1 to"),
        (["demo", "--rounds", "x"], "'x' is not a number from 1 to"),
        ([], "COMMAND"),
    ],
)
def test_bad_arguments_are_refused(arguments, words, capfd):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert words in capfd.readouterr().err


def test_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "vllm.distributed.graph_channels", "demo", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "without a GPU" in done.stdout
