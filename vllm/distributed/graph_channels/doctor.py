# SPDX-License-Identifier: Apache-2.0
"""What this machine can do for graph channels, and why not what it cannot.

Needs no running engine. Each backend is tried between processes of its own, with
the switches that are set; it takes seconds, and on GPUs a minute the first time.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.distributed.graph_channels.machine import facts
from vllm.distributed.graph_channels.switches import (
    Backend,
    outdated_variables,
    read_backend,
)
from vllm.distributed.graph_channels.trial import Standing, Trial, try_backend
from vllm.platforms import current_platform

MOST_RANKS = 16
_SWITCH = "VLLM_PCIE_ALLREDUCE_BACKEND"


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        ranks: Of the tensor parallel group in question.
        chosen: What the switch says, once it is one of the backends.
        used: What an engine reduces with; None if it ends with an error.
        trials: What became of each backend.
        facts: What the machine is.
        notes: Of variables that are set and refused or not read.
    """

    ranks: int
    chosen: Backend | None
    used: Backend | None
    trials: Sequence[Trial]
    facts: dict[str, str]
    notes: Sequence[str]


def run(ranks: int | None, *, as_json: bool) -> int:
    """Examine this machine and print what was found.

    Args:
        ranks: Of the tensor parallel group; None for all GPUs, or two without any.
        as_json: Whether to print one JSON object instead of lines.

    Returns:
        0 if an engine would use the backend that is chosen, 1 if not, 130 after an
        interrupt.
    """
    try:
        found = examine(ranks or default_ranks())
    except KeyboardInterrupt:
        return 130
    print(_as_json(found) if as_json else "\n".join(_lines(found)))
    return 0 if found.chosen and found.used is found.chosen else 1


def default_ranks() -> int:
    """One a GPU; on the CPU two."""
    if current_platform.is_cpu():
        return 2
    gpus: int = current_platform.device_count()
    return max(1, gpus)


def examine(ranks: int) -> Diagnosis:
    """Try every backend, and gather what the machine is."""
    # In this order: asking for facts may initialise CUDA, and ranks are forked.
    trials = [try_backend(backend, ranks) for backend in Backend]
    chosen, notes = None, outdated_variables()
    try:
        chosen = read_backend()
    except ValueError as refusal:
        notes.append(str(refusal))
    return Diagnosis(ranks, chosen, _used(chosen, trials), trials, facts(), notes)


def _used(chosen: Backend | None, trials: Sequence[Trial]) -> Backend | None:
    standings = {trial.backend: trial.standing for trial in trials}
    match standings.get(chosen) if chosen else None:
        case Standing.USES:
            return chosen
        case Standing.GOES_ON:
            return Backend.CPP
    return None


def _lines(found: Diagnosis) -> list[str]:
    lines = []
    width = max(map(len, found.facts))
    for subject, fact in found.facts.items():
        first, *others = fact.splitlines() or [""]
        lines.append(f"{subject:<{width}}  {first}")
        lines += [f"{'':<{width}}  {line}" for line in others]
    lines += ["", *found.notes, f"with --tensor-parallel-size {found.ranks}:"]
    lines += [f"  {_verdict(trial)}" for trial in found.trials]
    return [*lines, _conclusion(found)]


def _verdict(trial: Trial) -> str:
    name = f"{trial.backend.value:<4}"
    if trial.standing is Standing.USES:
        return f"{name}  can be used: {_SWITCH}={trial.backend.value}"
    return f"{name}  no, an engine {trial.standing.value}: {trial.reason}"


def _conclusion(found: Diagnosis) -> str:
    value = os.environ.get(_SWITCH)
    said = f"{_SWITCH} is not set" if value is None else f"{_SWITCH}={value}"
    if found.used is None:
        return f"{said}: this machine would not start an engine, see above"
    what = "vLLM's own" if found.used is Backend.CPP else "graph channels"
    return f"{said}: this machine would use {found.used.value} ({what})"


def _as_json(found: Diagnosis) -> str:
    return json.dumps(
        {
            "ranks": found.ranks,
            "chosen": found.chosen and found.chosen.value,
            "used": found.used and found.used.value,
            "backends": {
                trial.backend.value: {
                    "standing": trial.standing.name.lower(),
                    "reason": trial.reason,
                }
                for trial in found.trials
            },
            "facts": found.facts,
            "notes": list(found.notes),
        },
        indent=2,
    )
