"""Names, kinds and defaults match vLLM 0.32's, which data/vllm_0_32/make_api.py reads from its source."""

import inspect
import json
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from .. import LLM, AsyncLLM, BeamSearchOutput, BeamSearchParams, BeamSearchSequence, LLMEngine, metrics
from ..options.engine_args import AsyncEngineArgs, EngineArgs
from ..options.vllm_options import CompatibilityOptions, ServeCompatibilityOptions

FOLDER = Path(__file__).parent / "data" / "vllm_0_32"
DATA = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.json")}
ARGS = dict(DATA["engine_args"]["EngineArgs"])
KINDS: dict = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional or keyword",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_KEYWORD: "any other keyword",
}
OWN = {
    *("kv_cache_tokens", "kv_offloading_tokens", "offload_policy", "tile_size", "device"),
    *("kv_disk_dir", "kv_disk_size", "kv_disk_save"),
}
OTHER_DEFAULTS = {  # where ours differs, and why
    "model": "the shipped checkpoint",
    "gpu_memory_utilization": "the default is 90% on a GPU, and a CPU has no share",
    "watermark": "the engine's own, 5%",
}


def test_data_is_of_version_0_32():
    assert {name: data["vllm"] for name, data in DATA.items() if "vllm" in data and name != "sampling_params"} == {
        name: "0.32" for name in ("llm", "engine_args", "llm_engine", "async_llm", "beam_search", "metrics", "bodies")
    }


def rows(function) -> list[list]:
    """Return [name, kind, default] of each parameter, as in the data."""
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    empty, required = inspect.Parameter.empty, {"required": True}
    return [[p.name, KINDS[p.kind], required if p.default is empty else p.default] for p in parameters]


def expected(signature: list[list], **ours) -> list[list]:
    """Return the rows of the data with `ours` as defaults. An expression, an object of vLLM's, is None here."""
    plain = [[*row[:2], None if isinstance(row[2], dict) and "expression" in row[2] else row[2]] for row in signature]
    return [[name, kind, ours.get(name, default)] for name, kind, default in plain]


@pytest.mark.parametrize("name", ["generate", "chat", "embed", "beam_search", "reset_prefix_cache"])
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


def test_options_that_vllm_has_too_have_its_defaults(checkpoint):
    for field in fields(EngineArgs):
        if field.name in ARGS and field.name not in OTHER_DEFAULTS:
            theirs = ARGS[field.name]
            assert field.default == (None if isinstance(theirs, dict) else theirs), field.name
    assert all(ARGS[name] != EngineArgs.__dataclass_fields__[name].default for name in OTHER_DEFAULTS)
    theirs = {name for name, _, _ in DATA["llm"]["__init__"][1:-1]} & {field.name for field in fields(EngineArgs)}
    defaults = {name: default for name, _, default in DATA["llm"]["__init__"] if name in theirs - {*OTHER_DEFAULTS}}
    assert LLM(checkpoint, offload_policy="load", **defaults).config == LLM(checkpoint, offload_policy="load").config


COMPATIBLE = fields(CompatibilityOptions)
OTHER_VALUES = {str: "another", int: 7, float: 0.5, type(None): "something", bool: True}


def test_at_most_40_options_of_vllm_are_accepted_without_effect():
    ours = {field.name for field in fields(EngineArgs)} - {field.name for field in COMPATIBLE}
    assert len(COMPATIBLE) <= 40 and ours <= {*ARGS} | OWN
    serve = fields(ServeCompatibilityOptions)
    assert all(field.default in (None, ARGS.get(field.name, field.default)) for field in serve)
    more = {field.name: field.metadata.get("accepted") for field in serve}
    assert len(more) <= 40 and not more.keys() & {field.name for field in fields(EngineArgs)}
    for name, accepted in more.items():
        assert not accepted or ARGS.get(name, accepted[0]) in accepted, f"vLLM's default of {name}"
    assert [
        field.name for field in fields(AsyncEngineArgs) if field.name not in {f.name for f in fields(EngineArgs)}
    ] == ["enable_log_requests"]


@pytest.mark.parametrize("option", COMPATIBLE, ids=lambda option: option.name)
def test_compatible_options_change_nothing(option, checkpoint):
    plain, other = EngineArgs(model=checkpoint).engine_config(), OTHER_VALUES[type(option.default)]
    accepted = option.metadata.get("accepted", (option.default, other, {"mode": 3}))
    for value in (*accepted, None):
        assert EngineArgs(model=checkpoint, **{option.name: value}).engine_config() == plain
    if "accepted" in option.metadata:
        for make in (EngineArgs, lambda **options: LLM(checkpoint, **options)):
            with pytest.raises(ValueError, match=rf"{option.name} must be .*{option.default!r}.*, got {other!r}"):
                make(**{option.name: other})


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
