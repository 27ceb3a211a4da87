# SPDX-License-Identifier: Apache-2.0
"""Find exactly one node of a module by what it is called, and replace it.

LibCST fails open: a transform that matches nothing returns the source quietly,
and one that matches twice edits both. Every look-up here counts nodes and
accepts one only; anything else is an error that lists what is there.
"""

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from series.errors import SeriesError

Definition = cst.FunctionDef | cst.ClassDef

# Nodes that can hold a definition. Nothing else is descended into: an
# expression holds none, and most of a module is expressions.
_BLOCKS = (
    cst.BaseCompoundStatement,
    cst.IndentedBlock,
    cst.Else,
    cst.ExceptHandler,
    cst.Finally,
    cst.MatchCase,
)

# How many look-alikes an error lists.
_CANDIDATES = 5


@dataclass(frozen=True)
class Place:
    """A definition and the blocks around it.

    Attributes:
        name: Dotted name; ``A.h.<locals>.inner`` for a function inside a method.
        node: The definition.
        around: The nodes that hold it, from the module down.
    """

    name: str
    node: Definition
    around: tuple[cst.CSTNode, ...]

    @property
    def module(self) -> cst.Module:
        """The module that the definition stands in."""
        module = self.around[0]
        assert isinstance(module, cst.Module)
        return module

    def replace(self, new: Definition) -> cst.Module:
        """The module with this definition replaced and all else shared."""
        old: cst.CSTNode = self.node
        child: cst.CSTNode = new
        for parent in reversed(self.around):
            old, child = parent, _with_child(parent, old, child)
        assert isinstance(child, cst.Module)
        return child


def definitions(module: cst.Module) -> Iterator[Place]:
    """Every function and class of a module, in every arm of every statement."""
    return _definitions(module, "", ())


def one_function(module: cst.Module, name: str) -> tuple[Place, cst.FunctionDef]:
    """The only function of that dotted name.

    Raises:
        SeriesError: No function is called so, or several are.
    """
    place = _one_definition(module, name, cst.FunctionDef)
    assert isinstance(place.node, cst.FunctionDef)
    return place, place.node


def one_class(module: cst.Module, name: str) -> tuple[Place, cst.ClassDef]:
    """The only class of that dotted name.

    Raises:
        SeriesError: No class is called so, or several are.
    """
    place = _one_definition(module, name, cst.ClassDef)
    assert isinstance(place.node, cst.ClassDef)
    return place, place.node


def one_call(place: Place, callee: str) -> cst.Call:
    """The only call of ``callee`` (as it is written) inside a function.

    Raises:
        SeriesError: It is not called there, or several times.
    """
    calls = _Calls()
    place.node.visit(calls)
    written = [(code_of(call.func), call) for call in calls.found]
    found = [call for text, call in written if text == callee]
    if len(found) != 1:
        raise _miscounted(
            f"exactly one call of {callee} in {place.name}",
            place.module,
            found,
            difflib.get_close_matches(callee, {text for text, _ in written}),
        )
    return found[0]


def withs(place: Place) -> list[cst.With]:
    """Every ``with`` statement inside a function."""
    visitor = _Withs()
    place.node.visit(visitor)
    return visitor.found


def one_with(place: Place, item: str) -> cst.With:
    """The only ``with`` statement of a function that enters a call of ``item``.

    Raises:
        SeriesError: No ``with`` enters it, or several do.
    """
    entered = [
        (code_of(part.item.func), statement)
        for statement in withs(place)
        for part in statement.items
        if isinstance(part.item, cst.Call)
    ]
    found = [statement for text, statement in entered if text == item]
    if len(found) != 1:
        raise _miscounted(
            f"exactly one `with` that enters {item} in {place.name}",
            place.module,
            found,
            [text for text, _ in entered],
        )
    return found[0]


def one_statement(place: Place, words: str) -> tuple[cst.IndentedBlock, int]:
    """The block and the index of the only simple statement of that kind.

    Args:
        place: The function to look in, at any depth but in functions inside it.
        words: The statement, what it assigns to, or what it calls, as written.

    Raises:
        SeriesError: There is none, or there are several.
    """
    statements = _Statements(place.node)
    place.node.visit(statements)
    named = [(name, where) for where in statements.found for name in _names(where)]
    found = [(block, at) for name, (block, at) in named if name == words]
    if len(found) != 1:
        raise _miscounted(
            f"exactly one statement {words} in {place.name}",
            place.module,
            [block.body[at] for block, at in found],
            difflib.get_close_matches(words, {name for name, _ in named}),
        )
    return found[0]


def _names(where: tuple[cst.IndentedBlock, int]) -> set[str]:
    """What a statement may be called: itself, its target, or its callee."""
    block, at = where
    line = cst.ensure_type(block.body[at], cst.SimpleStatementLine)
    names = {code_of(line.with_changes(leading_lines=[])).partition("  #")[0]}
    match line.body[0]:
        case (
            cst.AnnAssign(target=target)
            | cst.Assign(targets=[cst.AssignTarget(target)])
        ):
            names.add(code_of(target))
        case cst.Expr(value=cst.Call(func=callee)):
            names.add(code_of(callee))
    return names


