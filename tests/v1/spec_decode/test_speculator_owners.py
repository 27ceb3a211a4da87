# SPDX-License-Identifier: Apache-2.0
"""Each speculator names its graphs: the V2 runner's, and the V1 proposers."""

import inspect

import pytest

import vllm.v1.spec_decode
import vllm.v1.worker.gpu.spec_decode
from tests.utils import import_all, with_subclasses
from tests.v1.speculators import (
    MANAGERS,
    SIZES,
    give_sizes,
    proposer_of,
    speculator_of,
)
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.graph_channels.identity import ChannelId, Owner, Phase
from vllm.distributed.graph_channels.scope import active_channel, channel_scope
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.autoregressive.speculator import (
    AutoRegressiveSpeculator,
)
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import (
    MultiModuleMTPSpeculator,
)
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

COVERS = (
    "vllm/v1/spec_decode/llm_base_proposer.py",
    "vllm/v1/spec_decode/dflash.py",
    "vllm/v1/spec_decode/extract_hidden_states.py",
    "vllm/v1/worker/gpu/spec_decode/autoregressive/speculator.py",
    "vllm/v1/worker/gpu/spec_decode/multi_module_mtp/speculator.py",
    "vllm/v1/worker/gpu/spec_decode/dflash/speculator.py",
    "vllm/v1/worker/gpu/spec_decode/dspark/speculator.py",
)

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
AUTOREGRESSIVE = ["vllm:draft_prefill:production", "vllm:draft_decode:production"]


def _speculators():
    """Every class of the V2 runner that a speculator can be made of."""
    import_all(vllm.v1.worker.gpu.spec_decode)
    return [
        cls for cls in with_subclasses(BaseSpeculator) if not inspect.isabstract(cls)
    ]


def _expected(cls):
    for ancestor, names in (
        (AutoRegressiveSpeculator, AUTOREGRESSIVE),
        (MultiModuleMTPSpeculator, ["vllm:multi_module_mtp:production"]),
        (DSparkSpeculator, ["vllm:dspark:production"]),
        (DFlashSpeculator, ["vllm:draft_query:production"]),
    ):
        if issubclass(cls, ancestor):
            return names
    raise AssertionError(f"no owner is known for {cls.__name__}")


SPECULATORS = _speculators()
# What a speculator captures, by the names it has for it.
FORWARD = ("_prefill", "_generate_draft", "_generate_drafts", "_generate_fused_drafts")


@pytest.mark.parametrize("breakable", [False, True])
@pytest.mark.parametrize("modes", [[FULL], [PIECEWISE], [PIECEWISE, FULL]])
@pytest.mark.parametrize("cls", SPECULATORS, ids=lambda cls: cls.__name__)
def test_every_graph_of_a_v2_speculator_runs_on_its_channel(
    cls, modes, breakable, communicator, channels, no_graphs
):  # R-A3 # R-B2 # C07
    speculator, seen = speculator_of(cls), []
    speculator.use_fused_multi_step_decode = False
    for name in FORWARD:
        setattr(speculator, name, lambda *batch: seen.append(str(active_channel())))
    for attribute in MANAGERS:
        give_sizes(getattr(speculator, attribute), modes, breakable)
    speculator.capture()
    # a warm-up and a capture of each size
    each = 2 * len(SIZES) * len(modes)
    assert seen == [name for name in _expected(cls) for _ in range(each)]
    entered = [event for event in channels.events if "enter" in event]
    assert entered == [f"tp enter {name}" for name in _expected(cls)]
    assert communicator.names == _expected(cls)


def test_one_step_needs_no_decode_graphs(communicator):
    speculator = speculator_of(EagleSpeculator)
    speculator.num_speculative_steps = 1
    speculator.capture()
    assert communicator.names == AUTOREGRESSIVE[:1]


def test_streams_do_not_name_graphs(communicator):  # R-A2 # C01
    # All owners are recorded on one stream here, as torch may recycle its handle.
    for cls in (EagleSpeculator, DFlashSpeculator, DSparkSpeculator):
        speculator_of(cls).capture()
    assert len(communicator.names) == len(set(communicator.names)) == 4


def test_every_manager_of_a_speculator_is_looked_at():
    # A speculator that gained a manager must not slip through the walk above.
    import_all(vllm.v1.worker.gpu.spec_decode)
    users = set()
    for cls in with_subclasses(BaseSpeculator):
        for name in inspect.getsource(inspect.getmodule(cls)).split("self.")[1:]:
            attribute = name.split(" ")[0].split(":")[0].split(".")[0]
            if attribute.endswith("cudagraph_manager"):
                users.add(attribute)
    assert users == set(MANAGERS)
    assert all(issubclass(kind, CudaGraphManager) for kind in MANAGERS.values())


# The V1 runner's proposers -------------------------------------------------


def _proposers():
    import_all(vllm.v1.spec_decode)
    return [*with_subclasses(SpecDecodeBaseProposer), ExtractHiddenStatesProposer]


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("cls", _proposers(), ids=lambda cls: cls.__name__)
def test_a_v1_draft_runs_in_its_own_scope(cls, phase, no_forward_context):
    # R-B4 # C07: once a batch size, all within one scope of the target.
    seen = []
    proposer = proposer_of(cls, seen)
    target = ChannelId(Owner.TARGET, phase)
    with channel_scope(target):
        for size in (4, 2, 1):
            proposer.dummy_run(size, is_graph_capturing=True)
            assert active_channel() == target
    assert set(seen) == {f"vllm:draft:{phase.value}"}
    assert len(seen) == 3


@pytest.mark.parametrize("cls", _proposers(), ids=lambda cls: cls.__name__)
def test_a_v1_dummy_batch_while_serving_opens_no_scope(cls, no_forward_context):
    # R-B4, R-A5
    seen = []
    proposer_of(cls, seen).dummy_run(num_tokens=1)
    assert set(seen) == {"None"}


def test_a_failing_v1_draft_gives_the_scope_back(no_forward_context):  # R-B5
    proposer = proposer_of(DFlashProposer, [])
    proposer.model.side_effect = RuntimeError
    target = ChannelId(Owner.TARGET, Phase.PROFILE)
    with channel_scope(target):
        with pytest.raises(RuntimeError):
            proposer.dummy_run(1)
        assert active_channel() == target
