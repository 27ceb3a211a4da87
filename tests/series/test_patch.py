# SPDX-License-Identifier: Apache-2.0
"""A patch's docstring is its commit message; ORDER lists every patch once."""

import pytest

from series.errors import SeriesError
from series.landing import ROOT
from series.patch import load_series, parse_message
from series.patches import ORDER

GOOD = """Name the thing

Why: It had no name,
    over two lines.
Upstream: Nothing.
Drop-when: It has one.
"""


def test_a_message_is_read():
    message = parse_message("toy", GOOD)
    assert message.subject == "Name the thing"
    assert message.why == "It had no name, over two lines."
    assert message.drop_when == "It has one."
    assert str(message).startswith("Name the thing\n\nWhy: It had no name")


@pytest.mark.parametrize(
    ("docstring", "found"),
    [
        (None, "subject ''"),
        ("Name the thing", "sections none"),
        (
            GOOD.replace("Name the thing", "Name the thing."),
            "subject 'Name the thing.'",
        ),
        (GOOD.replace("Name the thing", "N" * 73), "subject 'NNN"),
        (GOOD.replace("Name the thing", "Name\nit"), "subject 'Name\\nit'"),
        (GOOD.replace("Upstream: Nothing.\n", ""), "sections Why, Drop-when"),
        (GOOD.replace("Nothing.", ""), "sections Why, Upstream, Drop-when"),
        (GOOD + "Why: Again.\n", "sections Why, Upstream, Drop-when, Why"),
        (GOOD.replace("Upstream", "Elsewhere"), "sections Why, Drop-when"),
    ],
)
def test_another_form_is_refused(docstring, found):
    with pytest.raises(SeriesError) as caught:
        parse_message("toy", docstring)
    assert "the docstring of patch toy" in str(caught.value)
    assert found in str(caught.value)


def test_order_lists_every_module_once():
    modules = {path.stem for path in (ROOT / "series/patches").glob("*.py")}
    assert sorted(ORDER) == sorted(modules - {"__init__"})


def test_every_patch_of_the_series_has_a_message_and_a_purpose():
    for patch in load_series():
        assert patch.message.subject
        assert patch.edits or patch.adds
        assert len(patch.adds) == len(set(patch.adds))
