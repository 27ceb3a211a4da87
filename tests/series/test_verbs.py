# SPDX-License-Identifier: Apache-2.0
"""Each verb on invented code: what it makes, and what it refuses."""

import re
import textwrap
from hashlib import sha256

import libcst as cst
import pytest

from series.errors import SeriesError
from series.layout import formatted
from series.verbs import (
    add_attribute,
    add_decorator,
    add_import,
    add_items,
    add_method,
    add_parameter,
    append_to,
    append_to_if,
    enclose,
    enter_context,
    extend_docstring,
    insert_above,
    insert_before,
    insert_below,
    pass_argument,
    prepend_to,
    replace_body,
)


def _laid_out(source):
    return formatted({"toy.py": source.encode()})["toy.py"].decode()


def _text(source):
    return textwrap.dedent(source).lstrip("\n")


def _apply(edit, before):
    return _laid_out(edit.apply(cst.parse_module(_text(before))).code)


def _refusal(edit, before):
    with pytest.raises(SeriesError) as caught:
        edit.apply(cst.parse_module(_text(before)))
    return str(caught.value)


# Of the body that "another body" replaces.
OLD = sha256(b"# Gone.\nreturn b").hexdigest()[:16]

HITS = {
    "a method, the last one": (
        add_method(cls="C", code="def g(self):\n    return 2"),
        """
        class C:
            x = 1

            def f(self):
                return 1


        y = 3
        """,
        """
        class C:
            x = 1

            def f(self):
                return 1

            def g(self):
                return 2


        y = 3
        """,
    ),
    "above a statement, by what it assigns to": (
        insert_above(function="C.f", statement="self.b", code="# Why.\ngo(self)"),
        """
        class C:
            def f(self):
                # A note on b.
                self.b: int | None = None
                if self.a:
                    self.c = 2
        """,
        """
        class C:
            def f(self):
                # Why.
                go(self)
                # A note on b.
                self.b: int | None = None
                if self.a:
                    self.c = 2
        """,
    ),
    "below a statement, by what it calls, at any depth": (
        insert_below(function="f", statement="m.go", code="stop()"),
        """
        def f(m):
            try:
                with m:
                    m.go(1, 2)
            finally:
                end()
        """,
        """
        def f(m):
            try:
                with m:
                    m.go(1, 2)
                    stop()
            finally:
                end()
        """,
    ),
    "below a statement, as it is written": (
        insert_below(function="f", statement="x = 1", code="stop()"),
        """
        def f(m):
            x = 1  # noted
            y = 1

            def g():
                x = 1
        """,
        """
        def f(m):
            x = 1  # noted
            stop()
            y = 1

            def g():
                x = 1
        """,
    ),
    "another body": (
        replace_body(function="f", was=OLD, code="with scope():\n    return a"),
        """
        @decorated
        def f(a, b=1) -> int:
            \"\"\"What it does.\"\"\"
            # Gone.
            return b
        """,
        """
        @decorated
        def f(a, b=1) -> int:
            \"\"\"What it does.\"\"\"
            with scope():
                return a
        """,
    ),
    "parameter, the last one": (
        add_parameter(function="C.f", parameter="c: int | None = None"),
        """
        class C:
            def f(self, a, b=1):
                return a
        """,
        """
        class C:
            def f(self, a, b=1, c: int | None = None):
                return a
        """,
    ),
    "parameter, one a line": (
        add_parameter(function="f", parameter="c=None"),
        """
        def f(
            a,
            b=1,
        ):
            return a
        """,
        """
        def f(
            a,
            b=1,
            c=None,
        ):
            return a
        """,
    ),
    "parameter, by keyword only where others are": (
        add_parameter(function="f", parameter="c=None"),
        """
        def f(a, *, b=1, **rest):
            return a
        """,
        """
        def f(a, *, b=1, c=None, **rest):
            return a
        """,
    ),
    "parameter, of a function without any": (
        add_parameter(function="f", parameter="c=None"),
        """
        def f():
            return 1
        """,
        """
        def f(c=None):
            return 1
        """,
    ),
    "parameter, of a nested function": (
        add_parameter(function="C.f.<locals>.g", parameter="c=None"),
        """
        class C:
            def f(self):
                if self:

                    def g(a):
                        return a

                return g
        """,
        """
        class C:
            def f(self):
                if self:

                    def g(a, c=None):
                        return a

                return g
        """,
    ),
    "parameter, of the one so named in full": (
        add_parameter(function="D.f", parameter="c=None"),
        """
        class C:
            def f(self):
                return 1


        class D:
            def f(self):
                return 1


        def f():
            return 1
        """,
        """
        class C:
            def f(self):
                return 1


        class D:
            def f(self, c=None):
                return 1


        def f():
            return 1
        """,
    ),
    "parameter, of a function in a with, a try and a match": (
        add_parameter(function="f", parameter="c=None"),
        """
        match 1:
            case 1:
                try:
                    pass
                except ValueError:
                    pass
                else:
                    with open("x"):

                        def f():
                            return 1
        """,
        """
        match 1:
            case 1:
                try:
                    pass
                except ValueError:
                    pass
                else:
                    with open("x"):

                        def f(c=None):
                            return 1
        """,
    ),
    "argument": (
        pass_argument(function="f", call="self.m.go", argument="c=c"),
        """
        def f(self, c):
            self.n.go()
            return [self.m.go(1, b=2)]
        """,
        """
        def f(self, c):
            self.n.go()
            return [self.m.go(1, b=2, c=c)]
        """,
    ),
    "argument, of a call without any": (
        pass_argument(function="f", call="super().go", argument="c=c"),
        """
        def f(c):
            super().go()
        """,
        """
        def f(c):
            super().go(c=c)
        """,
    ),
    "argument, one a line": (
        pass_argument(function="f", call="go", argument="c=c"),
        """
        def f(c):
            go(
                1,
                b=2,
            )
        """,
        """
        def f(c):
            go(
                1,
                b=2,
                c=c,
            )
        """,
    ),
    "context": (
        enter_context(function="f", beside="one", context="scope(c)"),
        """
        def f(c):
            with one(1), two(2) as t:
                yield t
        """,
        """
        def f(c):
            with one(1), two(2) as t, scope(c):
                yield t
        """,
    ),
    "context, in parentheses": (
        enter_context(function="f", beside="two", context="scope(c)"),
        """
        def f(c):
            with (
                one(1),
                two(2),
            ):
                yield
        """,
        """
        def f(c):
            with (
                one(1),
                two(2),
                scope(c),
            ):
                yield
        """,
    ),
    "a statement in a context": (
        enclose(function="C.f", statement="self.m.go", context="scope(A, by=self.m)"),
        """
        class C:
            def f(self):
                if self.m:
                    pool = 1
                    # Why it goes.
                    self.m.go(pool)
                return 2
        """,
        """
        class C:
            def f(self):
                if self.m:
                    pool = 1
                    # Why it goes.
                    with scope(A, by=self.m):
                        self.m.go(pool)
                return 2
        """,
    ),
    "a statement in a context that another is in": (
        enclose(function="f", statement="go", context="scope()"),
        """
        def f():
            with scope():
                come()
            go()
        """,
        """
        def f():
            with scope():
                come()
            with scope():
                go()
        """,
    ),
    "decorator, outside the others": (
        add_decorator(function="C.f", decorator="scope(Owner.DRAFT)"),
        """
        class C:
            @override
            def f(self):
                return 1
        """,
        """
        class C:
            @scope(Owner.DRAFT)
            @override
            def f(self):
                return 1
        """,
    ),
    "attribute, below the docstring": (
        add_attribute(cls="C", statement="owner = Owner.DRAFT"),
        '''
        class C(B):
            """A class."""

            name = "c"
        ''',
        '''
        class C(B):
            """A class."""

            owner = Owner.DRAFT

            name = "c"
        ''',
    ),
    "attribute, of a class without a docstring": (
        add_attribute(cls="C", statement="owner: Owner = Owner.DRAFT"),
        """
        class C(B):
            name = "c"
        """,
        """
        class C(B):
            owner: Owner = Owner.DRAFT
            name = "c"
        """,
    ),
    "import, after the last that sorts before it": (
        add_import(statement="from pkg.m import a, b"),
        """
        import os

        from other import x
        from pkg.a import y
        from pkg.z import z
        """,
        """
        import os

        from other import x
        from pkg.a import y
        from pkg.m import a, b
        from pkg.z import z
        """,
    ),
    "import, first of its section": (
        add_import(statement="from pkg.m import a"),
        """
        import os

        # why z
        from pkg.z import z
        """,
        """
        import os

        # why z
        from pkg.m import a
        from pkg.z import z
        """,
    ),
    "docstring, of one line": (
        extend_docstring(function="C.f", text="\nMore about it.\nAnd more."),
        '''
        class C:
            def f(self):
                """One line."""
                return 1
        ''',
        '''
        class C:
            def f(self):
                """One line.

                More about it.
                And more.
                """
                return 1
        ''',
    ),
    "docstring, with a list of arguments": (
        extend_docstring(function="f", text="    c: Another."),
        '''
        def f(a, c):
            """Do it.

            Args:
                a: One.
            """
            return a
        ''',
        '''
        def f(a, c):
            """Do it.

            Args:
                a: One.
                c: Another.
            """
            return a
        ''',
    ),
    "code above a function, and above its decorator": (
        insert_before(definition="f", code="def g():\n    return 1\n"),
        """
        import os


        # why f
        @cached
        def f():
            return 2
        """,
        """
        import os


        def g():
            return 1


        # why f
        @cached
        def f():
            return 2
        """,
    ),
    "code at the start, below the docstring": (
        prepend_to(function="C.f", code="# why\nbegin()"),
        '''
        class C:
            def f(self):
                """Doc."""
                go()
        ''',
        '''
        class C:
            def f(self):
                """Doc."""
                # why
                begin()
                go()
        ''',
    ),
    "code at the start of a function without a docstring": (
        prepend_to(function="f", code="begin()"),
        """
        def f():
            go()
            return 1
        """,
        """
        def f():
            begin()
            go()
            return 1
        """,
    ),
    "code at the end": (
        append_to(function="f", code="if x:\n    end()\n"),
        """
        def f():
            go(lambda: 1)

            def g():
                return 1
        """,
        """
        def f():
            go(lambda: 1)

            def g():
                return 1

            if x:
                end()
        """,
    ),
    "code in an if": (
        append_to_if(test="TYPE_CHECKING", code="B: int = 2"),
        """
        if TYPE_CHECKING:
            A: int = 1
        if other:
            pass
        """,
        """
        if TYPE_CHECKING:
            A: int = 1
            B: int = 2
        if other:
            pass
        """,
    ),
    "items of a dict at the top": (
        add_items(name="table", items='"b": lambda: 2, "c": 3'),
        """
        table: dict = {
            # one
            "a": 1,
        }
        """,
        """
        table: dict = {
            # one
            "a": 1,
            "b": lambda: 2,
            "c": 3,
        }
        """,
    ),
    "elements of a set in a function": (
        add_items(name="names", items='"b"', function="f"),
        """
        def f():
            names = {"a"}
            return names
        """,
        """
        def f():
            names = {"a", "b"}
            return names
        """,
    ),
}


