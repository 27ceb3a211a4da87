# SPDX-License-Identifier: Apache-2.0
"""What this machine is, as far as channels depend on it.

Everything is asked for by itself, and what cannot be had is said to be unknown:
there may be no GPU, no b12x, or a container around us that hides things.
"""

import json
import os
import platform
import resource
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from vllm.distributed.device_communicators import b12x_gate, host_library
from vllm.distributed.device_communicators.b12x_pcie_all_reduce import needs

_MIB = 1 << 20
# An engine of two ranks takes half of it.
_SHARED_MEMORY = 1 << 30
_RECEIPT = Path(__file__).with_name("receipt.json")
_CGROUP = Path("/sys/fs/cgroup")
_IOMMU_GROUPS = Path("/sys/kernel/iommu_groups")
_DRIVER = Path("/proc/driver/nvidia/version")
# What decides which way NCCL takes between GPUs of one machine.
_NCCL = ("NCCL_P2P_", "NCCL_SHM_", "NCCL_CUMEM_", "NCCL_IB_", "NCCL_SOCKET_")


def facts() -> dict[str, str]:
    """What is known, by subject, in the order in which one reads it.

    Initialises CUDA if there is a GPU, so processes forked later cannot use it.
    """
    return {subject: _asked(question) for subject, question in _QUESTIONS.items()}


def _asked(question: Callable[[], str]) -> str:
    try:
        return question()
    except Exception as failure:  # drivers and file systems fail in any way
        return f"unknown: {type(failure).__name__}: {failure}"


def _vllm() -> str:
    receipt = json.loads(_RECEIPT.read_text())
    return f"{version('vllm')}, {receipt['series']} on {receipt['release']}"


def _platform() -> str:
    from vllm.platforms import current_platform  # chosen when it is asked for

    return current_platform.device_name or "none"


def _torch() -> str:
    return f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"


def _compiler() -> str:
    try:
        found: str = get_cpp_compiler()
        return found
    except InvalidCxxCompiler:
        return "none, and torch.compile wants one: install g++, or set CXX to yours"


def _b12x() -> str:
    try:
        found = version("b12x")
    except PackageNotFoundError:
        found = "none"
    refusal = b12x_gate.package_refusal(needs(allow_unvalidated=False))
    return refusal or f"{found}, with everything that is called of it"


def _driver() -> str:
    return _DRIVER.read_text().splitlines()[0] if _DRIVER.exists() else "none loaded"


def _gpus() -> str:
    lines = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        lines.append(
            f"{index}: {found.name}, compute capability {found.major}.{found.minor}, "
            f"{found.multi_processor_count} multiprocessors, "
            f"{found.total_memory // _MIB} MiB"
        )
    return "\n".join(lines) or "none visible"


def _peers() -> str:
    count = torch.cuda.device_count()
    apart = [
        f"{one} and {other}"
        for one in range(count)
        for other in range(one + 1, count)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    if count < 2:
        return "fewer than two GPUs"
    return f"none between {', '.join(apart)}" if apart else "between all GPUs"


def _nccl() -> str:
    said = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(_NCCL)]
    if torch.cuda.is_available():
        said.insert(0, ".".join(map(str, torch.cuda.nccl.version())))
    return ", ".join(said) or "nothing set"


def _iommu() -> str:
    groups = len(list(_IOMMU_GROUPS.iterdir())) if _IOMMU_GROUPS.exists() else 0
    booted = Path("/proc/cmdline").read_text().split()
    flags = [word for word in booted if "iommu" in word or "acs" in word]
    return f"{groups} groups" + (f", booted with {' '.join(flags)}" if flags else "")


def _shared_memory() -> str:
    usage = shutil.disk_usage("/dev/shm")
    said = f"{usage.free // _MIB} of {usage.total // _MIB} MiB free"
    if usage.free < _SHARED_MEMORY:
        said += "; processes of one engine talk through it, and a container may want"
        said += " --shm-size=4g or --ipc=host"
    return said


def _container() -> str:
    return ", ".join(_limits()) or "none"


def _limits() -> Iterator[str]:
    for name in ("memory.max", "cpu.max", "pids.max"):
        file = _CGROUP / name
        if file.exists() and not (text := file.read_text().strip()).startswith("max"):
            yield f"{name} {text}"
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY:
        yield f"locked memory {locked // 1024} KiB"


def _host_library() -> str:
    try:
        host_library.library()
    except RuntimeError as refusal:
        return str(refusal)
    return "loads"


def _system() -> str:
    cores = len(os.sched_getaffinity(0))
    return f"{platform.system()} {platform.release()}, {cores} cores to run on"


_QUESTIONS: dict[str, Callable[[], str]] = {
    "vLLM": _vllm,
    "platform": _platform,
    "Python": platform.python_version,
    "torch": _torch,
    "C++ compiler": _compiler,
    "b12x": _b12x,
    "host library": _host_library,
    "driver": _driver,
    "GPUs": _gpus,
    "peer access": _peers,
    "NCCL": _nccl,
    "IOMMU": _iommu,
    "/dev/shm": _shared_memory,
    "limits": _container,
    "system": _system,
}
