# SPDX-License-Identifier: Apache-2.0
"""docs/owners.md is what the tests are: it names those there are, and all owners."""

import ast
import re
from pathlib import Path

from tests.v1 import owner_table
from vllm.distributed.graph_channels.identity import Owner

ROOT = Path(__file__).parents[3]


def _functions(path):
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_document_is_the_table():
    text = (ROOT / "docs/owners.md").read_text()
    assert text == owner_table.document()


def test_every_test_that_it_names_exists():
    named = set(re.findall(r"`(tests/\S+\.py)(?:::(\w+))?`", owner_table.document()))
    assert len(named) > 10
    for path, function in named:
        assert not function or function in _functions(path), f"{path}::{function}"


def test_every_owner_is_driven_by_a_test():  # R-A3
    driven = {
        word
        for _, what, *_ in owner_table.RECORDED
        for word in re.findall(r"\w+", what)
    }
    assert {owner.value for owner in Owner} <= driven


def test_every_owner_has_an_engine():  # R-A3
    seen = {
        Owner(owner)
        for _, owners, *_ in owner_table.engines()
        for owner in owners.split(", ")
    }
    # vLLM 0.28.0 captures no graphs of context keys and values.
    assert set(Owner) - seen == {Owner.CONTEXT_KV}


def test_what_ran_is_of_engines_there_are():
    assert set(owner_table.RAN) <= {name for name, *_ in owner_table.engines()}
