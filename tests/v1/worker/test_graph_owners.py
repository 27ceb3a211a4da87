# SPDX-License-Identifier: Apache-2.0
"""The catalogue of a configuration holds the owners whose scopes will open."""

import inspect
from itertools import product
from types import SimpleNamespace

import pytest

import vllm.v1.worker.gpu.spec_decode as speculators
from tests.utils import import_all, with_subclasses
from tests.v1.owner_rows import ROWS
from vllm.config import SpeculativeConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.graph_channels.identity import Owner
from vllm.v1.worker import graph_channels
from vllm.v1.worker.gpu.spec_decode import init_speculator
from vllm.v1.worker.gpu.spec_decode.autoregressive.speculator import (
    AutoRegressiveSpeculator,
)
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import (
    MultiModuleMTPSpeculator,
)
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
from vllm.v1.worker.graph_owners import Stage, graph_owners

FULL = CUDAGraphMode.FULL_AND_PIECEWISE
PIECEWISE = CUDAGraphMode.PIECEWISE
TARGET, DRAFT, ENCODER = Owner.TARGET, Owner.DRAFT, Owner.ENCODER


def _speculative(method, model_type="llama", architecture="", layers=1, steps=3):
    """vLLM's own configuration of a draft, without what it reads from disk."""
    config = object.__new__(SpeculativeConfig)
    config.method = method
    config.num_speculative_tokens = steps
    config.enable_adaptive_verification = False
    hf_config = SimpleNamespace(model_type=model_type, num_nextn_predict_layers=layers)
    config.draft_model_config = SimpleNamespace(
        hf_config=hf_config, architectures=[architecture]
    )
    return config


def _config(speculative=None, mode=FULL, mm_encoder_tp_mode="weights", **model):
    return SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        model_config=SimpleNamespace(
            enforce_eager=model.get("enforce_eager", False),
            multimodal_config=SimpleNamespace(mm_encoder_tp_mode=mm_encoder_tp_mode),
        ),
        is_encoder_only=model.get("is_encoder_only", False),
        speculative_config=speculative,
    )


def _owners(config, v2, stage=Stage(), encoder=False):  # noqa: B008
    found = graph_owners(config, stage, v2_runner=v2, encoder_has_graphs=encoder)
    assert not found.communicating & found.silent
    return set(found.communicating), set(found.silent)


@pytest.mark.parametrize("v2", [False, True])
def test_a_plain_model_has_one_owner(v2):  # R-A3
    assert _owners(_config(), v2) == ({TARGET}, set())


@pytest.mark.parametrize("v2", [False, True])
def test_without_graphs_there_is_no_owner(v2):  # R-A3
    speculative = _speculative("eagle")
    config = _config(speculative, CUDAGraphMode.NONE, enforce_eager=True)
    assert _owners(config, v2, encoder=True) == (set(), set())


@pytest.mark.parametrize(
    "method, owner",
    [
        *((m, True) for m in ("eagle", "eagle3", "mtp", "dflash", "draft_model")),
        ("extract_hidden_states", False),  # silent
        *((m, None) for m in ("ngram", "ngram_gpu", "suffix", "medusa", "custom")),
    ],
)
def test_v1_a_proposer_that_runs_beside_the_target_is_an_owner(method, owner):  # R-A3
    communicating, silent = _owners(_config(_speculative(method)), v2=False)
    assert (DRAFT in communicating, DRAFT in silent) == (owner is True, owner is False)


def test_v1_all_methods_are_looked_at():
    # The runner calls dummy_run of what its configuration says below, and only it.
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner._dummy_run)
    asked = {
        name.partition("(")[0]
        for name in source.split("self.speculative_config.")[1:]
        if name.startswith("use")
    }
    assert asked == {"use_eagle", "uses_draft_model", "uses_extract_hidden_states"}


DRAFTS = {
    "DFlashSpeculator": _speculative("dflash"),
    "DFlash2Speculator": _speculative("dflash", architecture="DFlash2DraftModel"),
    "DSparkSpeculator": _speculative("dspark"),
    "Gemma4Speculator": _speculative("mtp", model_type="gemma4_mtp", layers=2),
    "MultiModuleMTPSpeculator": _speculative("mtp", layers=2),
    "MTPSpeculator": _speculative("mtp"),
    "EagleSpeculator": _speculative("eagle3"),
}


def _class_of(speculative, monkeypatch):
    """The class that vLLM makes of a configuration, without making it."""
    import_all(speculators)
    made = []
    for cls in with_subclasses(BaseSpeculator):
        module = inspect.getmodule(cls)
        monkeypatch.setattr(module, cls.__name__, lambda *_, cls=cls: made.append(cls))
    init_speculator(SimpleNamespace(speculative_config=speculative), None)
    return made[0]


