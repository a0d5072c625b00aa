"""What SamplingParams takes: the names, the ranges, and what is refused in words of its own."""

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import Field, fields
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args

from ..engine.checks import AT_LEAST_1, TYPES, Rule, is_number, is_whole
from ..engine.sampling_params import RULES as CORE_RULES

if TYPE_CHECKING:
    from .params import Fields, RepetitionDetectionParams

AT_LEAST_0: Rule = ("a whole number, 0 or above", lambda number: number >= 0)
COUNT: Rule = ("a whole number, 0 or above, or -1 for all", lambda number: number >= -1)
PENALTY: Rule = ("from -2 to 2", lambda penalty: -2 <= penalty <= 2)
TOKEN_IDS: Rule = ("a list of token ids", lambda token_ids: True)
SOME_TOKEN_IDS: Rule = ("a list of token ids, at least one", bool)
RULES: dict[str, Rule] = CORE_RULES | {
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": ("above 0", lambda penalty: penalty > 0),
    "top_k": ("a whole number, 0 or -1 (all) or above", lambda k: k >= -1),
    "min_p": ("from 0 to 1", lambda p: 0 <= p <= 1),
    "min_tokens": AT_LEAST_0,
    "logprobs": COUNT,
    "prompt_logprobs": COUNT,
    "logprob_token_ids": SOME_TOKEN_IDS,
    "allowed_token_ids": SOME_TOKEN_IDS,
    "stop_token_ids": TOKEN_IDS,
    "stream_interval": AT_LEAST_1,
    "bad_words": ("a list of texts, none of them empty", all),
}


def is_list_of(values: Any, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(values, list) and all(map(is_one, values))


def is_bias(bias: Any) -> bool:
    """-inf is a way to say never."""
    return is_number(bias) or bias == -math.inf


KINDS: dict[Any, Rule] = TYPES | {
    list[str]: ("a list of texts", lambda values: is_list_of(values, lambda value: isinstance(value, str))),
    list[int]: ("a list of whole numbers", lambda values: is_list_of(values, is_whole)),
    dict[int, float]: (
        "a dict from token ids to numbers",
        lambda value: isinstance(value, dict) and all(map(is_whole, value)) and all(map(is_bias, value.values())),
    ),
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
    """Raises ValueError for the first of `options` that is not among `names`."""
    for name in options:
        if name in GONE:
            raise ValueError(f"SamplingParams has no {name} any more: {GONE[name]}")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f": did you mean {near[0]}?" if near else f"; it has {', '.join(names)}"
            raise ValueError(f"SamplingParams has no {name!r}{hint}")


def check_params(params: "Fields") -> None:
    """Each field by itself, then together with others. A number is stored as Python's own int or float."""
    for field in fields(params):
        value = getattr(params, field.name)
        if field.name in REFUSED:
            check_refused(field.name, value)
        else:
            setattr(params, field.name, checked(field, value))
    check_together(params)


def checked(field: Field, value: Any) -> Any:
    kinds = get_args(field.type) if NoneType in get_args(field.type) else (field.type,)
    if value is None and NoneType in kinds:
        return None
    fitting = [kind for kind in kinds if kind is not NoneType and kind_rule(kind)[1](value)]
    words, holds = RULES.get(field.name) or (kind_rule(kinds[0])[0], lambda value: True)
    if not fitting or not holds(value):
        raise ValueError(f"{field.name} must be {words}, not {shown(value)}")
    return fitting[0](value) if fitting[0] in (int, float) else value


def kind_rule(kind: Any) -> Rule:
    """Of a class that is not in KINDS: an instance of it."""
    return KINDS.get(kind) or (f"a {kind.__name__}", lambda value: isinstance(value, kind))


def check_refused(name: str, value: Any) -> None:
    taken, why = REFUSED[name]
    if not any(type(value) is type(each) and value == each for each in taken):
        raise ValueError(f"{name} must be {' or '.join(map(str, taken))}, not {shown(value)}: {why}")


def check_together(params: "Fields") -> None:
    if params.structured_outputs is not None:
        params.structured_outputs.__post_init__()  # a field of it may have been set since
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise ValueError(f"min_tokens is {params.min_tokens}, above max_tokens, which is {params.max_tokens}")
    if params.stop and not params.detokenize:
        raise ValueError(f"stop is {shown(params.stop)}, and detokenize is False: there is no text to find it in")
    if params.prompt_logprobs is not None and params.skip_reading_prefix_cache is False:
        raise ValueError("skip_reading_prefix_cache is False, and prompt_logprobs are of what is computed, not cached")
    asked = params.logprob_token_ids
    if asked is not None and params.logprobs not in (None, len(asked)):
        raise ValueError(f"logprobs is {params.logprobs}, and there are {len(asked)} logprob_token_ids: leave it out")


def check_repetition(params: "RepetitionDetectionParams") -> None:
    """Raises ValueError for sizes that no pattern has, or a count that is no repetition."""
    for field in fields(params):
        words, holds = AT_LEAST_0
        value = getattr(params, field.name)
        if not is_whole(value) or not holds(value):
            raise ValueError(f"{field.name} must be {words}, not {shown(value)}")
    if params.min_pattern_size > params.max_pattern_size:
        sizes = (params.min_pattern_size, params.max_pattern_size)
        raise ValueError("min_pattern_size is {}, above max_pattern_size, which is {}".format(*sizes))
    if params.max_pattern_size > 0 and params.min_count < 2:
        raise ValueError(f"min_count must be 2 or above where max_pattern_size is set, not {params.min_count}")


def shown(value: Any) -> str:
    """On one line, and not a long one."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else text[:197] + "..."
