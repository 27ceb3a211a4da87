# SPDX-License-Identifier: Apache-2.0
"""Is what got installed what was built? Run as ``python -m series.installed``.

A resolver may answer a requirement that it cannot meet with an older release
instead of an error, so what is there is looked at, and not what was asked for.
"""

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator

from series.environment import Fault
from series.upstream import BASES

B12X = "1.2.6"
_AGAIN = "rm -rf .venv && make install"


def main() -> int:
    """Print the version that is installed, or every fault; 0 if there is none."""
    # Only the version is wanted of vLLM, not its remarks on the platform.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    faults = list(find_faults())
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    if not faults:
        print(f"installed: vllm {_version('vllm')}, b12x {B12X}")
    return 1 if faults else 0


def find_faults() -> Iterator[Fault]:
    """Every difference between this environment and what the build should give."""
    labels = [base.label for base in BASES.values()]
    vllm = _version("vllm")
    if vllm not in labels:
        yield Fault(f"vllm {' or '.join(labels)} installed", vllm, _AGAIN)
    else:
        said = importlib.import_module("vllm").__version__
        if said != vllm:
            yield Fault(f"vllm.__version__ {vllm}, as installed", said, _AGAIN)
    if _version("b12x") != B12X:
        yield Fault(f"b12x {B12X} installed", _version("b12x"), _AGAIN)
    try:
        importlib.import_module("b12x.comm.pcie")
    except ImportError as error:
        yield Fault("b12x.comm.pcie imported", str(error), _AGAIN)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return f"no {distribution}"


if __name__ == "__main__":
    sys.exit(main())
