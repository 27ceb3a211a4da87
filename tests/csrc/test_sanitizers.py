# SPDX-License-Identifier: Apache-2.0
"""The host transport's library under gcc's sanitizers."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = sorted((HERE.parents[1] / "csrc").glob("*.cpp"))


def build(folder: Path, driver: str, *flags: str) -> Path:
    program = folder / "driver"
    command = ["g++", "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", *flags]
    command += ["-pthread", "-o", program, HERE / driver, *SOURCES]
    subprocess.run(command, check=True, timeout=120)
    return program


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize(
    ("driver", "sanitizers"),
    [
        ("drive_threads.cpp", "thread"),
        ("drive_processes.cpp", "address,undefined"),
    ],
)
def test_no_sanitizer_complains(driver, sanitizers, tmp_path):
    flags = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    program = build(tmp_path, driver, *flags)
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    # vLLM's CPU platform preloads an allocator, before which ASan has to come.
    environment.pop("LD_PRELOAD", None)
    ended = subprocess.run(
        [program], capture_output=True, text=True, timeout=120, env=environment
    )
    assert (ended.returncode, ended.stderr) == (0, "")
