# SPDX-License-Identifier: Apache-2.0
"""The stack of open scopes: nesting, re-entry, and leaving after a failure."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.graph_channels.identity import ChannelId, Owner, Phase
from vllm.distributed.graph_channels.scope import (
    active_channel,
    channel_scope,
    open_scopes,
    owner_scope,
)

TARGET = ChannelId(Owner.TARGET, Phase.PRODUCTION)
ENCODER = ChannelId(Owner.ENCODER, Phase.PRODUCTION)


def test_nothing_is_active_outside_a_scope():
    assert active_channel() is None


def test_the_innermost_scope_wins():  # R-B4 # C04
    with channel_scope(TARGET):
        with channel_scope(ENCODER):
            assert active_channel() == ENCODER
        assert active_channel() == TARGET
    assert active_channel() is None


def test_an_unnamed_scope_does_not_take_over_the_name_around_it():
    with channel_scope(TARGET):
        with channel_scope(None):
            assert active_channel() is None
        assert active_channel() == TARGET


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failing_body_leaves_the_outer_scope_active(failure):  # R-B5
    with channel_scope(TARGET):
        with pytest.raises(failure), channel_scope(ENCODER), owner_scope(Owner.DRAFT):
            raise failure
        assert active_channel() == TARGET
    assert active_channel() is None


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("generation", [1, 2])
def test_an_inner_owner_takes_phase_and_generation_from_outside(
    phase, generation
):  # R-B4
    outer = ChannelId(Owner.TARGET, phase, generation)
    with channel_scope(outer):
        for _ in range(3):  # as often as there are batch sizes
            with owner_scope(Owner.DRAFT):
                assert active_channel() == ChannelId(Owner.DRAFT, phase, generation)
            assert active_channel() == outer


def test_an_inner_owner_alone_is_no_scope():  # R-B4
    with owner_scope(Owner.DRAFT):
        assert active_channel() is None
    with channel_scope(None), owner_scope(Owner.DRAFT):
        assert active_channel() is None


def test_as_a_decorator_it_looks_at_each_call():  # R-B4
    class Draft:
        @owner_scope(Owner.DRAFT)
        def dummy_run(self):
            return active_channel()

    draft = Draft()
    assert draft.dummy_run() is None
    with channel_scope(TARGET):
        assert str(draft.dummy_run()) == "vllm:draft:production"
    assert draft.dummy_run() is None


def test_the_methods_of_an_object_may_call_each_other():  # R-B4
    class Base:
        @owner_scope(Owner.DRAFT)
        def dummy_run(self):
            return open_scopes()

    class Draft(Base):
        @owner_scope(Owner.DRAFT)
        def dummy_run(self):
            return super().dummy_run()

    with channel_scope(TARGET):
        for draft in (Draft(), Draft()):  # without transports, nobody is refused
            outer, inner = draft.dummy_run()
            assert str(inner.channel_id) == "vllm:draft:production"
            assert inner.claimant is draft
            assert outer.claimant is outer.members


def test_another_thread_sees_the_open_scope():  # R-B9
    seen = []
    with channel_scope(TARGET):
        thread = threading.Thread(target=lambda: seen.append(active_channel()))
        thread.start()
        thread.join(timeout=10)
    assert seen == [TARGET]


@given(st.lists(st.sampled_from([TARGET, ENCODER, None]), max_size=6))
def test_any_nesting_unwinds(channels):  # R-B4
    def enter(rest):
        if not rest:
            return
        before = active_channel()
        with channel_scope(rest[0]):
            assert active_channel() == rest[0]
            enter(rest[1:])
            assert active_channel() == rest[0]
        assert active_channel() == before

    enter(channels)
    assert active_channel() is None
