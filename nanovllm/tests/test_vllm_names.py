"""Names, kinds and defaults against vLLM 0.32's, which data/vllm_0_32/make_api.py has read from its source."""

import inspect
import json
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from .. import LLM, AsyncLLM, BeamSearchOutput, BeamSearchParams, BeamSearchSequence, LLMEngine
from ..engine import stats as metrics
from ..engine.config import AsyncEngineArgs, EngineArgs
from ..engine.vllm_options import DEFAULTS, HARMLESS, WITHOUT_EFFECT

FOLDER = Path(__file__).parent / "data" / "vllm_0_32"
DATA = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.json")}
ARGS = dict(DATA["engine_args"]["EngineArgs"])
KINDS: dict = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional or keyword",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_KEYWORD: "any other keyword",
}
OWN = {"kv_cache_tokens", "kv_offloading_tokens", "offload_policy", "tile_size", "device"}
OTHER_DEFAULTS = {  # ours is another, and why
    "model": "the shipped checkpoint",
    "gpu_memory_utilization": "without it a GPU gives 90%, and a CPU has no such share",
    "watermark": "the engine's own, 5%",
}
GIVEN_VALUES = {str: "another", int: 7, float: 0.5, type(None): "something", bool: True}


def test_the_data_is_of_that_version():
    assert {name: data["vllm"] for name, data in DATA.items() if "vllm" in data and name != "sampling_params"} == {
        name: "0.32" for name in ("llm", "engine_args", "llm_engine", "async_llm", "beam_search", "metrics", "bodies")
    }


def rows(function) -> list[list]:
    """[name, kind, default] of each parameter, as the data has them."""
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    empty, required = inspect.Parameter.empty, {"required": True}
    return [[p.name, KINDS[p.kind], required if p.default is empty else p.default] for p in parameters]


def expected(signature: list[list], **ours) -> list[list]:
    """An expression stands for an object of vLLM's: None here. `ours` are defaults that it has not."""
    plain = [[*row[:2], None if isinstance(row[2], dict) and "expression" in row[2] else row[2]] for row in signature]
    return [[name, kind, ours.get(name, default)] for name, kind, default in plain]


@pytest.mark.parametrize("name", ["generate", "chat", "beam_search", "reset_prefix_cache"])
def test_methods_of_llm(name):
    assert rows(getattr(LLM, name)) == expected(DATA["llm"][name])


@pytest.mark.parametrize("name", [name for name in DATA["async_llm"] if name != "vllm"])
def test_methods_of_async_llm(name):
    assert rows(getattr(AsyncLLM, name)) == expected(DATA["async_llm"][name])


def test_methods_of_llm_engine():
    assert rows(LLMEngine.add_request) == expected(DATA["llm_engine"]["add_request"], params=None)
    assert rows(LLMEngine.abort_request) == expected(DATA["llm_engine"]["abort_request"])


def test_llm_takes_a_model_and_keywords():
    (model, kind, _), *keywords = DATA["llm"]["__init__"]
    assert rows(LLM.__init__)[0][:2] == [model, kind] and {kind for _, kind, _ in keywords[:-1]} == {"keyword"}
    with pytest.raises(TypeError, match="positional"):
        LLM("a", "b")
    assert {name for name, _, _ in keywords[:-1]} - {"chat_template"} <= {field.name for field in fields(EngineArgs)}


def test_llm_takes_all_of_vllms_defaults(checkpoint):
    """But the share of a GPU, which this machine may not have."""
    given = {name: default for name, _, default in DATA["llm"]["__init__"][1:-1] if name != "gpu_memory_utilization"}
    assert LLM(checkpoint, offload_policy="load", **given).config == LLM(checkpoint, offload_policy="load").config


def test_each_name_of_engine_args_is_known_and_no_other():
    ours = {field.name for field in fields(EngineArgs)}
    assert ours == {*ARGS} | OWN
    assert not {*DEFAULTS} & {*WITHOUT_EFFECT} and {*HARMLESS} <= {*DEFAULTS}
    assert [field.name for field in fields(AsyncEngineArgs) if field.name not in ours] == ["enable_log_requests"]
    assert DATA["engine_args"]["AsyncEngineArgs"] == [["enable_log_requests", False]]


def test_defaults_of_engine_args():
    for field in fields(EngineArgs):
        if field.name not in OWN and field.name not in OTHER_DEFAULTS:
            theirs = ARGS[field.name]
            assert field.default == (None if isinstance(theirs, dict) else theirs), field.name
    assert all(ARGS[name] != EngineArgs.__dataclass_fields__[name].default for name in OTHER_DEFAULTS)


@pytest.mark.parametrize("name", [*DEFAULTS])
def test_what_only_vllm_has_is_taken_at_its_default_and_refused_in_words_else(name, checkpoint):
    default = DEFAULTS[name]
    EngineArgs(model=checkpoint, **{name: default}).engine_config()
    for value in HARMLESS.get(name, ()):
        EngineArgs(model=checkpoint, **{name: value}).engine_config()
    value = not default if isinstance(default, bool) else GIVEN_VALUES[type(default)]
    if value in HARMLESS.get(name, ()):
        return
    for refused in (EngineArgs, lambda **options: LLM(checkpoint, **options)):
        with pytest.raises(ValueError) as caught:
            refused(**{name: value})
        assert str(caught.value).startswith(f"vLLM has {name}, nanovllm has not: ")
        assert str(caught.value).endswith(f"leave it at {default!r} ({value!r} was given)")


@pytest.mark.parametrize("name", [*WITHOUT_EFFECT])
def test_what_has_no_effect_is_taken_at_any_value(name, checkpoint):
    plain = EngineArgs(model=checkpoint).engine_config()
    for value in (WITHOUT_EFFECT[name], GIVEN_VALUES[type(WITHOUT_EFFECT[name])], {"mode": 3}):
        assert EngineArgs(model=checkpoint, **{name: value}).engine_config() == plain


def test_beam_search():
    data = DATA["beam_search"]
    names = [field.name for field in fields(BeamSearchSequence)]
    assert names == [name for name, _ in data["BeamSearchSequence"]]
    assert {name for name, _ in data["BeamSearchOutput"]} <= {field.name for field in fields(BeamSearchOutput)}
    ours = {field.name: field.default for field in fields(BeamSearchParams)}
    theirs = {name: MISSING if isinstance(default, dict) else default for name, default in data["BeamSearchParams"]}
    assert ours == theirs | {"max_tokens": 16, "early_stopping": False}


def test_metrics():
    for kind in ("Counter", "Gauge", "Vector", "Histogram"):
        names = [field.name for field in fields(getattr(metrics, kind))]
        assert names == ["name", "labels", *(name for name, _ in DATA["metrics"][kind])]