def one_if(module: cst.Module, test: str) -> cst.If:
    """The only top-level ``if`` of that condition, as it is written.

    Raises:
        SeriesError: There is none, or there are several.
    """
    ifs = [node for node in module.body if isinstance(node, cst.If)]
    found = [node for node in ifs if code_of(node.test) == test]
    if len(found) != 1:
        others = [code_of(node.test) for node in ifs]
        raise _miscounted(f"exactly one top-level `if {test}`", module, found, others)
    return found[0]


def one_assignment(
    block: cst.Module | Definition, module: cst.Module, name: str
) -> cst.BaseExpression:
    """What a name is assigned, in the only line of a block that assigns it.

    Raises:
        SeriesError: No line of the block itself assigns it, or several do.
    """
    body = block.body if isinstance(block, cst.Module) else block.body.body
    assignments = [pair for line in body if (pair := _assignment(line)) is not None]
    found = [value for target, value in assignments if target == name]
    if len(found) != 1:
        raise _miscounted(
            f"exactly one assignment of {name}",
            module,
            found,
            [target for target, _ in assignments],
        )
    return found[0]


def _assignment(line: cst.CSTNode) -> tuple[str, cst.BaseExpression] | None:
    match line:
        case cst.SimpleStatementLine(
            body=[cst.AnnAssign(cst.Name(name), value=cst.BaseExpression() as value)]
        ):
            return name, value
        case cst.SimpleStatementLine(
            body=[cst.Assign(targets=[cst.AssignTarget(cst.Name(name))], value=value)]
        ):
            return name, value
    return None


def imported_from(node: cst.CSTNode) -> str | None:
    """The module that a top-level ``from … import …`` line imports from."""
    match node:
        case cst.SimpleStatementLine(
            body=[cst.ImportFrom(module=cst.CSTNode() as source, relative=[])]
        ):
            return code_of(source)
    return None


def replace_inside(place: Place, old: cst.CSTNode, new: cst.CSTNode) -> cst.Module:
    """The module with one node inside a definition replaced."""
    changed = place.node.deep_replace(old, new)
    assert isinstance(changed, Definition)
    return place.replace(changed)


class _Calls(cst.CSTVisitor):
    def __init__(self) -> None:
        self.found: list[cst.Call] = []

    def visit_Call(self, node: cst.Call) -> None:
        self.found.append(node)


class _Withs(cst.CSTVisitor):
    def __init__(self) -> None:
        self.found: list[cst.With] = []

    def visit_With(self, node: cst.With) -> None:
        self.found.append(node)


class _Statements(cst.CSTVisitor):
    def __init__(self, function: Definition) -> None:
        self._function = function
        self.found: list[tuple[cst.IndentedBlock, int]] = []

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return node is self._function

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:
        for at, line in enumerate(node.body):
            if isinstance(line, cst.SimpleStatementLine):
                self.found.append((node, at))


def _definitions(
    block: cst.CSTNode, prefix: str, around: tuple[cst.CSTNode, ...]
) -> Iterator[Place]:
    around = (*around, block)
    for child in block.children:
        if isinstance(child, Definition):
            name = prefix + child.name.value
            yield Place(name, child, around)
            scope = "." if isinstance(child, cst.ClassDef) else ".<locals>."
            yield from _definitions(child, name + scope, around)
        elif isinstance(child, _BLOCKS):
            yield from _definitions(child, prefix, around)


def _one_definition(module: cst.Module, name: str, kind: type[Definition]) -> Place:
    places = [place for place in definitions(module) if isinstance(place.node, kind)]
    found = [place for place in places if place.name == name]
    if len(found) != 1:
        word = "class" if kind is cst.ClassDef else "function"
        raise _miscounted(
            f"exactly one {word} {name}",
            module,
            [place.node for place in found],
            _look_alikes(name, [place.name for place in places]),
        )
    return found[0]


def _look_alikes(name: str, names: list[str]) -> list[str]:
    last = name.rpartition(".")[2]
    same_last = [other for other in names if other.rpartition(".")[2] == last]
    return same_last or difflib.get_close_matches(name, names, n=_CANDIDATES)


def _miscounted(
    asked: str,
    module: cst.Module,
    found: Sequence[cst.CSTNode],
    look_alikes: Sequence[str],
) -> SeriesError:
    if found:
        lines = ", ".join(str(line) for line in _lines(module, found))
        seen = f"{len(found)} of them, at lines {lines}"
    else:
        others = ", ".join(look_alikes[:_CANDIDATES])
        seen = "none; " + (f"closest: {others}" if others else "nothing like it")
    return SeriesError(
        asked,
        found=seen,
        do="read what upstream changed there, then name the anchor anew in the patch",
    )


def _lines(module: cst.Module, nodes: Sequence[cst.CSTNode]) -> list[int]:
    """The line of each node; slow, for errors only."""
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    positions = wrapper.resolve(PositionProvider)
    return [positions[node].start.line for node in nodes]


def _with_child(parent: cst.CSTNode, old: cst.CSTNode, new: cst.CSTNode) -> cst.CSTNode:
    for field in dataclasses.fields(parent):
        value = getattr(parent, field.name)
        if value is old:
            return parent.with_changes(**{field.name: new})
        if isinstance(value, Sequence) and any(item is old for item in value):
            kept = [new if item is old else item for item in value]
            return parent.with_changes(**{field.name: kept})
    raise AssertionError(f"{type(parent).__name__} does not hold the node")


def code_of(node: cst.CSTNode) -> str:
    """A node as it is written, without the blank lines around a statement."""
    return cst.Module(body=[]).code_for_node(node).strip()
