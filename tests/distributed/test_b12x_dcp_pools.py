# SPDX-License-Identifier: Apache-2.0
"""DCP on b12x's own pools without a GPU: whose channel it is, and how often asked.

The pool's real code names, agrees on, captures, rolls back and closes channels,
and each channel's real code checks what it is given. Only memory and kernels are
stood in for: by gloo, so that results are right or wrong.
"""

import os
from contextlib import contextmanager, nullcontext
from time import monotonic

import pytest
import torch
from b12x.comm.pcie import pcie_oneshot
from b12x.comm.pcie.pcie_dcp_a2a import (
    PCIeDCPA2A,
    PCIeDCPA2APool,
    lse_reduce_scatter_reference,
)
from torch.distributed.distributed_c10d import _get_default_store

from tests import ranks
from tests.distributed import recording_transport
from tests.distributed.dcp_ranks import (
    HEAD_SIZE,
    HEADS,
    QUERY_HEAD_SIZE,
    decode_context_parallel,
    parts_of_all_kinds,
    wrong,
)
from tests.distributed.recording_transport import RecordingTransport
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import (
    b12x_gate,
    b12x_pcie_dcp,
    channel_transports,
)
from vllm.distributed.device_communicators.b12x_pcie_dcp import B12xDcp, channel_bytes
from vllm.distributed.device_communicators.dcp_geometry import DcpGeometry
from vllm.distributed.graph_channels import switches
from vllm.distributed.graph_channels.identity import (
    ChannelId,
    EagerLane,
    Owner,
    Phase,
)
from vllm.distributed.graph_channels.report import table
from vllm.distributed.graph_channels.scope import owner_scope
from vllm.distributed.graph_channels.stream_roles import auxiliary_stream

# Imports here, once, what every forked rank would import for itself.
VllmConfig()

CPU = torch.device("cpu")
DEADLINE = 60
LANE = str(EagerLane.DCP)
TARGET, DRAFT = (
    ChannelId(owner, Phase.PRODUCTION) for owner in (Owner.TARGET, Owner.DRAFT)
)
PROFILES = tuple(
    ChannelId(owner, Phase.PROFILE) for owner in (Owner.TARGET, Owner.DRAFT)
)


class NoMemory:
    """Stands for what maps memory for a channel."""

    def init_dcp_a2a(self, *arguments):
        return 1

    def dispose(self, pointer):
        pass


class GlooChannel(PCIeDCPA2A):
    """b12x's channel, whose kernels are gloo's collectives."""

    def __init__(self, pool):
        places = [[4096 * (n + turn * 16) for n in range(16)] for turn in (1, 2, 3)]
        signals, first, second = (place[: pool.world_size] for place in places)
        size = max(pool.head_dim, pool.query_head_dim)
        super().__init__(
            rank=pool.rank,
            world_size=pool.world_size,
            device="cpu",
            signal_ptrs=signals,
            staging0_ptrs=first,
            staging1_ptrs=second,
            max_batch_size=pool.max_batch_size,
            total_heads=pool.total_heads,
            head_dim=pool.head_dim,
            query_head_dim=pool.query_head_dim,
            output_capacity_elems=pool.max_batch_size * pool.total_heads * size,
            lse_offset=0,
            lse_capacity=pool.max_batch_size * pool.total_heads,
            ext_module=NoMemory(),
        )
        self.group = pool.exchange_group
        self.launches = 0

    def prepare_graph_lse_reduce_scatter(self, *, dtype):
        prepared.append(dtype)

    def prepare_graph_all_gather_heads(self):
        prepared.append("heads")

    def _launch_lse_reduce_scatter(self, partial, lse, out, *, natural_log, **others):
        self.launches += 1
        parts, lses = self._of_all(partial), self._of_all(lse)
        out.copy_(
            lse_reduce_scatter_reference(
                parts, lses, self.rank, is_lse_base_on_e=natural_log
            )
        )

    def _launch_all_gather_heads(self, local_input, out, **others):
        self.launches += 1
        out.copy_(torch.cat(list(self._of_all(local_input)), dim=1))

    def _of_all(self, tensor):
        found = [None] * self.world_size
        torch.distributed.all_gather_object(found, tensor, group=self.group)
        return torch.stack(found)


# Of this process: what is prepared for captures, votes of the gate, entries.
prepared, admitted, entered = [], [], []


