# SPDX-License-Identifier: Apache-2.0
"""V1 profiling on two ranks over the host transport, with faults.

The V1 runner's own profile_cudagraph_memory runs on each rank; what it captures
is an all-reduce between processes, which waits for its peer as a kernel would.
"""

import gc
import os
import time
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import PrefixStore

from tests import ranks
from tests.distributed.recording_transport import group
from tests.host import host_channels
from vllm.distributed import parallel_state
from vllm.distributed.graph_channels.identity import EagerLane, Owner
from vllm.distributed.graph_channels.ledger import Ledger
from vllm.distributed.graph_channels.scope import owner_scope
from vllm.distributed.graph_channels.together import Refused
from vllm.distributed.graph_channels.vote import GroupClosed
from vllm.v1.executor.lost_ranks import end_process_if_ranks_are_lost
from vllm.v1.worker.graph_channels import reserves_graph_channels

LIMIT = 60
DEADLINE = 3.0  # of a vote; a kernel that waits for its peer waits longer
KERNEL = 9.0


class Rank:
    """One rank's V1 runner, on a ledger with one host transport."""

    def __init__(self, rank, store, runner):
        gc.freeze()  # all of vLLM, else each collection walks it
        self.rank, self.runner = rank, runner
        self.ledger = Ledger(
            deadline=DEADLINE, closing_deadline=2, names_demanded_by="a test"
        )
        self.transport = host_channels(
            rank, 2, PrefixStore("transport", store), 1 << 12, KERNEL
        )
        self.ledger.register(
            self.transport, group("tp:0", rank, 2, store), (EagerLane.ALLREDUCE,)
        )
        parallel_state._LEDGER = self.ledger
        self.freed = 0
        runner._cleanup_profiling_kv_cache = self._free
        runner._warmup_and_capture = lambda *args, **kwargs: self.capture()
        self.fault = lambda: None

    def _free(self):
        self.freed += 1

    def capture(self):
        """Target and draft reduce, each on its channel; the fault is between them."""
        self.demand_sum()
        self.fault()
        with owner_scope(Owner.DRAFT):
            self.demand_sum()

    def demand_sum(self):
        total = self.transport.all_reduce(torch.full((8,), self.rank + 1.0))
        assert torch.equal(total, torch.full((8,), 3.0))

    def names(self):
        return {str(name): size for name, size in self.transport.inventory().items()}


def on_ranks(runner, body):
    return ranks.run(2, lambda rank, store: body(Rank(rank, store, runner)), LIMIT)


def values(outcomes):
    for outcome in outcomes:
        assert outcome.error is None, outcome.error.__notes__
    return [outcome.value for outcome in outcomes]


def raises(error):
    def fault():
        raise error

    return fault


def test_a_hundred_rounds_leave_nothing(v1_runner):  # R-C2 # C13
    def body(rank):
        before = rank.names()
        for _ in range(100):
            rank.runner.profile_cudagraph_memory()
            assert rank.names() == before
        return rank.freed, list(before)

    lanes = ["vllm:eager:allreduce"]
    assert values(on_ranks(v1_runner, body)) == [(100, lanes)] * 2


def test_all_ranks_raise_and_a_second_profile_works(v1_runner):  # R-C1 # C18
    def body(rank):
        before = rank.names()
        rank.fault = raises(RuntimeError("first error"))
        with pytest.raises(RuntimeError, match="first error") as raised:
            rank.runner.profile_cudagraph_memory()
        assert not hasattr(raised.value, "__notes__")
        assert rank.names() == before
        rank.fault = lambda: None
        rank.runner.profile_cudagraph_memory()
        assert rank.names() == before
        return rank.freed

    assert values(on_ranks(v1_runner, body)) == [2, 2]


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_one_rank_raises_outside_any_launch(v1_runner, failure):  # R-C1 # C18
    def body(rank):
        before = rank.names()
        captured = rank.capture

        def capture():
            captured()  # all that needs the other rank is done
            if rank.rank == 1:
                raise failure("first error")

        rank.runner._warmup_and_capture = lambda *args, **kwargs: capture()
        try:
            rank.runner.profile_cudagraph_memory()
        except Refused as refused:  # at the scope of the next owner
            assert rank.rank == 0 and "rank 1: voted on 'roll back'" in str(refused)
        except failure as error:
            assert rank.rank == 1 and str(error) == "first error"
            assert not hasattr(error, "__notes__")
        assert rank.names() == before and rank.ledger.lost is None
        rank.runner._warmup_and_capture = lambda *args, **kwargs: rank.capture()
        rank.runner.profile_cudagraph_memory()
        return rank.freed

    assert values(on_ranks(v1_runner, body)) == [2, 2]


