# SPDX-License-Identifier: Apache-2.0
"""Files exchanged all or none, whatever comes between."""

import errno
import itertools
import os
import py_compile
import signal
import stat
import subprocess
import sys

import pytest

from series import exchange as module
from series.errors import SeriesError
from series.exchange import STAGE, cut_off, exchange, put_back
from tests.series.toys import snapshot

CHANGE = {
    "pack/kept.py": b"KEPT = 2\n",
    "pack/gone.py": None,
    "old.dist-info/RECORD": None,
    "new.dist-info/RECORD": b"record",
    "new.dist-info/licenses/LICENSE": b"licence",
    "pack/added.py": b"ADDED = 1\n",
}


@pytest.fixture
def tree(tmp_path):
    return make(tmp_path / "tree")


def make(folder):
    for path, text in {
        "pack/__init__.py": "",
        "pack/kept.py": "KEPT = 1\n",
        "pack/gone.py": "GONE = 1\n",
        "old.dist-info/RECORD": "old",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


PUT = sum(content is not None for content in CHANGE.values())


def is_done(tree):
    return all(
        not (tree / path).exists()
        if content is None
        else (tree / path).read_bytes() == content
        for path, content in CHANGE.items()
    )


def test_files_and_their_folders_come_and_go(tree):
    exchange(tree, CHANGE, {"pack/added.py": 0o640})
    assert is_done(tree)
    assert stat.S_IMODE((tree / "pack/added.py").stat().st_mode) == 0o640
    assert {path.name for path in tree.iterdir()} == {"pack", "new.dist-info"}


def test_nothing_to_do_is_nothing_done(tree):
    before = snapshot(tree)
    exchange(tree, {"pack/never.py": None}, {})
    assert snapshot(tree) == before


def test_a_link_is_put_and_replaced(tree, tmp_path):
    (tmp_path / "ours.py").write_text("OURS = 1\n")
    exchange(tree, {"pack/kept.py": tmp_path / "ours.py"}, {})
    assert (tree / "pack/kept.py").is_symlink()
    exchange(tree, {"pack/kept.py": b"KEPT = 3\n"}, {})
    assert not (tree / "pack/kept.py").is_symlink()
    assert (tmp_path / "ours.py").read_text() == "OURS = 1\n"


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_an_installers_cache_is_not_written_through_its_links(tree, tmp_path, link):
    cache = tmp_path / "cache.py"
    cache.write_text("KEPT = 1\n")
    (tree / "pack/kept.py").unlink()
    link(cache, tree / "pack/kept.py")
    exchange(tree, CHANGE, {})
    assert is_done(tree)
    assert cache.read_text() == "KEPT = 1\n"


@pytest.mark.parametrize("path", ["pack/kept.py", "pack/gone.py"])
def test_a_read_only_file_is_refused(tree, path):  # C42
    (tree / path).chmod(0o444)
    before = snapshot(tree)
    with pytest.raises(SeriesError, match=f"read-only: {path}"):
        exchange(tree, CHANGE, {})
    assert snapshot(tree) == before


def test_byte_code_that_does_not_look_at_its_source_hides_nothing(tree):
    def value():
        command = "from pack import kept; print(kept.KEPT)"
        done = subprocess.run(
            [sys.executable, "-c", command],
            cwd=tree,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout.strip()

    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(tree / "pack/kept.py", invalidation_mode=unchecked)
    (tree / "pack/kept.py").write_text("KEPT = 9\n")
    assert value() == "1"  # so it would hide the change
    exchange(tree, CHANGE, {})
    assert value() == "2"


# Every step at which an exchange can be stopped: the n-th write, rename, removal
# or new folder, for each n there is.
STEPS = [(module, "write"), *((os, name) for name in ("replace", "unlink", "mkdir"))]


def stop_at(patch, turn, stop):
    """Call ``stop`` in place of the n-th step; returns the steps that began."""
    begun = []
    for owner, name in STEPS:
        real = getattr(owner, name)

        def counted(*args, real=real, **kwargs):
            begun.append(args)
            if len(begun) == turn + 1:
                stop()
            return real(*args, **kwargs)

        patch.setattr(owner, name, counted)
    return begun


def each_stop(tmp_path, stop):
    """Trees in which an exchange was stopped at each of its steps in turn."""
    for turn in itertools.count():
        tree = make(tmp_path / str(turn))
        before = snapshot(tree)
        with pytest.MonkeyPatch.context() as patch:
            begun = stop_at(patch, turn, stop)
            yield tree, before
        if len(begun) <= turn:
            assert turn > 3 * len(CHANGE)  # all of it was walked through
            return


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit, OSError])
def test_a_failure_at_any_step_leaves_all_or_none(tmp_path, failure):  # C42
    def stop():
        raise failure(errno.ENOSPC, "No space left on device")

    stopped = 0
    for tree, before in each_stop(tmp_path, stop):
        try:
            exchange(tree, CHANGE, {})
        except failure:
            stopped += 1
            put_back(tree)
            assert snapshot(tree) == before or is_done(tree)
        else:
            assert is_done(tree)
    assert stopped > 2 * len(CHANGE)


def test_a_kill_at_any_step_is_put_right_by_the_next_run(tree, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        steps = stop_at(patch, -1, lambda: None)
        exchange(tree, CHANGE, {})
    halves = 0
    for turn in range(len(steps)):
        tree = make(tmp_path / f"killed-{turn}")
        before = snapshot(tree)
        child = os.fork()
        if child == 0:
            try:
                with pytest.MonkeyPatch.context() as patch:
                    stop_at(patch, turn, lambda: os.kill(os.getpid(), signal.SIGKILL))
                    exchange(tree, CHANGE, {})
            finally:
                os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        halves += cut_off(tree)
        put_back(tree)
        assert not (tree / STAGE).exists()
        assert snapshot(tree) == before or is_done(tree)
    assert halves > len(CHANGE)


def test_a_put_back_that_is_cut_off_too_goes_on(tmp_path):
    real = os.replace
    for turn in range(PUT):
        tree = make(tmp_path / str(turn))
        before = snapshot(tree)
        calls = itertools.count()

        def stop_from_there_on(*args, calls=calls, turn=turn):
            if next(calls) >= turn:
                raise KeyboardInterrupt
            return real(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "replace", stop_from_there_on)
            with pytest.raises(KeyboardInterrupt):
                exchange(tree, CHANGE, {})
        put_back(tree)
        assert snapshot(tree) == before


def test_a_put_back_minds_no_byte_code_of_what_was_added(tree):
    before = snapshot(tree)
    with pytest.MonkeyPatch.context() as patch:
        real = os.replace

        def interrupted(source, target):
            real(source, target)
            if str(target).endswith("added.py"):
                py_compile.compile(target)
                raise KeyboardInterrupt

        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            exchange(tree, CHANGE, {})
    assert snapshot(tree) == before


def test_a_full_file_system_for_real(tree):
    # The kernel's own refusal, by a limit on the size of a file.
    import resource

    before = snapshot(tree)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8))
        try:
            exchange(tree, CHANGE, {})
        except OSError as error:
            os._exit(0 if error.errno == errno.EFBIG else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert snapshot(tree) == before
