"""Text to token ids and back, by the tokenizers library."""

import copy
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from typing import Any

from tokenizers import Tokenizer

from .tokenizer_backend import special_tokens
from .tokenizer_calls import TokenizerCalls, listed_ids
from .tokenizer_config import TokenizerConfig

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class HFTokenizer(TokenizerCalls):
    """A tokenizer as core wants one (encode, decode, visible, anchor), and as scripts know it from transformers.

    Special tokens give no text; with showing_special_tokens() they do.
    """

    def __init__(self, backend: Tokenizer, config: TokenizerConfig) -> None:
        self.backend = backend
        self.special_tokens_map = {name: token.content for name, token in config.named.items()}
        self.all_special_tokens = [token.content for token in special_tokens(config)]
        self.chat_template = config.chat_template
        self._vocab = backend.get_vocab()
        self._known = frozenset(self._vocab.values())
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._hidden = self._special
        has_bytes = b"ByteFallback" in (backend.decoder.__getstate__() if backend.decoder else b"")
        bytes_of = {i: BYTE_TOKEN.fullmatch(text) for text, i in self._vocab.items()} if has_bytes else {}
        self._bytes = {i: int(match[1], 16) for i, match in bytes_of.items() if match}

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_bos: bool = True, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids of `text`, between BOS and EOS where the checkpoint wants them and the caller does."""
        if not isinstance(text, str):
            raise ValueError(f"a tokenizer takes a text, not {type(text).__name__}")
        wants = add_bos if add_special_tokens is None else add_special_tokens
        return self.backend.encode(text, add_special_tokens=wants).ids

    def decode(self, token_ids: Any, skip_special_tokens: bool | None = None) -> str:
        """The text of `token_ids`, which grows with them: what comes later changes at most the last character.

        With `skip_special_tokens` it is the text that transformers gives. The two differ where byte tokens make no
        characters: there each byte is U+FFFD for itself; in transformers one of them makes its whole run U+FFFD.
        """
        ids = self.visible(listed_ids(token_ids), skip_special_tokens)
        if skip_special_tokens is not None or self._bytes.keys().isdisjoint(ids):
            return self.backend.decode(ids, skip_special_tokens=False)
        tokens = [self.backend.id_to_token(i) for i in ids]
        starts = character_starts([self._bytes.get(i) for i in ids])
        parted = [part for i, token in enumerate(tokens) for part in (["", token] if i in starts else [token])]
        return self.backend.decoder.decode(parted)

    def visible(self, token_ids: Sequence[int], skip_special_tokens: bool | None = None) -> list[int]:
        """`token_ids` without hidden ones, and without ids that the tokenizer does not have."""
        hidden = self._hidden if skip_special_tokens is None else self._special if skip_special_tokens else frozenset()
        return [i for i in token_ids if i in self._known and i not in hidden]

    def showing_special_tokens(self) -> "HFTokenizer":
        """The same tokenizer, but special tokens have a text in decode()."""
        other = copy.copy(self)
        other._hidden = frozenset()
        return other

    @cached_property
    def anchor(self) -> list[int]:
        """A token of a plain text: put before other tokens, it is a text that they go on from."""
        ids = sorted(self._known - set(self.backend.get_added_tokens_decoder()))
        return list(islice((i for i in ids if i not in self._bytes and self.decode([i]).strip(" \ufffd")), 1))


def character_starts(values: list[int | None]) -> set[int]:
    """Places of the bytes that begin a character, or that are none, behind another byte. None is no byte.

    >>> [*map(hex, "\u00e9".encode())], character_starts([0xC3, 0xA9, 0xC3, 0x41, None, 0x41])
    (['0xc3', '0xa9'], {2, 3})
    """
    starts: set[int] = set()
    place = 0
    while place < len(values):
        if place and values[place] is not None and values[place - 1] is not None:
            starts.add(place)
        place += character_length(values[place : place + 4])
    return starts


def character_length(values: list[int | None]) -> int:
    """How many of the values are the bytes of one character; 1 if the first begins none."""
    for length in range(2, len(values) + 1):
        if None in values[:length]:
            return 1
        with suppress(UnicodeDecodeError):
            if len(bytes(values[:length]).decode()) == 1:
                return length
    return 1
