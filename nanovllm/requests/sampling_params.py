"""SamplingParams: the fields of vLLM 0.32, in its order and with its defaults, and the classes of nested fields.

Values are normalized first (a seed of -1 becomes None, and a single stop string becomes a list), then checked one by
one, and then checked against each other.
"""

import copy
import inspect
import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar

from ..checks import (
    AT_LEAST_0,
    AT_LEAST_1,
    SEED,
    Rule,
    check_field,
    check_fields,
    check_unsupported,
    cli_option,
    did_you_mean,
    is_integer,
    is_number,
    short_repr,
)

MIN_TEMPERATURE = 0.01  # dividing logits by a smaller number loses their order in float32
MAX_STOP_CHARACTERS = 4096  # of all stop strings of a request: the search has one state for each character
MAX_NESTING = 64  # levels of objects and lists in a JSON schema; each level makes the grammar larger


class RequestOutputKind(Enum):
    CUMULATIVE = 0  # each output of a stream holds all tokens so far
    DELTA = 1  # each output holds only the new tokens
    FINAL_ONLY = 2  # the stream holds only the last output


@dataclass
class RepetitionDetectionParams:
    """A rule that ends an output once it repeats a pattern of tokens min_count times in a row."""

    max_pattern_size: int = 0  # longest pattern, in tokens; 0 turns the detection off
    min_pattern_size: int = 0  # shortest pattern, in tokens; 0 means 1
    min_count: int = 0  # occurrences in a row that end the output; at least 2 if the detection is on

    def __post_init__(self) -> None:
        """Check the fields. Raise ValueError with the name and value of an invalid one."""
        check_fields(self, {option.name: AT_LEAST_0 for option in fields(self)})
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError(
                f"min_pattern_size must be at most max_pattern_size, got {self.min_pattern_size} and "
                f"{self.max_pattern_size}"
            )
        if self.max_pattern_size > 0 and self.min_count < 2:
            raise ValueError(f"min_count must be at least 2 if max_pattern_size is set, got {self.min_count}")


@dataclass
class StructuredOutputsParams:
    """The format that an output must follow. Set exactly one of the first five fields."""

    json: str | dict[str, Any] | None = None  # a JSON schema
    regex: str | None = None  # a regular expression that matches the whole output
    choice: list[str] | None = None  # the possible outputs
    grammar: str | None = None  # in Lark or GBNF notation
    json_object: bool | None = None  # True: any JSON object
    disable_any_whitespace: bool = False  # no whitespace between the parts of JSON
    disable_additional_properties: bool = False  # objects have only the properties that the schema names
    whitespace_pattern: str | None = None  # a regular expression for the whitespace between the parts of JSON
    structural_tag: str | None = None  # unsupported
    reasoning_end_str: str | None = None  # this text ends the model's thought; the format applies after it
    reasoning_start_str: str | None = None  # begins an optional thought; None: the prompt has begun the thought
    tool_call_start_str: str | None = None  # begins a tool call, which is allowed instead of the format

    FORMATS: ClassVar = ("json", "regex", "choice", "grammar", "json_object")
    RULES: ClassVar[dict[str, Rule]] = {
        "json": ("a JSON schema, as a dictionary or a string", lambda schema: not is_blank(schema)),
        "regex": ("a string without NUL characters", lambda regex: "\0" not in regex),
        "choice": ("a non-empty list of strings", bool),
        "grammar": ("a non-empty string", lambda grammar: not is_blank(grammar)),
        "json_object": ("True", bool),
        "reasoning_end_str": ("a non-empty string", bool),
        "reasoning_start_str": ("a non-empty string", bool),
        "tool_call_start_str": ("a non-empty string", bool),
    }

    def __post_init__(self) -> None:
        """Check the fields. Raise ValueError with the name and value of an invalid one."""
        check_unsupported(structural_tag=self.structural_tag)
        formats = [name for name in self.FORMATS if getattr(self, name) is not None]
        if len(formats) != 1:
            raise ValueError(f"set one of {', '.join(self.FORMATS)}, got {' and '.join(formats) or 'none'}")
        check_fields(self, self.RULES)
        for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
            if getattr(self, name) and formats[0] not in ("json", "json_object"):
                raise ValueError(f"{name} needs json or json_object, got {formats[0]}")
        if self.reasoning_start_str is not None and self.reasoning_end_str is None:
            raise ValueError(f"reasoning_start_str is {self.reasoning_start_str!r}, but reasoning_end_str is missing")
        if self.json is not None:
            read_schema(self.json)

    @classmethod
    def of(cls, options: dict[str, Any]) -> "StructuredOutputsParams":
        """Build the parameters from a dictionary. Raise ValueError for an unknown name or an invalid value."""
        field_names = [option.name for option in fields(cls)]
        for name in options:
            if name not in field_names:
                raise ValueError(f"structured_outputs has no field {name!r}; its fields are {', '.join(field_names)}")
        return cls(**options)

    @property
    def format(self) -> str:
        """The name of the field that is set."""
        return next(name for name in self.FORMATS if getattr(self, name) is not None)


