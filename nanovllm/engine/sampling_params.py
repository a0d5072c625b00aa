"""SamplingParams: vLLM 0.32's fields, in its order, with its defaults and its readings of them.

A field is read first (a seed of -1 is None, one stop string a list), then checked by itself, then with others.
"""

import copy
import difflib
import inspect
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from .checks import AT_LEAST_1, SEED, Rule, check_field, is_number, is_whole, knob, shown
from .structured_outputs import StructuredOutputsParams

MAX_POSITIONAL = 28  # vLLM's class has private fields behind them, which are not taken here
MIN_TEMPERATURE = 0.01  # logits divided by less lose their order in float32


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
        """Raise ValueError for sizes that no pattern has, or a count that is no repetition."""
        for field in fields(self):
            words, holds = AT_LEAST_0
            value = getattr(self, field.name)
            if not is_whole(value) or not holds(value):
                raise ValueError(f"{field.name} must be {words}, not {shown(value)}")
        if self.min_pattern_size > self.max_pattern_size:
            sizes = (self.min_pattern_size, self.max_pattern_size)
            raise ValueError("min_pattern_size is {}, above max_pattern_size, which is {}".format(*sizes))
        if self.max_pattern_size > 0 and self.min_count < 2:
            raise ValueError(f"min_count must be 2 or above where max_pattern_size is set, not {self.min_count}")


