# SPDX-License-Identifier: Apache-2.0
"""Nothing that this project adds or patches acts when it is collected."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from series.patch import load_series
from tests.utils import OPTIONAL

# Of classes, in an edit's words: on its own, or before a method's name.
_NAMES = re.compile(r"(?:function|cls)='(\w+)")
ROOT = Path(__file__).parents[2]
# It may free its own memory, guarded; test_custom_allreduce_lifecycle.py says how.
ALLOWED = {"CustomAllreduce"}


def added_files():
    """The Python files of the series, by their path in vLLM."""
    return [path for patch in load_series() for path in patch.adds]


@cache
def classes():
    """Every class of the series, and every class with a method that it edits."""
    found = set()
    for path in added_files():
        module = importlib.import_module(_module(path))
        own = vars(module).values()
        found |= {
            each
            for each in own
            if inspect.isclass(each) and each.__module__ == module.__name__
        }
    for patch in load_series():
        for path, edits in patch.edits.items():
            names = {name for edit in edits for name in _NAMES.findall(edit.words)}
            found |= _patched(path, names)
    return sorted(found, key=lambda each: each.__qualname__)


def _module(path):
    return path.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")


def _patched(path, names):
    try:
        module = importlib.import_module(_module(path))
    except ModuleNotFoundError as error:
        assert error.name in OPTIONAL, path
        return set()
    held = (getattr(module, name, None) for name in names)
    return {each for each in held if inspect.isclass(each)}


def test_the_walk_finds_them():
    names = {each.__name__ for each in classes()}
    added = {"Ledger", "HostChannels", "HostChannel", "B12xChannels", "DcpChannels"}
    patched = {"GroupCoordinator", "CudaCommunicator", "CustomAllreduce", "WorkerProc"}
    assert added | patched <= names
    assert len(names) > 60


def test_no_class_has_a_finalizer_but_vllms_own():  # R-D3 # C24
    having = {
        each.__name__
        for each in classes()
        for cls in each.__mro__
        if "__del__" in vars(cls) and cls.__module__.startswith("vllm")
    }
    assert having == ALLOWED


def _calls_late(source):
    """What registers a call for later, of the names imported and the attributes."""
    named = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.alias(name=name)
                | ast.ImportFrom(module=name)
                | ast.Attribute(attr=name)
            ):
                named.add(name)
    return {"atexit", "finalize"} & named


@pytest.mark.parametrize(
    "source",
    [
        "import atexit; atexit.register(close)",
        "from atexit import register",
        "import weakref; weakref.finalize(self, self.close)",
        "from weakref import finalize as later",
    ],
)
def test_the_search_finds_what_is_called_late(source):
    assert _calls_late(source)


@pytest.mark.parametrize("path", added_files())
def test_no_file_calls_anything_late(path):  # R-D3
    assert not _calls_late((ROOT / path).read_text())


# What each class leaves when it is half-built, now and at interpreter exit.
_DROPPED = """
import gc, sys
from tests.distributed.test_finalizers import classes
kept = []
for each in classes():
    try:
        object.__new__(each)
        kept.append(object.__new__(each))
    except TypeError:
        pass  # an enumeration or the like: there is no half of it
gc.collect()
sys.kept = kept  # until the last moment
print(len(kept))
"""


def test_half_built_objects_go_in_silence_also_at_exit():  # R-D3 # C24
    done = subprocess.run(
        [sys.executable, "-c", _DROPPED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 30
    assert "Exception ignored" not in done.stderr
    assert "Traceback" not in done.stderr
