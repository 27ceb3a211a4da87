# SPDX-License-Identifier: Apache-2.0
"""Can this machine do what `make` is about to do? All faults in one list.

Run as ``python3 -m series.preflight VENV`` before anything is downloaded. Standard
library only, and readable by Python 3.8, for it also has to say that a Python
is too old.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from series.environment import Fault, foreign_vllm, usable_gpus

_GIB = 1 << 30
_PYTHONS = ((3, 11), (3, 12))
# The environment takes 4 GiB, the wheels and pip's cache 2; a torch that is not
# a CPU build takes 5 more. Once made, little is written beside a new wheel.
_DISK_FIRST = 12 * _GIB
_DISK_AGAIN = 2 * _GIB
# Two servers with their queues between processes take 1.1 GiB while they run.
_SHARED_MEMORY = 2 * _GIB


def main(arguments: list[str]) -> int:
    """Print every fault of this machine; 0 if there is none."""
    faults = list(find_faults(Path(arguments[0] if arguments else ".venv")))
    if not faults:
        return 0
    print(f"error: {len(faults)} thing(s) to mend first:", file=sys.stderr)
    for fault in faults:
        text = str(fault).replace("\n", "\n  ")
        print(f"- {text}", file=sys.stderr)
    return 1


def find_faults(venv: Path) -> Iterator[Fault]:
    """Every fault that is found without a download.

    Args:
        venv: The environment that is about to be made or used again.
    """
    yield from python_version()
    yield from venv_module()
    yield from compiler()
    yield from free_disk(venv)
    yield from temporary_folder()
    yield from shared_memory()
    yield from gpu()
    yield from environments(venv)


def python_version(version: tuple[int, ...] = sys.version_info[:3]) -> Iterator[Fault]:
    """The release this interpreter is of."""
    if version[:2] not in _PYTHONS:
        yield Fault(
            "Python 3.11 or 3.12",
            "Python " + ".".join(map(str, version)),
            "name another one: make PYTHON=python3.11",
        )


def venv_module() -> Iterator[Fault]:
    """Debian ships Python without the part that makes environments."""
    missing = [m for m in ("venv", "ensurepip") if not importlib.util.find_spec(m)]
    if missing:
        yield Fault(
            "a Python that can make virtual environments",
            "no module " + " and no module ".join(missing),
            f"apt-get install python3.{sys.version_info[1]}-venv",
        )


def compiler() -> Iterator[Fault]:
    """torch.compile builds its CPU kernels with it, at run time."""
    name = os.environ.get("CXX", "g++")  # it looks for no other
    if shutil.which(name) is None:
        yield Fault(
            "a C++ compiler",
            f"none called {name}",
            "apt-get install g++, or set CXX to the one you have",
        )


def free_disk(venv: Path) -> Iterator[Fault]:
    """Where the environment and the wheels go."""
    need = _DISK_AGAIN if venv.exists() else _DISK_FIRST
    free = shutil.disk_usage(venv.absolute().parent).free
    if free < need:
        yield Fault(
            f"{need // _GIB} GiB free on the disk of {venv}",
            f"{free / _GIB:.1f} GiB",
            "make room, for instance with: make clean; python3 -m pip cache purge",
        )


def shared_memory(path: Path = Path("/dev/shm")) -> Iterator[Fault]:
    """What the processes of one server talk through."""
    if not path.is_dir():
        yield Fault(
            f"shared memory at {path}",
            "no such folder",
            "run on Linux, with that file system mounted",
        )
        return
    free = shutil.disk_usage(path).free
    if free < _SHARED_MEMORY:
        yield Fault(
            f"{_SHARED_MEMORY // _GIB} GiB free in {path}",
            f"{free / _GIB:.2f} GiB",
            f"mount -o remount,size=4G {path}; for a container, --shm-size=4g",
        )


def temporary_folder() -> Iterator[Fault]:
    """pip unpacks here, and so does the build."""
    try:
        tempfile.TemporaryFile().close()
    except OSError as error:
        yield Fault(
            "a folder for temporary files that can be written to",
            str(error),
            "set TMPDIR to one",
        )


def gpu() -> Iterator[Fault]:
    """The CUDA base, gigabytes of it, is made here to run tests on GPUs."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cuda" and not usable_gpus():
        yield Fault(
            "a GPU that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves",
            "none",
            "install NVIDIA's driver; `make test` runs what needs no GPU",
        )


def environments(venv: Path) -> Iterator[Fault]:
    """Another vLLM in the environment to be used, or in an active one."""
    active = os.environ.get("VIRTUAL_ENV")
    folders = [venv] if active is None else [venv, Path(active)]
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        paths = glob.glob(str(folder / "lib" / "python3*" / "site-packages"))
        yield from foreign_vllm(paths, str(folder / "bin" / "python"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
