# SPDX-License-Identifier: Apache-2.0
"""Votes through a store: one verdict whatever the ranks, and the store, do.

The rules of agreement are checked on a model: a rank's vote is replayed with
scripted answers of store and clock, so that every interleaving can be visited
without a thread or a second passing.
"""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import count
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from tests import ranks
from vllm.distributed.graph_channels import vote
from vllm.distributed.graph_channels.vote import (
    MAX_RANKS,
    Electorate,
    GroupClosed,
    Outcome,
    Verdict,
)

GO, NO, ABANDONED = Verdict
AMPLE = 60.0  # of a vote that ends long before
SHORT = 0.8  # of a vote that is to be abandoned


class MemoryStore:
    """A store that is one dictionary."""

    def __init__(self, records=()):
        self.records = dict(records)

    def check(self, keys):
        return self.records.keys() >= set(keys)

    def get(self, key):
        return self.records[key]

    def compare_set(self, key, expected, desired):
        assert expected == ""
        return self.records.setdefault(key, desired.encode())


def together(stores, body):
    """What ``body(electorate)`` gives on each rank, each in a thread."""
    electors = [
        Electorate(s, rank, len(stores), "tp:0") for rank, s in enumerate(stores)
    ]
    with ThreadPoolExecutor(len(stores)) as pool:
        return list(pool.map(body, electors, timeout=AMPLE))


def alike(outcomes):
    """The one outcome that all of them are, but for each rank's own subject."""
    decided = [(o.verdict, dict(o.errors), o.missing) for o in outcomes]
    assert decided == decided[:1] * len(decided)
    return outcomes[0]


# The model


class Pause(BaseException):
    """The script is at its end; the next question is the argument."""


class Script:
    """Answers a rank's questions to store and clock from a list."""

    def __init__(self, answers):
        self.answers = iter(answers)
        self.looks = count()

    def ask(self, *question):
        for answer in self.answers:
            if isinstance(answer, Exception):
                raise answer
            return answer
        raise Pause(question)

    def check(self, keys):
        return self.ask("check", *keys)

    def get(self, key):
        return self.ask("get", key)

    def compare_set(self, key, expected, desired):
        assert expected == ""
        return self.ask("compare_set", key, desired.encode())

    def monotonic(self):
        look = next(self.looks)  # the first is at the start
        return float("inf") if look and self.ask("clock", look) else 0.0


@dataclass(frozen=True)
class Voter:
    """One rank in the model."""

    rank: int
    size: int
    subject: str = "step"
    error: str | None = None
    waits: bool = True


@cache
def after(voter, heard):
    """A rank's next question, or its outcome, once it has heard these answers."""
    script = Script(heard)
    with mock.patch.multiple(
        vote,
        run_with_deadline=lambda function, seconds, what: function(),
        monotonic=script.monotonic,
        token_bytes=lambda length: bytes([voter.rank]) * length,
        _POLL_SECONDS=0,
    ):
        try:
            elector = Electorate(script, voter.rank, voter.size, "g")
            cast = elector.vote if voter.waits else elector.refuse
            return cast(voter.subject, voter.error, deadline=1)
        except Pause as pause:
            return pause.args[0]


def answers(question, records, polls):
    """What store or clock may say to a question, and what the store holds then."""
    match question:
        case ["check", *keys]:
            return [(records.keys() >= set(keys), records)]
        case ["get", key]:
            return [(records[key], records)]  # a KeyError is a rank that hangs
        case ["compare_set", key, desired]:
            records = {key: desired} | records
            return [(records[key], records)]
        case ["clock", look]:
            return [(late, records) for late in {True, look > polls}]


def every_end(voters, polls=1):
    """The outcomes of all interleavings, the deadline passing at any poll."""
    todo, seen, ends = [((), ((),) * len(voters))], set(), []
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        records, heard = dict(state[0]), state[1]
        reached = [after(voter, told) for voter, told in zip(voters, heard)]
        ends += [reached] * all(isinstance(end, Outcome) for end in reached)
        for rank, question in enumerate(reached):
            if isinstance(question, Outcome):
                continue
            for answer, left in answers(question, records, polls):
                told = (*heard[:rank], (*heard[rank], answer), *heard[rank + 1 :])
                todo.append((tuple(sorted(left.items())), told))
    return ends