def gloo_pool(seat, geometry):
    """b12x's own pool over gloo; how often an id is entered is noted."""
    pool = PCIeDCPA2APool(
        rank=seat.group.rank,
        world_size=seat.group.size,
        device="cpu",
        max_batch_size=geometry.max_tokens,
        total_heads=geometry.heads,
        head_dim=geometry.head_size,
        query_head_dim=geometry.query_head_size,
        channel_factory=lambda stream: pytest.fail("asked for"),
    )
    pool._channel_factory, pool.exchange_group = None, seat.device_group
    real = pool.capture

    def new_channel(stream):
        pool._all_channels.append(GlooChannel(pool))
        return pool._all_channels[-1]

    def capture(stream=None, *, channel_id):
        entered.append(channel_id)
        return real(stream, channel_id=channel_id)

    pool._new_channel, pool.capture = new_channel, capture
    return pool


def open_dcp(seat, geometry, seconds):
    """Stands for the real one, which needs GPUs to share memory."""
    return B12xDcp(
        f"b12x DCP ({geometry})",
        gloo_pool(seat, geometry),
        CPU,
        channel_bytes(geometry, seat.group.size),
        rank=seat.group.rank,
        world=seat.group.size,
        geometry=geometry,
    )


def admit(seat, needs, subject, seconds):
    """Stands for the real one, which asks about GPUs."""
    admitted.append(needs.pool)


def on_ranks(body, world=2):
    """What ``body(rank)`` gives on each rank, with b12x's channels in place."""

    def rank_body(rank, store):
        os.environ["VLLM_PCIE_ALLREDUCE_BACKEND"] = "b12x"
        switches._demand_platform = lambda backend: None
        pcie_oneshot._object_broadcast_device = lambda group: "cpu"
        b12x_gate.admit, b12x_pcie_dcp.open_dcp = admit, open_dcp
        torch.distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=world
        )
        with decode_context_parallel(world, world, CPU, "gloo") as here:
            return body(here)

    return ranks.values(world, rank_body, DEADLINE)


def zeros(here, layer):
    """One exchange of nothing much."""
    part = torch.zeros(2, here.world * HEADS, HEAD_SIZE).bfloat16()
    lse = torch.zeros(part.shape[:2])
    return layer.combine(part, lse, seq_lens=None, query_start_loc=None)


def launches(here, number=0):
    """How often each channel of the group's first, or another, pool was used."""
    transport = list(here.channels._transports.values())[number]
    channels = transport._pool._logical_channels
    return {name: ch.launches for name, ch in channels.items() if ch.launches}


@pytest.mark.parametrize("world", [2, 4])
def test_b12x_takes_what_is_admitted(world):  # R-E2 # R-B8
    def body(here):
        failed = []
        for dtype in (torch.bfloat16, torch.float16):
            for base_e in (True, False):
                layer = here.layer(dtype, base_e=base_e)
                kinds = parts_of_all_kinds(here.world, CPU, dtype)
                for parts in kinds:
                    found = here.exchanged(layer, parts)
                    if wrong(found, parts.wanted(here.rank, base_e=base_e)):
                        failed.append((parts.name, dtype, base_e))
            query = torch.full((3, HEADS, QUERY_HEAD_SIZE), here.rank, dtype=dtype)
            gathered = layer.query_gather(query.transpose(0, 1).mT.mT.transpose(0, 1))
            owners = torch.arange(here.world).repeat_interleave(HEADS)
            assert gathered[2, :, 5].tolist() == owners.tolist()
        # one pool a dtype; its kernels are there before any capture; one gate
        assert prepared == [torch.bfloat16, "heads", torch.float16, "heads"]
        counts = [launches(here, number) for number in (0, 1)]
        return failed, counts, admitted

    # 8 kinds to 2 bases; queries of either dtype go to the first pool of their sizes
    counts = [{LANE: 18}, {LANE: 16}]
    found = on_ranks(body, world)
    assert found == [([], counts, ["DcpAllToAllPool"])] * world


def test_a_pool_made_inside_a_scope_joins_it():  # R-B3 # R-B4 # C04
    def body(here):
        with here.ledger.scope(TARGET):
            layer = here.layer()
            zeros(here, layer)
            for _ in range(3):
                with owner_scope(Owner.DRAFT):
                    zeros(here, layer)
            zeros(here, layer)
        zeros(here, layer)
        return launches(here), entered

    used = {str(TARGET): 2, str(DRAFT): 3, LANE: 1}
    assert on_ranks(body) == [(used, [str(TARGET), str(DRAFT)])] * 2


def test_the_query_goes_over_the_same_owners_channel():
    def body(here):
        layer = here.layer()
        with here.ledger.scope(TARGET):
            layer.query_gather(torch.zeros(1, HEADS, QUERY_HEAD_SIZE).bfloat16())
            zeros(here, layer)
        return launches(here)

    assert on_ranks(body) == [{str(TARGET): 2}] * 2


