# SPDX-License-Identifier: Apache-2.0
"""The vocabulary in which a patch says what it changes.

Each verb takes named fields and demands exactly one target. Anything else is a
SeriesError, and so is an edit that already stands there: the tool reads
pristine files only. New code is given as text; ruff lays it out afterwards.
"""

import textwrap
from collections.abc import Sequence

import libcst as cst

from series.anchors import (
    Place,
    code_of,
    imported_from,
    one_assignment,
    one_call,
    one_class,
    one_function,
    one_if,
    one_statement,
    one_with,
    replace_inside,
)
from series.edit import (
    Edit,
    already,
    append,
    assigned,
    docstring,
    parsed_call,
    parsed_parameter,
    returns,
    verb,
)
from series.errors import SeriesError

__all__ = [
    "Edit",
    "add_attribute",
    "add_decorator",
    "add_import",
    "add_items",
    "add_method",
    "add_parameter",
    "append_to",
    "append_to_if",
    "enter_context",
    "extend_docstring",
    "insert_above",
    "insert_before",
    "insert_below",
    "pass_argument",
    "prepend_to",
    "replace_body",
]


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
        raise already(f"the import {statement!r}", f"an import from {source}")
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
    new = parsed_parameter(parameter)
    params = node.params
    if new.name.value in [
        p.name.value for p in (*params.params, *params.kwonly_params)
    ]:
        raise already(f"{function}({parameter})", f"a parameter {new.name.value}")
    group = "kwonly_params" if params.kwonly_params else "params"
    grown = params.with_changes(**{group: append(getattr(params, group), new)})
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
    new = parsed_call(f"call({argument})").args[0]
    if new.keyword is None:
        raise SeriesError(
            f"{call}({argument}) in {function}",
            found="a positional argument",
            do="pass it by keyword",
        )
    keyword = new.keyword.value
    if keyword in [arg.keyword.value for arg in old.args if arg.keyword]:
        raise already(f"{call}({argument}) in {function}", f"an argument {keyword}")
    grown = old.with_changes(args=append(old.args, new))
    return replace_inside(place, old, grown)


@verb
def enter_context(
    module: cst.Module, *, function: str, beside: str, context: str
) -> cst.Module:
    """Enter one more context, last, in the only ``with`` that calls something.

    Args:
        module: The module to change.
        function: Dotted name of the function.
        beside: A context that the statement enters, as the call is written.
        context: The expression to enter innermost.
    """
    place, _ = one_function(module, function)
    old = one_with(place, beside)
    item = cst.WithItem(item=cst.parse_expression(context))
    if any(item.item.deep_equals(other.item) for other in old.items):
        raise already(f"{context} entered in {function}", f"a context {context}")
    return replace_inside(place, old, old.with_changes(items=append(old.items, item)))


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
        raise already(f"@{decorator} on {function}", "that decorator")
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
    if any(assigned(line) == name for line in body):
        raise already(f"{statement} in class {cls}", f"an attribute {name}")
    below = 1 if node.get_docstring() is not None else 0
    body.insert(below, cst.parse_statement(statement))
    return place.replace(node.with_changes(body=node.body.with_changes(body=body)))


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
def extend_docstring(module: cst.Module, *, function: str, text: str) -> cst.Module:
    """Add lines at the end of a function's docstring.

    Args:
        module: The module to change.
        function: Dotted name of the function.
        text: The lines; a blank one first starts a paragraph.
    """
    place, node = one_function(module, function)
    old = docstring(node)
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
        raise already(f"more in the docstring of {function}", "the text")
    value = f'{old.value[:-3].rstrip()}\n{lines}\n{indent}"""'
    return replace_inside(place, old, old.with_changes(value=value))


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
def replace_body(module: cst.Module, *, function: str, code: str) -> cst.Module:
    """Replace what a function does; its signature and docstring stay.

    Args:
        module: The module to change.
        function: Dotted name of the function.
        code: Whole statements, not indented.
    """
    place, node = one_function(module, function)
    kept = node.body.body[: 1 if docstring(node) is not None else 0]
    lines = _parsed_body(code)
    _demand_new(node.body.body, lines[:1], f"another body of {function}")
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


@verb
def add_items(
    module: cst.Module, *, name: str, items: str, function: str | None = None
) -> cst.Module:
    """Add items at the end of the only dict or set that a name is assigned.

    Args:
        module: The module to change.
        name: What is assigned, once.
        items: ``key: value, …`` or ``element, …``.
        function: Where it is assigned; at the top of the module by default.
    """
    place = None if function is None else one_function(module, function)[0]
    old = one_assignment(module if place is None else place.node, module, name)
    new = cst.parse_expression("{" + items + "}")
    if not isinstance(old, cst.Dict | cst.Set) or type(new) is not type(old):
        raise SeriesError(
            f"more items in {name}",
            found=f"a {type(old).__name__} there, and a {type(new).__name__} to add",
            do="add key-value pairs to a dict, elements to a set",
        )
    grown: cst.Dict | cst.Set = old
    for element in new.elements:
        if any(
            element.deep_equals(e.with_changes(comma=element.comma))
            for e in old.elements
        ):
            raise already(f"more items in {name}", "one of them")
        bare = element.with_changes(comma=cst.MaybeSentinel.DEFAULT)
        grown = grown.with_changes(elements=append(grown.elements, bare))
    if place is None:
        changed = module.deep_replace(old, grown)
        assert isinstance(changed, cst.Module)
        return changed
    return replace_inside(place, old, grown)


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


def _demand_new(
    body: Sequence[cst.CSTNode], lines: Sequence[cst.CSTNode], asked: str
) -> None:
    there = {code_of(old) for old in body}
    if any(code_of(line) in there for line in lines):
        raise already(asked, "one of its statements")
