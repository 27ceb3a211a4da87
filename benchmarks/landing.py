# SPDX-License-Identifier: Apache-2.0
"""How long the series takes to land, and what it brings to be built.

Run as ``python -m benchmarks.landing``. Prints a Markdown table of seconds, each
step once; the pinned wheel must be on this disk already, or is fetched first.
"""

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar
from zipfile import ZipFile

from series import native, upstream, wheel
from series.landing import compute
from series.patch import load_series
from series.tree import land

Result = TypeVar("Result")


def main() -> None:
    """Measure, and print the table."""
    base = upstream.choose()
    pristine = upstream.locate(base)
    patches = load_series()
    landing, computing = timed(lambda: compute(upstream.reader(pristine), patches))
    library, building = timed(native.build)
    with TemporaryDirectory() as folder:
        tree, built = Path(folder, "tree"), Path(folder, "vllm.whl")
        with ZipFile(pristine) as archive:
            archive.extractall(tree)
        _, landed = timed(
            lambda: land(
                tree, landing, modified=False, backup=None, library=lambda: library
            )
        )
        _, written = timed(lambda: wheel.write(base, pristine, landing, library, built))
        size = built.stat().st_size
    print(
        f"`{base.filename}`, {len(landing.changed)} files edited, "
        f"{len(landing.added)} added\n\n"
        "| step | seconds |\n|---|---:|\n"
        f"| every edit, in memory | {computing:.1f} |\n"
        f"| the host transport's library, compiled | {building:.1f} |\n"
        f"| landing on an unpacked tree | {landed:.1f} |\n"
        f"| the wheel of {size >> 20} MiB, written | {written:.1f} |"
    )


def timed(action: Callable[[], Result]) -> tuple[Result, float]:
    """What an action returns, and the seconds it took."""
    began = time.perf_counter()
    return action(), time.perf_counter() - began


if __name__ == "__main__":
    main()
