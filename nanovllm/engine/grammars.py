"""Grammars that outputs follow, by llguidance: tokens that the grammar forbids now get no probability."""

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
from .structured_outputs import StructuredOutputsParams, read_schema

MAX_GRAMMARS = 32  # that are kept compiled
DEAD_END = "no token of this checkpoint can come next"
MARK = "\2"  # a character that goes together with no other

# Vocabularies of bytes write each byte as a character that can be seen: Radford et al. 2019, the code of GPT-2.
VISIBLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
BYTE_OF = {chr(byte): byte for byte in VISIBLE} | {chr(256 + place): byte for place, byte in enumerate(HIDDEN)}


class GrammarProcessor:
    """A processor of logits that holds one sequence to a grammar."""

    def __init__(self, matcher: Any) -> None:
        """`matcher` is an llguidance.LLMatcher at its start, for this sequence alone."""
        self._matcher = matcher
        self._num_consumed = 0  # of the output's tokens; it only grows, also where the sequence is preempted

    def apply(self, logits: Tensor, output_token_ids: list[int]) -> None:
        """Leave the tokens that may come next. At the end of an output that is an EOS token. logits [vocab_size]"""
        new = output_token_ids[self._num_consumed :]
        if new and not self._matcher.is_stopped():
            self._matcher.consume_tokens(new)
        self._num_consumed = len(output_token_ids)
        logits[~allowed_tokens(self._matcher, len(logits)).to(logits.device)] = -math.inf


class Grammars:
    """Compiled grammars of one tokenizer. llguidance is imported for the first request that needs it."""

    def __init__(self, tokenizer: HFTokenizer | None, vocab_size: int, eos_token_ids: set[int]) -> None:
        """`vocab_size` is the model's; the EOS tokens are all that end an output by themselves."""
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._compiled = lru_cache(MAX_GRAMMARS)(self._compile)

    def processor(self, params: StructuredOutputsParams) -> GrammarProcessor:
        """Return the processor of one sequence. Raise ValueError if no output can follow the grammar."""
        if self._tokenizer is None:
            raise ValueError("structured_outputs are of texts, and there is no tokenizer")
        return GrammarProcessor(self._compiled(params.kind, grammar_text(self._library, params)).deep_copy())

    def _compile(self, kind: str, text: str) -> Any:
        matcher = self._library.LLMatcher(self._vocabulary, text, log_level=0)
        if matcher.is_error():
            raise ValueError(f"structured_outputs: {kind} cannot be followed: {error_of(matcher)}")
        allowed_tokens(matcher, self._vocab_size)  # raises if no output can begin
        return matcher

    @cached_property
    def _library(self) -> ModuleType:
        try:
            import llguidance
        except ImportError:
            raise ValueError("structured_outputs need llguidance: pip install 'nanovllm[structured]'") from None
        return llguidance

    @cached_property
    def _vocabulary(self) -> Any:
        """The vocabulary as an llguidance.LLTokenizer, which takes a moment to build for a large one."""
        if not self._eos_token_ids:
            raise ValueError("structured_outputs end with an EOS token, and the checkpoint names none")
        eos_token_ids = sorted(self._eos_token_ids)
        vocabulary = Vocabulary(self._tokenizer, self._vocab_size, eos_token_ids)
        found = self._library.LLTokenizer(self._library.TokenizerWrapper(vocabulary), eos_token=eos_token_ids)
        vocabulary.longest_first = found.greedy_tokenize
        return found


