# SPDX-License-Identifier: Apache-2.0
"""DCP's exchange over the host transport, through vLLM's own entry points.

Real ranks and real data; what must come of it is worked out in float64.
"""

import os
from functools import partial
from itertools import product
from time import monotonic
from types import SimpleNamespace

import pytest
import torch

from tests import ranks
from tests.distributed import dcp_ranks
from tests.distributed.dcp_ranks import (
    HEAD_SIZE,
    HEADS,
    MAX_TOKENS,
    QUERY_HEAD_SIZE,
    Parts,
    decode_context_parallel,
    parts_of_all_kinds,
    wrong,
)
from tests.host import ENCODER, TARGET, Stream
from vllm.config import VllmConfig
from vllm.distributed.device_communicators import dcp_transports, host_library
from vllm.distributed.device_communicators.dcp_channels import DcpChannels
from vllm.distributed.device_communicators.dcp_geometry import DcpGeometry
from vllm.distributed.device_communicators.host_graphs import RecordedGraph
from vllm.distributed.graph_channels.switches import read_switches
from vllm.distributed.graph_channels.together import Group
from vllm.v1.attention.ops import dcp_alltoall, dcp_utils

COVERS = (
    "vllm/distributed/parallel_state.py",
    "vllm/v1/attention/ops/dcp_alltoall.py",
    "vllm/v1/attention/ops/dcp_utils.py",
)

# Imports here, once, what every forked rank would import for itself.
VllmConfig()

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16)
DEADLINE = 60
TOKENS = "VLLM_DCP_A2A_MAX_TOKENS"


class OtherWay(Exception):
    """What takes the place of NCCL, which the CPU has not."""


@pytest.fixture(autouse=True)
def without_nccl(monkeypatch):
    """Tensors that no channel takes end in an exception."""

    def go(*args, **kwargs):
        raise OtherWay

    monkeypatch.setattr(dcp_alltoall, "_dcp_a2a_send_recv_buffers", go)


def on_ranks(world, body, context=None, comm="a2a", **environment):
    """What ``body(rank)`` gives on each rank of tensor parallel groups."""

    def rank_body(rank, store):
        os.environ.update({"VLLM_PCIE_ALLREDUCE_BACKEND": "host"} | environment)
        torch.distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=world
        )
        groups = decode_context_parallel(
            world, context or world, CPU, "gloo", comm=comm
        )
        with groups as here:
            return body(here)

    return ranks.values(world, rank_body, DEADLINE)


def upstreams(parts, rank, base_e):
    """What vLLM's own reference makes of a rank's heads."""
    world = parts.outputs.shape[0]
    heads = slice(rank * HEADS, (rank + 1) * HEADS)
    lses = torch.where(parts._has_context(), parts.lses, -torch.inf)
    combined = dcp_alltoall._lse_weighted_combine(
        parts.outputs[:, :, heads].float(),
        lses[:, :, heads],
        is_lse_base_on_e=base_e,
    )
    assert world == lses.shape[0]
    return combined.double()


# A group of two within four ranks has a namesake, which it must not meet.
@pytest.mark.parametrize(("world", "context"), [(2, 2), (4, 4), (8, 8), (4, 2)])
def test_parts_and_queries_are_exchanged(world, context):  # R-B8 # R-E2
    def body(here):
        failed = []
        for dtype in DTYPES:
            for base_e in (True, False):
                layer = here.layer(dtype, base_e=base_e)
                for parts in parts_of_all_kinds(context, CPU, dtype):
                    found = here.exchanged(layer, parts)
                    for wanted in (
                        parts.wanted(here.rank, base_e=base_e),
                        upstreams(parts, here.rank, base_e),
                    ):
                        if wrong(found, wanted):
                            failed.append((parts.name, dtype, base_e))
            query = torch.full((3, HEADS, QUERY_HEAD_SIZE), here.rank, dtype=dtype)
            gathered = layer.query_gather(query)
            owners = torch.arange(context).repeat_interleave(HEADS)
            assert torch.equal(
                gathered, owners[None, :, None].expand_as(gathered).to(dtype)
            )
        # one transport for each dtype, whatever the number of layers
        return failed, len(here.channels._transports)

    assert on_ranks(world, body, context) == [([], 2)] * world


