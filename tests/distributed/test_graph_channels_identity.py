# SPDX-License-Identifier: Apache-2.0
"""Names of graph channels: what they are, and what they depend on."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.distributed.graph_channels import identity
from vllm.distributed.graph_channels.identity import (
    MAX_GENERATION,
    ChannelId,
    EagerLane,
    Owner,
    Phase,
    catalogue,
    parse_channel,
)

channels = st.builds(
    ChannelId,
    st.sampled_from(Owner),
    st.sampled_from(Phase),
    st.integers(min_value=1, max_value=MAX_GENERATION),
)
names = channels | st.sampled_from(EagerLane)


@given(names)
def test_parsing_inverts_formatting(name):  # R-A1
    assert parse_channel(str(name)) == name


@given(names, names)
def test_two_channels_never_share_a_name(first, second):  # R-A3
    assert (str(first) == str(second)) == (first == second)


@pytest.mark.parametrize(
    ("channel", "text"),
    [
        (ChannelId(Owner.TARGET, Phase.PRODUCTION), "vllm:target:production"),
        (ChannelId(Owner.TARGET, Phase.PROFILE), "vllm:target:profile"),
        (ChannelId(Owner.TARGET, Phase.PRODUCTION, 2), "vllm:target:production:2"),
        (ChannelId(Owner.DRAFT_QUERY, Phase.PROFILE), "vllm:draft_query:profile"),
        (EagerLane.ALLREDUCE, "vllm:eager:allreduce"),
        (EagerLane.DCP, "vllm:eager:dcp"),
    ],
)
def test_spelling(channel, text):  # R-A1
    assert str(channel) == text


def test_the_owners_of_the_contract():  # R-A3
    assert {owner.value for owner in Owner} == {
        "target",
        "draft",
        "draft_prefill",
        "draft_decode",
        "draft_query",
        "dspark",
        "context_kv",
        "multi_module_mtp",
        "encoder",
    }


def test_no_owner_is_called_eager():  # R-A1
    assert "eager" not in {owner.value for owner in Owner}


@given(st.text() | st.text(alphabet="vlm:targetproducion0123456789 ", max_size=40))
def test_any_text_is_a_canonical_name_or_refused(text):  # R-A1
    try:
        parsed = parse_channel(text)
    except ValueError as error:
        assert repr(text) in str(error)
        assert "vllm:<owner>:<phase>" in str(error)
    else:
        assert str(parsed) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "vllm",
        "vllm:target",
        "vllm:target:production:1",
        "vllm:target:production:0",
        "vllm:target:production:-2",
        "vllm:target:production:+2",
        "vllm:target:production:02",
        "vllm:target:production: 2",
        "vllm:target:production:2 ",
        "vllm:target:production:\u0662",
        "vllm:target:production:2:3",
        f"vllm:target:production:{MAX_GENERATION + 1}",
        "vllm:target:production:" + "9" * 5000,
        "VLLM:target:production",
        "vllm:Target:production",
        "vllm:TARGET:production",
        "vllm:target:eager",
        "vllm:eager:target",
        "vllm:eager:production",
        "vllm:eager:allreduce:2",
        "other:target:production",
        " vllm:target:production",
        "vllm:target:production\n",
        "vllm::production",
    ],
)
def test_other_spellings_are_refused(text):  # R-A1
    with pytest.raises(ValueError, match="no channel is called"):
        parse_channel(text)


@pytest.mark.parametrize("generation", [0, -1, MAX_GENERATION + 1])
def test_a_generation_out_of_range_is_refused(generation):
    with pytest.raises(ValueError, match=f"not at {generation}"):
        ChannelId(Owner.TARGET, Phase.PRODUCTION, generation)


@pytest.mark.parametrize(
    "fields",
    [
        ("target", Phase.PRODUCTION),
        (Owner.TARGET, "production"),
        (Owner.TARGET, None),
        (Owner.TARGET, Phase.PRODUCTION, "2"),
        (Owner.TARGET, Phase.PRODUCTION, True),
        (Owner.TARGET, Phase.PRODUCTION, 2.0),
    ],
)
def test_a_field_of_another_type_is_refused(fields):
    with pytest.raises(TypeError):
        ChannelId(*fields)


def test_a_name_cannot_be_changed():
    channel = ChannelId(Owner.TARGET, Phase.PRODUCTION)
    with pytest.raises(dataclasses.FrozenInstanceError):
        channel.generation = 2


@given(st.lists(st.sampled_from(Owner)), st.sampled_from(Phase), st.randoms())
def test_a_catalogue_does_not_depend_on_order(owners, phase, random):  # R-A2
    shuffled = owners * 2
    random.shuffle(shuffled)
    listed = catalogue(shuffled, phase)
    assert listed == catalogue(owners, phase)
    assert [str(channel) for channel in listed] == sorted(
        f"vllm:{owner.value}:{phase.value}" for owner in set(owners)
    )


_PRINT_CATALOGUE = """
from vllm.distributed.graph_channels import identity as i
for phase in i.Phase:
    print(*i.catalogue(i.Owner, phase))
"""


def test_every_process_arrives_at_the_same_names():  # R-A2 # C01
    # Another process has other ids, other addresses, and another hash seed.
    seeds = ("1", "2")
    printed = {
        subprocess.run(
            [sys.executable, "-c", _PRINT_CATALOGUE],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in seeds
    }
    assert len(printed) == 1
    assert b"vllm:target:production" in printed.pop()


def test_it_imports_nothing_of_vllm_or_torch():
    source = Path(identity.__file__)
    code = (
        "import runpy, sys; "
        f"runpy.run_path({str(source)!r}, run_name='identity'); "
        "sys.exit(any(m.split('.')[0] in ('vllm', 'torch') for m in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
