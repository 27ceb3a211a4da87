# SPDX-License-Identifier: Apache-2.0
"""What the series makes of a release: toys first, then the real wheels."""

import compileall
import json
import re
import subprocess
import sys

import pytest

from series import landing as landing_module
from series import upstream
from series.errors import SeriesError
from series.landing import RECEIPT, ROOT, SeriesErrors, attempt, compute, digest
from series.patch import load_series
from series.verbs import add_decorator, add_parameter
from tests.series import toys


def test_patches_build_on_one_another():
    done = toys.landing(toys.FIRST, toys.SECOND)
    assert done.pristine["vllm/one.py"] == toys.read("vllm/one.py")
    assert done.changed["vllm/one.py"] == (
        b"@cached\ndef one(a, b=None):\n    return a\n"
    )


def test_the_receipt_names_what_came_in_and_what_goes_out():
    done = toys.landing(toys.FIRST, toys.SECOND)
    receipt = json.loads(done.added[RECEIPT])
    assert receipt["patches"] == ["first", "second"]
    assert receipt["files"].keys() == done.changed.keys()
    for path, sums in receipt["files"].items():
        assert sums["before"] == digest(done.pristine[path])
        assert sums["after"] == digest(done.changed[path])


def test_every_error_of_every_patch_is_reported():
    broken = toys.patch(
        "broken",
        {
            "vllm/one.py": (
                add_parameter(function="gone", parameter="b=None"),
                add_parameter(function="one", parameter="a=None"),
            ),
            "vllm/deep/two.py": (add_decorator(function="two", decorator="x"),),
        },
    )
    with pytest.raises(SeriesErrors) as caught:
        toys.landing(toys.FIRST, broken)
    said = str(caught.value)
    assert len(caught.value.errors) == 3
    assert "broken, vllm/one.py: exactly one function gone" in said
    assert "broken, vllm/one.py: one(a=None)" in said
    assert "broken, vllm/deep/two.py: exactly one function two" in said
    assert "closest: Two.two" in said
    assert "3 edits without exactly one place" in said


def test_an_edit_that_fails_does_not_hide_those_after_it():
    half = toys.patch(
        "half",
        {
            "vllm/one.py": (
                add_parameter(function="gone", parameter="b=None"),
                add_parameter(function="one", parameter="b=None"),
            )
        },
    )
    tried = attempt(toys.read, [half])
    assert len(tried.errors["half"]) == 1
    assert tried.edited["vllm/one.py"].startswith(b"def one(a, b=None)")


def test_a_file_laid_out_in_another_way_is_refused():
    def read(path):
        return b"def one( a ):\n    return  a\n"

    with pytest.raises(SeriesError, match="it would change others in vllm/one.py"):
        compute(read, [toys.SECOND])


def test_a_new_file_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(landing_module, "ROOT", tmp_path)
    with pytest.raises(SeriesError, match="the new file vllm/distributed/graph_chan"):
        compute(toys.read, [_with_adds("vllm/distributed/graph_channels/new.py")])


def _with_adds(*adds):
    return type(toys.SECOND)(
        "adds", toys.SECOND.message, toys.SECOND.edits, adds=tuple(adds)
    )


# The real wheels ------------------------------------------------------------

PARALLEL_STATE = "vllm/distributed/parallel_state.py"


@pytest.fixture(scope="module")
def real():
    return upstream.reader(upstream.locate(upstream.BASES["cpu"]))


def test_every_file_of_vllm_here_is_added_by_one_patch():
    added = [path for patch in load_series() for path in patch.adds]
    here = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "vllm").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert sorted(added) == sorted(here - {RECEIPT})


@pytest.fixture(scope="module")
def landed(real, tmp_path_factory):
    """A folder with every file that lands."""
    folder = tmp_path_factory.mktemp("landed")
    done = compute(real, load_series())
    for path, content in {**done.changed, **done.added}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def test_what_lands_compiles(landed):
    assert compileall.compile_dir(landed, quiet=1, force=True)


def test_what_lands_keeps_vllms_rules(landed):
    rules = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *rules, str(landed)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


ANCHOR = b"def graph_capture(\n    device: torch.device"


WHOLE = rb"(?s:.*?)\n(?=\w)"  # to the end of the function


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace(ANCHOR, ANCHOR.replace(b"capture", b"record")), ""),
        (lambda text: re.sub(b"@.*\n" + re.escape(ANCHOR) + WHOLE, b"", text), ""),
        (
            lambda text: text + b"\n\ndef graph_capture(device):\n    pass\n",
            "2 of them, at lines",
        ),
    ],
    ids=["changed", "removed", "doubled"],
)
def test_an_anchor_that_is_not_there_once_is_refused(real, change, words):  # C42
    def read(path):
        text = real(path)
        if path != PARALLEL_STATE:
            return text
        changed = change(text)
        assert text.count(ANCHOR) == 1 and changed != text
        return changed

    with pytest.raises(SeriesErrors) as caught:
        compute(read, load_series())
    said = str(caught.value)
    assert f"name_graph_owners, {PARALLEL_STATE}: exactly one function" in said
    assert words in said
    assert "do:" in said
