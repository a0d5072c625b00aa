"""SamplingParams and outputs match vLLM 0.32: names, order, defaults, normalization, and errors for invalid values."""

import copy
import inspect
import json
import math
import pickle
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

from .. import (
    CompletionOutput,
    Logprob,
    RepetitionDetectionParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from ..requests.sampling_params import UNSUPPORTED

np = pytest.importorskip("numpy")
DATA = json.loads((Path(__file__).parent / "data" / "vllm_0_32" / "sampling_params.json").read_text())
OWN = "output_text_buffer_length"  # set by vLLM itself, like the names with an underscore
FIELDS = [name for name, _ in DATA["SamplingParams"] if name[0] != "_" and name != OWN]


def refused(**options) -> str:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Names, order and defaults, from the data that nanovllm/tests/data/vllm_0_32/make_sampling_params.py has made


def test_fields_have_vllms_order_and_defaults():
    ours = inspect.signature(SamplingParams).parameters.values()
    defaults = [(each.name, str(each.default) if isinstance(each.default, Enum) else each.default) for each in ours]
    assert defaults == [(name, default) for name, default in DATA["SamplingParams"] if name in FIELDS]
    assert {each.kind for each in ours} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert [field.name for field in fields(SamplingParams)] == FIELDS


def test_positional_arguments_are_vllms():
    assert SamplingParams(2, 0.5, -0.5, 1.1, 0.7) == SamplingParams(
        n=2, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.1, temperature=0.7
    )


def test_from_optional_accepts_vllms_arguments():
    defaults = {name: default for name, default in DATA["SamplingParams.from_optional"] if name != "output_kind"}
    assert SamplingParams.from_optional(**defaults) == SamplingParams()
    assert SamplingParams.from_optional(n=None, temperature=None, top_p=None) == SamplingParams()
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    bias = SamplingParams.from_optional(logit_bias={"5": 500, 6: -101.0, 7: 1}).logit_bias
    assert bias == {5: 100, 6: -100, 7: 1}


def test_other_classes_have_vllms_names():
    assert [[kind.name, kind.value] for kind in RequestOutputKind] == DATA["RequestOutputKind"]
    for kind in (RepetitionDetectionParams, Logprob, CompletionOutput, RequestOutput):
        names = {name for name, _ in DATA[kind.__name__]}
        assert names - {*get_type_hints(kind)} == MISSING.get(kind, set())


MISSING = {
    CompletionOutput: {"routed_experts", "sampling_mask", "spec_decode_metrics", "weight_versions"},
    RequestOutput: {"encoder_prompt", "encoder_prompt_token_ids", "num_cache_creation_tokens"}
    | {"prompt_token_id_logprobs", "kv_transfer_params", "ec_transfer_params"},
}


# Normalization


@pytest.mark.parametrize(
    ("name", "value", "normalized"),
    [
        ("top_k", -1, 0),
        ("seed", -1, None),
        ("logprobs", True, 1),
        ("prompt_logprobs", True, 1),
        ("stop", None, []),
        ("stop", "end", ["end"]),
        ("stop", ("a", "b"), ["a", "b"]),
        ("stop_token_ids", None, []),
        ("stop_token_ids", np.array([3, 1]), [3, 1]),
        ("stop_token_ids", torch.tensor([3, 1]), [3, 1]),
        ("allowed_token_ids", (np.int64(4),), [4]),
        ("max_tokens", np.int32(4), 4),
        ("temperature", 1, 1.0),
        ("logit_bias", {"7": 1, 8: -math.inf}, {7: 1, 8: -math.inf}),
        ("watermarking", False, False),
        ("extra_args", {}, {}),
        ("thinking_token_budget", -1, None),
    ],
)
def test_value_is_normalized_as_in_vllm(name, value, normalized):
    result = getattr(SamplingParams(**{name: value}), name)
    assert result == normalized and type(result) is type(normalized)


def test_temperature_too_small_for_float32_is_raised_with_a_warning():
    with pytest.warns(UserWarning, match=r"temperature 0.001 .* 0.01") as caught:
        params = SamplingParams(temperature=0.001)
    assert params.temperature == 0.01 and caught[0].filename == __file__


def test_greedy_sampling_resets_top_p_top_k_and_min_p():
    params = SamplingParams(temperature=0, top_p=0.5, top_k=7, min_p=0.2)
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)


