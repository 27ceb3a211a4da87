# SPDX-License-Identifier: Apache-2.0
"""The picture of owners, channels and their life, drawn from a real demonstration.

``python -m tests.distributed.picture`` runs it and prints the picture;
tests/test_readme.py holds README.md to it.
"""

import contextlib
import io
import re

from vllm.distributed.graph_channels import demo

_RANKS, _ROUNDS = 2, 200
_HEADINGS = "memory   replays  wrong sums"
_ROW = re.compile(r"  (vllm:\S+) +(\S+) +(\d+) +(\d+) +(\d+)")
_PROFILED = re.compile(r"profiling took (\d+ KiB) and was rolled back: (.*)")


def picture() -> str:
    """Several lines of text.

    Raises:
        RuntimeError: The demonstration did not go well, or says other things.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = demo.run(_RANKS, _ROUNDS)
    return drawn(printed.getvalue()) if status == 0 else _fail(printed.getvalue())


def drawn(said: str) -> str:
    """The picture of what a demonstration printed."""
    profiled, rows = _PROFILED.search(said), _ROW.findall(said)
    if profiled is None or not rows or "nothing is left" not in said:
        return _fail(said)
    took, back = profiled.groups()
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        f"profile    ──▶ {took} for a while",
        f"roll back  ──▶ {back}",
        f"capture, replay on {_RANKS} ranks in opposite orders",
        f"  {'owner':<{widths[1]}}      {'channel':<{widths[0]}}      {_HEADINGS}",
    ]
    for name, owner, size, replays, wrong in rows:
        lines.append(
            f"  {owner:<{widths[1]}} ──▶  {name:<{widths[0]}} ──▶  "
            f"{size:>{widths[2]}} KiB  {replays:>7}  {wrong:>10}"
        )
    lines.append("close      ──▶ nothing is left")
    return "\n".join(lines) + "\n"


def _fail(said: str) -> str:
    raise RuntimeError(f"the demonstration did not go as it should:\n{said}")


if __name__ == "__main__":
    print(picture(), end="")
