# SPDX-License-Identifier: Apache-2.0
"""What the verbs are made of: the edit itself, and small pieces of syntax."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import libcst as cst

from series.errors import SeriesError

Fields = ParamSpec("Fields")

COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))


@dataclass(frozen=True)
class Edit:
    """One change to one file: a verb with its fields filled in.

    Attributes:
        words: The verb and its fields, as a reader would write them.
        apply: Gives the changed module, or raises SeriesError.
    """

    words: str
    apply: Callable[[cst.Module], cst.Module]


def verb(
    change: Callable[Concatenate[cst.Module, Fields], cst.Module],
) -> Callable[Fields, Edit]:
    """Turn a function of a module and named fields into a verb."""

    @wraps(change)
    def make(*args: Fields.args, **fields: Fields.kwargs) -> Edit:
        said = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        return Edit(
            words=f"{change.__name__}({said})",
            apply=lambda module: change(module, *args, **fields),
        )

    return make


def append(items: Sequence[Any], new: Any) -> list[Any]:
    """The items and a new last one, which takes over a trailing comma."""
    if not items:
        return [new]
    *first, last = items
    return [
        *first,
        last.with_changes(comma=COMMA),
        new.with_changes(comma=last.comma),
    ]


def already(asked: str, found: str) -> SeriesError:
    """The refusal of an edit that stands there already."""
    return SeriesError(
        asked,
        found=f"{found} is there already",
        do="drop the edit if upstream made it, or start from a pristine file",
    )


def parsed_call(text: str) -> cst.Call:
    """The call that a text is."""
    call = cst.parse_expression(text)
    assert isinstance(call, cst.Call)
    return call


def parsed_parameter(text: str) -> cst.Param:
    """The parameter that a text is in a ``def``."""
    function = cst.parse_statement(f"def f({text}): ...")
    assert isinstance(function, cst.FunctionDef)
    return function.params.params[0]


def assigned(line: cst.CSTNode) -> str | None:
    """The name that a class-level line assigns or annotates."""
    match line:
        case cst.SimpleStatementLine(body=[cst.AnnAssign(target=cst.Name(name)), *_]):
            return name
        case cst.SimpleStatementLine(
            body=[cst.Assign(targets=[cst.AssignTarget(target=cst.Name(name))]), *_]
        ):
            return name
    return None


def returns(node: cst.FunctionDef) -> bool:
    """Whether a function may end by a ``return`` of its own."""
    found = _Returns(node)
    node.visit(found)
    return found.any


class _Returns(cst.CSTVisitor):
    def __init__(self, function: cst.FunctionDef) -> None:
        self._function = function
        self.any = False

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return node is self._function

    def visit_Lambda(self, node: cst.Lambda) -> bool:
        return False

    def visit_Return(self, node: cst.Return) -> None:
        self.any = True


def docstring(node: cst.FunctionDef) -> cst.SimpleString | None:
    """A function's docstring, if it is one in triple double quotes."""
    match node.body.body[0]:
        case cst.SimpleStatementLine(body=[cst.Expr(value=cst.SimpleString() as text)]):
            return text if text.value.startswith('"""') else None
    return None
