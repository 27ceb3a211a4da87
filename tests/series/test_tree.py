# SPDX-License-Identifier: Apache-2.0
"""Landing on a tree and the way back: whole or not at all."""

import errno
import functools
import io
import itertools
import json
import os
import stat
import zipfile
from dataclasses import replace

import pytest

from series.errors import SeriesError
from series.git import git
from series.landing import RECEIPT
from series.survey import State, survey
from series.tree import land, recover, revert
from tests.series import toys
from tests.series.test_exchange import stop_at

LANDING = toys.landing(toys.FIRST, toys.SECOND)


@pytest.fixture
def tree(tmp_path):
    return toys.unpack(tmp_path / "tree")


@functools.cache
def older():
    """What an older series made of the release, with a file that is no more."""
    done = toys.landing(toys.FIRST)
    receipt = json.loads(done.added[RECEIPT]) | {"series": "channels.0"}
    added = {RECEIPT: json.dumps(receipt).encode(), "vllm/past.py": b"PAST = 1\n"}
    return replace(done, added=added)


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
        ".series-originals.zip",
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


def test_a_tree_of_an_older_series_without_its_originals_is_refused(tree):
    land(tree, older())
    (tree / ".series-originals.zip").unlink()
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


# The way back, and on to another series ---------------------------------------


def sources(folder):
    """A tree without metadata."""
    return toys.unpack(folder)


def checkout(folder):
    """The root of a git work tree, as a fork is developed in."""
    toys.unpack(folder)
    (folder / "vllm/_version.py").unlink()
    (folder / "vllm/__init__.py").write_text("")
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message=theirs")
    return folder


KINDS = pytest.mark.parametrize("make", [sources, checkout, toys.install])


def files(tree):
    """What is in a tree, git's own files apart."""
    return {p: c for p, c in toys.snapshot(tree).items() if p.split("/")[0] != ".git"}


@KINDS
def test_reverting_gives_back_every_byte_and_mode(tmp_path, make):
    tree = make(tmp_path / "tree")
    (tree / "vllm/one.py").chmod(0o755)
    before = files(tree)
    assert land(tree, LANDING, library=lambda: b"library") is True
    assert _is_landed(tree)
    assert files(tree) != before
    assert revert(tree) is True
    assert files(tree) == before
    assert revert(tree) is False


@KINDS
def test_an_older_series_is_taken_off_by_the_new_one(tmp_path, make):
    tree = make(tmp_path / "tree")
    before = files(tree)
    land(tree, older(), library=lambda: b"library")
    assert survey(tree, LANDING).state is State.OLDER
    assert land(tree, LANDING) is True
    assert _is_landed(tree)
    assert not (tree / "vllm/past.py").exists()
    assert survey(tree, LANDING).state is State.LANDED
    assert revert(tree) is True
    assert files(tree) == before


def test_a_git_work_tree_gets_nothing_but_what_lands(tmp_path):
    tree = checkout(tmp_path / "tree")
    before = set(files(tree))
    land(tree, LANDING)
    new = set(files(tree)) - before
    assert {path for path in new if (tree / path).is_file()} == {RECEIPT}


@KINDS
def test_a_file_changed_since_is_not_overwritten(tmp_path, make):
    tree = make(tmp_path / "tree")
    land(tree, LANDING)
    (tree / "vllm/one.py").write_text("MINE = 1\n")
    before = files(tree)
    with pytest.raises(SeriesError, match="changed since the landing: vllm/one.py"):
        revert(tree)
    assert files(tree) == before


def test_a_landing_that_git_or_a_wheel_made_is_told_how_to_go_back(tree):
    land(tree, LANDING)
    (tree / ".series-originals.zip").unlink()
    with pytest.raises(SeriesError, match="a landing without originals"):
        revert(tree)


def with_other_content(archive):
    """A sound archive whose originals are not those that its manifest tells of."""
    changed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(archive)) as old,
        zipfile.ZipFile(changed, "w") as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b"return 2", b"return 3"))
    return changed.getvalue()


@pytest.mark.parametrize("make", [sources, toys.install])
def test_originals_that_are_damaged_are_refused(tmp_path, make):
    tree = make(tmp_path / "tree")
    land(tree, LANDING)
    (archive,) = tree.rglob("*originals.zip")
    whole = archive.read_bytes()
    for damaged in (whole[:-9], b"", with_other_content(whole)):
        archive.write_bytes(damaged)
        before = files(tree)
        with pytest.raises(SeriesError, match="a damaged archive"):
            revert(tree)
        assert files(tree) == before
    archive.write_bytes(whole)
    assert revert(tree) is True


def test_a_backup_holds_the_originals_of_a_tree(tmp_path):
    tree = sources(tmp_path / "tree")
    before = files(tree)
    land(tree, LANDING, backup=tmp_path / "backup")
    assert not (tree / ".series-originals.zip").exists()
    with pytest.raises(SeriesError, match="without originals"):
        revert(tree)
    assert revert(tree, tmp_path / "backup") is True
    assert files(tree) == before


@pytest.mark.parametrize("make", [sources, toys.install])
def test_a_backup_of_another_landing_is_not_overwritten(tmp_path, make):
    land(sources(tmp_path / "other"), LANDING, backup=tmp_path / "backup")
    kept = toys.snapshot(tmp_path / "backup")
    tree = make(tmp_path / "tree")
    before = files(tree)
    with pytest.raises(SeriesError, match="there already, of another landing"):
        land(tree, LANDING, backup=tmp_path / "backup")
    assert toys.snapshot(tmp_path / "backup") == kept
    assert files(tree) == before


def test_an_installed_tree_has_a_backup_too_if_one_is_named(tmp_path):
    tree = toys.install(tmp_path / "tree")
    before = files(tree)
    land(tree, LANDING, backup=tmp_path / "backup")
    (inside,) = tree.glob("*.dist-info/originals.zip")
    assert inside.read_bytes() == (tmp_path / "backup/originals.zip").read_bytes()
    assert revert(tree) is True
    assert files(tree) == before


ACTS = {
    "land": lambda tree: land(tree, LANDING, library=lambda: b"library"),
    "upgrade": lambda tree: land(tree, LANDING),
    "revert": revert,
}


@pytest.mark.parametrize(
    ("make", "act"),
    [
        (checkout, "upgrade"),
        (toys.install, "land"),
        (toys.install, "upgrade"),
        (toys.install, "revert"),
    ],
)
def test_a_full_disk_at_any_step_leaves_all_or_none(
    tmp_path, monkeypatch, make, act
):  # C42
    # No machine crashes here, and waiting for the disk takes most of the time.
    monkeypatch.setattr(os, "fsync", lambda file: None)

    def start(name):
        tree = make(tmp_path / name)
        if act != "land":
            land(tree, older() if act == "upgrade" else LANDING)
        return tree

    refused = 0
    for turn in itertools.count():
        tree = start(str(turn))
        before = files(tree)
        with pytest.MonkeyPatch.context() as patch:
            begun = stop_at(patch, turn, full_disk)
            try:
                assert ACTS[act](tree) is True
            except SeriesError as error:
                assert "No space left on device" in str(error)
                refused += 1
                recover(tree)
                assert files(tree) == before
        # Whether or not it was done, one can go on from there, and back.
        land(tree, LANDING)
        assert _is_landed(tree)
        assert revert(tree) is True
        assert files(tree) == files(make(tmp_path / f"pristine-{turn}"))
        if len(begun) <= turn:
            break
    assert refused > 6


def full_disk():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
