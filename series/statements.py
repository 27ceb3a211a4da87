# SPDX-License-Identifier: Apache-2.0
"""Verbs that put whole statements somewhere, or others in their place."""

import hashlib
import textwrap
from collections.abc import Sequence

import libcst as cst

from series.anchors import (
    Place,
    code_of,
    one_class,
    one_function,
    one_if,
    one_statement,
    replace_inside,
    withs,
)
from series.edit import already, docstring, returns, verb
from series.errors import SeriesError


@verb
def add_method(module: cst.Module, *, cls: str, code: str) -> cst.Module:
    """Put a method at the end of a class.

    Args:
        module: The module to change.
        cls: Dotted name of the class.
        code: The whole ``def``, not indented.
    """
    place, node = one_class(module, cls)
    (method,) = _parsed_body(code)
    method = cst.ensure_type(method, cst.FunctionDef)
    name = method.name.value
    there = [n.name.value for n in node.body.body if isinstance(n, cst.FunctionDef)]
    if name in there:
        raise already(f"a method of class {cls}", f"a method {name}")
    block = node.body.with_changes(body=[*node.body.body, method])
    return place.replace(node.with_changes(body=block))


@verb
def insert_before(module: cst.Module, *, definition: str, code: str) -> cst.Module:
    """Put top-level code above a top-level function.

    Args:
        module: The module to change.
        definition: Name of the function.
        code: Whole statements.
    """
    place, node = one_function(module, definition)
    if place.around != (module,):
        raise SeriesError(
            f"code above {definition}",
            found="a function that is not at the top of the module",
            do="name one that is, or extend that function",
        )
    lines = _parsed_body(code)
    _demand_new(module.body, lines, f"code above {definition}")
    body = list(module.body)
    at = next(n for n, statement in enumerate(body) if statement is node)
    return module.with_changes(body=[*body[:at], *lines, *body[at:]])


@verb
def insert_above(
    module: cst.Module, *, function: str, statement: str, code: str
) -> cst.Module:
    """Put statements above a function's only simple statement of that kind.

    Args:
        module: The module to change.
        function: Dotted name of the function.
        statement: The statement, what it assigns to, or what it calls, as written.
        code: Whole statements, not indented.
    """
    return _insert_beside(module, function, statement, 0, code)


@verb
def insert_below(
    module: cst.Module, *, function: str, statement: str, code: str
) -> cst.Module:
    """Put statements below a function's only simple statement of that kind.

    Args:
        module: The module to change.
        function: Dotted name of the function.
        statement: The statement, what it assigns to, or what it calls, as written.
        code: Whole statements, not indented.
    """
    return _insert_beside(module, function, statement, 1, code)


@verb
def enclose(
    module: cst.Module, *, function: str, statement: str, context: str
) -> cst.Module:
    """Run a function's only simple statement of that kind in a ``with`` block.

    Args:
        module: The module to change.
        function: Dotted name of the function.
        statement: The statement, what it assigns to, or what it calls, as written.
        context: The expression to enter.
    """
    place, _ = one_function(module, function)
    block, at = one_statement(place, statement)
    item = cst.WithItem(item=cst.parse_expression(context))
    around_it = [around.items for around in withs(place) if around.body is block]
    entered = [other.item for items in around_it for other in items]
    if any(item.item.deep_equals(other) for other in entered):
        raise already(f"{statement} in {context} in {function}", f"a `with {context}`")
    line = cst.ensure_type(block.body[at], cst.SimpleStatementLine)
    inside = cst.IndentedBlock(body=[line.with_changes(leading_lines=[])])
    around = cst.With(items=[item], body=inside, leading_lines=line.leading_lines)
    body = [*block.body[:at], around, *block.body[at + 1 :]]
    return replace_inside(place, block, block.with_changes(body=body))