def test_tp_and_dcp_in_one_scope_are_entered_once_and_rolled_back_to_the_byte():
    # R-B1 # R-C2 # R-C4 # C19 # C45
    def body(here):
        events = []
        store = torch.distributed.PrefixStore("tp", _get_default_store())
        group = recording_transport.group("tp:0", here.rank, here.world, store)
        here.ledger.register(RecordingTransport("tp", events), group)
        layers = [here.layer(), here.layer(heads=4), here.layer()]
        transports = list(here.channels._transports.values())
        for transport in transports:  # as of a group that shares them
            here.ledger.register(transport, group)
        before = here.ledger.inventory()
        assert [list(channels) for channels in before.values()] == [[], [LANE], [LANE]]
        for _ in range(3):
            checkpoint = parallel_state.get_graph_channels().checkpoint()
            for channel_id in PROFILES:
                with here.ledger.scope(channel_id):
                    for layer in layers[::2]:
                        zeros(here, layer)
            during = here.ledger.inventory()
            assert all(
                {*map(str, PROFILES)} <= channels.keys() for channels in during.values()
            )
            parallel_state.get_graph_channels().rollback(checkpoint)
            assert here.ledger.inventory() == before
        profiled = entered.copy()
        entered.clear()
        here.ledger.prepare([TARGET, DRAFT])
        # C45: channels of the owners, and the lane
        for channels in list(here.ledger.inventory().values())[1:]:
            assert sorted(channels) == sorted([LANE, str(TARGET), str(DRAFT)])
            assert len(set(channels.values())) == 1
        with here.ledger.scope(TARGET):
            zeros(here, layers[0])
            with here.ledger.scope(DRAFT):
                zeros(here, layers[0])
            zeros(here, layers[0])
        times = {name: profiled.count(str(name)) for name in PROFILES}
        assert events.count("tp rollback") == 3
        return times, entered, launches(here)

    times = dict.fromkeys(PROFILES, 6)  # of two pools, in three rounds
    used = {str(TARGET): 2, str(DRAFT): 1}
    once = [str(TARGET)] * 2 + [str(DRAFT)] * 2
    assert on_ranks(body) == [(times, once, used)] * 2


def test_channels_are_closed_before_their_group_goes():  # R-D1
    def body(here):
        here.layer()
        (transport,) = here.channels._transports.values()
        (channel,) = transport._pool._all_channels
        here.ledger.close()
        return channel._ipc_exports_freed, transport._pool._closed

    assert on_ranks(body) == [(True, True)] * 2


def test_a_marked_stream_takes_nccl_outside_of_graphs():  # R-B8
    def body(here):
        here.layer()
        part = torch.zeros(2, 2 * HEADS, HEAD_SIZE).bfloat16()
        query = torch.zeros(2, HEADS, QUERY_HEAD_SIZE).bfloat16()
        with auxiliary_stream("a micro-batch"):
            marked = (
                here.channels.takes_partial(part, torch.zeros(2, 2 * HEADS)),
                here.channels.takes_query(query),
            )
        return marked, here.channels.takes_query(query)

    assert on_ranks(body) == [((False, False), True)] * 2


def test_the_table_has_a_line_for_each_channel():  # R-F1
    def body(here):
        layer = here.layer()
        with here.ledger.scope(TARGET):
            zeros(here, layer)
        (usage,) = here.ledger.usage()
        return table(usage).splitlines()

    title, _, *rows = on_ranks(body)[0]
    assert title.endswith(
        "b12x DCP (4 heads of 64, queries of 96, bfloat16, up to 16 tokens), 2 ranks"
    )
    size = channel_bytes(DcpGeometry(4, 64, 96, torch.bfloat16, 16), 2)
    assert [row.split() for row in rows] == [
        [LANE, "eager", f"{size:,}", "0"],
        [str(TARGET), "target", f"{size:,}", "0"],
        ["total", "a", "rank", f"{2 * size:,}", "0"],
    ]


# Who goes without -----------------------------------------------------------


@contextmanager
def errors(monkeypatch):
    """What is said at level error while it is open."""
    said = []
    logger = channel_transports.logger
    monkeypatch.setattr(logger, "error", lambda form, *what: said.append(form % what))
    yield said


