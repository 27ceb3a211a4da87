# SPDX-License-Identifier: Apache-2.0
"""What graph channels cannot be combined with is refused before anything starts."""

import pytest

from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.graph_channels.combinations import refuse_combinations

COVERS = ("vllm/config/vllm.py",)

BACKEND = "VLLM_PCIE_ALLREDUCE_BACKEND"
FEATURES = {
    "distributed_executor_backend": ("ray", "the Ray executor"),
    "enable_elastic_ep": (True, "elastic expert parallelism"),
    "enable_fault_tolerance": (True, "fault tolerance"),
}


@pytest.mark.parametrize("field", FEATURES)
@pytest.mark.parametrize("backend", ["b12x", "host"])
def test_a_configuration_is_refused_in_one_line(monkeypatch, field, backend):
    # R-D5
    monkeypatch.setenv(BACKEND, backend)
    config = VllmConfig()
    value, said = FEATURES[field]
    setattr(config.parallel_config, field, value)
    with pytest.raises(ValueError, match=f"{BACKEND}={backend} .* {said}") as caught:
        config.__post_init__()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["enable_elastic_ep", "enable_fault_tolerance"])
def test_without_channels_none_is(monkeypatch, field):  # R-A5
    monkeypatch.delenv(BACKEND, raising=False)
    config = VllmConfig()
    setattr(config.parallel_config, field, FEATURES[field][0])
    config.__post_init__()


@pytest.mark.parametrize("executor", ["mp", "uni", "external_launcher"])
def test_the_executors_that_are_handled_are_taken(monkeypatch, executor):  # R-D1
    monkeypatch.setenv(BACKEND, "host")
    config = VllmConfig()
    config.parallel_config.distributed_executor_backend = executor
    refuse_combinations(config)


def test_a_process_checkpoint_is_refused_before_anything(monkeypatch):  # R-D5
    # it is asked for while the engine runs: there is no switch to refuse at start
    def forbidden(action):
        pytest.fail("a communicator was asked")

    monkeypatch.setattr(parallel_state, "_apply_to_device_comms", forbidden)
    monkeypatch.setenv(BACKEND, "b12x")
    with pytest.raises(RuntimeError, match="b12x cannot be combined with process"):
        parallel_state.checkpoint_prepare_distributed_state()


def test_without_channels_it_is_prepared(monkeypatch):  # R-A5
    asked = []
    monkeypatch.setattr(parallel_state, "_apply_to_device_comms", asked.append)
    monkeypatch.setattr(parallel_state.torch.accelerator, "synchronize", lambda: None)
    monkeypatch.delenv(BACKEND, raising=False)
    parallel_state.checkpoint_prepare_distributed_state()
    assert len(asked) == 1