# Invalid values


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [0, 10**12, True, 1.5]),
        ("temperature", [-0.1, math.nan, math.inf, "warm", True, None, 10**30 * 1j]),
        ("top_k", [-2, -3, 2.5, 2.0, True]),
        ("top_p", [0.0, 1.01, math.nan, "0.5"]),
        ("min_p", [1.5]),
        ("max_tokens", [0, math.nan, 1.5, True, "16"]),
        ("min_tokens", [-1]),
        ("seed", [1.0, "1", False, 2**63, -(2**63) - 1]),
        ("ignore_eos", [1, None]),
        ("stop", [["a", ""], [13], 5, b"end", 0]),
        ("stop_token_ids", ["13", 3, [1.0], [1, "2"], b"a"]),
        ("bad_words", ["fox", [["fox"]], [""]]),
        ("allowed_token_ids", [[]]),
        ("presence_penalty", [2.5]),
        ("frequency_penalty", ["a", -2.1]),
        ("repetition_penalty", [0, 1e-300, 1e300, math.inf]),
        ("logprobs", [False, -2]),
        ("logit_bias", [{"fox": 1}, {1: math.nan}, {1: math.inf}, {1: 1e39}]),
        ("output_kind", [1]),
        ("stream_interval", [0]),
        ("skip_special_tokens", [1]),
        ("repetition_detection", [{}]),
    ],
)
def test_invalid_value_is_named(name, values):
    for value in values:
        message = refused(**{name: value})
        assert message.startswith(f"{name} must be ") and message.endswith(f", got {value!r}")


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"min_tokens": 17}, ("min_tokens", "max_tokens", "17", "16")),
        ({"stop": ""}, ("stop", "['']")),
        ({"stop": "a", "detokenize": False}, ("stop=['a']", "detokenize")),
        ({"stop_token_ids": torch.tensor(5)}, ("stop_token_ids", "5")),
        ({"logprob_token_ids": [4, 5], "logprobs": 3}, ("logprobs", "logprob_token_ids", "2", "3")),
        ({"prompt_logprobs": 1, "skip_reading_prefix_cache": False}, ("prompt_logprobs", "skip_reading_prefix_cache")),
    ],
)
def test_contradicting_values_are_named(options, numbers):
    assert all(number in refused(**options) for number in numbers)


def test_values_at_their_limits_are_accepted():
    params = SamplingParams(max_tokens=5, min_tokens=5, n=16_384, top_p=1.0, presence_penalty=2, logit_bias={1: 1e9})
    assert (params.max_tokens, params.min_tokens, params.n) == (5, 5, 16_384)
    assert SamplingParams(logprob_token_ids=[4, 5], logprobs=2).num_logprobs == 2
    assert RepetitionDetectionParams(2, 1, 2).min_count == 2
    assert [SamplingParams(seed=seed).seed for seed in (-(2**63), 2**63 - 1)] == [-(2**63), 2**63 - 1]


@pytest.mark.parametrize(
    ("options", "number"),
    [({}, None), ({"logprobs": 0}, 0), ({"logprobs": -1}, -1), ({"logprob_token_ids": [4, 5]}, 2)],
)
def test_num_logprobs_is_the_number_of_listed_tokens(options, number):
    assert SamplingParams(**options).num_logprobs == number


NO_VALUES: list[object] = [[[]], [None], 1j, object(), math.nan, torch.ones(2, 2)]


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams) if field.name not in UNSUPPORTED])
@pytest.mark.parametrize("value", NO_VALUES, ids=lambda value: type(value).__name__)
def test_no_field_accepts_a_meaningless_value(name, value):
    with pytest.raises(ValueError, match=f"^{name} .*must be .+, got .+$"):
        SamplingParams(**{name: value})


def test_number_too_large_for_a_float_is_named():
    assert refused(temperature=10**400).startswith("temperature must be a finite number, got 10000")


