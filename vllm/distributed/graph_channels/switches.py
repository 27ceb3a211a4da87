# SPDX-License-Identifier: Apache-2.0
"""The switches of graph channels, read from ``vllm.envs`` and checked at once.

``envs.py`` declares them; what a value means, and which are refused, stands here.
"""

import math
import os
import re
import sys
from dataclasses import dataclass
from enum import Enum, unique

import vllm.envs as envs
from vllm.logger import init_logger

logger = init_logger(__name__)

_UNITS = {"": 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_BYTES = re.compile(r"(\d{1,12}) ?([KMG]?B)?", re.IGNORECASE)
_MOST_BYTES = 1 << 30
_TOKENS = re.compile(r"[0-9]{1,7}")
_MOST_TOKENS = 1 << 20

# Of community builds of vLLM with b12x in them.
_NOT_HERE = {
    "flashinfer-ipc": "FlashInfer's PCIe IPC all-reduce is not part of this build",
}
_OUTDATED = {
    "VLLM_ENABLE_PCIE_ALLREDUCE": "VLLM_PCIE_ALLREDUCE_BACKEND alone chooses, and "
    "b12x there turns the PCIe all-reduce on",
    "VLLM_PCIE_DMA_MIN_BYTES": "there is no DMA all-reduce in this build, and large "
    "reductions take NCCL",
}

_STARTUP_SECONDS = 30.0
_SHUTDOWN_SECONDS = 1.0
_SHUTDOWN_SHARE = 0.2
_LEAST_SECONDS = 0.1
_MOST_SECONDS = 3600.0


@unique
class Backend(Enum):
    """What reduces over graph channels."""

    CPP = "cpp"
    """vLLM's own custom all-reduce: no graph channels."""

    B12X = "b12x"
    """The b12x package's PCIe pools, on CUDA."""

    HOST = "host"
    """Shared memory of one machine, on the CPU."""


@dataclass(frozen=True)
class Switches:
    """The switches of this process.

    Attributes:
        backend: What reduces.
        all_reduce_bytes: Largest tensor that is reduced over a channel; 0 for none.
        fused_bytes: The same, where add and RMSNorm follow in one kernel.
        dcp_tokens: Largest batch that DCP exchanges over a channel; None for that
            of the largest graph.
        allow_unvalidated: Whether b12x may run on GPUs it was not validated on.
        startup_seconds: How long a collective may take at start-up.
        shutdown_seconds: How long all of them together may take at shutdown.
    """

    backend: Backend
    all_reduce_bytes: int
    fused_bytes: int
    dcp_tokens: int | None
    allow_unvalidated: bool
    startup_seconds: float
    shutdown_seconds: float

    @property
    def largest_bytes(self) -> int:
        """The largest tensor of either kind; 0 if none is reduced over a channel."""
        return max(self.all_reduce_bytes, self.fused_bytes)


def read_switches() -> Switches:
    """The switches as the environment has them.

    Raises:
        ValueError: One has a value of another form; the message says which form.
    """
    startup = _seconds("VLLM_GRAPH_CHANNELS_DEADLINE", _STARTUP_SECONDS)
    return Switches(
        backend=read_backend(),
        all_reduce_bytes=_bytes("VLLM_PCIE_ONESHOT_ALLREDUCE_MAX_SIZE"),
        fused_bytes=_bytes("VLLM_PCIE_ONESHOT_FUSED_ADD_RMS_NORM_MAX_SIZE"),
        dcp_tokens=_tokens("VLLM_DCP_A2A_MAX_TOKENS"),
        allow_unvalidated=_flag("VLLM_B12X_ALLOW_UNVALIDATED_DEVICE"),
        startup_seconds=startup,
        shutdown_seconds=min(startup, _shutdown_seconds()),
    )


def _shutdown_seconds() -> float:
    """A part of what a worker has for its whole shutdown, before it is killed."""
    granted = envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS * _SHUTDOWN_SHARE
    return max(min(_SHUTDOWN_SECONDS, granted), _LEAST_SECONDS)


def exit_on_bad_switches() -> None:
    """End a command with one line on a switch that is refused, before it starts."""
    try:
        check_switches()
    except ValueError as refusal:
        sys.exit(f"error: {refusal}")


def check_switches() -> Switches:
    """The switches, if they have values that can be used here. Local.

    Raises:
        ValueError: One has a value of another form, or not of this platform.
    """
    switches = read_switches()
    _demand_platform(switches.backend)
    return switches


def tell_if_unused(tensor_parallel_size: int) -> None:
    """Say so where a backend was chosen and one rank has nobody to reduce with."""
    backend = read_backend()
    if tensor_parallel_size == 1 and backend is not Backend.CPP:
        logger.error(
            "VLLM_PCIE_ALLREDUCE_BACKEND=%s is not used: --tensor-parallel-size is 1, "
            "and one rank has nobody to reduce with",
            backend.value,
        )


def outdated_variables() -> list[str]:
    """What to say of the variables of community builds that are set here."""
    there = [name for name in _OUTDATED if name in os.environ]
    return [f"{name} is not read: {_OUTDATED[name]}" for name in there]


def _demand_platform(backend: Backend) -> None:
    # Not at the top: the platform is chosen when it is first asked for.
    from vllm.platforms import current_platform

    if backend is Backend.HOST and not current_platform.is_cpu():
        raise ValueError(
            "VLLM_PCIE_ALLREDUCE_BACKEND=host reduces in the memory of the host and "
            f"needs the CPU platform, not {current_platform.device_name}; unset it"
        )
    if backend is Backend.B12X and not current_platform.is_cuda():
        raise ValueError(
            "VLLM_PCIE_ALLREDUCE_BACKEND=b12x reduces between CUDA GPUs and needs "
            f"their platform, not {current_platform.device_name}; unset it"
        )


def read_backend() -> Backend:
    """The backend as the environment has it.

    Raises:
        ValueError: It is none of this build; the message says which there are.
    """
    text = envs.VLLM_PCIE_ALLREDUCE_BACKEND
    try:
        return Backend(text)
    except ValueError:
        known = ", ".join(backend.value for backend in Backend)
        why = _NOT_HERE.get(text)
        raise ValueError(
            f"VLLM_PCIE_ALLREDUCE_BACKEND={text!r}: expected one of {known}"
            + (f"; {why}" if why else "")
        ) from None


def _flag(name: str) -> bool:
    text: str = getattr(envs, name)
    if text not in ("0", "1"):
        raise ValueError(f"{name}={text!r}: expected 0 or 1")
    return text == "1"


def _bytes(name: str) -> int:
    text = getattr(envs, name)
    match = _BYTES.fullmatch(text.strip())
    size = int(match[1]) * _UNITS[(match[2] or "").upper()] if match else None
    if size is None or size > _MOST_BYTES:
        raise ValueError(
            f"{name}={text!r}: expected a number of bytes such as 65536, 64KB or 1MB, "
            "at most 1GB, or 0 for off"
        )
    return size


def _tokens(name: str) -> int | None:
    text = getattr(envs, name)
    if text is None:
        return None
    tokens = int(text) if _TOKENS.fullmatch(text) else 0
    if not 0 < tokens <= _MOST_TOKENS:
        raise ValueError(
            f"{name}={text!r}: expected a number of tokens from 1 to {_MOST_TOKENS}, "
            "or none at all for the largest captured batch"
        )
    return tokens


def _seconds(name: str, default: float) -> float:
    text = getattr(envs, name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MOST_SECONDS:
        raise ValueError(
            f"{name}={text!r}: expected a number of seconds above 0, at most "
            f"{_MOST_SECONDS:g}"
        )
    return seconds
