# SPDX-License-Identifier: Apache-2.0
"""What the built wheel says of itself, derived from what the base wheel says.

Every change names the requirement that it expects to find. A base whose list
has moved is an error and not a wheel with quietly different requirements.
"""

import json
from collections.abc import Mapping

from packaging.requirements import Requirement

from series.environment import OLDEST_PYTHON
from series.errors import SeriesError
from series.upstream import RELEASE, Base

VERSION_MODULE = "vllm/_version.py"

_REQUIRES = "Requires-Dist: "
_PYTHON = "Requires-Python: "
_BOUND, _OUR_BOUND = ">=3.10", ">=" + ".".join(map(str, OLDEST_PYTHON))
_SUMMARY = f"vLLM {RELEASE} with graph channels that know their owner"

# The extra that vLLM 0.28.0 declares cannot be installed: b12x 1.2.4 wants another
# nvidia-cutlass-dsl than vLLM does. 1.2.6 wants the same, and its comm/pcie is equal.
_B12X = {"b12x==1.2.4": 'b12x==1.2.6; extra == "b12x"'}

# By base and in this order: a requirement without its marker, and what stands in
# its place (None for nothing). The package index holds no torch 2.13.0+cpu, and any
# local CPU build satisfies 2.13.0; a CPU torch cannot load the other three.
_CHANGES: Mapping[str, Mapping[str, str | None]] = {
    "cpu": {
        "torch==2.13.0": None,
        "torch==2.13.0+cpu": "torch==2.13.0",
        "torchaudio": None,
        "torchvision": None,
        "torchcodec>=0.14": None,
        **_B12X,
    },
    "cuda": _B12X,
}

_ABOUT = f"""\
This is vLLM {RELEASE} with a patch series that gives every owner of CUDA graphs a
name, the same on all ranks, and threads it to the communicators. It is built from
the released wheel and is no release of the vLLM project: report what goes wrong
here to this build's maintainers first. vLLM's own description follows.

"""


def derive(base: Base, text: str, version: str = RELEASE) -> str:
    """The METADATA of the built wheel, or of an installed vLLM that was landed in.

    Args:
        base: The base it is built on.
        text: The base wheel's METADATA.
        version: The version that it states. Another than the release's has
            requirements of its own: those that ours would replace are, the others
            stay.

    Raises:
        SeriesError: An expected line is missing, or there more than once.
    """
    head, _, description = text.partition("\n\n")
    lines = head.splitlines()
    exact = version == RELEASE and f"Name: {base.distribution}" in lines
    name = [line for line in lines if line.startswith("Name: ")]
    _replace(lines, base, "".join(name), "Name: vllm")
    _replace(lines, base, f"Version: {version}", f"Version: {base.labelled(version)}")
    summary = [line for line in lines if line.startswith("Summary: ")]
    _replace(lines, base, "".join(summary), f"Summary: {_SUMMARY}")
    python = [line for line in lines if line.startswith(_PYTHON) and _BOUND in line]
    if exact or python:
        line = "".join(python) or _PYTHON + _BOUND
        _replace(lines, base, line, line.replace(_BOUND, _OUR_BOUND))
    for old, new in _CHANGES[base.key].items():
        if exact or any(_bare(line) == old for line in lines):
            line = _requirement(lines, base, old)
            _replace(lines, base, line, new and _REQUIRES + new)
    return "\n".join(lines) + "\n\n" + _ABOUT + description


def wheel_file(tag: str) -> str:
    """The WHEEL file: how the wheel was made, and for which interpreters."""
    return (
        "Wheel-Version: 1.0\n"
        "Generator: series (graph-channels)\n"
        "Root-Is-Purelib: false\n"
        f"Tag: {tag}\n"
    )


def version_module(version: str) -> bytes:
    """The content of ``vllm/_version.py``, which must agree with the metadata."""
    public, _, local = version.partition("+")
    parts = [int(p) if p.isdecimal() else p for p in (*public.split("."), local)]
    return f'''\
# SPDX-License-Identifier: Apache-2.0
"""The version of this build; written by the series tool."""

version = "{version}"
version_tuple = {json.dumps(parts).replace("[", "(").replace("]", ")")}
commit_id = None

__version__ = version
__version_tuple__ = version_tuple
__commit_id__ = commit_id
'''.encode()


def _requirement(lines: list[str], base: Base, wanted: str) -> str:
    """The one line that asks for ``wanted``, whatever its marker."""
    found = [line for line in lines if _bare(line) == wanted]
    if len(found) != 1:
        name = Requirement(wanted).name
        alike = [line for line in lines if line.startswith(_REQUIRES + name)]
        raise _moved(base, _REQUIRES + wanted, len(found), alike)
    return found[0]


def _bare(line: str) -> str | None:
    if not line.startswith(_REQUIRES):
        return None
    requirement = Requirement(line.removeprefix(_REQUIRES))
    requirement.marker = None
    return str(requirement)


def _replace(lines: list[str], base: Base, old: str, new: str | None) -> None:
    if lines.count(old) != 1:
        raise _moved(base, old, lines.count(old), lines[:3])
    at = lines.index(old)
    lines[at : at + 1] = [] if new is None else [new]


def _moved(base: Base, wanted: str, count: int, alike: list[str]) -> SeriesError:
    return SeriesError(
        f"the line '{wanted}' once in the metadata of {base.filename}",
        found=f"{count} of it; near it: {'; '.join(alike) or 'nothing alike'}",
        do="compare series/metadata.py with the requirements of this release",
    )
