# SPDX-License-Identifier: Apache-2.0
"""Plots of a benchmark's tables: whatever they have by size, as lines over it."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure


class Plot(NamedTuple):
    """What is drawn of a table.

    Attributes:
        over: What its first column counts.
        lines: By name, a value for each size; NaN where there is none.
    """

    over: str
    lines: dict[str, dict[int, float]]


def draw(said: str, path: Path) -> bool:
    """Draw the first table that has values by size, both axes logarithmic.

    Args:
        said: A benchmark's Markdown.
        path: Where the picture goes; its suffix says of which kind.

    Returns:
        Whether there is such a table.
    """
    plot = next(filter(None, map(_plot, _tables(said))), None)
    if plot is None:
        return False
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, values in plot.lines.items():
        axes.plot(list(values), list(values.values()), marker="o", label=name)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel(plot.over)
    axes.set_ylabel("ratio")
    axes.legend()
    figure.savefig(path)
    return True


def _tables(said: str) -> Iterator[list[list[str]]]:
    """The cells of each Markdown table, its ruler left out."""
    rows: list[list[str]] = []
    for line in [*said.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            yield [rows[0], *rows[2:]]
            rows = []


def _plot(table: Sequence[Sequence[str]]) -> Plot | None:
    """Lines over a first column of sizes; a column of words tells lines apart."""
    (over, *columns), *rows = table
    if len(rows) < 2 or not all(row[0].isdecimal() for row in rows):
        return None
    lines: dict[str, dict[int, float]] = {}
    for size, *cells in rows:
        prefix = ""
        for column, cell in zip(columns, cells, strict=True):
            if column == "way":
                prefix = f"{cell}, "
            else:
                values = lines.setdefault(prefix + column, {})
                values[int(size)] = _number(cell)
    return Plot(over, lines)


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:  # "not here"
        return math.nan
