# SPDX-License-Identifier: Apache-2.0
"""Verbs that add one piece to what stands there: an argument, a name, an item."""

import textwrap

import libcst as cst

from series.anchors import (
    imported_from,
    one_assignment,
    one_call,
    one_class,
    one_function,
    one_with,
    replace_inside,
)
from series.edit import (
    already,
    append,
    assigned,
    docstring,
    parsed_call,
    parsed_parameter,
    verb,
)
from series.errors import SeriesError


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
