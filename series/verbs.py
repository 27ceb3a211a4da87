# SPDX-License-Identifier: Apache-2.0
"""The vocabulary in which a patch says what it changes.

Each verb takes named fields and demands exactly one target. Anything else is a
SeriesError, and so is an edit that already stands there: the tool reads
pristine files only. New code is given as text; ruff lays it out afterwards.
"""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import libcst as cst

from series.anchors import (
    imported_from,
    one_call,
    one_class,
    one_function,
    one_with,
    replace_inside,
)
from series.errors import SeriesError

Fields = ParamSpec("Fields")


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


@verb
def add_import(module: cst.Module, *, statement: str) -> cst.Module:
    """Add a from-import beside the module's others from the same package.

    Args:
        module: The module to change.
        statement: ``from package.module import name, other``.
    """
    new = cst.parse_statement(statement)
    source = imported_from(new)
    if source is None:
        raise SeriesError(
            f"the import {statement!r}",
            found="no statement of the form `from package.module import name`",
            do="write it so in the patch",
        )
    sources = [imported_from(node) or "" for node in module.body]
    if source in sources:
        raise _already(f"the import {statement!r}", f"an import from {source}")
    package = source.partition(".")[0]
    peers = [n for n, other in enumerate(sources) if other.split(".")[0] == package]
    if not peers:
        raise SeriesError(
            f"the import {statement!r}",
            found=f"no import from {package} to stand beside",
            do="teach add_import this place, with a test",
        )
    body = list(module.body)
    after = [n for n in peers if sources[n] < source]
    if after:
        body.insert(after[-1] + 1, new)
    else:
        # The first import of its section takes over the blank line above it.
        first = cst.ensure_type(body[peers[0]], cst.SimpleStatementLine)
        body[peers[0]] = first.with_changes(leading_lines=[])
        body.insert(peers[0], new.with_changes(leading_lines=first.leading_lines))
    return module.with_changes(body=body)


@verb
def add_parameter(module: cst.Module, *, function: str, parameter: str) -> cst.Module:
    """Add a parameter after the last one of a function.

    Args:
        module: The module to change.
        function: Dotted name of the function.
        parameter: ``name: annotation = default``.
    """
    place, node = one_function(module, function)
    new = _parsed_parameter(parameter)
    params = node.params
    if new.name.value in [
        p.name.value for p in (*params.params, *params.kwonly_params)
    ]:
        raise _already(f"{function}({parameter})", f"a parameter {new.name.value}")
    group = "kwonly_params" if params.kwonly_params else "params"
    grown = params.with_changes(**{group: _append(getattr(params, group), new)})
    return place.replace(node.with_changes(params=grown))


@verb
def pass_argument(
    module: cst.Module, *, function: str, call: str, argument: str
) -> cst.Module:
    """Pass one more keyword argument in a function's only call of something.

    Args:
        module: The module to change.
        function: Dotted name of the function that makes the call.
        call: What is called, as it is written: ``self.manager.capture``.
        argument: ``name=expression``.
    """
    place, _ = one_function(module, function)
    old = one_call(place, call)
    new = _parsed_call(f"call({argument})").args[0]
    if new.keyword is None:
        raise SeriesError(
            f"{call}({argument}) in {function}",
            found="a positional argument",
            do="pass it by keyword",
        )
    keyword = new.keyword.value
    if keyword in [arg.keyword.value for arg in old.args if arg.keyword]:
        raise _already(f"{call}({argument}) in {function}", f"an argument {keyword}")
    grown = old.with_changes(args=_append(old.args, new))
    return replace_inside(place, old, grown)


@verb
def enter_context(
    module: cst.Module, *, function: str, before: str, context: str
) -> cst.Module:
    """Enter one more context, first, in the only ``with`` that calls something.

    Args:
        module: The module to change.
        function: Dotted name of the function.
        before: A context that the statement enters, as the call is written.
        context: The expression to enter first.
    """
    place, _ = one_function(module, function)
    old = one_with(place, before)
    item = cst.WithItem(item=cst.parse_expression(context), comma=_COMMA)
    if any(item.item.deep_equals(other.item) for other in old.items):
        raise _already(f"{context} entered in {function}", f"a context {context}")
    return replace_inside(place, old, old.with_changes(items=[item, *old.items]))


