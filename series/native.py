# SPDX-License-Identifier: Apache-2.0
"""Build csrc/ into the library that the host transport loads.

The library is small and optional: without a compiler the wheel is built all the
same, and choosing the host transport says what is missing.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from series.errors import SeriesError

ROOT = Path(__file__).resolve().parent.parent
_COMPILERS = ("c++", "g++", "clang++")
LIBRARY = "vllm/distributed/device_communicators/libvllm_host_channels.so.1"

# What builds it where the machine has no CMake, or none of its build tools.
_TOOLS = {"cmake": "cmake==4.4.5", "ninja": "ninja==1.13.2"}


def requirements() -> list[str]:
    """Packages that bring the build tools which this machine lacks."""
    if find_compiler() is None:
        return []
    lacking = [] if shutil.which("cmake") else ["cmake"]
    if not (shutil.which("make") or shutil.which("ninja")):
        lacking.append("ninja")
    return [_TOOLS[tool] for tool in lacking]


def build() -> bytes | None:
    """The library's content; None, with one line said, without a compiler.

    Raises:
        SeriesError: There is a compiler and it refused.
    """
    if find_compiler() is None:
        print("no C++ compiler: built without the host transport's library")
        return None
    with TemporaryDirectory() as scratch:
        _cmake("-S", str(ROOT), "-B", scratch, "-DCMAKE_BUILD_TYPE=Release")
        _cmake("--build", scratch)
        (library,) = Path(scratch).rglob(Path(LIBRARY).name)
        return library.read_bytes()


def build_if_possible() -> bytes | None:
    """The same where nothing installs build tools; None, said, where they lack."""
    lacking = requirements()
    if lacking:
        print(
            "no build tools: landed without the host transport's library. For it, "
            f"revert, `pip install {' '.join(lacking)}`, and land again"
        )
        return None
    return build()


def find_compiler() -> str | None:
    """The C++ compiler that CMake would take; ``CXX`` may hold options too."""
    named = shlex.split(os.environ.get("CXX", ""))[:1]
    return next(filter(None, map(shutil.which, named or _COMPILERS)), None)


def _cmake(*arguments: str) -> None:
    done = subprocess.run(["cmake", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise SeriesError(
            "csrc/ built by CMake",
            found="\n    ".join(said[-12:]),
            do="mend the compiler, or hide it (CXX=none) to build without the host "
            "transport",
        )
