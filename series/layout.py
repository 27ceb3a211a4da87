# SPDX-License-Identifier: Apache-2.0
"""Lay files out as upstream does: ruff's formatter with its own defaults."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from series.errors import SeriesError


def formatted(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Python files by path, formatted in one run of the pinned ruff.

    Raises:
        SeriesError: ruff refused one of them.
    """
    with TemporaryDirectory() as folder:
        root = Path(folder)
        for path, content in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
        _run_ruff(root)
        return {path: (root / path).read_bytes() for path in files}


def _run_ruff(root: Path) -> None:
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--quiet", "."]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode != 0:
        raise SeriesError(
            "the touched files laid out by ruff",
            found=done.stderr.strip() or f"exit status {done.returncode}",
            do="install the ruff that constraints.txt pins; if it is, an edit "
            "produced something that is not Python",
        )
