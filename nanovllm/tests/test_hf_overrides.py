"""hf_overrides: entries of config.json in place of the checkpoint's."""

import json

import pytest

from .. import LLM, SamplingParams
from ..checkpoints.model_config import read_model_config
from .testing.checkpoints import CONFIG, write_checkpoint
from .testing.engines import OPTIONS

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def config_of(folder, overrides=None, **entries):
    """Return the model config of a config.json with these entries."""
    (folder / "config.json").write_text(json.dumps(CONFIG | entries))
    return read_model_config(folder, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        {"max_position_embeddings": 256},
        {"rope_theta": 5e5},
        {"rope_scaling": LINEAR},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        {"rope_parameters": LLAMA3, "max_position_embeddings": 512},
        {"rope_scaling": None, "rms_norm_eps": 1e-3},
        {"tie_word_embeddings": True, "sliding_window": 8},
        {"of_another_model": {"a": 1}},
        {},
    ],
)
def test_overrides_are_entries_of_config_json(overrides, tmp_path):
    assert config_of(tmp_path, overrides) == config_of(tmp_path, **overrides)


@pytest.mark.parametrize("before", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("after", ["rope_scaling", "rope_parameters"])
def test_overrides_win_under_either_name_of_rope(before, after, tmp_path):
    entries = {before: LINEAR | {"rope_theta": 5e5}}
    assert config_of(tmp_path, {after: LLAMA3}, **entries) == config_of(tmp_path, rope_scaling=LLAMA3, rope_theta=5e5)
    assert config_of(tmp_path, {after: None}, **entries) == config_of(tmp_path, rope_theta=5e5)
    theta = config_of(tmp_path, rope_scaling=LINEAR, rope_theta=7e5)
    assert config_of(tmp_path, {"rope_theta": 7e5}, **entries) == theta
    assert config_of(tmp_path, {after: LINEAR | {"rope_theta": 7e5}}, **entries) == theta


def test_engine_runs_the_overridden_model(tmp_path):
    for name in ("plain", "scaled"):
        (tmp_path / name).mkdir()
    write_checkpoint(tmp_path / "plain")
    scaled = LLM(write_checkpoint(tmp_path / "scaled", rope_scaling=LINEAR, max_position_embeddings=128), **OPTIONS)
    overrides = {"rope_scaling": LINEAR, "max_position_embeddings": 128}
    llm = LLM(tmp_path / "plain", hf_overrides=overrides, **OPTIONS)
    prompt = [1, *range(10, 80)]  # longer than the checkpoint's own positions
    [expected], [output] = scaled.generate(prompt, GREEDY), llm.generate(prompt, GREEDY)
    assert llm.max_model_len == 128 and output.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        ([1], r"hf_overrides must be a dict.*, got \[1\]"),
        ({"hidden_size": "32"}, "config.json with hf_overrides: hidden_size must be a positive integer, got '32'"),
        ({"architectures": ["Gpt"]}, r"config.json with hf_overrides: unsupported model \['Gpt'\]"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "with hf_overrides: rope type must be .*, got 'yarn'"),
        ({"rope_scaling": "linear"}, "with hf_overrides: rope_.* must be an object, got 'linear'"),
        ({"rope_theta": "1"}, "with hf_overrides: rope_theta must be a positive number, got '1'"),
    ],
)
def test_wrong_override_is_one_clear_error(overrides, error, checkpoint):
    with pytest.raises(ValueError, match=error):
        LLM(checkpoint, hf_overrides=overrides, **OPTIONS)
