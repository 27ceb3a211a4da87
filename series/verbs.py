# SPDX-License-Identifier: Apache-2.0
"""The vocabulary in which a patch says what it changes.

Each verb takes named fields and demands exactly one target. Anything else is a
SeriesError, and so is an edit that already stands there: the tool reads
pristine files only. New code is given as text; ruff lays it out afterwards.
"""

from series.edit import Edit
from series.pieces import (
    add_attribute,
    add_decorator,
    add_import,
    add_items,
    add_parameter,
    enter_context,
    extend_docstring,
    pass_argument,
)
from series.statements import (
    add_method,
    append_to,
    append_to_if,
    enclose,
    insert_above,
    insert_before,
    insert_below,
    prepend_to,
    replace_body,
)

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
    "enclose",
    "enter_context",
    "extend_docstring",
    "insert_above",
    "insert_before",
    "insert_below",
    "pass_argument",
    "prepend_to",
    "replace_body",
]
