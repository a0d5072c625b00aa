"""SamplingParams: vLLM 0.32's fields, in its order, with its defaults and its readings of them."""

import copy
import inspect
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from ..engine.flags import knob
from ..engine.sampling_params import SamplingParams as CoreSamplingParams
from .params_checks import check_names, check_params, check_repetition
from .params_reading import read_params
from .structured_outputs import StructuredOutputsParams

MAX_POSITIONAL = 28  # behind them vLLM's class has fields of its own making, which are not taken here


class RequestOutputKind(Enum):
    CUMULATIVE = 0  # each output of a stream holds all so far
    DELTA = 1  # each holds what is new in it
    FINAL_ONLY = 2  # there is one output, the last


@dataclass
class RepetitionDetectionParams:
    """End an output that repeats a pattern of min_pattern_size to max_pattern_size tokens min_count times."""

    max_pattern_size: int = 0  # 0: nothing is looked for
    min_pattern_size: int = 0  # 0 means 1
    min_count: int = 0  # at least 2

    def __post_init__(self) -> None:
        check_repetition(self)


@dataclass
class Fields:
    """The fields, in the order of positional arguments."""

    n: int = knob(1, "samples of each prompt")
    presence_penalty: float = knob(0.0, "taken off the logit of each token that the output has; from -2 to 2")
    frequency_penalty: float = knob(0.0, "the same once for each time that the output has the token; from -2 to 2")
    repetition_penalty: float = knob(1.0, "above 1 weakens, below 1 favours the tokens of prompt and output")
    temperature: float = knob(1.0, "0 takes the likeliest token; above 1 flattens the distribution")
    watermarking: bool | None = None
    top_p: float = knob(1.0, "sample from the fewest tokens whose probabilities sum to p")
    top_k: int = knob(0, "sample from the k likeliest tokens only; 0 or -1: from all")
    min_p: float = knob(0.0, "sample from tokens at least this share as probable as the likeliest")
    seed: int | None = None  # the same seed and prompt give the same text, alone or in company; -1 is None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = knob(16, "most tokens to generate")  # None: up to max_model_len
    min_tokens: int = knob(0, "no stop token and no stop string ends an output before it has this many tokens")
    logprobs: int | None = None  # of each token, how many of the likeliest in its place are told beside it; -1: all
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    prompt_logprob_token_ids: list[list[int]] | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None  # these are told in place of the likeliest
    flat_logprobs: bool = False  # told as FlatLogprobs: a few long lists in place of many dicts
    detokenize: bool = True  # False: token ids only, the text stays empty
    skip_special_tokens: bool = knob(True, "leave special tokens out of the text")
    spaces_between_special_tokens: bool = True  # no tokenizer here puts any: the text is the same
    include_stop_str_in_output: bool = knob(False, "keep the stop string, or the stop token's text, in the text")
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None  # a stream has an output for its first token, and then for each so many
    skip_clone: bool = False  # clone() is a shallow copy
    structured_outputs: StructuredOutputsParams | None = None  # the form that the output must have
    logit_bias: dict[int, float] | None = None  # added to the logits of these tokens
    allowed_token_ids: list[int] | None = None  # no other token is sampled
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None  # the last token of none of them is sampled where it would complete it
    skip_reading_prefix_cache: bool | None = None  # True: its blocks are computed anew, and cached all the same
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError, naming the field and its value."""
        read_params(self)
        check_params(self)
        if self.temperature == 0:  # greedy: nothing else has a say
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0


class SamplingParams(Fields, CoreSamplingParams):  # type: ignore[misc]
    """What is asked of one request, or of many: a request takes a copy of its own when it is added.

    Scripts set fields of it before they use it, so it can be changed, as vLLM's can and core's cannot. A field that was
    set is checked when a request is made of it. What core takes beyond vLLM is taken here too: temperatures above 2,
    and several greedy samples.
    """

    __setattr__ = object.__setattr__  # core's is frozen
    __delattr__ = object.__delattr__
    __signature__ = inspect.signature(Fields)

    def __new__(cls, *values: Any, **options: Any) -> "SamplingParams":
        """Raises ValueError for a name that there is not, with the nearest, or with what took its place."""
        if len(values) > MAX_POSITIONAL:
            raise ValueError(f"{len(values)} positional arguments: give those behind {MAX_POSITIONAL} by name")
        check_names(options, [field.name for field in fields(cls)])
        return super().__new__(cls)

    @classmethod
    def from_optional(cls, **options: Any) -> "SamplingParams":
        """As a request of the OpenAI API says it: None is the default, and a logit bias lies within -100 and 100."""
        given = {name: value for name, value in options.items() if value is not None}
        if isinstance(bias := given.get("logit_bias"), dict):
            given["logit_bias"] = {token: clamped(value) for token, value in bias.items()}
        nothing = {"max_tokens": None} if options.get("max_tokens", 0) is None else {}  # up to max_model_len
        return cls(**(given | nothing))

    @classmethod
    def of(cls, params: CoreSamplingParams) -> "SamplingParams":
        """The same parameters; core's own ask for nothing more. Raises ValueError for what is neither."""
        if not isinstance(params, CoreSamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
        return params if isinstance(params, cls) else cls(**vars(params))

    def clone(self) -> "SamplingParams":
        return copy.copy(self) if self.skip_clone else copy.deepcopy(self)

    def checked(self) -> "SamplingParams":
        """A copy whose lists are its own, for one request. Raises ValueError if a field was set to what cannot be."""
        params = copy.copy(self)
        params.__post_init__()
        return params

    @property
    def num_logprobs(self) -> int | None:
        """How many are told of each place of the output; None if they are not asked for."""
        if self.logprobs is None and self.logprob_token_ids:
            return len(self.logprob_token_ids)
        return self.logprobs


def clamped(bias: Any) -> Any:
    return min(100.0, max(-100.0, bias)) if isinstance(bias, int | float) else bias