def test_one_rank_raises_and_its_peer_is_inside_a_kernel(v1_runner):
    # R-C1 # R-D2 # C18 # C49
    def body(rank):
        def capture():
            if rank.rank == 1:
                raise RuntimeError("first error")
            rank.demand_sum()  # waits for rank 1, as a kernel would

        rank.runner._warmup_and_capture = lambda *args, **kwargs: capture()
        began = time.monotonic()
        with pytest.raises(Exception) as raised:
            rank.runner.profile_cudagraph_memory()
        if rank.rank == 0:  # its kernel gave up at last
            assert "rank 1" in str(raised.value) and rank.freed == 0
            return
        assert time.monotonic() - began < DEADLINE + 1.5
        assert str(raised.value) == "first error"
        assert "rank 0 did not vote in time" in raised.value.__notes__[0]
        assert "rank 0 did not vote in time" in rank.ledger.lost
        assert rank.freed == 0  # it would have waited for the device
        assert "vllm:target:profile" in rank.names()  # owned, not half forgotten

    values(on_ranks(v1_runner, body))


def test_a_rank_that_never_comes_back_is_not_waited_for(v1_runner):  # R-C1 # C18
    def body(rank):
        rank.runner._warmup_and_capture = lambda *args, **kwargs: (
            time.sleep(DEADLINE + 3) if rank.rank == 1 else None
        )
        began = time.monotonic()
        with pytest.raises(GroupClosed, match="rank 1 did not vote in time"):
            rank.runner.profile_cudagraph_memory()
        return time.monotonic() - began < 2 * DEADLINE + 1, rank.freed

    patient, late = on_ranks(v1_runner, body)
    assert patient.value == (True, 0)
    assert late.error is None and late.value[1] == 0  # it obeys the verdict


@pytest.mark.parametrize("when", ["in the model", "after its captures"])
def test_a_rank_that_fails_alone_is_what_the_others_tell_of(v1_runner, when):
    # R-C3 # C18: at once, and not when a deadline has passed
    @reserves_graph_channels
    def determine(worker):
        worker.run_model()
        return worker.model_runner.profile_cudagraph_memory()

    def body(rank):
        fails = raises(RuntimeError("first error")) if rank.rank == 1 else lambda: None
        worker = SimpleNamespace(model_runner=rank.runner, use_v2_model_runner=False)
        worker.run_model = fails if when == "in the model" else lambda: None

        def capture():
            rank.demand_sum()
            if when == "after its captures":
                fails()

        rank.runner._warmup_and_capture = lambda *args, **kwargs: capture()
        rank.runner._create_encoder_cudagraph_manager = lambda: None
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="first error") as raised:
            determine(worker)
        seconds = time.monotonic() - began
        return str(raised.value), seconds < DEADLINE, rank.ledger.lost is None

    other, failed = values(on_ranks(v1_runner, body))
    assert failed == ("first error", True, True)
    assert "refused: rank 1: RuntimeError: first error" in other[0]
    if when == "after its captures":
        assert other[1:] == (True, True)
    else:  # it was going to profile, and waits in vain to roll that back
        assert not other[2]


def test_the_worker_ends_when_its_error_is_reported(v1_runner):  # R-D2
    def body(rank):
        if rank.rank == 1:
            time.sleep(3 * DEADLINE)
            os._exit(0)
        rank.runner._warmup_and_capture = lambda *args, **kwargs: None
        try:
            rank.runner.profile_cudagraph_memory()
        except GroupClosed:
            end_process_if_ranks_are_lost()
        os._exit(7)

    ended, _ = on_ranks(v1_runner, body)
    assert ended.status == 1 and not ended.late
