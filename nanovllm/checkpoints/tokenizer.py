"""HFTokenizer: text to token ids and back, by the tokenizers library. load_tokenizer() makes one of a folder."""

import copy
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .chat_template import apply_chat_template
from .tokenizer_files import NAMED, SentencepieceFile, TokenizerConfig, TokenizerFile, add_tokens, special_tokens


class Encoded(dict):
    """encoded["input_ids"], or encoded.input_ids."""

    __getattr__ = dict.__getitem__


class HFTokenizer:
    """A tokenizer with what the engine needs (encode, decode, visible, anchor), and what scripts call in transformers.

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
        """Return the token ids of `text`, between BOS and EOS if the checkpoint and the caller want them."""
        if not isinstance(text, str):
            raise ValueError(f"a tokenizer takes a text, not {type(text).__name__}")
        wants = add_bos if add_special_tokens is None else add_special_tokens
        return self.backend.encode(text, add_special_tokens=wants).ids

    def decode(self, token_ids: Any, skip_special_tokens: bool | None = None) -> str:
        """Return the text of `token_ids`. It grows with them: later tokens change at most the last character.

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
        """Return `token_ids` without hidden ones, and without ids that the tokenizer does not have."""
        hidden = self._hidden if skip_special_tokens is None else self._special if skip_special_tokens else frozenset()
        return [i for i in token_ids if i in self._known and i not in hidden]

    def showing_special_tokens(self) -> "HFTokenizer":
        """Return the same tokenizer, but special tokens have a text in decode()."""
        other = copy.copy(self)
        other._hidden = frozenset()
        return other

    @cached_property
    def anchor(self) -> list[int]:
        """A token of a plain text: put before other tokens, it is a text that they go on from."""
        ids = sorted(self._known - set(self.backend.get_added_tokens_decoder()))
        return list(islice((i for i in ids if i not in self._bytes and self.decode([i]).strip(" \ufffd")), 1))

    # What scripts call on a tokenizer of transformers

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoded:
        """Return input_ids and attention_mask of a text, or of a list of texts. Raise ValueError for other values."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens=add_special_tokens)
            return Encoded(input_ids=ids, attention_mask=[1] * len(ids))
        if not isinstance(text, list | tuple):
            raise ValueError(f"a tokenizer takes a text or a list of texts, not {type(text).__name__}")
        each = [self(one, add_special_tokens) for one in text]
        return Encoded({name: [one[name] for one in each] for name in ("input_ids", "attention_mask")})

    def __getattr__(self, name: str) -> Any:
        """Return bos_token, eos_token_id and the like; None if the folder names no such token."""
        named, key = self.__dict__.get("special_tokens_map", {}), name.removesuffix("_id")
        if key not in NAMED and key not in named:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return named.get(key) if name == key else self._vocab.get(named.get(key))

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Any] | None = None,
        tokenize: bool = True,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> str | list[int] | Encoded:
        """Return the prompt that the chat template makes of the messages: its text, or its token ids as from a call."""
        text = apply_chat_template(self, conversation, tools=tools, **kwargs)
        if not tokenize:
            return text
        encoded = self(text, add_special_tokens=False)
        return encoded if return_dict else encoded["input_ids"]

    def batch_decode(self, sequences: Iterable[Any], skip_special_tokens: bool | None = None) -> list[str]:
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Return the tokens of a text as they are in the vocabulary."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).tokens

    def get_vocab(self) -> dict[str, int]:
        return dict(self._vocab)

    @property
    def vocab_size(self) -> int:
        """The number of tokens without the added ones."""
        return self.backend.get_vocab_size(with_added_tokens=False)

    def id_to_token(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id)

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        return self.id_to_token(ids) if isinstance(ids, int) else [self.id_to_token(i) for i in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Return ids. A token that is not in the vocabulary has the id of unk_token, if there is one."""
        unknown = self._vocab.get(self.special_tokens_map.get("unk_token"))
        if isinstance(tokens, str):
            return self._vocab.get(tokens, unknown)
        return [self._vocab.get(token, unknown) for token in tokens]

    @property
    def all_special_ids(self) -> list[int]:
        return [self._vocab[token] for token in self.all_special_tokens]


def listed_ids(token_ids: Any) -> Sequence[int]:
    """Return a token id, or several, of any library, as a list. Raise ValueError for other values.

    >>> listed_ids(5), listed_ids((5, 6))
    ([5], (5, 6))
    """
    ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids  # of numpy and torch
    ids = [ids] if is_id(ids) else ids
    if not isinstance(ids, list | tuple):
        raise ValueError(f"token ids must be whole numbers in a list, not {type(ids).__name__}")
    for each in ids:
        if not is_id(each):
            raise ValueError(f"a token id must be a whole number, not {each!r}")
    return ids


def is_id(value: object) -> bool:
    """Return whether `value` is a whole number of any library."""
    return isinstance(value, Integral) and not isinstance(value, bool)


BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def character_starts(values: list[int | None]) -> set[int]:
    """Return the places of bytes that begin a character, or are part of none, behind another byte. None is no byte.

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
    """Return how many of the values are the bytes of one character; 1 if the first begins none."""
    for length in range(2, len(values) + 1):
        if None in values[:length]:
            return 1
        with suppress(UnicodeDecodeError):
            if len(bytes(values[:length]).decode()) == 1:
                return length
    return 1


def load_tokenizer(folder: str | Path) -> HFTokenizer | None:
    """Read tokenizer.json, or else tokenizer.model. Return None if the folder has neither: it serves token ids only.

    tokenizer.json wins, as in transformers: it alone says how text is cut and how added tokens match. Raise
    ValueError, naming file and entry, for a file that cannot be read.
    """
    folder = Path(folder)
    file: TokenizerFile | SentencepieceFile
    if (folder / "tokenizer.json").exists():
        file = TokenizerFile(folder / "tokenizer.json")
    elif (folder / "tokenizer.model").exists():
        file = SentencepieceFile(folder / "tokenizer.model")
    else:
        return None
    config = TokenizerConfig.from_folder(folder, file)
    tokenizer = HFTokenizer(add_tokens(file.build(config), config), config)
    try_out(tokenizer, file.path)
    return tokenizer


def try_out(tokenizer: HFTokenizer, path: Path) -> None:
    """Raise ValueError if the file is read, but no text goes through its parts."""
    try:
        tokenizer.decode([*tokenizer.anchor, *tokenizer.encode("a b")])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise ValueError(f"{path}: its parts do not fit together: {error}") from None
