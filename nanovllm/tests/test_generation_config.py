"""What a checkpoint recommends counts where a request brings no parameters, only there. Its EOS ids always stop."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .. import LLM, SamplingParams
from ..checkpoints.model_config import default_sampling_params, eos_token_ids
from .helpers import OPTIONS, write_checkpoint

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
    """A checkpoint that recommends ALL, and names an EOS of its own beside that of config.json."""
    return write(write_checkpoint(tmp_path), **ALL, do_sample=False, eos_token_id=[9, 8], bos_token_id=1)


def test_a_value_that_cannot_be_is_told_to_be_the_checkpoints(folder):
    write(folder, temperature=-3)
    with pytest.raises(ValueError, match=rf"generation_config of {folder}: temperature must be 0 or above, not -3"):
        LLM(folder, **OPTIONS)


def test_each_parameter_is_read_and_nothing_else(folder):
    assert default_sampling_params(folder) == AS_PARAMS
    assert SamplingParams(**AS_PARAMS).max_tokens == 7


def test_null_is_not_given_and_zero_is(tmp_path):
    assert default_sampling_params(write(tmp_path, temperature=0, top_k=None, top_p=1.0)) == {
        "temperature": 0,
        "top_p": 1.0,
    }
    assert default_sampling_params(write(tmp_path)) == {}


def test_vllm_stands_for_none_and_a_folder_for_its_own(folder, tmp_path):
    assert default_sampling_params(folder, "vllm") == {}
    other = write(tmp_path / "other", top_p=0.5)
    assert default_sampling_params(folder, other) == default_sampling_params(folder, str(other)) == {"top_p": 0.5}
    with pytest.raises(ValueError, match="generation_config must be auto, vllm or a folder, not 'best'"):
        default_sampling_params(folder, "best")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty is not a checkpoint folder: it has no config"):
        default_sampling_params(folder, tmp_path / "empty")


def test_an_override_comes_on_top_of_each(folder):
    override = {"temperature": 0.0, "max_new_tokens": 3, "top_k": None, "seed": 5}
    over_all = {name: value for name, value in AS_PARAMS.items() if name != "top_k"} | {
        "temperature": 0.0,
        "max_tokens": 3,
    }
    assert default_sampling_params(folder, override=override) == over_all
    assert default_sampling_params(folder, "vllm", override) == {"temperature": 0.0, "max_tokens": 3}


def test_an_old_config_json_gives_its_own_where_there_is_no_other_file(tmp_path):
    assert default_sampling_params(write(tmp_path, "config.json", **ALL)) == {"min_p": 0.1, "max_tokens": 7}
    assert default_sampling_params(write(tmp_path, top_p=0.5)) == {"top_p": 0.5}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", ["0.5", True, [1], {}, float("nan")], ids=repr)
def test_a_value_of_the_wrong_type_is_named_with_its_file(tmp_path, name, value):
    with pytest.raises(
        ValueError, match=rf"generation_config.json: {name} must be a number, not {re.escape(repr(value))}"
    ):
        default_sampling_params(write(tmp_path, **{name: value}))


# In the engine


def test_only_a_request_without_parameters_gets_them(folder):
    llm = LLM(write(folder, **ALL | {"temperature": 0.0}), **OPTIONS)
    assert vars(llm.get_default_sampling_params()) == vars(SamplingParams(**AS_PARAMS | {"temperature": 0.0}))
    lengths = [len(llm.generate([[1, 300]], params)[0].outputs[0].token_ids) for params in (None, SamplingParams())]
    assert lengths[0] == 7 < lengths[1]
    llm.get_default_sampling_params().temperature = 2.0
    assert llm.get_default_sampling_params().temperature == 0.0, "what is handed out is a copy"


@pytest.mark.parametrize(
    ("options", "max_tokens", "temperature"),
    [
        ({"generation_config": "vllm"}, 16, 1.0),
        ({"override_generation_config": {"temperature": 0.5}}, 7, 0.5),
        ({"generation_config": "vllm", "override_generation_config": {"max_new_tokens": 4}}, 4, 1.0),
    ],
)
def test_an_option_says_otherwise(folder, options, max_tokens, temperature):
    params = LLM(folder, **OPTIONS, **options).get_default_sampling_params()
    assert (params.max_tokens, params.temperature) == (max_tokens, temperature)


@pytest.mark.parametrize("entries", [{"temperature": -1}, {"top_p": 3}, {"top_k": 1.5}])
def test_a_value_that_cannot_be_is_refused_before_weights_are_read(tmp_path, entries):
    folder = write(write_checkpoint(tmp_path), **entries)
    (folder / "model.safetensors").write_bytes(b"poison")
    with pytest.raises(ValueError, match=f"generation_config of .*: {next(iter(entries))} must be"):
        LLM(folder, **OPTIONS)


def test_ends_of_a_text_stop_whatever_the_parameters_are_from(folder, tmp_path):
    """The ids that generation_config.json names, and the tokenizer's: all stop; ignore_eos goes past all of them."""
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
        [stopped, going_on] = llm.generate([[1, 300]] * 2, [SamplingParams(temperature=0.0, max_tokens=12), greedy])
        assert stopped.outputs[0].token_ids == free_run[:length] and stopped.outputs[0].finish_reason == "stop"
        assert going_on.outputs[0].token_ids == free_run


def test_ends_of_a_folder_are_those_of_generation_config_or_else_of_config(folder):
    assert eos_token_ids(folder) == (9, 8)
    (folder / "generation_config.json").unlink()
    assert eos_token_ids(folder) == (2,)
