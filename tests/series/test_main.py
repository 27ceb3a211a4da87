# SPDX-License-Identifier: Apache-2.0
"""The commands of `python -m series`, on the real wheels."""

import json
import re
import shutil
import zipfile

import libcst as cst
import pytest

from series import upstream
from series.__main__ import main
from series.landing import RECEIPT, ROOT, compute
from series.patch import load_series
from series.table import covering_tests, page
from series.verbs import prepend_to
from tests.series import toys

PARALLEL_STATE = "vllm/distributed/parallel_state.py"
CUSTOM_ALL_REDUCE = "vllm/distributed/device_communicators/custom_all_reduce.py"
CAPTURE = "CustomAllreduce.capture"


@pytest.fixture(scope="module")
def landing():
    read = upstream.reader(upstream.locate(upstream.BASES["cpu"]))
    return compute(read, load_series())


@pytest.fixture
def tree(tmp_path, landing):
    """The touched files of the real release."""
    read = upstream.reader(upstream.locate(upstream.BASES["cpu"]))
    for path in (*landing.changed, "vllm/_version.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(read(path))
    return tmp_path


def _with_a_line(content):
    """A file whose function is not quite what the series replaces."""
    line = prepend_to(function=CAPTURE, code="somebody_elses()")
    return line.apply(cst.parse_module(content)).bytes


def test_check_holds_on_both_bases(capsys):
    assert main(["check"]) == 0
    printed = capsys.readouterr().out
    for base in upstream.BASES.values():
        assert f"{base.filename}: " in printed
    assert printed.count("receipt holds") == 2


def test_check_names_a_receipt_that_does_not_hold(capsys, monkeypatch, tmp_path):
    stale = json.loads((ROOT / RECEIPT).read_text())
    stale["files"][PARALLEL_STATE]["after"] = "0" * 64
    shutil.copytree(ROOT / "vllm", tmp_path / "vllm")
    (tmp_path / RECEIPT).write_text(json.dumps(stale))
    monkeypatch.setattr("series.__main__.ROOT", tmp_path)
    assert main(["check"]) == 1
    assert f"another outcome for {PARALLEL_STATE}" in capsys.readouterr().err
    assert main(["check", "--update"]) == 0
    assert (tmp_path / RECEIPT).read_bytes() == (ROOT / RECEIPT).read_bytes()


def test_check_says_which_patches_hold_on_another_release(
    capsys, tmp_path, landing
):  # C42
    wheel = tmp_path / "vllm-0.99.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in landing.pristine.items():
            if path == PARALLEL_STATE:
                content = content.replace(b"def graph_capture(", b"def record(")
            archive.writestr(path, content)
    assert main(["check", "--base", str(wheel)]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^name_graph_owners: \d of its \d+ edits fail$", printed, re.M)
    assert "exactly one function graph_capture" in printed


def test_check_names_a_body_that_upstream_changed(capsys, tmp_path, landing):  # C42
    def check(changed):
        with zipfile.ZipFile(tmp_path / "release.whl", "w") as archive:
            for path, content in {**landing.pristine, **changed}.items():
                archive.writestr(path, content)
        status = main(["check", "--base", str(tmp_path / "release.whl")])
        return status, capsys.readouterr().out

    status, printed = check({})
    assert (status, printed.count(": holds")) == (0, len(load_series()))
    moved = _with_a_line(landing.pristine[CUSTOM_ALL_REDUCE])
    status, printed = check({CUSTOM_ALL_REDUCE: moved})
    assert status == 1
    assert re.search(r"^b12x_all_reduce: 1 of its \d+ edits fail$", printed, re.M)
    assert f"another body of {CAPTURE}" in printed


def test_land_and_land_again(capsys, tree, landing):  # C42
    assert main(["status", str(tree)]) == 0
    assert "vLLM 0.28.0, pristine" in capsys.readouterr().out
    assert main(["land", str(tree)]) == 0
    assert f"{len(landing.changed)} files edited" in capsys.readouterr().out
    assert main(["land", str(tree)]) == 0
    assert "landed already; nothing changed" in capsys.readouterr().out
    assert main(["status", str(tree)]) == 0
    assert "vLLM 0.28.0, landed" in capsys.readouterr().out


@pytest.mark.parametrize("modified", [[], ["--modified"]])
def test_a_vllm_that_runs_on_an_old_python_is_refused(capsys, tree, modified):
    site = tree / "lib/python3.10/site-packages"
    site.mkdir(parents=True)
    (tree / "vllm").rename(site / "vllm")
    before = toys.snapshot(tree)
    assert main(["land", *modified, str(site)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: Python 3.11 or later to run vLLM with the series on")
    assert f"found: Python 3.10, of {site}" in said
    assert "do:    take an environment of Python 3.11 or later" in said
    assert toys.snapshot(tree) == before


def test_a_landing_says_the_way_back_and_it_is_one(capsys, tree, tmp_path_factory):
    kept = tmp_path_factory.mktemp("kept")
    fork = (tree / PARALLEL_STATE).read_text() + "# A fork's own line.\n"
    (tree / PARALLEL_STATE).write_text(fork)
    assert main(["land", "--modified", "--backup", str(kept), str(tree)]) == 0
    (line,) = re.findall(
        r"^the way back: python -m series (.+)$", capsys.readouterr().out, re.M
    )
    assert main(["status", "--backup", str(kept), str(tree)]) == 0
    printed = capsys.readouterr().out
    assert "vLLM 0.28.0, landed" in printed
    assert "on files that were not the release's" in printed
    assert main(line.split()) == 0
    assert (tree / PARALLEL_STATE).read_text() == fork


def test_a_body_that_a_fork_changed_is_not_thrown_away(
    capsys, tree, tmp_path_factory
):  # C42
    fork = _with_a_line((tree / CUSTOM_ALL_REDUCE).read_bytes())
    (tree / CUSTOM_ALL_REDUCE).write_bytes(fork)
    before = toys.snapshot(tree)
    kept = tmp_path_factory.mktemp("kept")
    assert main(["land", "--modified", "--backup", str(kept), str(tree)]) == 1
    said = capsys.readouterr().err
    assert f"b12x_all_reduce, {CUSTOM_ALL_REDUCE}: another body of {CAPTURE}" in said
    assert "nothing was written" in said
    assert toys.snapshot(tree) == before
    assert not any(kept.iterdir())


@pytest.mark.parametrize("command", ["land", "revert", "status"])
def test_no_folder_is_not_the_current_one(capsys, command, tree):
    with pytest.raises(SystemExit):
        main([command, "--backup", "", str(tree)])
    assert "the name of a folder is wanted" in capsys.readouterr().err


def test_status_lists_what_is_unlike(capsys, tree):
    (tree / PARALLEL_STATE).write_text("")
    assert main(["status", str(tree)]) == 0
    printed = capsys.readouterr().out
    assert "vLLM 0.28.0, other" in printed
    assert f"{PARALLEL_STATE}: differs" in printed


def test_a_refusal_has_three_parts_and_a_status(capsys, tmp_path):
    assert main(["land", str(tmp_path / "nothing")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: a vLLM tree at ")
    assert "found:" in said
    assert "do:" in said


def test_an_interrupt_has_a_status_of_its_own(capsys, monkeypatch, tree):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("series.__main__.land", interrupt)
    assert main(["land", str(tree)]) == 130
    assert "no tree is left half landed" in capsys.readouterr().err


def test_every_changed_line_of_the_shown_diff_is_ours(capsys):
    assert main(["show", PARALLEL_STATE]) == 0
    lines = capsys.readouterr().out.splitlines()
    added = [line for line in lines if line.startswith("+") and line[1:2] != "+"]
    removed = [line for line in lines if line.startswith("-") and line[1:2] != "-"]
    # What is removed stands again with a name threaded through it.
    assert len(removed) == 3
    assert all("graph_capture(" in line or ".capture(" in line for line in removed)
    assert sum("channel_id" in line for line in added) >= 6


def test_export_writes_a_file_a_patch(capsys, tmp_path):
    assert main(["export", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out.split()
    assert len(printed) == len(load_series()) == len(list((tmp_path / "out").iterdir()))


def test_the_page_of_the_patches_is_that_of_today(landing):
    page_ = page(landing, load_series())
    assert (ROOT / "docs/patches.md").read_text() == page_
    for patch in load_series():
        for said in (patch.message.subject, patch.message.why, patch.message.drop_when):
            assert said in page_


def test_the_tests_cover_the_touched_files_and_no_others(landing):
    assert set(covering_tests(ROOT / "tests")) == set(landing.changed)