@pytest.mark.parametrize(
    "errors, decided", [((None, None), GO), ((None, "b"), NO), (("a", "b"), NO)]
)
def test_two_ranks_end_alike_in_every_interleaving(errors, decided):  # R-D6
    ends = every_end([Voter(rank, 2, error=said) for rank, said in enumerate(errors)])
    outcomes = [alike(end) for end in ends]
    said = {rank: text for rank, text in enumerate(errors) if text}
    whole = [o for o in outcomes if o.verdict is decided]
    given_up = [o for o in outcomes if o.verdict is ABANDONED]
    assert len(whole) + len(given_up) == len(outcomes)
    assert all((o.errors, o.missing) == (said, ()) for o in whole)
    # either rank may be the one that is missed, and only the other one is quoted
    assert {o.missing for o in given_up} == {(0,), (1,)}
    assert all(o.errors == dropped(said, o.missing) for o in given_up)


def dropped(said, missing):
    return {rank: text for rank, text in said.items() if rank not in missing}


def test_ranks_that_vote_on_different_subjects_never_go():  # R-D6
    ends = every_end([Voter(0, 2, "prepare"), Voter(1, 2, "close")])
    outcomes = [alike(end) for end in ends]
    refused = {0: "voted on 'prepare'", 1: "voted on 'close'"}
    assert {o.verdict for o in outcomes} == {NO, ABANDONED}
    assert all(o.errors == refused for o in outcomes if o.verdict is NO)
    assert all(not o.errors for o in outcomes if o.verdict is ABANDONED)


def test_the_error_of_one_who_refuses_is_the_only_reason():  # R-D6
    refusing = Voter(1, 2, "another step", "b", waits=False)
    outcomes = [alike(end) for end in every_end([Voter(0, 2, "step"), refusing])]
    assert {o.verdict for o in outcomes} == {NO, ABANDONED}
    assert all(o.errors == {1: "b"} for o in outcomes if o.verdict is NO)


def test_a_vote_without_a_subject_is_refused():  # R-G2
    with pytest.raises(ValueError, match="needs a subject"):
        Electorate(MemoryStore(), 0, 2, "tp:0").vote("", deadline=AMPLE)


def test_three_ranks_end_alike_in_every_interleaving():  # R-D6
    ends = every_end([Voter(rank, 3) for rank in range(3)], polls=0)
    assert {alike(end).verdict for end in ends} == {GO, ABANDONED}


LOST = ConnectionError("server gone")
DEAD = None
NEVER = 1000


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_ranks_end_alike_though_others_die_or_lose_the_store(data):  # R-D6
    size = data.draw(st.integers(3, 4))
    said = st.sampled_from([None, None, "out of memory"])
    voters = [Voter(rank, size, error=data.draw(said)) for rank in range(size)]
    # after so many answers a rank hears no more, or only that the store is gone
    fates = st.none() | st.tuples(st.sampled_from([DEAD, LOST]), st.integers(0, 12))
    fate = [data.draw(fates) for _ in voters]
    heard = [()] * size
    records = {}

    def step(rank, choice):
        nonlocal records
        question = after(voters[rank], heard[rank])
        if isinstance(question, Outcome):
            return False
        end, last = fate[rank] or (None, NEVER)
        if len(heard[rank]) >= last:
            heard[rank] += (LOST,) * (end is LOST)
            return end is LOST
        options = answers(question, records, polls=3)
        answer, records = options[choice % len(options)]
        heard[rank] += (answer,)
        return True

    for rank, choice in data.draw(
        st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 1)), max_size=60)
    ):
        step(rank, choice)
    while any([step(rank, 0) for rank in range(size)]):
        pass

    ended = [after(voter, told) for voter, told in zip(voters, heard)]
    healthy = [end for end, fated in zip(ended, fate) if fated is None]
    assert all(isinstance(end, Outcome) for end in healthy)
    if healthy:
        alike(healthy)
    for rank, end in enumerate(ended):
        if isinstance(end, Outcome) and LOST in heard[rank]:
            lost = {rank: "the store failed: ConnectionError: server gone"}
            assert (end.verdict, end.errors, end.missing) == (ABANDONED, lost, ())