def test_a_padded_query_has_room_behind_its_heads():
    def body(here):
        layer = here.layer(padded=9)
        query = torch.full((3, HEADS, QUERY_HEAD_SIZE), here.rank).bfloat16()
        gathered = layer.query_gather(query)
        room = gathered.untyped_storage().nbytes()
        return gathered[0, :, 0].tolist(), room == 3 * 9 * QUERY_HEAD_SIZE * 2

    assert on_ranks(2, body) == [([0, 0, 1, 1], True)] * 2


@pytest.mark.parametrize("world", [2, 4, 8])
def test_recorded_exchanges_of_two_owners_replay_in_opposite_orders(world):
    # R-B4 # C01
    def body(here):
        layer = here.layer()
        (transport,) = here.channels._transports.values()
        shape = (world, 4, world * HEADS, HEAD_SIZE)
        owners = [
            recorded(here, layer, transport, channel_id, shape)
            for channel_id in (TARGET, ENCODER)
        ]
        streams = [Stream(), Stream()]
        order = (0, 1) if here.rank % 2 == 0 else (1, 0)
        failed = 0
        for turn in range(20):
            generator = torch.Generator().manual_seed(turn)
            expected = []
            for _, output, lse, _ in owners:
                outputs = torch.randn(shape, generator=generator).bfloat16()
                lses = torch.randn(shape[:-1], generator=generator) * 8
                output.copy_(outputs[here.rank])
                lse.copy_(lses[here.rank])
                parts = Parts("", outputs, lses)
                expected.append(parts.wanted(here.rank, base_e=True))
            for n in order:
                streams[n].launch(owners[n][0].replay)
            for n in order:
                streams[n].synchronize()
            for (_, _, _, found), wanted in zip(owners, expected, strict=True):
                failed += wrong(found, wanted)
        return failed, {str(n): count for n, count in transport.recorded().items()}

    counts = {str(TARGET): 1, str(ENCODER): 1}
    assert on_ranks(world, body) == [(0, counts)] * world


def recorded(here, layer, transport, channel_id, shape):
    """A graph of one exchange: with its output, its LSE and what comes of them."""
    output, lse = torch.zeros(shape[1:]).bfloat16(), torch.zeros(shape[1:-1])
    graph = RecordedGraph(transport)
    with here.ledger.scope(channel_id), graph.capture():
        found = layer.combine(output, lse, seq_lens=None, query_start_loc=None)
    return graph, output, lse, found


@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_kind_of_parts_is_replayed_from_a_graph(world):  # R-B1 # R-B3
    def replayed(here, layer, parts):
        graph = RecordedGraph(list(here.channels._transports.values())[-1])
        with graph.capture():
            found = here.exchanged(layer, parts)
        found.fill_(7)
        graph.replay()
        return found

    def body(here):
        failed, count = [], 0
        with here.ledger.scope(TARGET):
            for dtype, base_e in product(DTYPES, (True, False)):
                layer = here.layer(dtype, base_e=base_e)
                for parts in parts_of_all_kinds(world, CPU, dtype):
                    if parts.head_major or not parts.lses[0].is_contiguous():
                        continue  # a copy would be recorded, which is refused
                    found, count = replayed(here, layer, parts), count + 1
                    if wrong(found, parts.wanted(here.rank, base_e=base_e)):
                        failed.append((parts.name, dtype, base_e))
        return failed, count

    assert on_ranks(world, body) == [([], 5 * 4)] * world


def test_a_copy_is_not_recorded():
    def body(here):
        layer = here.layer()
        (transport,) = here.channels._transports.values()
        parts = parts_of_all_kinds(2, CPU, torch.bfloat16)[5]
        assert parts.head_major
        with (
            here.ledger.scope(TARGET),
            RecordedGraph(transport).capture(),
            pytest.raises(ValueError, match="takes contiguous CPU tensors"),
        ):
            here.exchanged(layer, parts)
        return True

    assert on_ranks(2, body) == [True] * 2


