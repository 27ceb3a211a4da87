# SPDX-License-Identifier: Apache-2.0
"""The series as commits, and together with what a neighbour changed."""

import re
import subprocess

import pytest

from series import upstream
from series.__main__ import main
from series.errors import SeriesError
from series.git import git
from series.landing import compute_modified
from series.metadata import VERSION_MODULE
from series.patch import load_series
from series.repository import branch
from tests.series import toys

PARALLEL_STATE = "vllm/distributed/parallel_state.py"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"
MANAGER = "vllm/v1/worker/gpu/cudagraph_utils.py"
ENVS = "vllm/envs.py"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """What `series branch` makes of the CPU base."""
    folder = tmp_path_factory.mktemp("branch") / "repository"
    wheel = upstream.locate(upstream.BASES["cpu"])
    folder_commits = list(branch(wheel, load_series(), folder))
    git(folder, "branch", "neighbour", f"HEAD~{len(load_series())}")
    return folder, folder_commits


@pytest.fixture(scope="module")
def patches(tmp_path_factory):
    """What `series export` writes."""
    folder = tmp_path_factory.mktemp("patches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(upstream.DEVICE, "cpu")
        assert main(["export", str(folder)]) == 0
    return sorted(folder.iterdir())


@pytest.fixture
def fork(repository):
    """The pristine branch of the repository, as it was after use."""
    folder, _ = repository
    yield folder
    subprocess.run(["git", "am", "--abort"], cwd=folder, capture_output=True)
    git(folder, "checkout", "--quiet", "--force", "neighbour")
    git(folder, "reset", "--quiet", "--hard", f"graph-channels~{len(load_series())}")
    git(folder, "clean", "--quiet", "-d", "--force")


def change(fork, changes):
    """Commit a neighbour's changes: functions of a file's text, by path."""
    git(fork, "checkout", "--quiet", "neighbour")
    for path, edit in changes.items():
        before = (fork / path).read_text()
        after = edit(before)
        assert after != before
        (fork / path).write_text(after)
    git(fork, "commit", "--quiet", "--all", "--message=a neighbour's change")


def apply(fork, patches):
    """``git am -3`` them; returns what git said, and whether it could."""
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "am", "-3"]
    done = subprocess.run(
        [*command, *map(str, patches)], cwd=fork, capture_output=True, text=True
    )
    return done.returncode == 0, done.stdout + done.stderr


def tree_of_head(fork):
    return git(fork, "rev-parse", "HEAD^{tree}").strip()


def test_each_patch_is_a_commit_on_the_pristine_sources(repository):
    folder, commits = repository
    subjects = [patch.message.subject for patch in load_series()]
    assert [commit.subject for commit in commits] == ["vLLM 0.28.0", *subjects]
    log = git(folder, "log", "--reverse", "--format=%T %s").splitlines()
    assert log[: len(commits)] == [f"{c.tree} {c.subject}" for c in commits]
    files = git(folder, "ls-tree", "-r", "--name-only", "HEAD").splitlines()
    assert PARALLEL_STATE in files
    assert VERSION_MODULE not in files
    assert not [path for path in files if re.search(r"\.so\b", path)]


def test_the_sources_are_the_wheels_byte_for_byte(fork):
    read = upstream.reader(upstream.locate(upstream.BASES["cpu"]))
    git(fork, "checkout", "--quiet", "neighbour")
    files = [path for path in fork.rglob("*") if path.is_file()]
    files = [path for path in files if ".git" not in path.relative_to(fork).parts]
    assert len(files) > 2000
    for path in files:
        assert path.read_bytes() == read(str(path.relative_to(fork))), path