@verb
def add_decorator(module: cst.Module, *, function: str, decorator: str) -> cst.Module:
    """Decorate a function, outside the decorators it has.

    Args:
        module: The module to change.
        function: Dotted name of the function.
        decorator: The decorator's expression, without ``@``.
    """
    place, node = one_function(module, function)
    new = cst.Decorator(decorator=cst.parse_expression(decorator))
    if any(new.decorator.deep_equals(old.decorator) for old in node.decorators):
        raise _already(f"@{decorator} on {function}", "that decorator")
    return place.replace(node.with_changes(decorators=[new, *node.decorators]))


@verb
def add_attribute(module: cst.Module, *, cls: str, statement: str) -> cst.Module:
    """Put an assignment at the top of a class, below its docstring.

    Args:
        module: The module to change.
        cls: Dotted name of the class.
        statement: ``name = expression`` or ``name: annotation = expression``.
    """
    place, node = one_class(module, cls)
    name = statement.partition("=")[0].partition(":")[0].strip()
    body = list(node.body.body)
    if any(_assigned(line) == name for line in body):
        raise _already(f"{statement} in class {cls}", f"an attribute {name}")
    below = 1 if node.get_docstring() is not None else 0
    body.insert(below, cst.parse_statement(statement))
    return place.replace(node.with_changes(body=node.body.with_changes(body=body)))


@verb
def extend_docstring(module: cst.Module, *, function: str, text: str) -> cst.Module:
    """Add lines at the end of a function's docstring.

    Args:
        module: The module to change.
        function: Dotted name of the function.
        text: The lines; a blank one first starts a paragraph.
    """
    place, node = one_function(module, function)
    old = _docstring(node)
    if old is None:
        raise SeriesError(
            f"more lines in the docstring of {function}",
            found="no docstring in triple double quotes",
            do="leave it, or describe the change elsewhere",
        )
    indent = " " * 4 * sum(isinstance(n, cst.IndentedBlock) for n in place.around)
    indent += " " * 4
    lines = textwrap.indent(text.rstrip(), indent)
    if lines.lstrip() in old.value:
        raise _already(f"more in the docstring of {function}", "the text")
    value = f'{old.value[:-3].rstrip()}\n{lines}\n{indent}"""'
    return replace_inside(place, old, old.with_changes(value=value))


_COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))


def _append(items: Sequence[Any], new: Any) -> list[Any]:
    """The items and a new last one, which takes over a trailing comma."""
    if not items:
        return [new]
    *first, last = items
    return [
        *first,
        last.with_changes(comma=_COMMA),
        new.with_changes(comma=last.comma),
    ]


def _already(asked: str, found: str) -> SeriesError:
    return SeriesError(
        asked,
        found=f"{found} is there already",
        do="drop the edit if upstream made it, or start from a pristine file",
    )


def _parsed_call(text: str) -> cst.Call:
    call = cst.parse_expression(text)
    assert isinstance(call, cst.Call)
    return call


def _parsed_parameter(text: str) -> cst.Param:
    function = cst.parse_statement(f"def f({text}): ...")
    assert isinstance(function, cst.FunctionDef)
    return function.params.params[0]


def _assigned(line: cst.CSTNode) -> str | None:
    """The name that a class-level line assigns or annotates."""
    match line:
        case cst.SimpleStatementLine(body=[cst.AnnAssign(target=cst.Name(name)), *_]):
            return name
        case cst.SimpleStatementLine(
            body=[cst.Assign(targets=[cst.AssignTarget(target=cst.Name(name))]), *_]
        ):
            return name
    return None


def _docstring(node: cst.FunctionDef) -> cst.SimpleString | None:
    match node.body.body[0]:
        case cst.SimpleStatementLine(body=[cst.Expr(value=cst.SimpleString() as text)]):
            return text if text.value.startswith('"""') else None
    return None