def test_what_no_channel_takes_goes_the_other_way_on_all_ranks():  # R-E2 # C34
    def body(here):
        layer = here.layer()
        exchange = partial(dcp_alltoall.dcp_a2a_lse_reduce, cp_group=here.group)
        part = torch.zeros(3, 2 * HEADS, HEAD_SIZE).bfloat16()
        lse = torch.zeros(3, 2 * HEADS)
        assert exchange(part, lse).shape == (3, HEADS, HEAD_SIZE)
        large = torch.zeros(MAX_TOKENS + 1, 2 * HEADS, HEAD_SIZE).bfloat16()
        for arguments in (
            {"return_lse": True},  # FlashAttention, FlashInfer's prefill
            {"cp_attn_out": part.float()},
            {"cp_attn_out": large, "cp_attn_lse": torch.zeros(large.shape[:2])},
        ):
            given = {"cp_attn_out": part, "cp_attn_lse": lse} | arguments
            with pytest.raises(OtherWay):
                exchange(**given)
        # queries have gloo for another way
        queries = torch.full((MAX_TOKENS + 1, HEADS, QUERY_HEAD_SIZE), here.rank)
        assert not here.channels.takes_query(queries)
        gathered = layer.query_gather(queries.bfloat16())
        return gathered[-1, :, 0].tolist()

    assert on_ranks(2, body) == [[0, 0, 1, 1]] * 2


@pytest.mark.parametrize(
    ("context", "comm", "backend"),
    [(2, "ag_rs", "host"), (1, "a2a", "host"), (2, "a2a", "cpp")],
)
def test_without_the_switches_nothing_is_there(context, comm, backend):  # R-A5
    def body(here):
        here.layer()
        labels = [label for label in here.ledger.inventory() if "DCP" in label]
        return here.group.dcp_channels, labels

    environment = {"VLLM_PCIE_ALLREDUCE_BACKEND": backend}
    found = on_ranks(2, body, context, comm, **environment)
    assert found == [(None, [])] * 2


@pytest.mark.parametrize("trouble", ["no library", "other sizes"])
def test_one_rank_that_cannot_takes_its_group_off(trouble, monkeypatch, tmp_path):
    # R-E1 # C37
    def body(here):
        if here.rank == 1 and trouble == "no library":
            monkeypatch.setattr(host_library, "LIBRARY", tmp_path / "gone.so")
            host_library.library.cache_clear()
        if here.rank == 1 and trouble == "other sizes":
            os.environ[TOKENS] = "8"
        # Read again, as each rank has it.
        switches = read_switches()
        largest = partial(dcp_transports.largest_batch, switches=switches)
        monkeypatch.setattr(
            dcp_transports, "largest_batch", lambda config, _: largest(config)
        )
        for _ in range(2):  # asked once, and said once
            layer = here.layer()
            assert not layer.over_channels
        part = torch.zeros(3, 2 * HEADS, HEAD_SIZE).bfloat16()
        with pytest.raises(OtherWay):
            layer.combine(
                part,
                torch.zeros(3, 2 * HEADS),
                seq_lens=None,
                query_start_loc=None,
            )
        # The tensor parallel group has its channels, and still demands names.
        return list(here.ledger.inventory()), here.ledger.names_demanded_by

    kept = ["host all-reduce of tp:0"], "VLLM_PCIE_ALLREDUCE_BACKEND=host"
    assert on_ranks(2, body) == [kept] * 2


def test_names_are_demanded_again_where_dcp_alone_has_channels():  # R-A5
    def body(here):
        here.ledger.go_without()
        before = here.ledger.names_demanded_by
        here.layer()
        return before, here.ledger.names_demanded_by

    off = {"VLLM_PCIE_ONESHOT_ALLREDUCE_MAX_SIZE": "0"}
    demanded = (None, "VLLM_PCIE_ALLREDUCE_BACKEND=host")
    assert on_ranks(2, body, **off) == [demanded] * 2


