"""Structured outputs with llguidance: tokens that a request's grammar forbids get zero probability."""

import json
import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoints.stream_decoder import StreamDecoder
from ..checkpoints.tokenizer import HFTokenizer
from .logits_processors import LogitsProcessor
from .sampling_params import StructuredOutputsParams, read_schema

MAX_CACHED_GRAMMARS = 32
DEAD_END_ERROR = "no token of this checkpoint can come next"


class GrammarProcessor:
    """A logits processor that keeps one sequence within a grammar."""

    def __init__(self, matcher: Any) -> None:
        """Take an llguidance.LLMatcher in its initial state, which no other sequence may share."""
        self._matcher = matcher
        self._num_consumed = 0  # output tokens; never decreases, since a preempted sequence keeps its output

    def apply(self, logits: Tensor, output_token_ids: list[int]) -> None:
        """Ban the tokens of `logits` [vocab_size] that can't come next. After a complete output, only EOS can."""
        new_token_ids = output_token_ids[self._num_consumed :]
        if new_token_ids and not self._matcher.is_stopped():
            self._matcher.consume_tokens(new_token_ids)
        self._num_consumed = len(output_token_ids)
        logits[~allowed_token_mask(self._matcher, len(logits)).to(logits.device)] = -math.inf


class AnswerProcessor:
    """A logits processor that keeps one sequence's answer within a grammar.

    The answer is the text after the model's thought, if it has one. Thoughts and tool calls are unconstrained.
    """

    def __init__(
        self,
        grammar: GrammarProcessor,
        tokenizer: HFTokenizer,
        thought_start: int | None,
        thought_end: str | None,
        call_start: int | None,
    ) -> None:
        """Take the text that ends a thought, and the tokens that begin a thought and a tool call.

        With `thought_end` but without `thought_start`, the output begins inside a thought. Without `thought_end`,
        the output has no thought.
        """
        self._grammar, self._thought_start, self._call_start = grammar, thought_start, call_start
        self._decoder, self._tail = StreamDecoder(tokenizer.showing_special_tokens(), []), ""  # of the thought
        self._thought_end, self._has_thought_ended = thought_end or "", thought_end is None
        self._num_read = 0  # output tokens read, all in the thought

    def apply(self, logits: Tensor, output_token_ids: list[int]) -> None:
        thought_start = self._thought_start
        may_think = thought_start is not None and not output_token_ids
        if thought_start is not None and output_token_ids and output_token_ids[0] != thought_start:
            self._has_thought_ended = True
        while not self._has_thought_ended and self._num_read < len(output_token_ids):
            text = self._tail + self._decoder.push([output_token_ids[self._num_read]])
            self._tail = text[-len(self._thought_end) :]
            self._has_thought_ended = self._thought_end in text
            self._num_read += 1
        answer = output_token_ids[self._num_read :]
        if not (self._has_thought_ended or may_think) or answer[:1] == [self._call_start]:
            return
        exceptions = ((thought_start, may_think), (self._call_start, not answer))
        allowed = [token_id for token_id, is_allowed in exceptions if is_allowed and token_id is not None]
        saved_logits = logits[allowed]  # [num_allowed], a copy
        self._grammar.apply(logits, answer)
        logits[allowed] = saved_logits


