# SPDX-License-Identifier: Apache-2.0
"""The ledger on recorders: what is asked of whom, in which order, and what is not."""

import gc
import logging
import weakref

import pytest
from torch.distributed import HashStore

from tests.distributed.recording_transport import (
    RecordingTransport,
    alone,
    group,
)
from vllm.distributed.graph_channels.deadline import DeadlineMissed
from vllm.distributed.graph_channels.identity import (
    ChannelId,
    EagerLane,
    Owner,
    Phase,
    catalogue,
)
from vllm.distributed.graph_channels.ledger import Ledger
from vllm.distributed.graph_channels.scope import (
    active_channel,
    open_scopes,
    owner_scope,
)
from vllm.distributed.graph_channels.together import Refused
from vllm.distributed.graph_channels.transport import CheckpointError
from vllm.distributed.graph_channels.vote import GroupClosed

TARGET = ChannelId(Owner.TARGET, Phase.PRODUCTION)
PROFILE = ChannelId(Owner.TARGET, Phase.PROFILE)
ENCODER = ChannelId(Owner.ENCODER, Phase.PRODUCTION)


def _ledger(**options):
    return Ledger(deadline=5, closing_deadline=5, **options)


@pytest.fixture
def events():
    return []


@pytest.fixture
def two(events):
    """A ledger with one transport in TP's group and one in DCP's."""
    ledger = _ledger()
    transports = [RecordingTransport(name, events) for name in ("tp", "dcp")]
    for transport in transports:
        ledger.register(transport, alone(transport.label))
    return ledger, *transports


# Scopes ---------------------------------------------------------------------


def test_a_scope_enters_every_transport_in_one_order(two, events):  # R-B1
    ledger, _, _ = two
    with ledger.scope(TARGET):
        assert active_channel() == TARGET
        entered = list(events)
    assert entered == [
        "tp enter vllm:target:production",
        "tp synchronize",
        "dcp enter vllm:target:production",
        "dcp synchronize",
    ]
    assert events[4:] == [
        "dcp leave vllm:target:production",
        "tp leave vllm:target:production",
    ]


def test_a_transport_of_two_groups_is_entered_once(events):  # R-B1 # C19
    ledger = _ledger()
    shared = RecordingTransport("shared", events)
    groups = alone("tp"), alone("dcp")
    for its_group in groups:
        ledger.register(shared, its_group)
    checkpoint = ledger.checkpoint()
    with ledger.scope(TARGET):
        pass
    ledger.rollback(checkpoint)
    ledger.close()
    for call in ("enter", "leave", "checkpoint", "rollback", "close"):
        assert sum(event.split()[1] == call for event in events) == 1, call


@pytest.mark.parametrize("count", [0, 1, 2])
def test_every_call_reaches_each_transport_once(events, count):  # C19
    ledger = _ledger()
    for number in range(count):
        ledger.register(RecordingTransport(f"t{number}", events), alone(f"g{number}"))
    checkpoint = ledger.checkpoint()
    with ledger.scope(TARGET):
        pass
    ledger.rollback(checkpoint)
    ledger.close()
    for call in ("enter", "leave", "checkpoint", "rollback", "close"):
        assert sum(event.split()[1] == call for event in events) == count, call


def test_an_inner_owner_is_entered_on_the_transports_and_left(two, events):  # R-B4
    ledger, _, _ = two
    with ledger.scope(TARGET):
        for _ in range(3):
            with owner_scope(Owner.DRAFT):
                assert str(active_channel()) == "vllm:draft:production"
        assert active_channel() == TARGET
    draft = [event for event in events if "draft" in event]
    assert (
        draft
        == [
            "tp enter vllm:draft:production",
            "dcp enter vllm:draft:production",
            "dcp leave vllm:draft:production",
            "tp leave vllm:draft:production",
        ]
        * 3
    )


def test_a_scope_of_an_open_scopes_name_is_refused(two):  # R-A3
    ledger, _, _ = two
    with (
        ledger.scope(TARGET),
        pytest.raises(Refused, match="a second capture as vllm:target:production"),
        ledger.scope(TARGET),
    ):
        pass


def test_re_entry_makes_no_collective(two, events):  # R-B4
    ledger, tp, _ = two
    with ledger.scope(TARGET):
        with owner_scope(Owner.DRAFT):
            pass
        votes = tp_votes(ledger)
        for _ in range(2):
            with owner_scope(Owner.DRAFT):
                pass
    assert tp_votes(ledger) == votes
    assert events.count("tp synchronize") == 2


def tp_votes(ledger):
    """How many votes the first group has held."""
    return ledger._groups[0]._electorate._votes