@pytest.mark.parametrize(("startup", "longest"), [("30", 77), ("90", 90)])
def test_a_peer_that_reads_weights_or_compiles_is_waited_for_as_for_a_step(
    startup, longest, monkeypatch
):  # R-D2
    def body(here):
        agree, waits = Group.agree, []

        def noted(group, subject, until, **given):
            waits.append(round(until - monotonic()))
            agree(group, subject, until, **given)

        monkeypatch.setattr(Group, "agree", noted)
        here.layer()
        (transport,) = here.channels._transports.values()
        return waits[0], transport.deadline

    seconds = {
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "77",
        "VLLM_GRAPH_CHANNELS_DEADLINE": startup,
    }
    assert on_ranks(2, body, **seconds) == [(longest, 77)] * 2


def test_a_direct_workspace_does_not_go_before_channels(monkeypatch):
    # whether or not VLLM_USE_DIRECT_DCP_A2A says so
    def direct(*args):
        raise AssertionError("asked for")

    monkeypatch.setattr(dcp_utils, "get_direct_dcp_a2a_workspace", direct)
    monkeypatch.setattr(dcp_utils, "get_direct_dcp_q_gather_workspace", direct)

    def body(here):
        return here.layer().combine.func is dcp_alltoall.dcp_a2a_lse_reduce

    assert on_ranks(2, body) == [True] * 2
    with pytest.raises(AssertionError, match="asked for"):
        on_ranks(2, body, VLLM_PCIE_ALLREDUCE_BACKEND="cpp")


# Which way, and how large ----------------------------------------------------

GEOMETRY = DcpGeometry(8, 64, 96, torch.bfloat16, max_tokens=4)


def tokens(batch, heads=8, size=64, dtype=torch.bfloat16):
    return torch.zeros(batch, heads, size, dtype=dtype)


def heads_first(batch, room=0, odd=0):
    storage = torch.zeros(8, (batch + room) * 64 + odd).bfloat16()
    return storage[:, : batch * 64].view(8, batch, 64).transpose(0, 1)


# name: the part, and whether it is taken
PARTIALS = {
    "one": (tokens(1), True),
    "the largest": (tokens(4), True),
    "too many": (tokens(5), False),
    "none": (tokens(0), False),
    "other heads": (tokens(2, heads=16), False),
    "another size": (tokens(2, size=128), False),
    "float16": (tokens(2, dtype=torch.float16), False),
    "float32": (tokens(2, dtype=torch.float32), False),
    "two dimensions": (tokens(2).flatten(1), False),
    "heads first": (heads_first(3), True),
    "heads first, with room": (heads_first(3, room=5), True),
    "heads first, unaligned": (heads_first(3, odd=3), False),
    "sliced heads": (tokens(2, heads=16)[:, :8], False),
    "every second token": (tokens(4)[::2], False),
    "sliced elements": (tokens(2, size=128)[..., :64], False),
    "one of odd stride": (tokens(2, heads=16)[:1, :8], True),
    "starts unaligned": (tokens(3).view(-1)[4:1028].view(2, 8, 64), False),
}


@pytest.mark.parametrize("name", PARTIALS)
def test_which_parts_are_taken(name):  # R-E2
    part, taken = PARTIALS[name]
    lse = torch.zeros(part.shape[:2])
    assert GEOMETRY.takes_partial(part, lse) == taken
    # the values are not looked at
    assert GEOMETRY.takes_partial(part, lse + torch.nan) == taken


@pytest.mark.parametrize(
    ("lse", "taken"),
    [
        (torch.zeros(2, 8), True),
        (torch.zeros(8, 2).T, True),
        (torch.zeros(2, 8).bfloat16(), True),
        (torch.zeros(2, 7), False),
        (torch.zeros(2, 8).int(), False),
    ],
)
def test_which_lses_are_taken(lse, taken):  # R-E2
    assert GEOMETRY.takes_partial(tokens(2), lse) == taken


QUERIES = {
    "one": (tokens(1, 4, 96), True),
    "too many": (tokens(5, 4, 96), False),
    "all heads": (tokens(2, 8, 96), False),
    "an output's size": (tokens(2, 4, 64), False),
    "8 bits": (tokens(2, 4, 96, dtype=torch.float8_e4m3fn), True),
    "across": (tokens(4, 2, 96).transpose(0, 1), True),
    "starts unaligned": (tokens(3, 4, 96).view(-1)[4:772].view(2, 4, 96), False),
}