class Grammars:
    """The compiled grammars for one tokenizer. The first request that needs a grammar imports llguidance."""

    def __init__(self, tokenizer: HFTokenizer | None, vocab_size: int, eos_token_ids: set[int]) -> None:
        """Take the model's vocabulary size and its EOS tokens."""
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._cached_matcher = lru_cache(MAX_CACHED_GRAMMARS)(self._compile)

    def processors(self, params: StructuredOutputsParams, count: int) -> Sequence[LogitsProcessor]:
        """Return a processor for each of `count` sequences. Raise ValueError for an invalid or unusable grammar."""
        if (tokenizer := self._tokenizer) is None:
            raise ValueError("structured_outputs need a tokenizer, and this engine has none")
        matcher = self._cached_matcher(params.format, grammar_text(self._library, params))
        processors = [GrammarProcessor(matcher.deep_copy()) for _ in range(count)]
        if params.reasoning_end_str is None and params.tool_call_start_str is None:
            return processors
        thought_start = self._first_token(params.reasoning_start_str)
        call_start = self._first_token(params.tool_call_start_str)
        thought_end = params.reasoning_end_str
        return [AnswerProcessor(grammar, tokenizer, thought_start, thought_end, call_start) for grammar in processors]

    def _first_token(self, text: str | None) -> int | None:
        token_ids = self._tokenizer.encode(text, add_special_tokens=False) if self._tokenizer and text else []
        return token_ids[0] if token_ids and token_ids[0] < self._vocab_size else None

    def _compile(self, name: str, text: str) -> Any:
        matcher = self._library.LLMatcher(self._vocabulary, text, log_level=0)
        if matcher.is_error():
            raise ValueError(f"structured_outputs: invalid {name}: {error_of(matcher)}")
        allowed_token_mask(matcher, self._vocab_size)  # raises if no first token is possible
        return matcher

    @cached_property
    def _library(self) -> ModuleType:
        try:
            import llguidance
        except ImportError:
            raise ValueError("structured_outputs need llguidance: pip install 'llguidance>=1.9'") from None
        library: ModuleType = llguidance
        return library

    @cached_property
    def _vocabulary(self) -> Any:
        """The vocabulary as an llguidance.LLTokenizer, which takes a moment to build from a large vocabulary."""
        if self._tokenizer is None or not self._eos_token_ids:
            raise ValueError("structured_outputs end with an EOS token, and the checkpoint names none")
        num_token_ids, eos_token_ids = max(self._vocab_size, len(self._tokenizer)), sorted(self._eos_token_ids)
        return self._library.LLTokenizer(
            self._tokenizer.json_without_prefix_space(), n_vocab=num_token_ids, eos_token=eos_token_ids
        )


def grammar_text(library: ModuleType, params: StructuredOutputsParams) -> str:
    """Return the grammar in llguidance's own notation. Raise ValueError if llguidance cannot read it."""
    if params.format in ("json", "json_object"):
        schema = {"type": "object"} if params.json is None else params.json
        schema = read_schema(schema, is_closed=params.disable_additional_properties)
        options: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace}
        if params.whitespace_pattern is not None:
            options["whitespace_pattern"] = params.whitespace_pattern
        return str(library.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options))
    if params.choice is not None:
        return str(library.LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, params.choice))))
    if params.regex is not None:
        return str(library.LLMatcher.grammar_from_regex(params.regex))
    try:
        return str(library.grammar_from("grammar", params.grammar))
    except ValueError as error:
        raise ValueError(f"structured_outputs: invalid grammar: {first_lines(str(error))}") from None


def allowed_token_mask(matcher: Any, vocab_size: int) -> Tensor:
    """Return a mask of the tokens that may come next, bool [vocab_size]. Raise ValueError if no token may."""
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)  # after an error, only EOS is set
    allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")[:vocab_size]).bool()  # [vocab_size]
    if matcher.is_error():
        raise ValueError(f"structured_outputs: {error_of(matcher)}")
    may_end = matcher.is_accepting() or matcher.is_stopped()
    if not may_end and not matcher.validate_tokens([int(allowed.int().argmax())]):
        raise ValueError(f"structured_outputs: {DEAD_END_ERROR}")  # the grammar forces text that no tokens can spell
    return allowed


def error_of(matcher: Any) -> str:
    """Return the error of a matcher as one line."""
    error = matcher.get_error()
    return DEAD_END_ERROR if error.startswith("NoExtension") else first_lines(error)


def first_lines(error: str, max_lines: int = 3) -> str:
    r"""Return the first lines of an error as one line.

    >>> first_lines("at 1(8): no such name\n   1 | start: foo\n              ^\n")
    'at 1(8): no such name 1 | start: foo ^'
    """
    return " ".join(" ".join(error.splitlines()[:max_lines]).split())