@pytest.mark.parametrize("why", ["E3", "gate", "pool", "heads"])
def test_a_group_that_goes_without_says_so_once(why, monkeypatch):
    # R-E1 # R-E3 # R-F1 # C47
    def body(here):
        def refuse(*arguments):
            tried.append(arguments)
            raise b12x_gate.Unavailable("out of order")

        tried = []
        if why == "E3":
            parallel_state._ENABLE_CUSTOM_ALL_REDUCE = False
        elif why == "gate":
            b12x_gate.admit = refuse
        elif why == "pool":
            b12x_pcie_dcp.open_dcp = refuse
        with errors(monkeypatch) as said:
            dtype = torch.float32 if why == "heads" else torch.bfloat16
            layers = [here.layer(dtype) for _ in range(3)]
        assert not any(layer.over_channels for layer in layers)
        assert here.ledger.inventory() == {}
        return said, len(tried)

    first, second = on_ranks(body)
    reason = {
        "E3": "custom all-reduce is switched off",
        "heads": "16-bit ones are exchanged",
    }.get(why, "out of order")
    assert second[0] == []
    (line,) = first[0]
    assert line.startswith("dcp:0 goes on without graph channels: ") and reason in line
    assert first[1] == second[1] == (1 if why in ("gate", "pool") else 0)


def test_after_a_pool_that_could_not_be_made_no_other_is_asked_for(monkeypatch):
    # R-E1 # R-F1
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def body(here):
        def fail():
            raise RuntimeError("out of memory")

        b12x_pcie_dcp.open_dcp = lambda seat, geometry, seconds: b12x_gate.make_pool(
            seat, fail, seconds
        )
        with errors(monkeypatch) as said:
            layers = [here.layer(heads=heads) for heads in (HEADS, 2 * HEADS)]
        return [layer.over_channels for layer in layers], len(said)

    assert on_ranks(body) == [([False, False], 1), ([False, False], 0)]


@pytest.mark.parametrize(
    "launch", ["_launch_lse_reduce_scatter", "_launch_all_gather_heads"]
)
def test_a_self_test_with_wrong_results_ends_the_start(launch):  # R-E4
    def body(here):
        if here.rank == 1:
            real = getattr(GlooChannel, launch)

            def stale(channel, *tensors, **others):
                real(channel, *tensors, **others)
                tensors[-1][0, 0, 0] += 1

            setattr(GlooChannel, launch, stale)
        begun = monotonic()
        with pytest.raises(RuntimeError, match="self-test failed.*ACS"):
            here.layer()
        assert monotonic() - begun < 15  # nobody waits for a peer that has left
        return here.group.dcp_channels.serves(
            DcpGeometry(4, 64, 96, torch.bfloat16, 16)
        )

    assert on_ranks(body) == [False] * 2


@pytest.mark.parametrize(("world", "served"), [(3, False), (6, False), (16, True)])
def test_groups_of_other_sizes_are_refused_with_the_list(world, served, monkeypatch):
    # R-E1 # C27
    monkeypatch.setattr(b12x_gate, "package_refusal", lambda needs: None)
    monkeypatch.setattr(b12x_gate, "_device_refusal", lambda device, needs: None)
    needs = b12x_pcie_dcp.needs(allow_unvalidated=False)
    refusal = b12x_gate.local_refusal(world, CPU, needs)
    if served:
        assert refusal is None
    else:
        assert f"of 2, 4, 8, 16 ranks, not of {world}" in refusal


def test_six_ranks_keep_their_tensor_parallel_channels_and_have_none_for_dcp():
    # R-E1 # C27
    def body(here):
        def demand_size(seat, needs, subject, seconds):
            seat.group.agree(
                subject,
                monotonic() + seconds,
                error=b12x_gate.local_refusal(seat.group.size, CPU, needs),
            )

        b12x_gate.admit = demand_size
        store = torch.distributed.PrefixStore("tp", _get_default_store())
        group = recording_transport.group("tp:0", here.rank, here.world, store)
        here.ledger.register(RecordingTransport("tp", []), group)
        assert not here.layer().over_channels
        assert not here.layer(heads=4).over_channels  # asked once a group
        return list(here.ledger.inventory()), here.ledger.names_demanded_by

    kept = ["tp"], "VLLM_PCIE_ALLREDUCE_BACKEND=b12x"
    assert on_ranks(body, world=6) == [kept] * 6


def test_what_is_called_of_b12x_is_there():  # R-E1 # C28
    for method, names in b12x_gate._POOL_CALLS.items():
        assert b12x_gate._absent(PCIeDCPA2APool, method, names) == []
    for operation in b12x_pcie_dcp.needs(allow_unvalidated=False).operations:
        assert callable(getattr(PCIeDCPA2A, operation))


@pytest.mark.parametrize("tokens", [512, 64])
def test_a_channel_takes_what_its_shapes_say(tokens):  # C45
    geometry = DcpGeometry(32, 512, 576, torch.bfloat16, tokens)
    signals = (64 * 16 + 2 * 64 * 16 * 32) * 4
    staging = tokens * 32 * 576 * 2 + tokens * 32 * 4
    assert channel_bytes(geometry, 8) == signals + 2 * staging