def test_a_transport_made_inside_a_scope_joins_it(events):  # R-B3 # C04
    ledger = _ledger()
    late = RecordingTransport("late", events)
    with ledger.scope(TARGET), ledger.scope(ENCODER):
        ledger.register(late, alone())
        assert [e for e in events if "enter" in e] == [
            "late enter vllm:target:production",
            "late enter vllm:encoder:production",
        ]
    leaves = [e for e in events if "leave" in e]
    assert leaves == [
        "late leave vllm:encoder:production",
        "late leave vllm:target:production",
    ]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failing_body_leaves_without_a_collective(two, events, failure):
    # R-B5 # C40
    ledger, _, _ = two
    with pytest.raises(failure), ledger.scope(TARGET):
        votes = tp_votes(ledger)
        raise failure
    assert tp_votes(ledger) == votes
    assert events[-2:] == [
        "dcp leave vllm:target:production",
        "tp leave vllm:target:production",
    ]
    assert not open_scopes()


def test_an_entry_that_fails_leaves_nothing_entered(two, events):
    ledger, _, dcp = two
    dcp.fail["synchronize"] = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"), ledger.scope(TARGET):
        pytest.fail("the body ran")
    assert not open_scopes()
    assert [e for e in events if "leave" in e] == [
        "dcp leave vllm:target:production",
        "tp leave vllm:target:production",
    ]


def test_an_entry_that_is_not_begun_takes_no_name(two):  # R-A3
    ledger, tp, _ = two

    def refuse(channel_id):
        raise RuntimeError("its lane serves another stream")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tp, "capture", refuse)
        with pytest.raises(RuntimeError, match="another stream"), ledger.scope(TARGET):
            pytest.fail("the body ran")
    with ledger.scope(TARGET):
        assert active_channel() == TARGET


@pytest.mark.parametrize("transports", [0, 1])
@pytest.mark.parametrize("switch", [None, "VLLM_PCIE_ALLREDUCE_BACKEND=host"])
def test_a_capture_without_a_name(events, switch, transports):  # R-A5 # C05
    ledger = _ledger(names_demanded_by=switch)
    ledger.watch(alone())  # as of a group that asks for a transport
    for _ in range(transports):
        ledger.register(RecordingTransport("tp", events), alone())
    if switch is None:
        with ledger.scope(None):
            assert active_channel() is None
        assert events == []
        return
    refused = pytest.raises((ValueError, Refused), match="without a channel_id")
    with refused as caught, ledger.scope(None):
        pytest.fail("the body ran")
    assert switch in str(caught.value)
    assert events == []


def test_a_second_capture_is_refused_before_the_transport_that_is_asked_for():
    # R-A3
    ledger = _ledger(names_demanded_by="VLLM_PCIE_ALLREDUCE_BACKEND=host")
    ledger.watch(alone())
    with ledger.scope(TARGET):
        pass
    with pytest.raises(ValueError, match="a second capture"), ledger.scope(TARGET):
        pytest.fail("the body ran")


def test_where_no_group_asks_for_a_transport_no_capture_is_refused():  # R-A5
    ledger = _ledger(names_demanded_by="VLLM_PCIE_ALLREDUCE_BACKEND=host")
    for channel_id in (TARGET, TARGET, None):
        with ledger.scope(channel_id):
            assert active_channel() == channel_id


class _Draft:
    @owner_scope(Owner.DRAFT)
    def capture(self, then=lambda: None):
        then()


class _Encoder:
    @owner_scope(Owner.ENCODER)
    def capture(self, then=lambda: None):
        then()


def test_a_name_that_is_taken_inside_another_inner_scope_is_taken(two):  # R-A3
    ledger, _, _ = two
    draft, encoder = _Draft(), _Encoder()
    with ledger.scope(TARGET):
        encoder.capture(draft.capture)
        with pytest.raises(Refused, match=r"draft:production \(by a .*_Draft\)"):
            _Draft().capture()
        with pytest.raises(Refused, match=r"draft:production \(by a .*_Draft\)"):
            encoder.capture(_Draft().capture)
        draft.capture()
        encoder.capture(draft.capture)
        encoder.capture()
    with (
        ledger.scope(ChannelId(Owner.TARGET, Phase.PROFILE)),
        pytest.raises(Refused, match="encoder:profile"),
    ):
        encoder.capture(_Encoder().capture)
    assert not open_scopes()


def test_who_captured_is_not_kept_alive(two):
    ledger, _, _ = two
    draft, other = _Draft(), _Draft()
    with ledger.scope(TARGET):
        draft.capture()
        with pytest.raises(Refused):
            other.capture()
    gone = [weakref.ref(draft), weakref.ref(other)]
    del draft, other
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


