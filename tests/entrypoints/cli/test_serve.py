# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` says in one line what switch it refuses, before it does anything."""

import argparse

import pytest

from vllm.entrypoints.cli import serve

COVERS = ("vllm/entrypoints/cli/serve.py",)

BACKEND = "VLLM_PCIE_ALLREDUCE_BACKEND"


@pytest.fixture
def looked_at(monkeypatch):
    """The arguments that vLLM's own check was given."""
    given = []
    monkeypatch.setattr(serve, "validate_parsed_serve_args", given.append)
    return given


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("b12", "expected one of cpp, b12x, host"),
        ("flashinfer-ipc", "is not part of this build"),
        ("b12x", "b12x reduces between CUDA GPUs"),
    ],
)
def test_a_switch_that_is_refused_ends_it(monkeypatch, looked_at, value, words):  # R-F3
    monkeypatch.setenv(BACKEND, value)
    with pytest.raises(SystemExit) as ended:
        serve.ServeSubcommand().validate(argparse.Namespace())
    (line,) = str(ended.value.code).splitlines()
    assert line.startswith(f"error: {BACKEND}=") and words in line
    assert not looked_at


def test_good_values_are_no_matter(monkeypatch, looked_at):  # R-F3
    monkeypatch.setenv(BACKEND, "host")
    arguments = argparse.Namespace()
    serve.ServeSubcommand().validate(arguments)
    assert looked_at == [arguments]