@dataclass
class SamplingParams:
    """A request's rules: how to choose tokens, when to stop, and which outputs to return.

    You can also set fields later: when a request is added, the engine checks them again and keeps a copy.
    """

    n: int = cli_option(1, "samples per prompt")
    presence_penalty: float = cli_option(0.0, "subtracted from the logits of tokens in the output so far")
    frequency_penalty: float = cli_option(0.0, "like presence_penalty, but once per occurrence of the token")
    repetition_penalty: float = cli_option(1.0, "above 1 discourages tokens of the prompt and the output so far")
    temperature: float = cli_option(1.0, "0 picks the likeliest token; above 1 flattens the distribution")
    watermarking: bool | None = None
    top_p: float = cli_option(1.0, "sample from the likeliest tokens whose probabilities add up to this share")
    top_k: int = cli_option(0, "sample from only this many of the likeliest tokens; 0 or -1 means all")
    min_p: float = cli_option(0.0, "minimum probability of a token, relative to that of the likeliest token")
    seed: int | None = None  # the same seed and prompt give the same text, even in a batch; -1 means None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = cli_option(16, "maximum number of tokens to generate")  # None: up to max_model_len
    min_tokens: int = cli_option(0, "number of tokens to generate before stop tokens and stop strings take effect")
    logprobs: int | None = None  # list this many of the likeliest tokens at each position of the output; -1 means all
    prompt_logprobs: int | None = None  # list this many of the likeliest tokens at each position of the prompt
    prompt_logprob_token_ids: list[list[int]] | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None  # list these tokens instead of the likeliest
    flat_logprobs: bool = False
    detokenize: bool = True  # False: return token ids only and leave the text empty
    skip_special_tokens: bool = cli_option(True, "leave special tokens out of the text")
    spaces_between_special_tokens: bool = True  # has no effect: the tokenizers never add such spaces
    include_stop_str_in_output: bool = cli_option(False, "keep the stop string in the text")
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None  # stream an output for the first token, and then once per this many tokens
    skip_clone: bool = False  # make clone() a shallow copy
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None  # by token id: the number to add to the token's logit
    allowed_token_ids: list[int] | None = None  # sample no other tokens
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None  # never sample a token that completes one of these words
    skip_reading_prefix_cache: bool | None = None  # True: compute cached blocks again; they still enter the cache
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None

    __signature__: ClassVar[inspect.Signature]

    def __new__(cls, *values: Any, **options: Any) -> "SamplingParams":
        """Raise ValueError for an unknown name, with the most similar known one."""
        for name in options:
            if name not in cls.__dataclass_fields__:
                field_names = [option.name for option in fields(cls)]
                raise ValueError(f"SamplingParams has no field {name!r}{did_you_mean(name, field_names)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Normalize and check the fields. Raise ValueError with the name and value of an invalid one."""
        self._normalize()
        for option in fields(self):
            value = getattr(self, option.name)
            if value is not option.default and option.name in UNSUPPORTED:
                check_unsupported(**{option.name: value})
            elif value is not option.default:  # most are defaults, which are valid
                setattr(self, option.name, check_field(option, value, RULES))
        self._check_together()
        if self.temperature == 0:  # greedy sampling ignores these
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0

    @classmethod
    def from_optional(cls, **options: Any) -> "SamplingParams":
        """Build the parameters from a request of the OpenAI API, where None means the default.

        The exception is `max_tokens`, where None means no limit. Values of `logit_bias` below -100 become -100, and
        values above 100 become 100.
        """
        values = {name: value for name, value in options.items() if value is not None}
        if isinstance(bias := values.get("logit_bias"), dict):
            values["logit_bias"] = {token: clamped_bias(value) for token, value in bias.items()}
        if "max_tokens" in options:
            values["max_tokens"] = options["max_tokens"]
        return cls(**values)

    @classmethod
    def of(cls, params: "SamplingParams") -> "SamplingParams":
        """Return `params`. Raise ValueError if it is not of this class."""
        if not isinstance(params, cls):
            raise ValueError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        return params

    def clone(self) -> "SamplingParams":
        """Return a deep copy, or a shallow one if skip_clone is set."""
        return copy.copy(self) if self.skip_clone else copy.deepcopy(self)

    def checked(self) -> "SamplingParams":
        """Return a checked copy, whose lists are copies, too. Raise ValueError if a field has an invalid value."""
        params = copy.copy(self)
        params.__post_init__()
        return params

    @property
    def num_logprobs(self) -> int | None:
        """The number of tokens listed at each position of the output (-1: all), or None without logprobs."""
        if self.logprobs is None and self.logprob_token_ids:
            return len(self.logprob_token_ids)
        return self.logprobs

    def _normalize(self) -> None:
        """Convert equivalent values to one form. Leave values of a wrong type unchanged for the checks to report."""
        self.stop = as_list([self.stop] if isinstance(self.stop, str) else self.stop, [])
        self.stop_token_ids = as_list(self.stop_token_ids, [])
        self.bad_words = as_list(self.bad_words, [])
        self.allowed_token_ids = as_list(self.allowed_token_ids)
        self.logprob_token_ids = as_list(self.logprob_token_ids)
        self.logprobs = 1 if self.logprobs is True else self.logprobs
        self.prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs
        self.top_k = 0 if is_minus_1(self.top_k) else self.top_k
        self.seed = None if is_minus_1(self.seed) else self.seed
        self.thinking_token_budget = None if self.thinking_token_budget == -1 else self.thinking_token_budget
        if isinstance(self.logit_bias, dict):
            self.logit_bias = {as_token_id(token): bias for token, bias in self.logit_bias.items()}
        if isinstance(self.structured_outputs, dict):
            self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
        if is_number(self.temperature) and 0 < self.temperature < MIN_TEMPERATURE:
            message = f"temperature {self.temperature} is too small for float32, using {MIN_TEMPERATURE}"
            warnings.warn(message, stacklevel=4)  # the warning shows the line that builds the parameters
            self.temperature = MIN_TEMPERATURE

    def _check_together(self) -> None:
        if self.structured_outputs is not None:
            self.structured_outputs.__post_init__()  # checks its fields again, which the caller may have set
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens, got {self.min_tokens} and {self.max_tokens}")
        check_length("stop", self.stop or ())
        if self.stop and not self.detokenize:
            raise ValueError(f"stop needs text to search: set detokenize=True, got stop={short_repr(self.stop)}")
        if self.prompt_logprobs is not None and self.skip_reading_prefix_cache is False:
            raise ValueError("prompt_logprobs must compute the whole prompt: leave skip_reading_prefix_cache unset")
        token_ids = self.logprob_token_ids
        if token_ids is not None and self.logprobs not in (None, len(token_ids)):
            raise ValueError(
                f"logprobs must be unset or the number of logprob_token_ids, {len(token_ids)}, got {self.logprobs}"
            )


# By default, inspect.signature() shows the arguments of __new__; editors and scripts need the fields.
SamplingParams.__signature__ = inspect.Signature(
    [field for field in inspect.signature(SamplingParams.__init__).parameters.values() if field.name != "self"]
)

COUNT_OR_ALL: Rule = ("at least 0, or -1 for all", lambda number: number >= -1)
PENALTY: Rule = ("between -2 and 2", lambda penalty: -2 <= penalty <= 2)
TOKEN_IDS: Rule = ("a non-empty list of token ids", bool)
RULES: dict[str, Rule] = {
    "n": ("between 1 and 16,384", lambda n: 1 <= n <= 1 << 14),  # all samples are created when the request arrives
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": ("between 1e-9 and 1e9", lambda penalty: 1e-9 <= penalty <= 1e9),  # so logits stay finite
    "temperature": ("at least 0", lambda temperature: temperature >= 0),
    "top_p": ("above 0 and at most 1", lambda p: 0 < p <= 1),
    "top_k": COUNT_OR_ALL,
    "min_p": ("between 0 and 1", lambda p: 0 <= p <= 1),
    "seed": SEED,
    "stop": ("one or more non-empty strings", all),
    "max_tokens": AT_LEAST_1,
    "min_tokens": AT_LEAST_0,
    "logprobs": COUNT_OR_ALL,
    "prompt_logprobs": COUNT_OR_ALL,
    "logprob_token_ids": TOKEN_IDS,
    "logit_bias": ("numbers of at most 1e9", lambda biases: max(biases.values(), default=0.0) <= 1e9),
    "stream_interval": AT_LEAST_1,
    "allowed_token_ids": TOKEN_IDS,
    "bad_words": ("a list of non-empty strings", all),
}
UNSUPPORTED = (  # vLLM's fields that must have their defaults
    *("watermarking", "prompt_logprob_token_ids", "prompt_logprob_start", "flat_logprobs", "extra_args"),
    *("thinking_token_budget", "routed_experts_prompt_start", "trace_decode_token_ids"),
)


def as_list(values: Any, default: list[Any] | None = None) -> Any:
    """Return `values` as a list, with integers as Python ints, or `default` for None. Return other values unchanged.

    >>> as_list((1, 2)), as_list(None, []), as_list(5)
    ([1, 2], [], 5)
    """
    if values is None:
        return default
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable):
        return values
    return [int(value) if is_integer(value) else value for value in values]