@pytest.mark.parametrize("name", DRAFTS)
def test_v2_the_owners_are_those_of_the_speculators_class(name, monkeypatch):
    # R-A3 # C07
    cls = _class_of(DRAFTS[name], monkeypatch)
    assert cls.__name__ == name
    if issubclass(cls, AutoRegressiveSpeculator):
        expected = {Owner.DRAFT_PREFILL, Owner.DRAFT_DECODE}
    elif issubclass(cls, MultiModuleMTPSpeculator):
        expected = {Owner.MULTI_MODULE_MTP}
    else:
        assert issubclass(cls, DFlashSpeculator)
        expected = {cls.graph_owner}
    assert _owners(_config(DRAFTS[name]), v2=True) == ({TARGET, *expected}, set())


def test_v2_every_speculator_is_looked_at():
    source = inspect.getsource(speculators.init_speculator)
    made = {
        line.split("return ")[1] for line in source.split("\n") if "return " in line
    }
    assert {call.partition("(")[0] for call in made} == set(DRAFTS)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_what_the_tiny_engines_expect_is_in_the_catalogue(row):  # R-A3
    speculative = None
    if given := row.engine().get("speculative_config"):
        speculative = _speculative(
            given["method"],
            architecture="".join(given.get("model", {}).get("architectures", ())),
            layers=row.target.get("num_nextn_predict_layers", 1),
            steps=given["num_speculative_tokens"],
        )
    config = _config(speculative, CUDAGraphMode[row.cudagraph_mode])
    assert _owners(config, row.runner == "V2")[0] == {
        Owner(owner) for owner in row.owners
    }


def test_v2_one_step_has_no_decode_graphs():
    config = _config(_speculative("eagle", steps=1))
    assert _owners(config, v2=True)[0] == {TARGET, Owner.DRAFT_PREFILL}


@pytest.mark.parametrize("name", DRAFTS)
def test_v2_drafts_that_want_full_graphs_have_none_without(name):  # R-A3
    communicating, silent = _owners(_config(DRAFTS[name], PIECEWISE), v2=True)
    assert communicating <= {TARGET, Owner.DRAFT_PREFILL}
    assert communicating | silent == _owners(_config(DRAFTS[name]), v2=True)[0]


def test_v2_adaptive_verification_turns_full_graphs_on():
    speculative = _speculative("dspark")
    speculative.enable_adaptive_verification = True
    config = _config(speculative, PIECEWISE)
    assert _owners(config, v2=True) == ({TARGET, Owner.DSPARK}, set())


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("mode", ["weights", "data"])
def test_an_encoder_in_data_mode_is_silent(v2, mode):  # R-A3
    found = _owners(_config(mm_encoder_tp_mode=mode), v2, encoder=True)
    if mode == "data":
        assert found == ({TARGET}, {ENCODER})
    else:
        assert found == ({TARGET, ENCODER}, set())


def test_v2_captures_an_encoder_alone():  # R-A3
    config = _config(mode=CUDAGraphMode.NONE)
    assert _owners(config, v2=True, encoder=True) == ({ENCODER}, set())
    assert _owners(config, v2=False, encoder=True) == (set(), set())


def test_v2_a_worker_that_only_encodes_captures_nothing():
    config = _config(is_encoder_only=True)
    assert _owners(config, v2=True, encoder=True) == (set(), set())


@pytest.mark.parametrize("v2", [False, True])
def test_drafts_stand_on_the_last_stage(v2):  # R-B1
    config = _config(_speculative("eagle"))
    for first, last in product([False, True], repeat=2):
        drafts = _owners(config, v2, Stage(first, last))[0] - {TARGET}
        assert bool(drafts) is last


@pytest.mark.parametrize("first", [False, True])
def test_v2_the_encoder_stands_on_the_first_stage(first):  # R-B1
    found, _ = _owners(_config(), v2=True, stage=Stage(is_first=first), encoder=True)
    assert (ENCODER in found) is first


def test_ranks_of_a_group_see_the_same():  # R-A2 # C06
    # Nothing of a rank enters: a configuration and a stage are all there is.
    parameters = inspect.signature(graph_owners).parameters
    assert list(parameters) == ["config", "stage", "v2_runner", "encoder_has_graphs"]


@pytest.mark.parametrize("first, last", product((False, True), repeat=2))
@pytest.mark.parametrize("wanted, images, able", product((False, True), repeat=3))
def test_a_runner_is_asked_where_it_stands_and_whether_its_encoder_is_captured(
    first, last, wanted, images, able, monkeypatch
):
    asked = []
    monkeypatch.setattr(
        graph_channels,
        "get_pp_group",
        lambda: SimpleNamespace(is_first_rank=first, is_last_rank=last),
    )
    monkeypatch.setattr(
        graph_channels, "supports_encoder_cudagraph", lambda model: model == "able"
    )
    monkeypatch.setattr(
        graph_channels, "graph_owners", lambda *_, **named: asked.append((_, named))
    )
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mm_encoder=wanted)
    )
    runner = SimpleNamespace(
        vllm_config=config,
        supports_mm_inputs=images,
        get_model=lambda: "able" if able else "unable",
    )
    graph_channels._owners(runner, v2_runner=True)
    captured = wanted and images and able
    stage = Stage(is_first=first, is_last=last)
    named = {"v2_runner": True, "encoder_has_graphs": captured}
    assert asked == [((config, stage), named)]
