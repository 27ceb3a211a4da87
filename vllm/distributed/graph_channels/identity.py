# SPDX-License-Identifier: Apache-2.0
"""What a communication channel is called.

A channel is a set of buffers that the graphs of one owner reduce over. Its name
is worked out from the owner's role alone, so every rank arrives at the same one
without asking: never from a stream, a pointer, a count of calls, a process or a
rank. Names look like this:

=============================  ==============================================
``vllm:target:production``     graphs that serve requests
``vllm:target:profile``        throwaway graphs that measure memory
``vllm:target:production:2``   a recapture while the first graphs still live
``vllm:eager:allreduce``       what runs outside any graph
=============================  ==============================================

This module imports nothing of vLLM or torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, unique

_PREFIX = "vllm"
_EAGER = "eager"

# Fits the signed 32-bit field of the records in which ranks exchange names.
MAX_GENERATION = 2**31 - 1


@unique
class Owner(Enum):
    """Who captures graphs. A new owner is one line here."""

    TARGET = "target"
    """The served model, on both runners."""

    DRAFT = "draft"
    """The V1 runner's proposer, which captures inside the target's scope."""

    DRAFT_PREFILL = "draft_prefill"
    """First step of an autoregressive speculator (EAGLE, MTP, Gemma4)."""

    DRAFT_DECODE = "draft_decode"
    """Later steps of an autoregressive speculator."""

    DRAFT_QUERY = "draft_query"
    """The query forward of DFlash and DFlash2."""

    DSPARK = "dspark"
    """DSpark's query forward and Markov head."""

    CONTEXT_KV = "context_kv"
    """A draft's context key/value stage, where it has graphs of its own."""

    MULTI_MODULE_MTP = "multi_module_mtp"
    """Multi-token prediction with one module a step."""

    ENCODER = "encoder"
    """The multimodal encoder, on both runners."""


@unique
class Phase(Enum):
    """What the graphs are for."""

    PROFILE = "profile"
    """Captured to measure memory, then thrown away."""

    PRODUCTION = "production"
    """Captured to be replayed."""


@unique
class EagerLane(Enum):
    """A channel for what runs outside any graph."""

    ALLREDUCE = "allreduce"
    DCP = "dcp"

    def __str__(self) -> str:
        return f"{_PREFIX}:{_EAGER}:{self.value}"


@dataclass(frozen=True)
class ChannelId:
    """The name of the channel that one owner's graphs communicate on.

    Attributes:
        owner: Who captures the graphs.
        phase: What they are for.
        generation: 1 for an owner's first capture, one more for each capture
            made while the graphs of the last still live; at most
            ``MAX_GENERATION``.

    Raises:
        TypeError: A field is of another type; a text is never taken for one.
        ValueError: The generation is out of range.
    """

    owner: Owner
    phase: Phase
    generation: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.owner, Owner) or not isinstance(self.phase, Phase):
            raise TypeError(
                f"a channel is named by an Owner and a Phase, not by "
                f"{self.owner!r} and {self.phase!r}; parse_channel() reads texts"
            )
        if type(self.generation) is not int:
            raise TypeError(f"a generation is an int, not {self.generation!r}")
        if not 1 <= self.generation <= MAX_GENERATION:
            raise ValueError(
                f"a generation lies between 1 and {MAX_GENERATION}, "
                f"not at {self.generation}"
            )

    def __str__(self) -> str:
        name = f"{_PREFIX}:{self.owner.value}:{self.phase.value}"
        return name if self.generation == 1 else f"{name}:{self.generation}"


def parse_channel(name: str) -> ChannelId | EagerLane:
    """Read a channel's name; the inverse of ``str``.

    Args:
        name: Exactly what ``str`` of a ``ChannelId`` or ``EagerLane`` gives;
            other spellings of the same, such as a generation of 1, are refused.

    Raises:
        ValueError: No channel is called so; the message lists what may be.
    """
    match name.split(":"):
        case [prefix, eager, lane] if (prefix, eager) == (_PREFIX, _EAGER):
            if lane in _values(EagerLane):
                return EagerLane(lane)
        case [prefix, owner, phase, *generation] if prefix == _PREFIX:
            if owner in _values(Owner) and phase in _values(Phase):
                number = _parse_generation(generation)
                if number is not None:
                    return ChannelId(Owner(owner), Phase(phase), number)
    raise ValueError(
        f"no channel is called {name!r}: expected "
        f"{_PREFIX}:<owner>:<phase>[:<generation, 2 to {MAX_GENERATION}>] or "
        f"{_PREFIX}:{_EAGER}:<lane>, with an owner of {_listed(Owner)}, "
        f"a phase of {_listed(Phase)}, a lane of {_listed(EagerLane)}"
    )


def catalogue(owners: Iterable[Owner], phase: Phase) -> tuple[ChannelId, ...]:
    """The channels of a set of owners, in the order every rank prepares them.

    Args:
        owners: In any order; one named twice counts once.
        phase: The phase they all are in.

    Returns:
        First-generation names, sorted as texts.
    """
    return tuple(sorted({ChannelId(owner, phase) for owner in owners}, key=str))


def _parse_generation(parts: list[str]) -> int | None:
    """1 if no generation is given; None if what is given is not canonical."""
    if not parts:
        return 1
    text = parts[0]
    # str.isdecimal admits other scripts' digits, and int() signs and spaces
    if len(parts) > 1 or not (text.isascii() and text.isdecimal()):
        return None
    if text.startswith("0") or len(text) > len(str(MAX_GENERATION)):
        return None
    return int(text) if 2 <= int(text) <= MAX_GENERATION else None


def _values(kind: type[Enum]) -> list[str]:
    return [member.value for member in kind]


def _listed(kind: type[Enum]) -> str:
    return ", ".join(_values(kind))
