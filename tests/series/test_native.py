# SPDX-License-Identifier: Apache-2.0
"""The host transport's library: built if there is a compiler, and said if not."""

import ctypes

import pytest

from series import native, upstream, wheel
from series.errors import SeriesError

CPU = upstream.BASES["cpu"]


def test_the_library_is_built_and_loads(tmp_path):
    library = native.build()
    assert library is not None
    (tmp_path / "library.so").write_bytes(library)
    loaded = ctypes.CDLL(str(tmp_path / "library.so"))
    assert loaded.hc_all_reduce


def test_without_a_compiler_there_is_none(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "none")
    assert native.build() is None
    assert "no C++ compiler" in capsys.readouterr().out
    assert native.requirements() == []


def test_a_compiler_that_refuses_is_an_error(monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(SeriesError, match="csrc/ built by CMake") as caught:
        native.build()
    assert "CXX=none" in str(caught.value)


def test_tools_that_are_missing_are_asked_for(monkeypatch):
    real = native.shutil.which
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(
        native.shutil,
        "which",
        lambda name: None if name in ("cmake", "make", "ninja") else real(name),
    )
    names = [text.partition("==")[0] for text in native.requirements()]
    assert names == ["cmake", "ninja"]


def test_what_was_compiled_here_is_not_called_portable():
    assert "manylinux_2_28_x86_64" in wheel.wheel_name(CPU, None)
    assert wheel.wheel_name(CPU, b"").endswith("-cp38-abi3-linux_x86_64.whl")