@pytest.mark.parametrize(("edit", "before", "after"), HITS.values(), ids=HITS)
def test_hit(edit, before, after):
    assert _laid_out(_text(before)) == _text(before), "the toy is not laid out"
    assert _apply(edit, before) == _text(after)


TWICE = """
if a:

    def f(x):
        go(x)

else:

    def f(x):
        go(x)
"""
OVERLOADED = """
class C:
    @overload
    def f(self, x: int): ...
    @overload
    def f(self, x: str): ...
    def f(self, x):
        return x
"""

LOST = replace_body(function="C.f", was=OLD, code="return a")

REFUSALS = {
    "another body, one statement more": (
        LOST,
        "class C:\n    def f(self):\n        # Gone.\n        return b\n        go()\n",
        [f"another body of C.f in place of that with the digest '{OLD}'", "was='"],
    ),
    "another body, a comment changed": (
        LOST,
        "class C:\n    def f(self):\n        # Needed!\n        return b\n",
        ["another body of C.f", "which would be lost"],
    ),
    "another body, none but the docstring": (
        LOST,
        'class C:\n    def f(self):\n        """Do it."""\n',
        ["another body of C.f", "which would be lost"],
    ),
    "no such function": (
        add_parameter(function="g", parameter="c=None"),
        "def f(x):\n    go(x)\n",
        ["exactly one function g", "none"],
    ),
    "a function of that name elsewhere is offered": (
        add_parameter(function="C.f", parameter="c=None"),
        "class D:\n    def f(self):\n        pass\n",
        ["exactly one function C.f", "closest: D.f"],
    ),
    "a class is no function": (
        add_parameter(function="C", parameter="c=None"),
        "class C:\n    pass\n",
        ["exactly one function C", "none"],
    ),
    "a method is not found by its last name": (
        add_parameter(function="f", parameter="c=None"),
        "class C:\n    def f(self):\n        pass\n",
        ["closest: C.f"],
    ),
    "defined in both arms": (
        add_parameter(function="f", parameter="c=None"),
        TWICE,
        ["exactly one function f", "2 of them, at lines 3, 8"],
    ),
    "overloaded": (
        add_decorator(function="C.f", decorator="d"),
        OVERLOADED,
        ["exactly one function C.f", "3 of them"],
    ),
    "parameter there already": (
        add_parameter(function="f", parameter="c=None"),
        "def f(a, c=1):\n    pass\n",
        ["a parameter c is there already"],
    ),
    "keyword-only parameter there already": (
        add_parameter(function="f", parameter="c=None"),
        "def f(a, *, c=1):\n    pass\n",
        ["a parameter c is there already"],
    ),
    "no such call": (
        pass_argument(function="f", call="self.m.go", argument="c=c"),
        "def f(self):\n    self.m.going()\n",
        ["exactly one call of self.m.go in f", "closest: self.m.going"],
    ),
    "called twice": (
        pass_argument(function="f", call="go", argument="c=c"),
        "def f():\n    go(1)\n    go(2)\n",
        ["exactly one call of go in f", "2 of them, at lines 2, 3"],
    ),
    "called in another function only": (
        pass_argument(function="f", call="go", argument="c=c"),
        "def f():\n    pass\n\n\ndef g():\n    go(1)\n",
        ["exactly one call of go in f", "none"],
    ),
    "argument passed already": (
        pass_argument(function="f", call="go", argument="c=c"),
        "def f():\n    go(c=1)\n",
        ["an argument c is there already"],
    ),
    "argument not by keyword": (
        pass_argument(function="f", call="go", argument="c"),
        "def f():\n    go(1)\n",
        ["a positional argument"],
    ),
    "no such with": (
        enter_context(function="f", beside="one", context="scope()"),
        "def f():\n    with two():\n        pass\n",
        ["exactly one `with` that enters one in f", "closest: two"],
    ),
    "enclosed already": (
        enclose(function="f", statement="go", context="scope()"),
        "def f():\n    with scope():\n        go()\n",
        ["a `with scope()` is there already"],
    ),
    "enclosed twice": (
        enclose(function="f", statement="go", context="scope()"),
        "def f():\n    go()\n    go()\n",
        ["exactly one statement go in f", "2 of them, at lines 2, 3"],
    ),
    "entered in two": (
        enter_context(function="f", beside="one", context="scope()"),
        "def f():\n    with one():\n        pass\n    with one():\n        pass\n",
        ["2 of them, at lines 2, 4"],
    ),
    "context entered already": (
        enter_context(function="f", beside="one", context="scope()"),
        "def f():\n    with scope(), one():\n        pass\n",
        ["a context scope() is there already"],
    ),
    "decorated already": (
        add_decorator(function="f", decorator="scope(1)"),
        "@scope(1)\ndef f():\n    pass\n",
        ["that decorator is there already"],
    ),
    "no such class": (
        add_attribute(cls="C", statement="x = 1"),
        "def C():\n    pass\n",
        ["exactly one class C", "none"],
    ),
    "attribute there already": (
        add_attribute(cls="C", statement="x = 1"),
        "class C:\n    y = 2\n    x = 2\n",
        ["an attribute x is there already"],
    ),
    "annotated attribute there already": (
        add_attribute(cls="C", statement="x = 1"),
        "class C:\n    x: int\n",
        ["an attribute x is there already"],
    ),
    "imported from there already": (
        add_import(statement="from pkg.m import a"),
        "from pkg.m import b\n",
        ["an import from pkg.m is there already"],
    ),
    "no import of the package": (
        add_import(statement="from pkg.m import a"),
        "from package.m import b\n",
        ["no import from pkg to stand beside"],
    ),
    "not a from-import": (
        add_import(statement="import pkg.m"),
        "from pkg.m import b\n",
        ["no statement of the form `from package.module import name`"],
    ),
    "code above a method": (
        insert_before(definition="C.f", code="x = 1"),
        "class C:\n    def f(self):\n        pass\n",
        ["a function that is not at the top of the module"],
    ),
    "code after a return": (
        append_to(function="f", code="end()"),
        "def f(x):\n    if x:\n        return 1\n    go()\n",
        ["a return, after which it would not run"],
    ),
    "no such if": (
        append_to_if(test="TYPE_CHECKING", code="x = 1"),
        "if TYPING:\n    pass\n",
        ["exactly one top-level `if TYPE_CHECKING`", "closest: TYPING"],
    ),
    "two such ifs": (
        append_to_if(test="a", code="x = 1"),
        "if a:\n    pass\nif a:\n    pass\n",
        ["2 of them, at lines 1, 3"],
    ),
    "assigned twice": (
        add_items(name="table", items='"b"'),
        'table = {"a"}\ntable = {"c"}\n',
        ["exactly one assignment of table", "2 of them"],
    ),
    "assigned in a function only": (
        add_items(name="table", items='"b"'),
        'def f():\n    table = {"a"}\n',
        ["exactly one assignment of table", "none"],
    ),
    "an element for a dict": (
        add_items(name="table", items='"b"'),
        'table = {"a": 1}\n',
        ["a Dict there, and a Set to add"],
    ),
    "a list": (
        add_items(name="table", items='"b"'),
        'table = ["a"]\n',
        ["a List there"],
    ),
    "method there already": (
        add_method(cls="C", code="def f(self, a):\n    go()"),
        "class C:\n    def f(self):\n        pass\n",
        ["a method f is there already"],
    ),
    "no such statement": (
        insert_below(function="f", statement="self.a", code="x()"),
        "def f(self):\n    self.ab = 1\n",
        ["exactly one statement self.a in f", "closest: self.ab"],
    ),
    "two such statements": (
        insert_above(function="f", statement="go", code="x()"),
        "def f():\n    go(1)\n    if 1:\n        go(2)\n",
        ["exactly one statement go in f", "2 of them, at lines 2, 4"],
    ),
    "no docstring": (
        extend_docstring(function="f", text="More."),
        "def f():\n    pass\n",
        ["no docstring"],
    ),
}


