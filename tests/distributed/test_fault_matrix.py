# SPDX-License-Identifier: Apache-2.0
"""Every fault at every step, on real ranks: the table of docs/faults.md is true."""

import gc
import os
from pathlib import Path

import pytest

from tests import ranks
from tests.distributed import faults
from tests.distributed.fault_cells import LIMIT, STALL, Cell, Observed, run_cell
from tests.distributed.faults import Fault, How, Step, Then, expected

# Cells mostly wait; so many of them wait at a time.
LANES = 4
# Less than any vote waits for a rank that is missing.
AT_ONCE = 1.2
DOCUMENT = Path(__file__).parents[2] / "docs" / "faults.md"


def cells_of(step: Step) -> list[Cell]:
    """All faults on the first and last of two ranks; the worst two of four."""
    two = [Cell(step, fault, rank, 2) for fault in Fault for rank in (0, 1)]
    worst = (Fault.SIGKILL, Fault.STALL)
    four = [Cell(step, fault, rank, 4) for fault in worst for rank in (0, 3)]
    # the long ones last, so that each lane gets as many of them
    return sorted(two + four, key=lambda cell: cell.fault is Fault.STALL)


# Every group of rules that says what a failure leaves: R-B5 # R-C1 # R-C2 # R-C3
# R-D2 # R-D4 # R-D6 # C18 # C37 # C38 # C40
@pytest.mark.parametrize("step", Step, ids=lambda step: step.value)
def test_ranks_end_as_documented(step):
    cells = cells_of(step)

    def lane(number, store):
        gc.freeze()  # else a rank that looks for garbage copies all there is
        return {cell: observe(cell) for cell in cells[number::LANES]}

    wrong = []
    for observed in ranks.values(LANES, lane, deadline=len(cells) / LANES * 60):
        for cell, endings in observed.items():
            wrong += complaints(cell, endings)
    assert not wrong, "\n".join(wrong)


def observe(cell: Cell) -> list[Observed]:
    """How each rank of a cell ended; none of them is left."""
    endings = run_cell(cell, expected(cell.step, cell.fault).others.then)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    return endings


def complaints(cell: Cell, endings: list[Observed]) -> list[str]:
    """Where the ranks of a cell are not as the table says."""
    row = expected(cell.step, cell.fault)
    found = []
    for rank, seen in enumerate(endings):
        mine = rank == cell.rank
        demanded = row.it if mine else row.others
        where = f"{cell}: rank {rank}"
        if seen.ending != demanded:
            found.append(f"{where}: {seen.ending}, not {demanded}: {seen.error}")
        limit = LIMIT + (STALL if mine and cell.fault is Fault.STALL else 0)
        if seen.ending == (How.RAISES, Then.KEEPS):
            limit = AT_ONCE  # R-D4: nothing collective follows
        if seen.seconds > limit:
            found.append(f"{where}: took {seen.seconds:.1f} s, above {limit:.1f}")
        if seen.left:
            found.append(f"{where}: left {seen.left}")
        if mine and seen.ending.how is How.DIES and seen.error != cell.fault.value:
            found.append(f"{where}: was ended by {seen.error}")
        named = mine or seen.ending.how is How.NOTHING
        if not named and f"rank {cell.rank}" not in seen.error:
            found.append(f"{where}: does not name the rank: {seen.error}")
        # R-C3: what could not be rolled back is attached to the first error
        attached = "Rolling its channels back failed too" in seen.error
        if attached != rollback_failed(cell.step, seen):
            found.append(f"{where}: attached is {attached}: {seen.error}")
    return found


def rollback_failed(step: Step, seen: Observed) -> bool:
    """Whether a rank came to a rollback with an error, and it failed too."""
    if seen.ending.then not in (Then.KEEPS, Then.CLOSES):
        return False
    if step in (Step.PREPARE, Step.ENTRY):
        return True
    if step is Step.CHECKPOINT:  # the rank with the fault has none to go back to
        return seen.ending.how is How.ABANDONED
    return step is Step.WARM_UP and seen.ending.how is How.WAITS


def test_the_document_is_the_table():
    assert DOCUMENT.read_text() == faults.document()