def test_numpy_numbers_are_accepted():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), max_tokens=np.uint8(7), seed=np.int32(-2))
    assert params == SamplingParams(temperature=0.5, top_k=3, max_tokens=7, seed=-2)
    assert type(params.temperature) is float and type(params.max_tokens) is type(params.seed) is int


def test_long_value_is_shortened_in_the_message():
    assert len(refused(allowed_token_ids=[*range(10000), "a"])) < 300
    whole, longer = "a" * 198, "a" * 199  # 200 and 201 characters in quotes
    assert refused(seed=whole).endswith(f", got {whole!r}")
    assert refused(seed=longer).endswith(f", got '{'a' * 196}...")


def test_subclass_may_have_more_fields():
    @dataclass
    class Named(SamplingParams):
        extra: int = 3
        temperature: float = 0.5

    checked = Named(extra=np.int64(4), n=2).checked()
    assert (checked.extra, type(checked.extra), checked.temperature, checked.n) == (4, int, 0.5, 2)
    with pytest.raises(ValueError, match=r"extra must be an integer, got 'x'"):
        Named(extra="x")
    with pytest.raises(ValueError, match=r"no field 'extar': did you mean 'extra'\?"):
        Named(extar=1)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_field_must_be_unset(name):
    for value in ({"a": 1}, 7):
        assert refused(**{name: value}).startswith(f"{name} is unsupported")


NEAR = {"temprature": "temperature", "max_token": "max_tokens", "topk": "top_k"}


@pytest.mark.parametrize(("name", "near"), NEAR.items())
def test_unknown_name_gets_the_nearest(name, near):
    assert refused(**{name: 1}) == f"SamplingParams has no field {name!r}: did you mean {near!r}?"
    assert refused(xyz=1) == "SamplingParams has no field 'xyz'"


@pytest.mark.parametrize(
    ("sizes", "numbers"),
    [
        ((-1, 0, 2), ("max_pattern_size must be ", "got -1")),
        ((2, 3, 2), ("min_pattern_size must be ", "max_pattern_size, got 3 and 2")),
        ((2, 1, 1), ("min_count must be ", "got 1")),
    ],
)
def test_invalid_repetition_detection_is_refused(sizes, numbers):
    with pytest.raises(ValueError) as caught:
        RepetitionDetectionParams(*sizes)
    assert all(number in str(caught.value) for number in numbers)


# Parameters that change later


def test_fields_can_be_set_and_are_checked_for_each_request():
    params = SamplingParams()
    params.max_tokens, params.stop, params.top_k = 5, "end", -1
    copied = params.checked()
    assert (copied.max_tokens, copied.stop, copied.top_k) == (5, ["end"], 0)
    params.temperature = "hot"
    with pytest.raises(ValueError, match=r"temperature must be .*, got 'hot'"):
        params.checked()
    del params.temperature
    assert params.temperature == 1.0, "the default is back"


def test_request_has_its_own_lists():
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, bad_words=["b"], allowed_token_ids=[1], stop_token_ids=[2])
    copied = params.checked()
    params.stop.append("c")
    params.logit_bias[3] = 1.0
    for each in (params.bad_words, params.allowed_token_ids, params.stop_token_ids):
        each.append(7)
    assert copied == SamplingParams(
        stop=["a"], logit_bias={1: 2.0}, bad_words=["b"], allowed_token_ids=[1], stop_token_ids=[2]
    )


def test_clone_is_a_deep_copy_unless_skip_clone_is_set():
    params = SamplingParams(stop=["a"])
    assert params.clone() == params and params.clone().stop is not params.stop
    params.skip_clone = True
    assert params.clone() is not params and params.clone().stop is params.stop
    assert pickle.loads(pickle.dumps(params)) == copy.copy(params) == params == replace(params)
    assert replace(params, n=2).n == 2


@pytest.mark.parametrize("params", [None, {"n": 2}, "greedy"])
def test_value_of_another_type_is_refused(params):
    with pytest.raises(ValueError, match=f"sampling_params must be SamplingParams, got {type(params).__name__}"):
        SamplingParams.of(params)
