"""generation_config.json: its sampling parameters apply to requests without any; its EOS ids stop every request."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .. import LLM, SamplingParams
from ..checkpoints.model_config import default_sampling_params, eos_token_ids
from .testing.checkpoints import write_checkpoint
from .testing.engines import OPTIONS

ALL = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.25,
    "frequency_penalty": 0.5,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.1,
    "max_new_tokens": 7,
}
AS_PARAMS = {name: value for name, value in ALL.items() if name != "max_new_tokens"} | {"max_tokens": 7}


def write(folder: Path, name: Any = "generation_config.json", **entries: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(entries))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkpoint that recommends ALL, and whose EOS ids differ from those in config.json."""
    return write(write_checkpoint(tmp_path), **ALL, do_sample=False, eos_token_id=[9, 8], bos_token_id=1)


def test_error_for_an_invalid_value_names_the_checkpoint(folder):
    write(folder, temperature=-3)
    with pytest.raises(ValueError, match=rf"generation_config of {folder}: temperature must be .*-3"):
        LLM(folder, **OPTIONS)


def test_reads_every_sampling_parameter_and_nothing_else(folder):
    assert default_sampling_params(folder) == AS_PARAMS
    assert SamplingParams(**AS_PARAMS).max_tokens == 7


def test_null_is_missing_and_zero_is_a_value(tmp_path):
    assert default_sampling_params(write(tmp_path, temperature=0, top_k=None, top_p=1.0)) == {
        "temperature": 0,
        "top_p": 1.0,
    }
    assert default_sampling_params(write(tmp_path)) == {}


def test_generation_config_is_vllm_or_another_folder(folder, tmp_path):
    assert default_sampling_params(folder, "vllm") == {}
    other = write(tmp_path / "other", top_p=0.5)
    assert default_sampling_params(folder, other) == default_sampling_params(folder, str(other)) == {"top_p": 0.5}
    with pytest.raises(ValueError, match="generation_config must be auto, vllm or a folder, got 'best'"):
        default_sampling_params(folder, "best")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty is not a checkpoint folder: it has no config"):
        default_sampling_params(folder, tmp_path / "empty")


def test_overrides_win(folder):
    override = {"temperature": 0.0, "max_new_tokens": 3, "top_k": None, "seed": 5}
    expected = {name: value for name, value in AS_PARAMS.items() if name != "top_k"} | {
        "temperature": 0.0,
        "max_tokens": 3,
    }
    assert default_sampling_params(folder, override=override) == expected
    assert default_sampling_params(folder, "vllm", override) == {"temperature": 0.0, "max_tokens": 3}


def test_old_config_json_counts_if_generation_config_json_is_missing(tmp_path):
    assert default_sampling_params(write(tmp_path, "config.json", **ALL)) == {"min_p": 0.1, "max_tokens": 7}
    assert default_sampling_params(write(tmp_path, top_p=0.5)) == {"top_p": 0.5}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", ["0.5", True, [1], {}, float("nan")], ids=repr)
def test_error_for_a_wrong_type_names_the_file_and_the_entry(tmp_path, name, value):
    with pytest.raises(
        ValueError, match=rf"generation_config.json: {name} must be a number, got {re.escape(repr(value))}"
    ):
        default_sampling_params(write(tmp_path, **{name: value}))


# In the engine


def test_only_requests_without_parameters_get_the_defaults(folder):
    llm = LLM(write(folder, **ALL | {"temperature": 0.0}), **OPTIONS)
    assert vars(llm.get_default_sampling_params()) == vars(SamplingParams(**AS_PARAMS | {"temperature": 0.0}))
    lengths = [len(llm.generate([[1, 300]], params)[0].outputs[0].token_ids) for params in (None, SamplingParams())]
    assert lengths[0] == 7 < lengths[1]
    llm.get_default_sampling_params().temperature = 2.0
    assert llm.get_default_sampling_params().temperature == 0.0, "the caller got a copy"


@pytest.mark.parametrize(
    ("options", "max_tokens", "temperature"),
    [
        ({"generation_config": "vllm"}, 16, 1.0),
        ({"override_generation_config": {"temperature": 0.5}}, 7, 0.5),
        ({"generation_config": "vllm", "override_generation_config": {"max_new_tokens": 4}}, 4, 1.0),
    ],
)
def test_options_change_the_defaults(folder, options, max_tokens, temperature):
    params = LLM(folder, **OPTIONS, **options).get_default_sampling_params()
    assert (params.max_tokens, params.temperature) == (max_tokens, temperature)


@pytest.mark.parametrize("entries", [{"temperature": -1}, {"top_p": 3}, {"top_k": 1.5}])
def test_invalid_value_is_rejected_before_weights_are_read(tmp_path, entries):
    folder = write(write_checkpoint(tmp_path), **entries)
    (folder / "model.safetensors").write_bytes(b"invalid")
    with pytest.raises(ValueError, match=f"generation_config of .*: {next(iter(entries))} must be"):
        LLM(folder, **OPTIONS)


def test_eos_ids_stop_requests_with_and_without_parameters(folder, tmp_path):
    """All EOS ids of generation_config.json and of the tokenizer stop a request, unless ignore_eos is set."""
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    free_run = LLM(folder, **OPTIONS).generate([[1, 300]], greedy)[0].outputs[0].token_ids
    ends = sorted({*free_run[3:]} - {*free_run[:3]})[:2]
    write(folder, eos_token_id=ends)
    other = write(tmp_path / "other", eos_token_id=free_run[1])
    first = min(map(free_run.index, ends))
    for options, length in (
        ({}, first + 1),
        ({"generation_config": "vllm"}, first + 1),
        ({"generation_config": other}, 2),
    ):
        llm = LLM(folder, **OPTIONS, **options)
        [stopped, ignoring] = llm.generate([[1, 300]] * 2, [SamplingParams(temperature=0.0, max_tokens=12), greedy])
        assert stopped.outputs[0].token_ids == free_run[:length] and stopped.outputs[0].finish_reason == "stop"
        assert ignoring.outputs[0].token_ids == free_run


def test_eos_ids_come_from_generation_config_or_else_from_config(folder):
    assert eos_token_ids(folder) == (9, 8)
    (folder / "generation_config.json").unlink()
    assert eos_token_ids(folder) == (2,)