@dataclass
class SamplingParams:
    """How the tokens of a request are chosen, when they end, and which outputs the caller gets.

    Scripts set fields after they have made one, so it can be changed, as vLLM's can. The engine reads and checks the
    fields again when a request is added, and keeps a copy.
    """

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
    logprobs: int | None = None  # how many of the likeliest tokens are listed beside each token; -1: all
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    prompt_logprob_token_ids: list[list[int]] | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None  # these are listed in place of the likeliest
    flat_logprobs: bool = False  # as FlatLogprobs: a few long lists in place of many dicts
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

    def __new__(cls, *values: Any, **options: Any) -> "SamplingParams":
        """Raise ValueError for an unknown name, with the nearest, or with what took its place."""
        if len(values) > MAX_POSITIONAL:
            raise ValueError(f"{len(values)} positional arguments: give those behind {MAX_POSITIONAL} by name")
        check_names(options, [field.name for field in fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Raise ValueError, naming the field and its value."""
        self._read()
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in REFUSED:
                check_refused(field.name, value)
            else:
                setattr(self, field.name, check_field(field, value, RULES))
        self._check_together()
        if self.temperature == 0:  # greedy: nothing else has a say
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0

    @classmethod
    def from_optional(cls, **options: Any) -> "SamplingParams":
        """Read a request of the OpenAI API: None is the default, and a logit bias lies within -100 and 100."""
        given = {name: value for name, value in options.items() if value is not None}
        if isinstance(bias := given.get("logit_bias"), dict):
            given["logit_bias"] = {token: clamped(value) for token, value in bias.items()}
        nothing = {"max_tokens": None} if options.get("max_tokens", 0) is None else {}  # up to max_model_len
        return cls(**(given | nothing))

    @classmethod
    def of(cls, params: "SamplingParams") -> "SamplingParams":
        """Return `params`. Raise ValueError if they are of another type."""
        if not isinstance(params, cls):
            raise ValueError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
        return params

    def clone(self) -> "SamplingParams":
        """Return a deep copy; a shallow one if skip_clone is set."""
        return copy.copy(self) if self.skip_clone else copy.deepcopy(self)

    def checked(self) -> "SamplingParams":
        """Return a copy with lists of its own, for one request. Raise ValueError if a field was set to a bad value."""
        params = copy.copy(self)
        params.__post_init__()
        return params

    @property
    def num_logprobs(self) -> int | None:
        """The number of tokens listed at each place of the output; None if log-probabilities are not requested."""
        if self.logprobs is None and self.logprob_token_ids:
            return len(self.logprob_token_ids)
        return self.logprobs

    def _read(self) -> None:
        """Bring what may be said in several ways into one. A value of a wrong type stays, for the checks to show."""
        self.stop = listed([self.stop] if isinstance(self.stop, str) else self.stop, [])
        self.stop_token_ids = unique(listed(self.stop_token_ids, []))
        self.bad_words = unique(listed(self.bad_words, []))
        self.allowed_token_ids = listed(self.allowed_token_ids)
        self.logprob_token_ids = listed(self.logprob_token_ids)
        self.logprobs = 1 if self.logprobs is True else self.logprobs
        self.prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs
        self.top_k = 0 if is_minus_1(self.top_k) else self.top_k
        self.seed = None if is_minus_1(self.seed) else self.seed
        if isinstance(self.logit_bias, dict):
            self.logit_bias = {as_token_id(token): bias for token, bias in self.logit_bias.items()}
        if isinstance(self.structured_outputs, dict):
            self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
        if is_number(self.temperature) and 0 < self.temperature < MIN_TEMPERATURE:
            words = f"temperature {self.temperature} is below {MIN_TEMPERATURE}: {MIN_TEMPERATURE} is taken"
            warnings.warn(words, stacklevel=4)  # at the line that made the parameters
            self.temperature = MIN_TEMPERATURE

    def _check_together(self) -> None:
        if self.structured_outputs is not None:
            self.structured_outputs.__post_init__()  # a field of it may have been set since
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, above max_tokens, which is {self.max_tokens}")
        if self.stop and not self.detokenize:
            raise ValueError(f"stop is {shown(self.stop)}, and detokenize is False: there is no text to find it in")
        if self.prompt_logprobs is not None and self.skip_reading_prefix_cache is False:
            raise ValueError(
                "skip_reading_prefix_cache is False, and prompt_logprobs are of what is computed, not cached"
            )
        listed_ids = self.logprob_token_ids
        if listed_ids is not None and self.logprobs not in (None, len(listed_ids)):
            count = len(listed_ids)
            raise ValueError(f"logprobs is {self.logprobs}, and there are {count} logprob_token_ids: leave it out")


# inspect would show __new__'s arguments: editors and scripts read the fields here.
SamplingParams.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [each for each in inspect.signature(SamplingParams.__init__).parameters.values() if each.name != "self"]
)


AT_LEAST_0: Rule = ("a whole number, 0 or above", lambda number: number >= 0)
COUNT: Rule = ("a whole number, 0 or above, or -1 for all", lambda number: number >= -1)
PENALTY: Rule = ("from -2 to 2", lambda penalty: -2 <= penalty <= 2)
SOME_TOKEN_IDS: Rule = ("a list of token ids, at least one", bool)
RULES: dict[str, Rule] = {
    "n": ("a whole number, at least 1, and at most 16,384", lambda n: 1 <= n <= 1 << 14),  # all are made on arrival
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": ("above 0", lambda penalty: penalty > 0),
    "temperature": ("0 or above", lambda temperature: temperature >= 0),
    "top_p": ("above 0 and at most 1", lambda p: 0 < p <= 1),
    "top_k": ("a whole number, 0 or -1 (all) or above", lambda k: k >= -1),
    "min_p": ("from 0 to 1", lambda p: 0 <= p <= 1),
    "seed": SEED,
    "stop": ("a text or several, none of them empty", all),
    "stop_token_ids": ("a list of token ids", lambda token_ids: True),
    "max_tokens": AT_LEAST_1,
    "min_tokens": AT_LEAST_0,
    "logprobs": COUNT,
    "prompt_logprobs": COUNT,
    "logprob_token_ids": SOME_TOKEN_IDS,
    "stream_interval": AT_LEAST_1,
    "allowed_token_ids": SOME_TOKEN_IDS,
    "bad_words": ("a list of texts, none of them empty", all),
}

# Fields that are taken at these values only, and why.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "watermarking": ((None, False), "there is no watermark here"),
    "prompt_logprob_token_ids": ((None,), "prompt_logprobs=-1 tells all tokens of each place"),
    "prompt_logprob_start": ((None,), "it goes with prompt_logprob_token_ids, which is not served here"),
    "extra_args": ((None, {}), "there is no plugin here that reads them"),
    "thinking_token_budget": ((None, -1), "no model here is told when to stop thinking"),
    "routed_experts_prompt_start": ((0,), "no model here has experts"),
    "trace_decode_token_ids": ((None,), "no engine here replays tokens"),
}

# Names that vLLM had before 0.32, and what to say in their place.
GONE = {
    "best_of": "ask for n samples, and choose among them by cumulative_logprob",
    "use_beam_search": "use LLM.beam_search(prompts, BeamSearchParams(beam_width=4, max_tokens=16))",
    "length_penalty": "BeamSearchParams has it, for LLM.beam_search",
    "early_stopping": "BeamSearchParams has it, for LLM.beam_search",
    "guided_decoding": "use structured_outputs=StructuredOutputsParams(json=...)",
    "logits_processors": "use logit_bias, allowed_token_ids, bad_words or structured_outputs",
    "truncate_prompt_tokens": "give the prompt as token ids, and cut them before",
}


def check_names(options: Iterable[str], names: list[str]) -> None:
    """Raise ValueError for the first of `options` that is not among `names`."""
    for name in options:
        if name in GONE:
            raise ValueError(f"SamplingParams has no {name} any more: {GONE[name]}")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f": did you mean {near[0]}?" if near else f"; it has {', '.join(names)}"
            raise ValueError(f"SamplingParams has no {name!r}{hint}")


def check_refused(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is one at which the field `name` changes nothing."""
    taken, why = REFUSED[name]
    if not any(type(value) is type(each) and value == each for each in taken):
        raise ValueError(f"{name} must be {' or '.join(map(str, taken))}, not {shown(value)}: {why}")


def listed(values: Any, nothing: list | None = None) -> Any:
    """Return a list of several values; a value that is not several stays as it is.

    >>> listed((1, 2)), listed(None, []), listed(5)
    ([1, 2], [], 5)
    """
    if values is None:
        return nothing
    values = values.tolist() if hasattr(values, "tolist") else values  # an array's numbers are its own
    if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable):
        return values
    return [int(value) if is_whole(value) else value for value in values]


def unique(values: Any) -> Any:
    """Return a list with each value once.

    >>> unique([3, 1, 3]), unique(5)
    ([3, 1], 5)
    """
    is_plain = isinstance(values, list) and all(isinstance(value, int | str) for value in values)
    return list(dict.fromkeys(values)) if is_plain else values  # any others are refused as they are


def as_token_id(token: Any) -> Any:
    """Return the number that a text stands for: JSON has no other keys than texts.

    >>> as_token_id("17"), as_token_id(17), as_token_id("a")
    (17, 17, 'a')
    """
    return int(token) if is_whole(token) or (isinstance(token, str) and token.isdecimal()) else token


def is_minus_1(value: Any) -> bool:
    """Return whether `value` is -1, and not -1.0."""
    return is_whole(value) and value == -1


def clamped(bias: Any) -> Any:
    """Return a logit bias within -100 and 100."""
    return min(100.0, max(-100.0, bias)) if isinstance(bias, int | float) else bias
