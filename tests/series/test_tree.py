# SPDX-License-Identifier: Apache-2.0
"""Landing on a tree: whole or not at all, whatever comes between."""

import errno
import json
import os
import signal
import stat

import pytest

from series import tree as tree_module
from series.errors import SeriesError
from series.landing import RECEIPT
from series.survey import State, survey
from series.tree import land
from tests.series import toys

LANDING = toys.landing(toys.FIRST, toys.SECOND)


@pytest.fixture
def tree(tmp_path):
    return toys.unpack(tmp_path / "tree")


def _is_landed(tree):
    landed = {**LANDING.changed, **LANDING.added}
    return all((tree / path).read_bytes() == landed[path] for path in landed)


def test_landing_writes_every_file_and_leaves_nothing_else(tree):  # C42
    before = toys.snapshot(tree)
    assert land(tree, LANDING) is True
    assert _is_landed(tree)
    new = set(toys.snapshot(tree)) - set(before)
    assert new == {
        RECEIPT,
        "vllm/distributed",
        "vllm/distributed/graph_channels",
    }


def test_a_second_landing_changes_nothing(tree):  # C42
    land(tree, LANDING)
    before = toys.snapshot(tree)
    times = {p: p.stat().st_mtime_ns for p in tree.rglob("*")}
    assert land(tree, LANDING) is False
    assert toys.snapshot(tree) == before
    assert {p: p.stat().st_mtime_ns for p in tree.rglob("*")} == times


def test_modes_are_kept(tree):
    (tree / "vllm/one.py").chmod(0o755)
    land(tree, LANDING)
    assert stat.S_IMODE((tree / "vllm/one.py").stat().st_mode) == 0o755


def test_survey_tells_the_states_apart(tree):
    assert survey(tree, LANDING).state is State.PRISTINE
    assert survey(tree, LANDING).version == "0.28.0"
    land(tree, LANDING)
    found = survey(tree, LANDING)
    assert (found.state, found.series) == (State.LANDED, "channels.1")


def _refused(tree, *words):
    before = toys.snapshot(tree)
    with pytest.raises(SeriesError) as caught:
        land(tree, LANDING)
    assert toys.snapshot(tree) == before
    for word in (*words, "do:"):
        assert word in str(caught.value)


def test_a_tree_of_an_older_series_is_refused(tree):
    older = toys.landing(toys.FIRST)
    receipt = json.loads(older.added[RECEIPT]) | {"series": "channels.0"}
    older.added[RECEIPT] = json.dumps(receipt).encode()
    land(tree, older)
    assert survey(tree, LANDING).series == "channels.0"
    _refused(tree, "the series channels.0 landed", "vllm/one.py: differs")


def test_the_same_series_with_a_file_edited_by_hand_is_refused(tree):
    land(tree, LANDING)
    with (tree / "vllm/one.py").open("a") as file:
        file.write("# by hand\n")
    _refused(tree, "vllm/one.py: differs", "vllm/deep/two.py: landed already")


def test_an_altered_file_is_refused(tree):  # C42
    (tree / "vllm/deep/two.py").write_text("class Two:\n    pass\n")
    _refused(tree, "touched files that are not the release's", "deep/two.py: differs")


def test_a_missing_file_is_refused(tree):
    (tree / "vllm/deep/two.py").unlink()
    _refused(tree, "vllm/deep/two.py: missing")


def test_a_file_in_the_place_of_a_new_one_is_refused(tree):
    (tree / RECEIPT).parent.mkdir(parents=True)
    (tree / RECEIPT).write_text("{}")
    _refused(tree, f"{RECEIPT}: there already, and differs")


def test_another_release_is_refused_with_its_version_and_files(tree):  # C42
    (tree / "vllm/_version.py").write_text("__version__ = version = '0.29.0'\n")
    (tree / "vllm/one.py").write_text("def one():\n    return 1\n")
    _refused(tree, "vLLM 0.29.0, not 0.28.0", "vllm/one.py: differs")


