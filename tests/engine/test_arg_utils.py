# SPDX-License-Identifier: Apache-2.0
"""A switch that is refused is refused when the configuration is made."""

import pytest

from vllm.distributed.graph_channels import switches
from vllm.engine.arg_utils import EngineArgs

COVERS = ("vllm/engine/arg_utils.py",)

BACKEND = "VLLM_PCIE_ALLREDUCE_BACKEND"


@pytest.fixture
def arguments(monkeypatch):
    """Of an engine, for a model that is nowhere: to look for it is too late."""

    def looked_for(*args, **kwargs):
        raise LookupError("a model was looked for")

    monkeypatch.setattr(
        "vllm.engine.arg_utils.maybe_override_with_speculators", looked_for
    )
    return EngineArgs(model="nobody/nothing")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (BACKEND, "B12X", "expected one of cpp, b12x, host"),
        (BACKEND, "b12x", "b12x reduces between CUDA GPUs"),
        (BACKEND, "flashinfer-ipc", "is not part of this build"),
        ("VLLM_PCIE_ONESHOT_ALLREDUCE_MAX_SIZE", "64K", "64KB or 1MB"),
        ("VLLM_PCIE_ONESHOT_FUSED_ADD_RMS_NORM_MAX_SIZE", "x", "64KB or 1MB"),
        ("VLLM_DCP_A2A_MAX_TOKENS", "0", "a number of tokens"),
        ("VLLM_GRAPH_CHANNELS_DEADLINE", "0", "seconds above 0"),
        ("VLLM_B12X_ALLOW_UNVALIDATED_DEVICE", "yes", "expected 0 or 1"),
    ],
)
def test_it_is_refused_before_a_model_is_looked_for(
    monkeypatch, arguments, name, value, words
):  # R-F3
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words) as caught:
        arguments.create_engine_config()
    assert str(caught.value).startswith(f"{name}=")


@pytest.mark.parametrize(
    ("value", "ranks", "lines"), [("host", 1, 1), ("host", 2, 0), ("cpp", 1, 0)]
)
def test_one_rank_is_told_that_it_has_nobody(
    monkeypatch, arguments, value, ranks, lines
):  # R-F1 # C47
    monkeypatch.setenv(BACKEND, value)
    said = []
    monkeypatch.setattr(
        switches.logger, "error", lambda form, *what: said.append(form % what)
    )
    arguments.tensor_parallel_size = ranks
    with pytest.raises(LookupError):
        arguments.create_engine_config()
    assert len(said) == lines
    assert all(f"{BACKEND}=host is not used" in line for line in said)


@pytest.mark.parametrize("value", ["cpp", "host"])
def test_good_values_are_no_matter(monkeypatch, arguments, value):  # R-F3
    monkeypatch.setenv(BACKEND, value)
    with pytest.raises(LookupError, match="a model was looked for"):
        arguments.create_engine_config()
