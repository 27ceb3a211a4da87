# SPDX-License-Identifier: Apache-2.0
"""Any order of preparing, capturing, checkpoints and rollbacks, against a model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.distributed.recording_transport import RecordingTransport, alone
from vllm.distributed.graph_channels.identity import (
    ChannelId,
    EagerLane,
    Owner,
    Phase,
)
from vllm.distributed.graph_channels.ledger import Ledger
from vllm.distributed.graph_channels.together import Refused
from vllm.distributed.graph_channels.transport import CheckpointError

owners = st.sampled_from([ChannelId(o, p) for o in list(Owner)[:3] for p in Phase])


class Life(RuleBasedStateMachine):
    """A ledger that gets transports, captures and rolls back; and what it holds."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger(deadline=5, closing_deadline=5)
        self.held = {}  # by transport: the channels it should have
        self.taken = set()  # names that graphs were captured under
        # (checkpoint, what was held then, what was taken then), oldest first
        self.honoured = []
        self.spent = [Ledger(deadline=5, closing_deadline=5).checkpoint()]

    @precondition(lambda self: len(self.held) < 3)
    @rule()
    def register(self):  # R-B3, R-C2
        label = f"t{len(self.held)}"
        self.ledger.register(
            RecordingTransport(label, []), alone(label), lanes=[EagerLane.DCP]
        )
        self.held[label] = {EagerLane.DCP}
        for _, held, _ in self.honoured:  # it goes back to its lane with those
            held[label] = {EagerLane.DCP}

    @rule(channels=st.lists(owners, min_size=1, max_size=3))
    def prepare(self, channels):
        self.ledger.prepare(channels)
        for held in self.held.values():
            held |= set(channels)

    @rule(channel=owners, failing=st.booleans())
    def capture(self, channel, failing):  # R-B5
        if channel in self.taken:  # R-A1: by graphs that were not rolled back
            if self.held:
                with pytest.raises(Refused), self.ledger.scope(channel):
                    pytest.fail("entered")
            return
        try:
            with self.ledger.scope(channel):
                if failing:
                    raise KeyError
        except KeyError:
            assert failing
        self.taken.add(channel)
        for held in self.held.values():
            held.add(channel)

    @rule()
    def checkpoint(self):
        held = {label: set(names) for label, names in self.held.items()}
        self.honoured.append((self.ledger.checkpoint(), held, set(self.taken)))

    @precondition(lambda self: self.honoured)
    @rule(data=st.data())
    def rollback(self, data):  # R-C2
        at = data.draw(st.integers(0, len(self.honoured) - 1))
        checkpoint, held, self.taken = self.honoured[at]
        self.ledger.rollback(checkpoint)
        self.held = {label: set(names) for label, names in held.items()}
        self.spent += [later for later, *_ in self.honoured[at:]]
        del self.honoured[at:]

    @rule(data=st.data())
    def roll_back_to_a_spent_one(self, data):  # R-C4 # C17
        with pytest.raises(CheckpointError):
            self.ledger.rollback(data.draw(st.sampled_from(self.spent)))

    @invariant()
    def holds_what_it_should(self):
        names = {label: set(held) for label, held in self.ledger.inventory().items()}
        assert names == {
            label: {str(name) for name in held} for label, held in self.held.items()
        }

    def teardown(self):
        self.ledger.close()
        assert self.ledger.inventory() == {}


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