def test_a_folder_without_vllm_is_refused(tmp_path):
    with pytest.raises(SeriesError, match="no vllm/_version.py"):
        land(tmp_path, LANDING)


@pytest.mark.parametrize("path", LANDING.changed)
def test_a_read_only_file_is_refused(tree, path):  # C42
    (tree / path).chmod(0o444)
    _refused(tree, f"read-only: {path}", "chmod u+w")


# Every moment at which a landing can be stopped: a count of writes to the
# stage, then a count of renames into place, whichever comes to its turn.
WRITES = len(LANDING.changed) + len(LANDING.added) + 1  # and the journal
RENAMES = 1 + len(LANDING.changed) + len(LANDING.added)
MOMENTS = [("_write", n) for n in range(WRITES)] + [
    ("replace", n) for n in range(RENAMES)
]


def _stop_at(monkeypatch, moment, stop):
    """Call ``stop`` at the n-th call of a step of the landing."""
    step, turn = moment
    module = tree_module if step == "_write" else os
    real = getattr(module, step)
    calls = []

    def counted(*args):
        calls.append(args)
        if len(calls) == turn + 1:
            stop()
        return real(*args)

    monkeypatch.setattr(module, step, counted)
    return calls


def _raise(error):
    def stop():
        raise error

    return stop


def test_the_moments_are_all_there_are(tree, monkeypatch):
    writes = _stop_at(monkeypatch, ("_write", -1), _raise(AssertionError))
    renames = _stop_at(monkeypatch, ("replace", -1), _raise(AssertionError))
    land(tree, LANDING)
    assert (len(writes), len(renames)) == (WRITES, RENAMES)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_full_disk_leaves_the_tree_as_it_was(tree, monkeypatch, moment):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")
    _stop_at(monkeypatch, moment, _raise(full))
    _refused(tree, "No space left on device: a file", "make room")
    assert land(tree, LANDING) is True
    assert _is_landed(tree)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_leaves_the_tree_as_it_was(tree, monkeypatch, moment, failure):
    before = toys.snapshot(tree)
    _stop_at(monkeypatch, moment, _raise(failure()))
    with pytest.raises(failure):
        land(tree, LANDING)
    assert toys.snapshot(tree) == before


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_is_put_right_by_the_next_run(tree, monkeypatch, moment):
    before = toys.snapshot(tree)
    child = os.fork()
    if child == 0:
        _stop_at(monkeypatch, moment, lambda: os.kill(os.getpid(), signal.SIGKILL))
        land(tree, LANDING)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL

    if moment[0] == "replace" and moment[1] > 0:
        with pytest.raises(SeriesError, match="cut off half way"):
            survey(tree, LANDING)
    tree_module.put_back(tree)
    assert toys.snapshot(tree) == before
    assert land(tree, LANDING) is True
    assert _is_landed(tree)


def test_a_put_back_that_is_cut_off_too_goes_on(tree, monkeypatch):
    before = toys.snapshot(tree)
    real = os.replace
    for turn in range(1, RENAMES):
        calls = []

        def stop_from_there_on(*args, calls=calls, turn=turn):
            calls.append(args)
            if len(calls) > turn:
                raise KeyboardInterrupt
            return real(*args)

        monkeypatch.setattr(os, "replace", stop_from_there_on)
        with pytest.raises(KeyboardInterrupt):
            land(tree, LANDING)
        monkeypatch.setattr(os, "replace", real)
        tree_module.put_back(tree)
        assert toys.snapshot(tree) == before


def test_a_full_file_system_for_real(tmp_path):
    # The kernel's own refusal, by a limit on the size of a file.
    import resource

    tree = toys.unpack(tmp_path / "tree")
    before = toys.snapshot(tree)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        try:
            land(tree, LANDING)
        except SeriesError as error:
            os._exit(0 if "File too large" in str(error) else 2)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert toys.snapshot(tree) == before