class Vocabulary:
    """The tokenizer under the names that llguidance asks for."""

    bos_token_id = None
    longest_first: Callable[[str], list[int]]

    def __init__(self, tokenizer: HFTokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._tokenizer, self.eos_token_id = tokenizer, eos_token_ids[0]
        tokens = token_bytes(tokenizer.showing_special_tokens())
        self.tokens = (tokens + [b""] * vocab_size)[: max(vocab_size, len(tokens))]
        self.special_token_ids = [i for i in range(len(tokens)) if not tokenizer.visible([i])]
        self._mark = self._encode(MARK)

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that continues another: at the start of one, a tokenizer may add a space."""
        token_ids = self._encode(MARK + text)
        if token_ids[: len(self._mark)] == self._mark:
            found = self._spelling(text, token_ids[len(self._mark) :])
            if sum(len(self.tokens[i]) for i in found) == len(text.encode()):
                return found
        return self._spelling(text, self.longest_first(text))  # a normalizer changes some texts

    def _spelling(self, text: str, token_ids: list[int]) -> list[int]:
        """Return as many of the tokens as spell the beginning of the text, and are not special."""
        found, rest = [], text.encode()
        for token_id in token_ids:
            if token_id in self.special_token_ids or not rest.startswith(self.tokens[token_id]):
                break
            found.append(token_id)
            rest = rest[len(self.tokens[token_id]) :]
        return found

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def grammar_text(library: ModuleType, params: StructuredOutputsParams) -> str:
    """Return the grammar as llguidance takes it. Raise ValueError for one that it cannot read."""
    if params.kind in ("json", "json_object"):
        given = {"type": "object"} if params.json is None else params.json
        schema = read_schema(given, is_closed=params.disable_additional_properties)
        options: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace}
        if params.whitespace_pattern is not None:
            options["whitespace_pattern"] = params.whitespace_pattern
        return library.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)
    if params.kind == "choice":
        return library.LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, params.choice)))
    if params.kind == "regex":
        return library.LLMatcher.grammar_from_regex(params.regex)
    try:
        return library.grammar_from("grammar", params.grammar)
    except ValueError as error:
        raise ValueError(f"structured_outputs: grammar cannot be followed: {first_lines(str(error))}") from None


def allowed_tokens(matcher: Any, vocab_size: int) -> Tensor:
    """Return which tokens may come next, bool [vocab_size]. Raise ValueError at a dead end."""
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)  # an EOS token's alone in case of an error
    allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")[:vocab_size]).bool()  # [vocab_size]
    if matcher.is_error():
        raise ValueError(f"structured_outputs: {error_of(matcher)}")
    may_end = matcher.is_accepting() or matcher.is_stopped()
    if not may_end and not matcher.validate_tokens([int(allowed.int().argmax())]):
        raise ValueError(f"structured_outputs: {DEAD_END}")  # a text is forced for which there are no tokens
    return allowed


def error_of(matcher: Any) -> str:
    """Return the error of a matcher, in one line."""
    error = matcher.get_error()
    return DEAD_END if error.startswith("NoExtension") else first_lines(error)


def first_lines(error: str, most: int = 3) -> str:
    """Return an error of several lines as one.

    >>> first_lines("at 1(8): no such name\\n   1 | start: foo\\n              ^\\n")
    'at 1(8): no such name 1 | start: foo ^'
    """
    return " ".join(" ".join(error.splitlines()[:most]).split())


def token_bytes(tokenizer: HFTokenizer) -> list[bytes]:
    """Return the bytes that each token adds to a text; none for an id that the tokenizer does not have."""
    backend: Any = tokenizer.backend
    vocab, added = backend.get_vocab(), backend.get_added_tokens_decoder()
    is_byte_level = b"ByteLevel" in (backend.decoder.__getstate__() if backend.decoder else b"")
    found = [b""] * (max(vocab.values()) + 1)
    for token, token_id in vocab.items():
        found[token_id] = bytes_of_bytes(token) if is_byte_level else bytes_of_piece(token)
    before = tokenizer.decode(tokenizer.anchor)
    for token_id in added:  # these are texts; a decoder may put a space before one
        found[token_id] = tokenizer.decode([*tokenizer.anchor, token_id])[len(before) :].encode()
    return found


def bytes_of_bytes(token: str) -> bytes:
    """Return the bytes of a token of a vocabulary of bytes.

    >>> bytes_of_bytes("\u0120fox")
    b' fox'
    """
    return bytes(BYTE_OF[character] for character in token if character in BYTE_OF)


def bytes_of_piece(token: str) -> bytes:
    """Return the bytes of a token of a vocabulary of pieces.

    >>> bytes_of_piece("\u2581fox"), bytes_of_piece("<0x0A>")
    (b' fox', b'\\n')
    """
    byte = BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()