# Disposable captures --------------------------------------------------------


def test_a_rollback_gives_back_what_came_since(two, events):  # R-C2 # C13 # C15
    ledger, _, _ = two
    ledger.prepare([*EagerLane, TARGET])
    before = ledger.inventory()
    checkpoint = ledger.checkpoint()
    for channel in catalogue(Owner, Phase.PROFILE):
        with ledger.scope(channel):
            pass
    assert ledger.inventory() != before
    ledger.rollback(checkpoint)
    assert ledger.inventory() == before
    # Synchronised first, then rolled back; the channel can be captured on again.
    assert events.index("tp rollback") > len(events) - 5
    assert events[-4:] == [
        "tp synchronize",
        "tp rollback",
        "dcp synchronize",
        "dcp rollback",
    ]
    with ledger.scope(PROFILE):
        pass


def test_a_hundred_rounds_leave_what_was_there(two):  # R-C2
    ledger, _, _ = two
    ledger.prepare(list(EagerLane))
    before = ledger.inventory()
    for _ in range(100):
        checkpoint = ledger.checkpoint()
        with ledger.scope(PROFILE), owner_scope(Owner.DRAFT):
            pass
        ledger.rollback(checkpoint)
        assert ledger.inventory() == before


def test_a_transport_that_came_during_a_profile_is_rolled_back_too(events):  # R-C2
    ledger = _ledger()
    checkpoint = ledger.checkpoint()
    late = RecordingTransport("late", events)
    with ledger.scope(PROFILE):
        ledger.register(late, alone())
    assert ledger.inventory() == {"late": {str(PROFILE): 64}}
    ledger.rollback(checkpoint)
    assert ledger.inventory() == {"late": {}}


def test_the_first_error_surfaces_with_the_second_attached(two):  # R-C3 # C18
    ledger, tp, _ = two
    checkpoint = ledger.checkpoint()
    tp.fail["rollback"] = RuntimeError("B")
    with pytest.raises(ValueError, match="A") as caught:
        try:
            with ledger.scope(PROFILE):
                raise ValueError("A")
        except ValueError as failure:
            ledger.rollback(checkpoint, failure)
            raise
    assert caught.value.__notes__ == ["Rolling its channels back failed too: B"]


def test_a_failing_rollback_alone_is_raised(two, events):  # R-C3
    ledger, tp, _ = two
    checkpoint = ledger.checkpoint()
    tp.fail["rollback"] = RuntimeError("B")
    with pytest.raises(RuntimeError, match="B"):
        ledger.rollback(checkpoint)
    assert "dcp rollback" in events  # the other group is rolled back all the same


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_after_a_failed_profile_a_second_one_works(two, failure):  # R-C1 # C18
    ledger, _, _ = two
    before = ledger.inventory()
    for error in (failure, None):
        checkpoint = ledger.checkpoint()
        try:
            with ledger.scope(PROFILE):
                if error is not None:
                    raise error
        except failure as raised:
            ledger.rollback(checkpoint, raised)
        else:
            ledger.rollback(checkpoint)
        assert ledger.inventory() == before


def test_a_checkpoint_is_spent_by_a_rollback_to_it_or_before_it(two):  # R-C4 # C17
    ledger, _, _ = two
    first, second = ledger.checkpoint(), ledger.checkpoint()
    ledger.rollback(first)
    for spent in (first, second):
        with pytest.raises(CheckpointError, match="take a new one"):
            ledger.rollback(spent)


def test_another_ledgers_checkpoint_is_refused_before_anything(two, events):
    # R-C4 # C17
    ledger, _, _ = two
    with ledger.scope(TARGET):
        pass
    before, count = ledger.inventory(), len(events)
    with pytest.raises(CheckpointError):
        ledger.rollback(_ledger().checkpoint())
    assert ledger.inventory() == before
    assert len(events) == count


def test_inside_a_scope_both_are_refused_before_anything(two, events):  # R-C4 # C17
    ledger, _, _ = two
    checkpoint = ledger.checkpoint()
    with ledger.scope(TARGET):
        count = len(events)
        with pytest.raises(RuntimeError, match="leave the scope first"):
            ledger.checkpoint()
        with pytest.raises(RuntimeError, match="leave the scope first"):
            ledger.rollback(checkpoint)
        assert len(events) == count
    ledger.rollback(checkpoint)


# Closing --------------------------------------------------------------------


