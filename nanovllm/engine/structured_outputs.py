"""Structured outputs with llguidance: tokens that the grammar of a request forbids get no probability."""

import json
import math
from collections.abc import Callable
from functools import cached_property, lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoints.tokenizer import BYTE_TOKEN, HFTokenizer
from .sampling_params import StructuredOutputsParams, read_schema

MAX_GRAMMARS = 32  # compiled grammars in the cache
DEAD_END = "no token of this checkpoint can come next"
MARK = "\2"  # a character that tokenizers never merge with the text after it

# Byte-level vocabularies write each byte as a printable character: Radford et al. 2019, the code of GPT-2.
VISIBLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
BYTE_OF = {chr(byte): byte for byte in VISIBLE} | {chr(256 + i): byte for i, byte in enumerate(HIDDEN)}


class GrammarProcessor:
    """A logits processor that keeps one sequence within a grammar."""

    def __init__(self, matcher: Any) -> None:
        """Take an llguidance.LLMatcher in its initial state, which no other sequence may share."""
        self._matcher = matcher
        self._num_consumed = 0  # output tokens; never decreases, since a preempted sequence keeps its output

    def apply(self, logits: Tensor, output_token_ids: list[int]) -> None:
        """Ban all tokens that must not come next in `logits` [vocab_size]. At the end, only EOS remains."""
        new = output_token_ids[self._num_consumed :]
        if new and not self._matcher.is_stopped():
            self._matcher.consume_tokens(new)
        self._num_consumed = len(output_token_ids)
        logits[~allowed_tokens(self._matcher, len(logits)).to(logits.device)] = -math.inf


class Grammars:
    """The compiled grammars for one tokenizer. The first request that needs one imports llguidance."""

    def __init__(self, tokenizer: HFTokenizer | None, vocab_size: int, eos_token_ids: set[int]) -> None:
        """Take the model's vocabulary size, and every token that ends an output by itself."""
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._compiled = lru_cache(MAX_GRAMMARS)(self._compile)

    def processor(self, params: StructuredOutputsParams) -> GrammarProcessor:
        """Return a processor for one sequence. Raise ValueError if no output can follow the grammar."""
        if self._tokenizer is None:
            raise ValueError("structured_outputs need text, and there is no tokenizer")
        return GrammarProcessor(self._compiled(params.format, grammar_text(self._library, params)).deep_copy())

    def _compile(self, name: str, text: str) -> Any:
        matcher = self._library.LLMatcher(self._vocabulary, text, log_level=0)
        if matcher.is_error():
            raise ValueError(f"structured_outputs: invalid {name}: {error_of(matcher)}")
        allowed_tokens(matcher, self._vocab_size)  # raises if no token can come first
        return matcher

    @cached_property
    def _library(self) -> ModuleType:
        try:
            import llguidance
        except ImportError:
            raise ValueError("structured_outputs need llguidance: pip install 'llguidance>=1.0'") from None
        library: ModuleType = llguidance
        return library

    @cached_property
    def _vocabulary(self) -> Any:
        """The vocabulary as an llguidance.LLTokenizer, which takes a moment to build if it is large."""
        if self._tokenizer is None or not self._eos_token_ids:
            raise ValueError("structured_outputs end with an EOS token, and the checkpoint names none")
        eos_token_ids = sorted(self._eos_token_ids)
        vocabulary = Vocabulary(self._tokenizer, self._vocab_size, eos_token_ids)
        result = self._library.LLTokenizer(self._library.TokenizerWrapper(vocabulary), eos_token=eos_token_ids)
        vocabulary.longest_first = result.greedy_tokenize
        return result


class Vocabulary:
    """The tokenizer, with the attributes that llguidance expects."""

    bos_token_id = None
    longest_first: Callable[[str], list[int]]

    def __init__(self, tokenizer: HFTokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._tokenizer, self.eos_token_id = tokenizer, eos_token_ids[0]
        tokens = token_bytes(tokenizer.showing_special_tokens())
        self.tokens = (tokens + [b""] * vocab_size)[: max(vocab_size, len(tokens))]
        self.special_token_ids = [i for i in range(len(tokens)) if not tokenizer.visible([i])]
        self._mark = self._encode(MARK)

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of text in the middle of an output. At the start, a tokenizer may add a space."""
        token_ids = self._encode(MARK + text)
        if token_ids[: len(self._mark)] == self._mark:
            result = self._spelling(text, token_ids[len(self._mark) :])
            if sum(len(self.tokens[i]) for i in result) == len(text.encode()):
                return result
        return self._spelling(text, self.longest_first(text))  # the tokenizer's normalizer has changed the text

    def _spelling(self, text: str, token_ids: list[int]) -> list[int]:
        """Return the leading tokens that spell the start of the text and are not special."""
        result, rest = [], text.encode()
        for token_id in token_ids:
            if token_id in self.special_token_ids or not rest.startswith(self.tokens[token_id]):
                break
            result.append(token_id)
            rest = rest[len(self.tokens[token_id]) :]
        return result

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


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


def allowed_tokens(matcher: Any, vocab_size: int) -> Tensor:
    """Return which tokens may come next, bool [vocab_size]. Raise ValueError at a dead end."""
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)  # after an error, only EOS is set
    allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")[:vocab_size]).bool()  # [vocab_size]
    if matcher.is_error():
        raise ValueError(f"structured_outputs: {error_of(matcher)}")
    may_end = matcher.is_accepting() or matcher.is_stopped()
    if not may_end and not matcher.validate_tokens([int(allowed.int().argmax())]):
        raise ValueError(f"structured_outputs: {DEAD_END}")  # the grammar forces text that no tokens spell
    return allowed


def error_of(matcher: Any) -> str:
    """Return the error of a matcher on one line."""
    error = matcher.get_error()
    return DEAD_END if error.startswith("NoExtension") else first_lines(error)


def first_lines(error: str, most: int = 3) -> str:
    r"""Return the first lines of an error as one line.

    >>> first_lines("at 1(8): no such name\n   1 | start: foo\n              ^\n")
    'at 1(8): no such name 1 | start: foo ^'
    """
    return " ".join(" ".join(error.splitlines()[:most]).split())


def token_bytes(tokenizer: HFTokenizer) -> list[bytes]:
    """Return the bytes that each token adds to a text, and b"" for unused ids."""
    backend: Any = tokenizer.backend
    vocab, added = backend.get_vocab(), backend.get_added_tokens_decoder()
    is_byte_level = b"ByteLevel" in (backend.decoder.__getstate__() if backend.decoder else b"")
    result = [b""] * (max(vocab.values()) + 1)
    for token, token_id in vocab.items():
        result[token_id] = byte_level_bytes(token) if is_byte_level else piece_bytes(token)
    before = tokenizer.decode(tokenizer.anchor)
    for token_id in added:  # plain text, but a decoder may put a space before it
        result[token_id] = tokenizer.decode([*tokenizer.anchor, token_id])[len(before) :].encode()
    return result


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a token from a byte-level vocabulary.

    >>> byte_level_bytes("\u0120fox")
    b' fox'
    """
    return bytes(BYTE_OF[character] for character in token if character in BYTE_OF)


def piece_bytes(token: str) -> bytes:
    r"""Return the bytes of a token from a SentencePiece vocabulary.

    >>> piece_bytes("\u2581fox"), piece_bytes("<0x0A>")
    (b' fox', b'\n')
    """
    byte = BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()
