# SPDX-License-Identifier: Apache-2.0
"""Recorded graphs on channels: what the project exists to get right."""

from functools import partial

import pytest
import torch

from tests import ranks
from tests.host import ENCODER, PROFILE, TARGET, Stream, host_channels
from vllm.distributed.device_communicators.host_graphs import RecordedGraph
from vllm.distributed.device_communicators.host_segments import HostChannelError

# How often each graph is replayed, for each number of ranks.
REPLAYS = {2: 10_000, 4: 2_000, 8: 500}


class Counted:
    """A recorded all-reduce of whole numbers, which knows what its sums must be."""

    def __init__(self, transport, channel_id, rank, world, step):
        self.rank, self.world, self.step = rank, world, step
        self.tensor = torch.zeros(64)
        self.wrong = 0
        self.graph = RecordedGraph(transport)
        with transport.capture(channel_id), self.graph.capture():
            self.sum = transport.all_reduce(self.tensor)

    def replay(self, turn):
        self.tensor.fill_(self.step * (turn + self.rank))
        self.graph.replay()
        ranks_sum = self.world * (self.world - 1) // 2
        expected = self.step * (turn * self.world + ranks_sum)
        self.wrong += not torch.all(self.sum == expected)


def race(transport, rank, world, channels, turns, fresh_streams=False):
    """Launch two graphs, odd ranks in the opposite order; how many sums are wrong."""
    graphs = [
        Counted(transport, channel, rank, world, step)
        for channel, step in zip(channels, (1, 3))
    ]
    order = graphs if rank % 2 == 0 else graphs[::-1]
    streams = [Stream(), Stream()]
    for turn in range(turns):
        if fresh_streams:
            for stream in streams:
                stream.end()
            streams = [Stream(), Stream()]
        for stream, graph in zip(streams, order):
            stream.launch(partial(graph.replay, turn))
        for stream in streams:
            stream.synchronize()
    return sum(graph.wrong for graph in graphs)


@pytest.mark.parametrize("world", [2, 4])
def test_two_graphs_on_one_channel_get_each_others_numbers(world):
    # the fault that named channels remove: it must be seen here
    def body(rank, store):
        transport = host_channels(rank, world, store)
        transport.prepare([TARGET])
        transport.deadline = 1
        try:
            return race(transport, rank, world, (TARGET, TARGET), turns=50)
        except HostChannelError:
            return 1

    assert sum(ranks.values(world, body, deadline=30)) > 0


@pytest.mark.parametrize("world", REPLAYS)
def test_two_graphs_on_two_channels_never_do(world):  # R-A2
    def body(rank, store):
        transport = host_channels(rank, world, store)
        turns = REPLAYS[world]
        return race(transport, rank, world, (TARGET, ENCODER), turns)

    assert ranks.values(world, body, deadline=60) == [0] * world


def test_channels_do_not_depend_on_threads_and_their_numbers():  # R-A2
    def body(rank, store):
        transport = host_channels(rank, 2, store)
        channels = (TARGET, ENCODER)
        return race(transport, rank, 2, channels, turns=200, fresh_streams=True)

    assert ranks.values(2, body, deadline=30) == [0, 0]


def test_one_graph_is_recorded_while_another_replays():
    def body(rank, store):
        transport = host_channels(rank, 2, store)
        first = Counted(transport, TARGET, rank, 2, 1)
        stream = Stream()
        stream.launch(lambda: [first.replay(turn) for turn in range(2000)])
        for turn in range(200):
            second = Counted(transport, ENCODER, rank, 2, 3)
            second.replay(turn)
            assert not second.wrong
        stream.synchronize()
        return first.wrong

    assert ranks.values(2, body, deadline=30) == [0, 0]


def test_a_profile_capture_comes_between_two_replays():  # R-C2
    def body(rank, store):
        transport = host_channels(rank, 2, store)
        production = Counted(transport, TARGET, rank, 2, 1)
        production.replay(0)
        before = dict(transport.inventory())
        checkpoint = transport.checkpoint()
        profile = Counted(transport, PROFILE, rank, 2, 3)
        profile.replay(0)
        transport.rollback(checkpoint)
        assert transport.inventory() == before
        production.replay(1)
        with pytest.raises(HostChannelError, match="target:profile: it was rolled ba"):
            profile.replay(1)
        return production.wrong + profile.wrong

    assert ranks.values(2, body, deadline=30) == [0, 0]


def test_nothing_runs_while_it_is_recorded_and_reset_drops_it():
    def body(rank, store):
        transport = host_channels(rank, 2, store)
        graph = RecordedGraph(transport)
        tensor = torch.zeros(4)
        with transport.capture(TARGET):
            if rank == 0:  # alone: the operation would wait for rank 1
                with graph.capture():
                    transport.all_reduce(tensor, out=tensor)
                assert torch.all(tensor == 0)
                graph.reset()
                graph.replay()
            assert torch.all(transport.all_reduce(tensor + 1) == 2)  # a warm-up, R-B2

    ranks.values(2, body, deadline=30)


def test_a_failed_recording_is_dropped():  # R-B5
    def body(rank, store):
        transport = host_channels(rank, 2, store)
        graph = RecordedGraph(transport)
        with transport.capture(TARGET):
            with pytest.raises(KeyboardInterrupt), graph.capture():
                transport.all_reduce(torch.zeros(4))
                raise KeyboardInterrupt
            graph.replay()  # of nothing
            assert torch.all(transport.all_reduce(torch.ones(4)) == 2)

    ranks.values(2, body, deadline=30)


def test_recording_outside_a_scope_raises_at_the_call():  # R-B7
    transport = host_channels(0, 2, None)
    refused = pytest.raises(RuntimeError, match=r"enter graph_capture\(device, channel")
    with refused, RecordedGraph(transport).capture():
        raise AssertionError("entered")


def test_one_graph_records_at_a_time():
    def body(rank, store):
        transport = host_channels(rank, 2, store)
        with transport.capture(TARGET), RecordedGraph(transport).capture():
            refused = pytest.raises(RuntimeError, match="another graph is being record")
            with refused, RecordedGraph(transport).capture():
                raise AssertionError("entered")

    ranks.values(2, body, deadline=30)


def test_what_would_be_refused_is_refused_when_recorded():  # R-E2
    def body(rank, store):
        transport = host_channels(rank, 2, store, max_bytes=64)
        refused = pytest.raises(ValueError, match="above the 64")
        graph = RecordedGraph(transport)
        with transport.capture(TARGET), graph.capture(), refused:
            transport.all_reduce(torch.zeros(17))

    ranks.values(2, body, deadline=30)