def test_closing_takes_all_transports_last_first_and_once(two, events):  # R-D1 # C20
    ledger, _, _ = two
    ledger.close()
    ledger.close()
    assert events == ["dcp close", "tp close"]
    assert ledger.inventory() == {}


def test_a_close_that_fails_is_said_once_and_tried_again(two, events, heard):
    # R-D1 # C20 # C38
    ledger, tp, _ = two
    tp.fail["close"] = RuntimeError("unmap failed")
    ledger.close()
    ledger.close()
    said = [r.getMessage() for r in heard if r.levelno == logging.ERROR]
    assert len(said) == 1
    assert "tp is not closed" in said[0] and "unmap failed" in said[0]
    assert list(ledger.inventory()) == ["tp"]
    del tp.fail["close"]
    ledger.close()
    assert ledger.inventory() == {}


def test_after_a_failed_set_up_only_closing_is_tried(two):  # C38
    ledger, tp, dcp = two
    tp.fail["prepare"] = RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        ledger.prepare([TARGET])
    assert dcp.channels == {TARGET: 64}  # the other group is not concerned
    del tp.fail["prepare"]
    with pytest.raises(GroupClosed, match="only closing is possible"):
        ledger.prepare([TARGET])
    ledger.close()
    assert ledger.inventory() == {}


def test_an_abandoned_ledger_begins_nothing(two, events, heard):  # R-D4
    ledger, _, _ = two
    checkpoint = ledger.checkpoint()
    events.clear()
    ledger.abandon("SIGTERM")
    ledger.abandon("again")
    ledger.close()
    ledger.rollback(checkpoint)
    with pytest.raises(GroupClosed, match="SIGTERM"), ledger.scope(TARGET):
        pytest.fail("the body ran")
    assert events == []
    assert [r.getMessage() for r in heard] == [
        "Graph channels are left to the end of the process: SIGTERM"
    ]


def test_a_silent_owner_enters_no_transport(two, events):  # R-A3
    ledger, _, _ = two
    ledger.silence([Owner.ENCODER, Owner.DRAFT])
    with ledger.scope(ENCODER):
        assert active_channel() == ENCODER
    assert events == []
    with ledger.scope(TARGET), owner_scope(Owner.DRAFT):
        late = RecordingTransport("late", events)
        ledger.register(late, alone("late"))  # R-B3: joins the target's scope alone
    assert not [event for event in events if "draft" in event]
    assert ledger.inventory()["late"] == {str(TARGET): 64}
    ledger.silence([])
    again = ChannelId(Owner.ENCODER, Phase.PRODUCTION, generation=2)
    with ledger.scope(again):
        assert f"tp enter {again}" in events


@pytest.mark.parametrize("failure", [None, RuntimeError("first error")])
def test_a_rank_that_misses_a_rollback_is_told_of_once(two, heard, failure):
    # R-C1 # R-C3
    ledger, tp, _ = two
    assert ledger.lost is None
    checkpoint = ledger.checkpoint()
    tp.fail["synchronize"] = DeadlineMissed("synchronize", 1)
    if failure is None:
        with pytest.raises(DeadlineMissed):
            ledger.rollback(checkpoint)
    else:
        ledger.rollback(checkpoint, failure)
        assert "did not end within 1 s" in failure.__notes__[0]
    ledger.close()
    assert "did not end within 1 s" in ledger.lost
    (said,) = [record.getMessage() for record in heard]
    assert said.startswith("Graph channels are left to the end of the process")


def test_a_rank_that_has_failed_refuses_for_the_others(events):  # R-C3
    store = HashStore()
    failed, other = (_ledger() for _ in range(2))
    for rank, ledger in enumerate((failed, other)):
        transport = RecordingTransport(f"rank {rank}", events)
        ledger.register(transport, group("tp:0", rank, 2, store))
    failed.refuse([TARGET], "first error")
    with pytest.raises(Refused, match="rank 0: first error"):
        other.prepare([TARGET])
    assert events == []
    assert failed.lost is None and other.lost is None


def test_a_failure_with_all_ranks_there_loses_nobody(two):  # R-C1
    ledger, tp, _ = two
    checkpoint = ledger.checkpoint()
    tp.fail["rollback"] = RuntimeError("unmap failed")
    with pytest.raises(RuntimeError, match="unmap failed"):
        ledger.rollback(checkpoint)
    assert ledger.lost is None


def test_a_dropped_ledger_makes_no_call(events):  # R-D3 # C24
    ledger = _ledger()
    ledger.register(RecordingTransport("tp", events), alone())
    gone = weakref.ref(ledger)
    del ledger
    gc.collect()
    assert gone() is None and events == []