@pytest.mark.parametrize(("edit", "before", "words"), REFUSALS.values(), ids=REFUSALS)
def test_refusal(edit, before, words):
    said = _refusal(edit, before)
    for word in words:
        assert word in said
    assert "do:" in said


@pytest.mark.parametrize(("edit", "before", "after"), HITS.values(), ids=HITS)
def test_an_edit_is_never_made_twice(edit, before, after):
    once = cst.parse_module(_text(after))
    with pytest.raises(SeriesError, match="there already"):
        edit.apply(once)


# Indentation, the docstring and the lines' ends are not what a body does.
@pytest.mark.parametrize(
    "before",
    [
        "def f():\n  # Gone.\n  return b\n",
        "def f():\r\n    # Gone.\r\n    return b\r\n",
        'def f():\n    """Doc."""\n\n    # Gone.\n    return b\n\n\nx = 1\n',
        "if a:\n class C:\n  def f(self):\n   # Gone.\n   return b\n",
    ],
    ids=["narrow", "line ends", "docstring", "nested"],
)
def test_the_same_body_is_known_wherever_it_stands(before):
    name = "C.f" if "class" in before else "f"
    edit = replace_body(function=name, was=OLD, code="return a")
    after = edit.apply(cst.parse_module(before)).code
    assert "return a" in after and "Gone" not in after


def test_the_digest_that_a_refusal_tells_is_the_one_to_write():
    before = "def f():\n    return c\n"
    said = _refusal(replace_body(function="f", was="", code="return a"), before)
    (told,) = re.findall("was='([0-9a-f]{16})'", said)
    edit = replace_body(function="f", was=told, code="return a")
    assert _apply(edit, before) == "def f():\n    return a\n"


def test_an_edit_says_itself():
    edit = add_parameter(function="f", parameter="c=None")
    assert edit.words == "add_parameter(function='f', parameter='c=None')"
