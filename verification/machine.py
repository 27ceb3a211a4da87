# SPDX-License-Identifier: Apache-2.0
"""Which GPUs, which versions, and which sources are tested."""

import hashlib
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from verification.receipt import Gpu, Machine

_SOURCES = ("csrc", "series", "tests", "verification", "vllm")
_DISTRIBUTIONS = ("torch", "vllm", "b12x", "pytest")


class Gpus:
    """The GPUs that ranks are put on, through NVML: no CUDA context is made.

    ``CUDA_VISIBLE_DEVICES`` counts where it names GPUs by index or UUID.

    Args:
        nvml: NVML's Python bindings, initialised.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles = [self._handle(name) for name in self._visible()]

    def facts(self) -> list[Gpu]:
        """What each GPU is."""
        nvml = self._nvml
        return [
            Gpu(
                nvml.nvmlDeviceGetName(handle),
                nvml.nvmlDeviceGetMemoryInfo(handle).total,
                "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(handle)),
            )
            for handle in self._handles
        ]

    def used_bytes(self) -> list[int]:
        """Memory in use on each GPU, by anybody."""
        info = self._nvml.nvmlDeviceGetMemoryInfo
        return [info(handle).used for handle in self._handles]

    def driver(self) -> str:
        """The driver's version."""
        return str(self._nvml.nvmlSystemGetDriverVersion())

    def _visible(self) -> list[str]:
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        if named is None:
            return [str(n) for n in range(self._nvml.nvmlDeviceGetCount())]
        return [name.strip() for name in named.split(",") if name.strip()]

    def _handle(self, name: str) -> Any:
        if name.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)


class NoGpus(RuntimeError):
    """There is no GPU that can be used; the message says why."""


@contextmanager
def opened() -> Iterator[Gpus]:
    """NVML, from its start to its end.

    Raises:
        NoGpus: No driver, no GPU, or a GPU that is named and not there.
    """
    pynvml: Any = import_module("vllm.third_party.pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoGpus(f"no NVIDIA driver answers: {error}") from error
    try:
        try:
            gpus = Gpus(pynvml)
        except pynvml.NVMLError as error:
            raise NoGpus(f"CUDA_VISIBLE_DEVICES names none: {error}") from error
        if not gpus.facts():
            raise NoGpus("the NVIDIA driver shows no GPU")
        yield gpus
    finally:
        pynvml.nvmlShutdown()


def described(gpus: Gpus) -> Machine:
    """The machine, as a receipt holds it."""
    versions = {
        "driver": gpus.driver(),
        "linux": platform.release(),
        "python": platform.python_version(),
    }
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed as a distribution"
    return Machine(gpus.facts(), versions, mps_serves())


def mps_serves() -> bool:
    """Whether CUDA programs started from here go through an MPS control daemon.

    Source: NVIDIA's Multi-Process Service guide, "CUDA_MPS_PIPE_DIRECTORY".
    """
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return Path(pipes, "control").exists()


def tree_digest(root: Path) -> str:
    """sha256 over path and content of every source file, in order of path."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                digest.update(f"{path.relative_to(root)}\0{content}\n".encode())
    return digest.hexdigest()