@verb
def replace_body(
    module: cst.Module, *, function: str, was: str, code: str
) -> cst.Module:
    """Replace what a function does; its signature and docstring stay.

    Args:
        module: The module to change.
        function: Dotted name of the function.
        was: The digest of the one body that may go, as a refusal tells it: whatever
            else upstream or a fork does there would be lost without a word.
        code: Whole statements, not indented.
    """
    place, node = one_function(module, function)
    below = 1 if docstring(node) is not None else 0
    kept, old = node.body.body[:below], node.body.body[below:]
    lines = _parsed_body(code)
    _demand_new(old, lines[:1], f"another body of {function}")
    found = _digest(old)
    if found != was:
        raise SeriesError(
            f"another body of {function} in place of that with the digest {was!r}",
            found=f"one with the digest {found!r}, which would be lost",
            do="read it, put what it has to keep into the patch's code, then write "
            f"was={found!r} there",
        )
    block = node.body.with_changes(body=[*kept, *lines])
    return place.replace(node.with_changes(body=block))


@verb
def prepend_to(module: cst.Module, *, function: str, code: str) -> cst.Module:
    """Put statements at the start of a function, below its docstring.

    Args:
        module: The module to change.
        function: Dotted name of the function.
        code: Whole statements, not indented.
    """
    place, node = one_function(module, function)
    below = 1 if docstring(node) is not None else 0
    return _insert_into(place, node, below, code)


@verb
def append_to(module: cst.Module, *, function: str, code: str) -> cst.Module:
    """Put statements at the end of a function that has no ``return``.

    Args:
        module: The module to change.
        function: Dotted name of the function.
        code: Whole statements, not indented.
    """
    place, node = one_function(module, function)
    if returns(node):
        raise SeriesError(
            f"code at the end of {function}",
            found="a return, after which it would not run",
            do="extend the function in another way",
        )
    return _insert_into(place, node, len(node.body.body), code)


@verb
def append_to_if(module: cst.Module, *, test: str, code: str) -> cst.Module:
    """Put statements at the end of the only top-level ``if`` of that test.

    Args:
        module: The module to change.
        test: The condition, as it is written.
        code: Whole statements, not indented.
    """
    old = one_if(module, test)
    lines = _parsed_body(code)
    _demand_new(old.body.body, lines, f"code in `if {test}`")
    block = old.body.with_changes(body=[*old.body.body, *lines])
    body = [old.with_changes(body=block) if s is old else s for s in module.body]
    return module.with_changes(body=body)


def _insert_into(place: Place, node: cst.FunctionDef, at: int, code: str) -> cst.Module:
    lines = _parsed_body(code)
    _demand_new(node.body.body, lines, f"code in {place.name}")
    body = list(node.body.body)
    block = node.body.with_changes(body=[*body[:at], *lines, *body[at:]])
    return place.replace(node.with_changes(body=block))


def _insert_beside(
    module: cst.Module, function: str, statement: str, offset: int, code: str
) -> cst.Module:
    place, _ = one_function(module, function)
    block, at = one_statement(place, statement)
    lines = _parsed_body(code)
    _demand_new(block.body, lines, f"code beside {statement} in {function}")
    body = [*block.body[: at + offset], *lines, *block.body[at + offset :]]
    return replace_inside(place, block, block.with_changes(body=body))


def _parsed_body(code: str) -> list[cst.CSTNode]:
    parsed = cst.parse_module(textwrap.dedent(code).strip("\n") + "\n")
    first, *rest = parsed.body
    # Comments above the first statement belong to the module when parsed.
    first = first.with_changes(leading_lines=[*parsed.header, *first.leading_lines])
    return [first, *rest]


def _digest(body: Sequence[cst.CSTNode]) -> str:
    """Of what statements are, comments too, wherever the function stands."""
    text = "\n".join(code_of(statement) for statement in body)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _demand_new(
    body: Sequence[cst.CSTNode], lines: Sequence[cst.CSTNode], asked: str
) -> None:
    there = {code_of(old) for old in body}
    if any(code_of(line) in there for line in lines):
        raise already(asked, "one of its statements")
