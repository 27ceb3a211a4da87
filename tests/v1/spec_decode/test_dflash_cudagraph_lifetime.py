# SPDX-License-Identifier: Apache-2.0
"""DFlash: V1's throwaway draft graphs leave nothing, V2's only graphs stay."""

import gc
import weakref
from types import SimpleNamespace

import pytest

from tests.v1.speculators import proposer_of, speculator_of
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.distributed.graph_channels.identity import ChannelId, Owner, Phase
from vllm.distributed.graph_channels.scope import active_channel
from vllm.distributed.parallel_state import get_graph_channels
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator


class _Graph:
    """Stands for a torch.cuda.CUDAGraph: somebody may hold it."""


@pytest.fixture
def profiled(v1_runner, channels, no_forward_context):
    """A V1 runner whose draft is vLLM's DFlashProposer, captured by a wrapper."""
    events = channels.events
    wrapper = object.__new__(CUDAGraphWrapper)
    wrapper.runnable, wrapper.graph_pool = None, None
    wrapper.concrete_cudagraph_entries = {}
    CUDAGraphWrapper._all_instances.add(wrapper)

    def capture(**inputs):
        graph = _Graph()
        weakref.finalize(graph, events.append, "draft graph destroyed")
        wrapper.concrete_cudagraph_entries[graph] = graph
        events.append(f"draft graph in {active_channel()}")

    proposer = proposer_of(DFlashProposer, [])
    proposer.model.side_effect = capture
    v1_runner.vllm_config.speculative_config.method = "dflash"
    v1_runner._warmup_and_capture = lambda *args, **kwargs: proposer.dummy_run(8)
    v1_runner._cleanup_profiling_kv_cache = lambda: events.append("KV freed")
    gc.freeze()  # all of vLLM, else each collection walks it
    yield v1_runner
    gc.unfreeze()
    CUDAGraphWrapper._all_instances.discard(wrapper)


def test_v1_draft_graphs_die_before_their_channel(profiled, channels):
    # R-C1 # C13 # C15
    profiled.profile_cudagraph_memory()
    words = ("draft graph", "tp rollback", "KV")
    assert [event for event in channels.events if event.startswith(words)] == [
        "draft graph in vllm:draft:profile",
        "draft graph destroyed",
        "tp rollback",
        "KV freed",
    ]


def test_v1_the_checkpoint_precedes_the_draft_and_its_target(profiled, channels):
    # R-C1 # C15: a checkpoint before the draft alone would keep the target's channel
    profiled.profile_cudagraph_memory()
    assert channels.events[0] == "tp checkpoint"
    assert not [name for name in channels.channels if "profile" in str(name)]


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_v1_a_draft_that_fails_is_what_the_user_sees(profiled, channels, failure):
    # R-C3 # C18
    before = dict(channels.channels)

    def fail(*args, **kwargs):
        raise failure("of the draft")

    profiled._warmup_and_capture = fail
    with pytest.raises(failure, match="of the draft"):
        profiled.profile_cudagraph_memory()
    assert channels.channels == before
    assert get_graph_channels().lost is None


@pytest.mark.parametrize(
    "cls, owner",
    [
        (DFlashSpeculator, Owner.DRAFT_QUERY),
        (DFlash2Speculator, Owner.DRAFT_QUERY),
        (DSparkSpeculator, Owner.DSPARK),
    ],
)
def test_v2_graphs_are_captured_once_and_stay(cls, owner, channels, monkeypatch):
    # R-C5 # C46: on the channel that was prepared, with none beside it
    channel = ChannelId(owner, Phase.PRODUCTION)
    ledger = get_graph_channels()
    ledger.prepare([channel])
    prepared = dict(channels.channels)
    speculator = speculator_of(cls)
    manager = speculator.query_cudagraph_manager
    manager.graphs = {}

    def capture(self, *args, channel_id=None, **kwargs):
        with ledger.scope(channel_id):
            self.graphs["4 tokens"] = SimpleNamespace(channel=active_channel())

    monkeypatch.setattr(CudaGraphManager, "capture", capture)
    speculator.capture()
    assert manager.graphs["4 tokens"].channel == channel
    assert channels.channels == prepared
    assert not [e for e in channels.events if "checkpoint" in e or "rollback" in e]
