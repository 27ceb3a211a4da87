# SPDX-License-Identifier: Apache-2.0
"""Diffs for reading, and patches that `git am` takes."""

import subprocess

import pytest

from series import upstream
from series.errors import SeriesError
from series.export import diff, export
from series.landing import RECEIPT, compute
from series.patch import load_series
from series.tree import land
from tests.series import toys

LANDING = toys.landing(toys.FIRST, toys.SECOND)
NO_MAIL = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")


def _git(repository, *command):
    subprocess.run(
        ["git", *NO_MAIL, *command],
        cwd=repository,
        check=True,
        capture_output=True,
        timeout=60,
    )


def _files(tree):
    return {
        str(path.relative_to(tree)): path.read_bytes()
        for path in tree.rglob("*")
        if path.is_file()
        and ".git" not in path.parts
        and path.name != ".series-originals.zip"
    }


def test_a_diff_holds_our_lines():
    assert diff(LANDING, "vllm/one.py") == (
        "--- a/vllm/one.py\n"
        "+++ b/vllm/one.py\n"
        "@@ -1,2 +1,3 @@\n"
        "-def one(a):\n"
        "+@cached\n"
        "+def one(a, b=None):\n"
        "     return a\n"
    )


def test_a_new_files_diff_comes_from_nowhere():
    assert diff(LANDING, RECEIPT).startswith(f"--- /dev/null\n+++ b/{RECEIPT}\n")


def test_a_file_that_is_not_touched_has_no_diff():
    with pytest.raises(SeriesError, match="touches 4 files, not this one"):
        diff(LANDING, "vllm/other.py")


def test_git_am_gives_what_landing_gives(tmp_path):
    landed = toys.unpack(tmp_path / "landed")
    land(landed, LANDING)

    repository = toys.unpack(tmp_path / "repository")
    _git(repository, "init", "--quiet")
    _git(repository, "add", "--all")
    _git(repository, "commit", "--quiet", "--message=pristine")
    patches = export(toys.read, (toys.FIRST, toys.SECOND), tmp_path / "patches")
    assert [path.name for path in patches] == [
        "0001-Change-with-first.patch",
        "0002-Change-with-second.patch",
    ]
    _git(repository, "am", "--quiet", *map(str, patches))
    assert _files(repository) == _files(landed)


def test_git_am_gives_what_landing_gives_on_the_real_wheel(tmp_path):
    read = upstream.reader(upstream.locate(upstream.BASES["cpu"]))
    landing = compute(read, load_series())
    trees = {name: tmp_path / name for name in ("landed", "repository")}
    for tree in trees.values():
        for path in (*landing.changed, "vllm/_version.py"):
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(read(path))
    land(trees["landed"], landing)
    _git(trees["repository"], "init", "--quiet")
    _git(trees["repository"], "add", "--all")
    _git(trees["repository"], "commit", "--quiet", "--message=pristine")
    patches = export(read, load_series(), tmp_path / "patches")
    _git(trees["repository"], "am", "--quiet", *map(str, patches))
    assert _files(trees["repository"]) == _files(trees["landed"])


def test_an_export_is_the_same_for_everyone(tmp_path):
    first, second = (
        [
            path.read_bytes()
            for path in export(toys.read, (toys.FIRST,), tmp_path / name)
        ]
        for name in ("a", "b")
    )
    assert first == second


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(SeriesError, match="something there already"):
        export(toys.read, (toys.FIRST,), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
