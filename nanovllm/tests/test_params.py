"""SamplingParams and outputs are vLLM 0.32's: names, order, defaults, readings. What cannot be is one clear line."""

import copy
import inspect
import json
import math
import pickle
from dataclasses import fields, replace
from enum import Enum
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

from .. import (
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    RepetitionDetectionParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from ..engine.sampling_params import GONE, MAX_POSITIONAL, REFUSED

np = pytest.importorskip("numpy")
DATA = json.loads((Path(__file__).parent / "data" / "vllm_0_32" / "sampling_params.json").read_text())
OWN = "output_text_buffer_length"  # like the names with an underscore, it is set by vLLM, not by a caller
FIELDS = [name for name, _ in DATA["SamplingParams"] if name[0] != "_" and name != OWN]


def refused(**options) -> str:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Names, kinds and defaults, as the data has them (nanovllm/tests/data/vllm_0_32/make_sampling_params.py made it)


def test_the_parameters_are_vllms_in_its_order_with_its_defaults():
    ours = inspect.signature(SamplingParams).parameters.values()
    shown = [(each.name, str(each.default) if isinstance(each.default, Enum) else each.default) for each in ours]
    assert shown == [(name, default) for name, default in DATA["SamplingParams"] if name in FIELDS]
    assert {each.kind for each in ours} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert [field.name for field in fields(SamplingParams)] == FIELDS


def test_a_positional_argument_is_the_same_field():
    names = [name for name, _ in DATA["SamplingParams"]]
    assert names[:MAX_POSITIONAL] == FIELDS[:MAX_POSITIONAL] and names[MAX_POSITIONAL] == OWN
    assert SamplingParams(2, 0.5, -0.5, 1.1, 0.7) == SamplingParams(
        n=2, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.1, temperature=0.7
    )
    with pytest.raises(ValueError, match="29 positional arguments: give those behind 28 by name"):
        SamplingParams(*range(29))


def test_from_optional_takes_what_vllms_takes():
    taken = {name: default for name, default in DATA["SamplingParams.from_optional"] if name != "output_kind"}
    assert SamplingParams.from_optional(**taken) == SamplingParams()
    assert SamplingParams.from_optional(n=None, temperature=None, top_p=None) == SamplingParams()
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    bias = SamplingParams.from_optional(logit_bias={"5": 500, 6: -101.0, 7: 1}).logit_bias
    assert bias == {5: 100, 6: -100, 7: 1}


def test_other_classes_have_vllms_names():
    assert [[kind.name, kind.value] for kind in RequestOutputKind] == DATA["RequestOutputKind"]
    assert {*vars(FlatLogprobs())} == {name for name, _ in DATA["FlatLogprobs"]}
    for kind in (RepetitionDetectionParams, Logprob, CompletionOutput, RequestOutput):
        there = {name for name, _ in DATA[kind.__name__]}
        assert there - {*get_type_hints(kind)} == NOT_HERE.get(kind, set())


NOT_HERE = {
    CompletionOutput: {"routed_experts", "sampling_mask", "spec_decode_metrics", "weight_versions"},
    RequestOutput: {"encoder_prompt", "encoder_prompt_token_ids", "num_cache_creation_tokens"}
    | {"prompt_token_id_logprobs", "kv_transfer_params", "ec_transfer_params"},
}


# How a value is read


@pytest.mark.parametrize(
    ("name", "given", "read"),
    [
        ("top_k", -1, 0),
        ("seed", -1, None),
        ("logprobs", True, 1),
        ("prompt_logprobs", True, 1),
        ("stop", None, []),
        ("stop", "end", ["end"]),
        ("stop", ("a", "b"), ["a", "b"]),
        ("stop_token_ids", None, []),
        ("stop_token_ids", [3, 1, 3], [3, 1]),
        ("stop_token_ids", np.array([3, 1]), [3, 1]),
        ("bad_words", ["a", "b", "a"], ["a", "b"]),
        ("stop_token_ids", torch.tensor([3, 1]), [3, 1]),
        ("allowed_token_ids", (np.int64(4),), [4]),
        ("max_tokens", np.int32(4), 4),
        ("temperature", 1, 1.0),
        ("logit_bias", {"7": 1, 8: -math.inf}, {7: 1, 8: -math.inf}),
        ("watermarking", False, False),
        ("extra_args", {}, {}),
        ("thinking_token_budget", -1, -1),
    ],
)
def test_a_value_is_read_as_vllm_reads_it(name, given, read):
    value = getattr(SamplingParams(**{name: given}), name)
    assert value == read and type(value) is type(read)


def test_a_temperature_too_low_for_float32_is_raised_and_said():
    with pytest.warns(UserWarning, match=r"temperature 0.001 is below 0.01: 0.01 is taken") as caught:
        params = SamplingParams(temperature=0.001)
    assert params.temperature == 0.01 and caught[0].filename == __file__


def test_greedy_params_have_nothing_else_to_say():
    params = SamplingParams(temperature=0, top_p=0.5, top_k=7, min_p=0.2)
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)