# Records


def cast(subject="step", error=None):
    """The ballot of rank 1 of 2, as it lies in the store."""
    store = MemoryStore({"tp:0/0/0": b"no ballot, so that the vote ends at once"})
    Electorate(store, 1, 2, "tp:0").vote(subject, error, deadline=AMPLE)
    return store.records["tp:0/0/1"]


def answer_to(record, key="tp:0/0/1"):
    """How a vote of rank 0 of 2 ends if the store holds this record."""
    store = MemoryStore({key: record})
    return Electorate(store, 0, 2, "tp:0").vote("step", deadline=AMPLE)


@settings(deadline=None)
@given(st.binary(max_size=1200) | st.text("0123456789abcdef").map(str.encode))
def test_what_is_no_ballot_is_its_ranks_error(record):  # R-G2
    outcome = answer_to(record)
    assert outcome.verdict is NO
    assert list(outcome.errors) == [1]
    assert outcome.errors[1].startswith("malformed ballot: ")


BALLOT = cast(error="out of memory")


@settings(deadline=None)
@given(st.integers(0, len(BALLOT) // 2 - 1), st.integers(1, 255))
def test_a_damaged_ballot_is_never_agreement(where, flipped):  # R-G2
    record = bytearray.fromhex(BALLOT.decode())
    record[where] ^= flipped
    outcome = answer_to(record.hex().encode())
    # a byte of the voter or of a text makes another ballot, any other makes none
    assert outcome.verdict is NO
    assert 1 in outcome.errors


def test_a_ballot_of_another_version_is_named():  # R-G2
    outcome = answer_to(b"0200" + BALLOT[4:])
    length = len(BALLOT) // 2
    told = f"{length} bytes of version 2, not {length} of version 1"
    assert outcome.errors[1] == f"malformed ballot: {told}"


@settings(deadline=None)
@given(st.binary(max_size=64) | st.text("0123456789abcdef", min_size=1).map(str.encode))
def test_what_is_no_verdict_abandons_the_vote(record):  # R-G2
    outcome = answer_to(record, "tp:0/0/verdict")
    assert outcome.verdict is ABANDONED
    assert outcome.errors[0].startswith("the store failed: ")


def test_a_verdict_on_ranks_that_do_not_exist_abandons_the_vote():  # R-G2
    store = MemoryStore()
    Electorate(store, 0, 3, "tp:0").vote("step", deadline=SHORT)
    outcome = answer_to(store.records["tp:0/0/verdict"], "tp:0/0/verdict")
    assert "contradict" in outcome.errors[0]


ANY_TEXT = st.text(st.characters(), max_size=500)  # surrogates included


@settings(deadline=None)
@given(ANY_TEXT)
def test_a_long_error_is_cut_between_characters(error):  # R-G2
    record = cast(error=error)
    assert len(record) == len(BALLOT)
    said = answer_to(record).errors[1]
    whole = error.encode(errors="replace").decode()
    if len(whole.encode()) <= 384:
        assert said == whole
    else:
        kept, mark = said.split("… [")
        assert whole.startswith(kept)
        assert len(mark) == len("01234567]")
        assert 380 < len(said.encode()) <= 384


def test_long_subjects_that_differ_at_their_end_differ():  # R-D6
    store = MemoryStore()
    outcomes = together(
        [store] * 2,
        lambda e: e.vote("né" * 200 + str(e.rank), deadline=AMPLE),
    )
    assert alike(outcomes).verdict is NO


# Groups, in threads and processes


@pytest.fixture(params=["hash", "file", "tcp"])
def stores(request, tmp_path):
    """Two ranks' clients of one store, behind a prefix as process groups have."""
    if request.param == "hash":
        clients = [HashStore()] * 2
    elif request.param == "file":
        clients = [FileStore(str(tmp_path / "store"), 2) for _ in range(2)]
    else:
        server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        clients = [server, TCPStore("127.0.0.1", server.port, None, False)]
    return [PrefixStore("group", client) for client in clients]


def test_compare_set_writes_a_key_once(stores):  # R-D6
    one, other = stores
    assert one.compare_set("key", "", "first") == b"first"
    assert other.compare_set("key", "", "second") == b"first"
    assert one.get("key") == other.get("key") == b"first"
    assert not one.check(["key", "absent"])


def test_all_ranks_hear_every_error(stores):  # R-D6
    outcomes = together(
        stores, lambda e: e.vote("prepare", f"no memory on {e.rank}", deadline=AMPLE)
    )
    outcome = alike(outcomes)
    assert outcome.errors == {0: "no memory on 0", 1: "no memory on 1"}
    assert str(outcome) == (
        "prepare: refused: rank 0: no memory on 0; rank 1: no memory on 1"
    )


def test_one_who_comes_late_obeys(stores):  # R-D6
    waiter, late = (Electorate(s, rank, 2, "tp:0") for rank, s in enumerate(stores))
    first = waiter.vote("close", deadline=SHORT)
    assert alike([first, late.vote("close", deadline=AMPLE)]).verdict is ABANDONED
    assert str(first) == "close: abandoned: rank 1 did not vote in time"
    for elector in (waiter, late):
        with pytest.raises(
            GroupClosed, match="tp:0 is closed: close: abandoned: rank 1"
        ):
            elector.vote("rollback", deadline=AMPLE)


def test_one_who_refuses_waits_for_nobody(stores):  # R-D6 # R-B5
    refusing, late = (Electorate(s, n, 2, "tp:0") for n, s in enumerate(stores[:2]))
    began = time.monotonic()
    first = refusing.refuse("step", "no memory", deadline=AMPLE)
    second = late.vote("another step", deadline=AMPLE)
    assert time.monotonic() - began < AMPLE / 2
    assert alike([first, second]).verdict is NO
    assert dict(second.errors) == {0: "no memory"}
    with ThreadPoolExecutor(2) as pool:  # they are in step, and go on
        votes = pool.map(lambda e: e.vote("next", deadline=AMPLE), (refusing, late))
        assert alike(list(votes)).verdict is GO


def test_who_waits_already_is_refused_at_once():  # R-D6
    store = MemoryStore()

    def body(elector):
        if elector.rank == 1:
            time.sleep(0.1)
            return elector.refuse("step", "no memory", deadline=AMPLE)
        return elector.vote("step", deadline=AMPLE)

    began = time.monotonic()
    outcome = alike(together([store] * 2, body))
    assert time.monotonic() - began < AMPLE / 2
    assert (outcome.verdict, dict(outcome.errors)) == (NO, {1: "no memory"})


@pytest.mark.parametrize("size", [1, 8, 16, MAX_RANKS])
def test_groups_of_many_ranks(size):  # R-D6
    def body(elector):
        last = elector.rank == size - 1
        return [
            elector.vote("prepare", deadline=AMPLE),
            elector.vote("capture", "no" if last else None, deadline=AMPLE),
        ]

    both = together([HashStore()] * size, body)
    assert alike([agreed for agreed, _ in both]).verdict is GO
    assert alike([refused for _, refused in both]).errors == {size - 1: "no"}


def test_a_thousand_votes_stay_in_step():  # R-D6
    def body(elector):
        turns = [(f"step {n}", "no" if n % 10 == 0 else None) for n in range(1000)]
        return [elector.vote(*turn, deadline=AMPLE).verdict for turn in turns]

    assert together([HashStore()] * 2, body) == [([NO] + [GO] * 9) * 100] * 2


def test_a_killed_rank_is_missed_by_all():  # R-D6 # R-C1
    def body(rank, store):
        elector = Electorate(store, rank, 3, "tp:0")
        agreed = elector.vote("prepare", deadline=AMPLE)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return agreed.verdict, elector.vote("rollback", deadline=SHORT)

    first, killed, last = ranks.run(3, body, deadline=AMPLE)
    assert killed.status == -signal.SIGKILL
    assert first.value[0] is last.value[0] is GO
    assert alike([first.value[1], last.value[1]]).missing == (1,)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("delay", [0, 0.2])
def test_no_vote_outlasts_its_store(sign, delay):  # R-D2 # R-D6
    """The server dies or freezes, before the vote or while it waits."""

    def body(rank, store):
        if rank == 0:
            server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            store.set("server", f"{server.port} {os.getpid()}")
            time.sleep(AMPLE)
        port, process = map(int, store.get("server").split())
        elector = Electorate(TCPStore("127.0.0.1", port, None, False), 0, 2, "tp:0")
        timer = threading.Timer(delay, os.kill, (process, sign))
        timer.start()
        if not delay:
            timer.join()
        start = time.monotonic()
        outcome = elector.vote("close", deadline=1)
        lasted = time.monotonic() - start
        os.kill(process, signal.SIGKILL)
        return outcome, lasted

    _, survivor = ranks.run(2, body, deadline=AMPLE)
    outcome, lasted = survivor.value
    assert lasted < 3
    assert outcome.verdict is ABANDONED
    assert outcome.errors[0].startswith("the store failed: ")


# One electorate


def test_after_an_abandoned_vote_the_store_is_left_alone():  # R-D2
    store = mock.Mock(wraps=MemoryStore())
    elector = Electorate(store, 0, 2, "tp:0")
    assert elector.vote("close", deadline=SHORT).verdict is ABANDONED
    store.reset_mock()
    for _ in range(2):
        with pytest.raises(GroupClosed, match="rank 1 did not vote in time"):
            elector.vote("close", deadline=AMPLE)
    assert not store.mock_calls


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_leaves_the_ballot_and_closes_the_group(error):  # R-C1
    def interrupt(*_):
        raise error

    store = MemoryStore()
    elector = Electorate(store, 0, 2, "tp:0")
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(error):
            elector.vote("rollback", deadline=AMPLE)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(GroupClosed, match="rollback: the vote did not end"):
        elector.vote("close", deadline=AMPLE)
    for thread in threading.enumerate():
        if thread.name == "tp:0: rollback":
            thread.join(AMPLE / 4)
            assert not thread.is_alive()
    peer = Electorate(store, 1, 2, "tp:0")
    assert peer.vote("rollback", deadline=AMPLE).verdict is GO


def test_a_rank_that_gave_up_gives_no_verdict_later():  # R-D6
    """Its store freezes after its ballot; when it thaws, nobody waits."""
    store, thaw = MemoryStore(), threading.Event()

    def freeze(keys):
        thaw.wait(AMPLE)
        return MemoryStore.check(store, keys)

    frozen = mock.Mock(wraps=store, check=freeze)
    late = Electorate(frozen, 0, 2, "tp:0").vote("close", deadline=0.1)
    assert late.errors[0].endswith("tp:0: close did not end within 0.1 s")
    MemoryStore.compare_set(store, "tp:0/0/1", "", cast().decode())
    thaw.set()
    for thread in threading.enumerate():
        if thread.name == "tp:0: close":
            thread.join(AMPLE)
    assert "tp:0/0/verdict" not in store.records


def test_two_groups_of_one_name_are_told():  # R-D6
    store = MemoryStore()
    Electorate(store, 0, 1, "tp:0").vote("step", deadline=AMPLE)
    with pytest.raises(GroupClosed, match="another has voted as rank 0"):
        Electorate(store, 0, 1, "tp:0").vote("step", deadline=AMPLE)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_a_refused_deadline_casts_nothing(seconds):
    store = MemoryStore()
    elector = Electorate(store, 0, 1, "tp:0")
    with pytest.raises(ValueError, match="seconds"):
        elector.vote("step", deadline=seconds)
    assert not store.records
    assert elector.vote("step", deadline=AMPLE).verdict is GO


@pytest.mark.parametrize("rank, size", [(-1, 2), (2, 2), (0, 0), (0, MAX_RANKS + 1)])
def test_a_rank_is_one_of_its_group(rank, size):
    with pytest.raises(ValueError, match="1 to 64 ranks"):
        Electorate(MemoryStore(), rank, size, "tp:0")