def test_the_command_prints_the_tree_hashes(capsys, monkeypatch, tmp_path):
    def toy(wheel, patches, folder):
        return branch_of_toys(folder)

    monkeypatch.setattr("series.__main__.branch", toy)
    assert main(["branch", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(re.fullmatch(r"[0-9a-f]{40} \S.*", line) for line in lines)
    assert lines[-1].split()[0] == tree_of_head(tmp_path / "out")


def branch_of_toys(folder):
    """A repository of the invented release and series."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("series.repository.reader", lambda wheel: toys.read)
        sources = {path: text.encode() for path, text in toys.PRISTINE.items()}
        patch.setattr("series.repository._sources", lambda wheel: sources)
        return list(branch(folder / "wheel", (toys.FIRST, toys.SECOND), folder))


def test_a_branch_is_the_same_for_everyone(tmp_path, monkeypatch):
    first = branch_of_toys(tmp_path / "a")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "somebody")
    assert branch_of_toys(tmp_path / "b") == first
    heads = [git(tmp_path / name, "rev-parse", "HEAD") for name in "ab"]
    assert heads[0] == heads[1]


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(SeriesError, match="something there already"):
        list(branch(tmp_path / "wheel", (), tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


# Neighbours -----------------------------------------------------------------

FURTHER_DOWN = {
    PARALLEL_STATE: lambda text: text + "\n\ndef a_neighbour() -> int:\n    return 1\n",
    ENVS: lambda text: text + "\n\nA_NEIGHBOURS = 1\n",
}
FURTHER_UP = {
    path: lambda text: "# A neighbour's line.\n\n# And another.\n\n" + text
    for path in (RUNNER, MANAGER)
}
THE_SAME_LINE = {
    PARALLEL_STATE: lambda text: text.replace("def graph_capture(", "def record("),
}


@pytest.mark.parametrize("changes", [FURTHER_DOWN, FURTHER_UP], ids=["down", "up"])
def test_git_and_landing_compose_alike(fork, patches, changes, capsys):
    change(fork, changes)
    theirs = git(fork, "rev-parse", "HEAD").strip()
    assert main(["land", "--modified", str(fork)]) == 0
    told = capsys.readouterr().out
    assert sorted(re.findall(r"not the release's: (.*)", told)) == sorted(changes)
    git(fork, "add", "--all")
    landed = git(fork, "write-tree").strip()
    git(fork, "reset", "--quiet")
    assert main(["revert", str(fork)]) == 0
    assert git(fork, "status", "--porcelain") == ""

    done, said = apply(fork, patches)
    assert done, said
    assert git(fork, "rev-parse", f"HEAD~{len(patches)}").strip() == theirs
    assert tree_of_head(fork) == landed


def test_a_true_conflict_is_named_by_both(fork, patches, capsys):
    change(fork, THE_SAME_LINE)
    assert main(["land", "--modified", str(fork)]) == 1
    told = capsys.readouterr().err
    assert f"name_graph_owners, {PARALLEL_STATE}: exactly one function" in told
    assert "nothing was written" in told
    assert git(fork, "status", "--porcelain") == ""

    done, said = apply(fork, patches)
    assert not done
    assert f"Merge conflict in {PARALLEL_STATE}" in said
    assert "Name every graph owner" in said


def test_a_landing_again_on_a_fork_changes_nothing(fork, capsys):
    change(fork, FURTHER_DOWN)
    assert main(["land", "--modified", str(fork)]) == 0
    for again in (["land", "--modified"], ["land"]):
        assert main([*again, str(fork)]) == 0
        assert "landed already; nothing changed" in capsys.readouterr().out
    assert main(["status", str(fork)]) == 0
    told = capsys.readouterr().out
    assert "landed" in told and "on files that were not the release's" in told
    assert main(["revert", str(fork)]) == 0
    assert git(fork, "status", "--porcelain") == ""


@pytest.fixture
def other(tmp_path):
    """A checkout of invented sources, one file of which is somebody's own."""
    folder = toys.unpack(tmp_path / "checkout")
    (folder / "vllm/one.py").write_text("X = 1\n\n\ndef one(a):\n    return a\n")
    return folder


@pytest.fixture
def toy_series(monkeypatch):
    """The invented series in the place of the real one."""
    monkeypatch.setattr("series.__main__.load_series", lambda: (toys.FIRST,))


def test_a_fork_needs_a_way_back(other, tmp_path, toy_series, capsys):
    command = ["land", "--modified", str(other)]
    assert main(command) == 1
    assert "add --backup DIR" in capsys.readouterr().err
    git(other, "init", "--quiet")
    git(other, "add", "--all")
    git(other, "commit", "--quiet", "--message=theirs")
    (other / "mine.txt").write_text("mine")
    before = toys.snapshot(other / "vllm")
    assert main(command) == 1
    told = capsys.readouterr().err
    assert "uncommitted in git" in told and "mine.txt" in told
    assert toys.snapshot(other / "vllm") == before
    backup = ["--backup", str(tmp_path / "backup")]
    assert main([*command, *backup]) == 0
    assert "not the release's: vllm/one.py" in capsys.readouterr().out
    assert main(["revert", str(other), *backup]) == 0
    assert toys.snapshot(other / "vllm") == before


def test_a_newer_series_on_a_fork_takes_the_older_one_off(
    other, toy_series, monkeypatch, capsys
):
    before = toys.snapshot(other)
    command = [str(other), "--backup", str(other.parent / "backup")]
    monkeypatch.setattr("series.__main__.load_series", lambda: (toys.SECOND,))
    assert main(["land", "--modified", *command]) == 0
    monkeypatch.setattr("series.__main__.load_series", lambda: (toys.FIRST,))
    assert main(["land", *command]) == 0
    told = capsys.readouterr().out
    assert "taken off first" in told and "not the release's: vllm/one.py" in told
    landed = (other / "vllm/one.py").read_text()
    assert landed == "X = 1\n\n\ndef one(a, b=None):\n    return a\n"
    assert main(["revert", *command]) == 0
    assert toys.snapshot(other) == before


def test_lines_that_ruff_would_change_are_left_and_told(other, toy_series, capsys):
    rough = "X  =  1\ndef one(a):\n    return a\n"
    (other / "vllm/one.py").write_text(rough)
    backup = ["--backup", str(other.parent / "backup")]
    assert main(["land", "--modified", str(other), *backup]) == 0
    told = capsys.readouterr().out
    assert "vllm/one.py; our lines in it are not laid out" in told
    landed = (other / "vllm/one.py").read_text()
    assert landed == rough.replace("one(a)", "one(a, b=None)")


def test_a_file_that_is_no_python_is_named():
    def read(path):
        return b"<<<<<<<\n" if path == "vllm/one.py" else toys.read(path)

    with pytest.raises(SeriesError, match="first, vllm/one.py: a Python file"):
        compute_modified(read, (toys.FIRST,))


def test_a_file_that_the_fork_removed_is_named(other, toy_series, capsys):
    (other / "vllm/deep/two.py").unlink()
    backup = ["--backup", str(other.parent / "backup")]
    assert main(["land", "--modified", str(other), *backup]) == 1
    told = capsys.readouterr().err
    assert "first, vllm/deep/two.py: vllm/deep/two.py in" in told