# What cannot be


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or above, not -0.1"),
        ({"temperature": math.nan}, "temperature must be 0 or above, not nan"),
        ({"temperature": math.inf}, "temperature must be 0 or above, not inf"),
        ({"top_k": -3}, "top_k must be a whole number, 0 or -1 (all) or above, not -3"),
        ({"top_k": 2.5}, "top_k must be a whole number, 0 or -1 (all) or above, not 2.5"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, not 0.0"),
        ({"top_p": 1.01}, "top_p must be above 0 and at most 1, not 1.01"),
        ({"top_p": math.nan}, "top_p must be above 0 and at most 1, not nan"),
        ({"max_tokens": 0}, "max_tokens must be a whole number, at least 1, not 0"),
        ({"max_tokens": math.nan}, "max_tokens must be a whole number, at least 1, not nan"),
        ({"n": 10**12}, "n must be a whole number, at least 1, and at most 16,384, not 1000000000000"),
        ({"n": 0}, "n must be a whole number, at least 1, and at most 16,384, not 0"),
        ({"n": True}, "n must be a whole number, at least 1, and at most 16,384, not True"),
        ({"n": 1.5}, "n must be a whole number, at least 1, and at most 16,384, not 1.5"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number, at least 1, not 1.5"),
        ({"max_tokens": True}, "max_tokens must be a whole number, at least 1, not True"),
        ({"max_tokens": "16"}, "max_tokens must be a whole number, at least 1, not '16'"),
        ({"temperature": "warm"}, "temperature must be 0 or above, not 'warm'"),
        ({"temperature": True}, "temperature must be 0 or above, not True"),
        ({"temperature": None}, "temperature must be 0 or above, not None"),
        ({"top_k": True}, "top_k must be a whole number, 0 or -1 (all) or above, not True"),
        ({"top_p": "0.5"}, "top_p must be above 0 and at most 1, not '0.5'"),
        ({"seed": 1.0}, "seed must be a whole number of 64 bits, not 1.0"),
        ({"seed": "1"}, "seed must be a whole number of 64 bits, not '1'"),
        ({"seed": False}, "seed must be a whole number of 64 bits, not False"),
        ({"seed": 2**63}, "seed must be a whole number of 64 bits, not 9223372036854775808"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, not 1"),
        ({"ignore_eos": None}, "ignore_eos must be True or False, not None"),
        ({"stop": ""}, "stop must be a text or several, none of them empty, not ['']"),
        ({"stop": ["a", ""]}, "stop must be a text or several, none of them empty, not ['a', '']"),
        ({"stop": [13]}, "stop must be a text or several, none of them empty, not [13]"),
        ({"stop": 5}, "stop must be a text or several, none of them empty, not 5"),
        ({"stop": b"end"}, "stop must be a text or several, none of them empty, not b'end'"),
        ({"stop_token_ids": "13"}, "stop_token_ids must be a list of token ids, not '13'"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a list of token ids, not 3"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids must be a list of token ids, not [1.0]"),
        ({"presence_penalty": 2.5}, "presence_penalty must be from -2 to 2, not 2.5"),
        ({"frequency_penalty": "a"}, "frequency_penalty must be from -2 to 2, not 'a'"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0, not 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be above 0, not inf"),
        ({"min_p": 1.5}, "min_p must be from 0 to 1, not 1.5"),
        ({"top_k": -2}, "top_k must be a whole number, 0 or -1 (all) or above, not -2"),
        ({"top_k": 2.0}, "top_k must be a whole number, 0 or -1 (all) or above, not 2.0"),
        ({"min_tokens": -1}, "min_tokens must be a whole number, 0 or above, not -1"),
        ({"min_tokens": 17}, "min_tokens is 17, above max_tokens, which is 16"),
        ({"logprobs": False}, "logprobs must be a whole number, 0 or above, or -1 for all, not False"),
        ({"stop": ["a", ""]}, "stop must be a text or several, none of them empty, not ['a', '']"),
        ({"stop": 0}, "stop must be a text or several, none of them empty, not 0"),
        ({"stop": "a", "detokenize": False}, "stop is ['a'], and detokenize is False: there is no text to find it in"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids must be a list of token ids, not [1, '2']"),
        ({"stop_token_ids": b"a"}, "stop_token_ids must be a list of token ids, not b'a'"),
        ({"stop_token_ids": torch.tensor(5)}, "stop_token_ids must be a list of token ids, not 5"),
        ({"bad_words": "fox"}, "bad_words must be a list of texts, none of them empty, not 'fox'"),
        ({"bad_words": [["fox"]]}, "bad_words must be a list of texts, none of them empty, not [['fox']]"),
        ({"allowed_token_ids": []}, "allowed_token_ids must be a list of token ids, at least one, not []"),
        ({"logit_bias": {"fox": 1}}, "logit_bias must be a dict from token ids to numbers, not {'fox': 1}"),
        ({"logit_bias": {1: math.nan}}, "logit_bias must be a dict from token ids to numbers, not {1: nan}"),
        ({"logit_bias": {1: math.inf}}, "logit_bias must be a dict from token ids to numbers, not {1: inf}"),
        ({"output_kind": 1}, "output_kind must be a RequestOutputKind, not 1"),
        ({"stream_interval": 0}, "stream_interval must be a whole number, at least 1, not 0"),
        ({"skip_special_tokens": 1}, "skip_special_tokens must be True or False, not 1"),
        ({"repetition_detection": {}}, "repetition_detection must be a RepetitionDetectionParams, not {}"),
        (
            {"logprob_token_ids": [4, 5], "logprobs": 3},
            "logprobs is 3, and there are 2 logprob_token_ids: leave it out",
        ),
        (
            {"prompt_logprobs": 1, "skip_reading_prefix_cache": False},
            "skip_reading_prefix_cache is False, and prompt_logprobs are of what is computed, not cached",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_named_with_its_value(options, says):
    assert refused(**options) == says


NO_VALUES: list[object] = [[[]], [None], 1j, object(), math.nan, torch.ones(2, 2)]


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
@pytest.mark.parametrize("value", NO_VALUES, ids=lambda value: type(value).__name__)
def test_no_parameter_takes_what_is_no_value_at_all(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be .+, not .+$"):
        SamplingParams(**{name: value})


def test_a_number_too_large_for_a_float_is_named():
    assert refused(temperature=10**400).startswith("temperature must be 0 or above, not 10000")


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), max_tokens=np.uint8(7), seed=np.int32(-2))
    assert params == SamplingParams(temperature=0.5, top_k=3, max_tokens=7, seed=-2)
    assert type(params.temperature) is float and type(params.max_tokens) is type(params.seed) is int


def test_a_long_value_is_cut():
    assert len(refused(allowed_token_ids=[*range(10000), "a"])) < 300


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_taken_at_its_default_only_and_refused_with_a_reason(name):
    taken, why = REFUSED[name]
    assert all(SamplingParams(**{name: each}) for each in taken)
    for value in ({"a": 1}, np.array([[1, 2]]), 7):
        assert refused(**{name: value}).endswith(f": {why}")
    assert "\n" not in refused(**{name: np.zeros((3, 3))})


@pytest.mark.parametrize("name", GONE)
def test_what_vllm_had_before_is_refused_with_what_took_its_place(name):
    assert refused(**{name: None}) == f"SamplingParams has no {name} any more: {GONE[name]}"
    assert name not in FIELDS


NEAR = {"temprature": "temperature", "max_token": "max_tokens", "topk": "top_k"}


@pytest.mark.parametrize(("name", "near"), NEAR.items())
def test_an_unknown_name_gets_the_nearest(name, near):
    assert refused(**{name: 1}) == f"SamplingParams has no '{name}': did you mean {near}?"
    assert refused(xyz=1).startswith("SamplingParams has no 'xyz'; it has n, presence_penalty,")


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((-1, 0, 2), "max_pattern_size must be a whole number, 0 or above, not -1"),
        ((2, 3, 2), "min_pattern_size is 3, above max_pattern_size, which is 2"),
        ((2, 1, 1), "min_count must be 2 or above where max_pattern_size is set, not 1"),
    ],
)
def test_a_repetition_that_is_none_is_refused(sizes, says):
    with pytest.raises(ValueError) as caught:
        RepetitionDetectionParams(*sizes)
    assert str(caught.value) == says


# Scripts set fields of them, and hand them on


def test_they_can_be_set_and_a_request_checks_what_was_set():
    params = SamplingParams()
    params.max_tokens, params.stop, params.top_k = 5, "end", -1
    taken = params.checked()
    assert (taken.max_tokens, taken.stop, taken.top_k) == (5, ["end"], 0)
    params.temperature = "hot"
    with pytest.raises(ValueError, match="temperature must be 0 or above, not 'hot'"):
        params.checked()
    del params.temperature
    assert params.temperature == 1.0, "a default is there again"


def test_a_request_has_lists_of_its_own():
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, bad_words=["b"], allowed_token_ids=[1], stop_token_ids=[2])
    taken = params.checked()
    params.stop.append("c")
    params.logit_bias[3] = 1.0
    for each in (params.bad_words, params.allowed_token_ids, params.stop_token_ids):
        each.append(7)
    assert taken == SamplingParams(
        stop=["a"], logit_bias={1: 2.0}, bad_words=["b"], allowed_token_ids=[1], stop_token_ids=[2]
    )


def test_a_clone_is_a_deep_copy_unless_it_need_not_be():
    params = SamplingParams(stop=["a"])
    assert params.clone() == params and params.clone().stop is not params.stop
    params.skip_clone = True
    assert params.clone() is not params and params.clone().stop is params.stop
    assert pickle.loads(pickle.dumps(params)) == copy.copy(params) == params == replace(params)
    assert replace(params, n=2).n == 2


@pytest.mark.parametrize("params", [None, {"n": 2}, "greedy"])
def test_a_value_of_another_type_is_not_taken_for_parameters(params):
    with pytest.raises(ValueError, match=f"sampling_params must be SamplingParams, not {type(params).__name__}"):
        SamplingParams.of(params)


# FlatLogprobs


def test_flat_logprobs_read_as_a_list_of_dicts():
    places = [None, {3: Logprob(-0.5, 1, "a"), 1: Logprob(-1.5, 2)}, {7: Logprob(-0.1, 1)}]
    flat = FlatLogprobs(places)
    assert [*flat] == [{}, *places[1:]] and flat[-1] == places[2] and len(flat) == 3
    assert flat[1:] == FlatLogprobs(places[1:]) and [*flat[:0]] == []
    assert (flat.start_indices, flat.end_indices, flat.token_ids) == ([0, 0, 2], [0, 2, 3], [3, 1, 7])
    with pytest.raises(IndexError):
        flat[3]