def check_length(name: str, texts: Iterable[str], limit: int = MAX_STOP_CHARACTERS) -> None:
    """Raise ValueError if the strings of a field have more than `limit` characters."""
    if (num_characters := sum(map(len, texts))) > limit:
        raise ValueError(f"{name} must have at most {limit:,} characters in total, got {num_characters:,}")


def as_token_id(token: Any) -> Any:
    """Return the token id in a key of a JSON object, or the key itself if it is not a number.

    >>> as_token_id("17"), as_token_id(17), as_token_id("a")
    (17, 17, 'a')
    """
    return int(token) if is_integer(token) or (isinstance(token, str) and token.isdecimal()) else token


def is_minus_1(value: Any) -> bool:
    """Return True for the integer -1, but not for -1.0."""
    return is_integer(value) and value == -1


def clamped_bias(bias: Any) -> Any:
    """Return a logit bias, clamped to the range from -100 to 100. Return a value that is not a number unchanged."""
    return min(100.0, max(-100.0, bias)) if isinstance(bias, int | float) else bias


def is_blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()


def read_schema(source: str | dict[str, Any], is_closed: bool = False) -> Any:
    """Return a copy of a JSON schema. With `is_closed`, objects allow only the properties that they name.

    Raise ValueError if the schema is not valid JSON or is nested too deeply.

    >>> read_schema('{"properties": {"a": {"type": "string"}}}', is_closed=True)
    {'properties': {'a': {'type': 'string'}}, 'additionalProperties': False}
    """
    try:
        schema = json.loads(source if isinstance(source, str) else json.dumps(source))
    except (ValueError, TypeError) as error:
        raise ValueError(f"json must be a JSON schema: {error}") from None
    except RecursionError:
        schema = None
    if schema is None or nesting_depth(schema) > MAX_NESTING:
        raise ValueError(f"json must be nested at most {MAX_NESTING} levels deep")
    if not isinstance(schema, dict | bool):
        raise ValueError(f"json must be a JSON schema, got {short_repr(source)}")
    if is_closed:
        close_objects(schema)
    return schema


def nesting_depth(value: Any) -> int:
    """Return how many levels of lists and dictionaries are nested in each other.

    >>> nesting_depth({"a": [1, {}]}), nesting_depth(1)
    (3, 0)
    """
    depth, values = 0, [value]
    while values := [value for value in values if isinstance(value, dict | list)]:
        depth += 1
        values = [inner for value in values for inner in (value.values() if isinstance(value, dict) else value)]
    return depth


def close_objects(schema: Any) -> None:
    """Forbid additional properties in each object that names its properties, unless the schema says otherwise."""
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        close_objects(part)
    if isinstance(schema, dict) and not {"properties", "patternProperties"}.isdisjoint(schema):
        schema.setdefault("additionalProperties", False)
