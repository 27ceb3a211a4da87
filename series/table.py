# SPDX-License-Identifier: Apache-2.0
"""docs/patches.md: the patches one by one, and the files that they touch."""

import ast
import difflib
from collections.abc import Sequence
from pathlib import Path

from series.errors import SeriesError
from series.landing import ROOT, Landing
from series.patch import Patch

_HEAD = """\
<!-- Written by `python -m series patches > docs/patches.md`; a test compares. -->
# The patches, one by one

Each is a module of [series/patches](../series/patches); this is its docstring, which
is also its commit message.
`python -m series show FILE` prints what becomes of a file of vLLM's.

"""


def page(landing: Landing, patches: Sequence[Patch]) -> str:
    """docs/patches.md, from the patches' docstrings.

    Raises:
        SeriesError: No test claims a file that they touch.
    """
    chapters = [_chapter(patch) for patch in patches]
    touched = f"## The files of vLLM that they touch\n\n{table(landing, patches)}"
    return _HEAD + "\n".join([*chapters, touched])


def _chapter(patch: Patch) -> str:
    message = patch.message
    edits = sum(len(edits) for edits in patch.edits.values())
    return (
        f"## {message.subject}\n\n"
        f"`{patch.name}`: {edits} edits in {len(patch.edits)} files of vLLM, and "
        f"{len(patch.adds)} new files.\n\n"
        f"- **Why:** {message.why}\n"
        f"- **Upstream:** {message.upstream}\n"
        f"- **Drop when:** {message.drop_when}\n"
    )


def table(landing: Landing, patches: Sequence[Patch]) -> str:
    """A Markdown table of the upstream files that the series edits.

    Raises:
        SeriesError: No test claims one of them.
    """
    tests = covering_tests(ROOT / "tests")
    untested = sorted(path for path in landing.changed if path not in tests)
    if untested:
        raise SeriesError(
            "a test of behaviour for each touched file",
            found=f"none whose COVERS lists {', '.join(untested)}",
            do="write one and name the file in its COVERS",
        )
    rows = [
        f"| {path} | {', '.join(p.name for p in patches if path in p.edits)} "
        f"| {_lines_added(landing, path)} | {', '.join(tests[path])} |\n"
        for path in sorted(landing.changed)
    ]
    return "| vLLM file | patch | lines added | test |\n|---|---|---|---|\n" + "".join(
        rows
    )


def covering_tests(root: Path) -> dict[str, list[str]]:
    """The tests of each upstream file, by the ``COVERS`` of the test modules.

    Args:
        root: The folder of the tests; what is returned is relative to its parent.
    """
    tests: dict[str, list[str]] = {}
    for module in sorted(root.rglob("test_*.py")):
        for path in _covers(module):
            tests.setdefault(path, []).append(str(module.relative_to(root.parent)))
    return tests


def _covers(module: Path) -> tuple[str, ...]:
    for node in ast.parse(module.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name("COVERS")], value=value):
                return tuple(ast.literal_eval(value))
    return ()


def _lines_added(landing: Landing, path: str) -> int:
    """Lines of the landed file that upstream's does not have, changed ones too."""
    before = landing.pristine[path].decode().splitlines()
    after = landing.changed[path].decode().splitlines()
    diff = difflib.unified_diff(before, after, n=0, lineterm="")
    return sum(line.startswith("+") for line in diff) - 1  # without the +++ line
