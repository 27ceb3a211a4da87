# SPDX-License-Identifier: Apache-2.0
"""After installing, what is there is compared with what was asked for."""

import importlib.metadata
import subprocess
import sys

import pytest

from series import installed


# C41
def test_this_environment_is_as_it_should_be():
    assert list(installed.find_faults()) == []


# C41
@pytest.mark.parametrize(
    ("distribution", "version"),
    [("vllm", "0.27.1"), ("vllm", "0.28.0"), ("b12x", "1.2.4")],
)
def test_another_version_is_told(monkeypatch, capsys, distribution, version):
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: version if name == distribution else real(name),
    )
    assert installed.main() == 1
    told = capsys.readouterr().err
    assert f"found: {version}\n" in told
    assert "make install" in told


# C41
def test_a_missing_package_is_told(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert [f.found for f in installed.find_faults()] == ["no vllm", "no b12x"]


# C41
def test_a_b12x_that_does_not_import_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "b12x.comm.pcie", None)
    (fault,) = installed.find_faults()
    assert "b12x.comm.pcie" in fault.expected


def test_the_module_says_another_version_than_the_metadata(monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "dev")
    (fault,) = installed.find_faults()
    assert fault.found == "dev"


def test_nothing_is_missing_for_vllm():
    command = [sys.executable, "-m", "pip", "check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