@pytest.mark.parametrize("name", QUERIES)
def test_which_queries_are_taken(name):  # R-E2
    query, taken = QUERIES[name]
    assert GEOMETRY.takes_query(query, world=2) == taken


def test_a_row_of_a_query_is_of_whole_packs():  # R-E2
    narrow = DcpGeometry(8, 64, 72, torch.bfloat16, max_tokens=4)
    assert narrow.takes_query(tokens(2, 4, 72), world=2)
    in_8_bits = tokens(2, 4, 72, dtype=torch.float8_e4m3fn)
    assert not narrow.takes_query(in_8_bits, world=2)


def test_a_transport_that_may_not_be_used_here_takes_nothing():  # R-B8
    transport = SimpleNamespace(
        query_dtypes=(torch.bfloat16,), on_main_stream=lambda: False
    )
    group = SimpleNamespace(size=2)
    channels = DcpChannels(SimpleNamespace(group=group))
    channels.add(GEOMETRY, transport)
    assert not channels.takes_partial(tokens(2), torch.zeros(2, 8))
    assert not channels.takes_query(tokens(2, 4, 96))
    transport.on_main_stream = lambda: True
    assert channels.takes_partial(tokens(2), torch.zeros(2, 8))
    assert channels.takes_query(tokens(2, 4, 96))
    assert not channels.takes_query(tokens(2, 4, 96).half())


@pytest.mark.parametrize(
    ("dtype", "sizes", "reason"),
    [
        (torch.float32, (64, 96), "16-bit ones are exchanged"),
        (torch.bfloat16, (60, 96), "multiples of 8 are exchanged"),
        (torch.bfloat16, (64, 100), "multiples of 8 are exchanged"),
        (torch.float16, (64, 96), None),
    ],
)
def test_geometries_that_no_pool_has(dtype, sizes, reason):  # R-E2
    refusal = DcpGeometry(8, *sizes, dtype, 4).refusal()
    assert (refusal is None) if reason is None else (reason in refusal)


@pytest.mark.parametrize(
    ("text", "captured", "largest"),
    [
        (None, [1, 2, 512], 512),  # C45: not the scheduler's 3072
        ("64", [1, 2, 512], 64),
        ("4096", [1, 2, 512], 3072),
        (None, [], 100),  # no graphs: as many as decode at once
    ],
)
def test_the_largest_batch(text, captured, largest, monkeypatch):  # C45 # R-F3
    monkeypatch.delenv(TOKENS, raising=False)
    if text is not None:
        monkeypatch.setenv(TOKENS, text)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=3072, max_num_seqs=100),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=captured,
            max_cudagraph_capture_size=max(captured, default=0),
        ),
    )
    assert dcp_transports.largest_batch(config, read_switches()) == largest


@pytest.mark.parametrize("text", ["0", "-1", "", "64 ", "1e3", "2000000", "all"])
def test_other_numbers_of_tokens_are_refused(text, monkeypatch):  # R-F3 # R-G3
    monkeypatch.setenv(TOKENS, text)
    with pytest.raises(ValueError, match="tokens from 1 to 1048576") as caught:
        read_switches()
    assert f"{TOKENS}={text!r}" in str(caught.value)


def test_the_reference_knows_what_it_must():
    # by hand: weights 1/4 and 3/4, in both bases
    outputs = torch.tensor([4.0, 8.0]).view(2, 1, 1, 1).expand(2, 1, 2, 8)
    for base_e, three in ((True, torch.tensor(3.0).log()), (False, 1.584962500721156)):
        lses = torch.tensor([0.0, float(three)]).view(2, 1, 1).expand(2, 1, 2)
        wanted = dcp_ranks.Parts("", outputs, lses).wanted(0, base_e=base_e)
        torch.testing.assert_close(
            wanted, torch.full_like(wanted, 7), rtol=1e-6, atol=0
        )
