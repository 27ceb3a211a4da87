# SPDX-License-Identifier: Apache-2.0
"""docs/owners.md is what the tests are: it names those there are, and all owners."""

import ast
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.v1 import owner_table
from tests.v1.owner_rows import SPECULATORS
from verification import receipt
from verification.receipt import Gpu, Machine, Outcome, Receipt, Test
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.graph_channels.identity import Owner
from vllm.v1.worker.gpu.spec_decode import init_speculator
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

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
    assert set(Owner) - seen == set(owner_table.UNCAPTURED_OWNERS)


def test_what_ran_is_of_engines_there_are():
    assert {name for name, *_ in owner_table.engines()} >= set(owner_table.ran())


def test_the_last_receipt_of_a_rows_own_test_counts(tmp_path, monkeypatch):
    name, other, moved = list(owner_table.TARGETS)[:3]
    own = owner_table.TARGETS_TEST
    for day, tests in (
        ("02", [(f"{own}[{name}]", "failed"), (f"{own}[{other}]", "passed")]),
        ("03", [(f"{own}[{name}]", "passed"), (f"{own}[{other}]", "hung")]),
        ("04", [(f"tests/test_elsewhere.py::test_it[{moved}]", "failed")]),
        ("05", [(f"{own}[{name}]", "not run"), (f"{own}[{other}]", "skipped")]),
    ):
        made = Receipt(
            f"2026-12-{day}T10:00:00+00:00",
            "0" * 64,
            Machine([Gpu("a GPU", 1, "12.0")], {}),
            0,
            [
                Test(test, Outcome(how), 1.0, "" if how == "passed" else "why")
                for test, how in tests
            ],
            [],
        )
        receipt.write(made, tmp_path / f"{day}.json")
    monkeypatch.setattr(owner_table, "_RECEIPTS", tmp_path)
    where = "[2026-12-03](receipts/03.json)"
    found = owner_table.ran.__wrapped__()
    assert found == {name: where, other: f"{owner_table.FAILED} {where}"}


def test_every_engine_without_an_encoder_has_its_cell():
    cells = {
        f"{runner}, {mode}" if name == "no draft" else f"{runner}, {name}, {mode}"
        for runner, name, _, *ran in owner_table.combinations()
        for mode, where in zip(owner_table.MODES, ran, strict=True)
        if where in ("**GPU**", owner_table.FAILED)
    }
    assert cells == {name for name in owner_table.ran() if "encoder" not in name}


def test_where_another_mode_is_the_reason_there_is_an_engine():
    engines = {"**GPU**", owner_table.FAILED, owner_table.UNRECEIPTED}
    for runner, name, _, *ran in owner_table.combinations():
        assert owner_table.SAME not in ran or engines & set(ran), (runner, name)


def test_v2_refuses_a_draft_model():
    method = SimpleNamespace(
        method="draft_model",
        use_gemma4_mtp=lambda: False,
        use_multi_module_mtp=lambda: False,
        use_eagle=lambda: False,
    )
    with pytest.raises(NotImplementedError, match="draft_model"):
        init_speculator(SimpleNamespace(speculative_config=method), None)


def test_every_v1_speculator_has_a_row():
    source = inspect.getsource(GPUModelRunner.__init__)
    made = set(re.findall(r"self\.drafter = (\w+)\(", source))
    assert made == set(SPECULATORS["V1"].values())


def test_every_v2_speculator_has_a_row():
    source = inspect.getsource(init_speculator)
    made = set(re.findall(r"return (\w+)\(", source))
    assert made == set(SPECULATORS["V2"].values())


def test_every_graph_mode_has_a_column():
    columns = {mode.split()[-1] for mode in owner_table.MODES}
    assert columns | {"NONE"} == {mode.name for mode in CUDAGraphMode}
