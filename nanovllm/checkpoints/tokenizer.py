"""Text to token ids and back, with the tokenizers library.

Start with load_tokenizer(). It reads tokenizer.json or tokenizer.model and merges the files next to it as
transformers 5 does, so that special tokens get the same ids and flags:

    TokenizerFile | SentencepieceFile, TokenizerConfig  ->  tokenizers.Tokenizer  ->  HFTokenizer
"""

import codecs
import copy
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import groupby, islice
from numbers import Integral
from pathlib import Path
from threading import Lock
from typing import Any, TypeGuard

from tokenizers import Tokenizer

from .chat_template import apply_chat_template
from .entries import shorten
from .tokenizer_files import (
    FIRST_SPACE,
    TOKEN_NAMES,
    SentencepieceFile,
    TokenizerConfig,
    TokenizerFile,
    add_tokens,
    special_tokens,
)

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
REDIRECT_LOCK = Lock()  # only one thread at a time may redirect standard error
REPLACEMENT = "\ufffd"  # what the bytes of an incomplete character decode to
EACH_BYTE = "nanovllm.each_byte"  # an error handler that replaces each invalid byte; Python's "replace" merges some


def replace_byte(error: UnicodeError) -> tuple[str, int]:
    """Replace one invalid byte, and continue decoding after it."""
    assert isinstance(error, UnicodeDecodeError), "bytes are decoded, never encoded"
    return REPLACEMENT, error.start + 1


codecs.register_error(EACH_BYTE, replace_byte)


class Encoding(dict[str, Any]):
    """Token ids, as encoding["input_ids"] or encoding.input_ids."""

    __getattr__ = dict.__getitem__


class HFTokenizer:
    """A tokenizer with what the engine needs (encode, decode, visible, anchor) and transformers' common methods.

    Special tokens decode to nothing, except in the copy that showing_special_tokens() returns.
    """

    def __init__(self, backend: Tokenizer, config: "TokenizerConfig") -> None:
        self.backend = backend
        self.special_tokens_map = {name: token.content for name, token in config.named.items()}
        self.all_special_tokens = [token.content for token in special_tokens(config)]
        self.chat_template = config.chat_template
        self._vocab = backend.get_vocab()
        self._known_ids = frozenset(self._vocab.values())
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._hidden_ids = self._special_ids
        has_bytes = b"ByteFallback" in (backend.decoder.__getstate__() if backend.decoder else b"")
        matches = {i: BYTE_TOKEN.fullmatch(text) for text, i in self._vocab.items()} if has_bytes else {}
        self._byte_of = {i: int(match[1], 16) for i, match in matches.items() if match}
        self._texts: dict[int, str] = {}  # cached by decode_one()
        self.whole_texts: dict[int, str] = {}  # those of visible tokens that end with a character: see StreamDecoder

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_bos: bool = True, add_special_tokens: bool | None = None) -> list[int]:
        """Return the token ids of `text`. Add BOS and EOS if the checkpoint does, unless the caller opts out."""
        if not isinstance(text, str):
            raise ValueError(f"a tokenizer takes a string, got {type(text).__name__}")
        with_special = add_bos if add_special_tokens is None else add_special_tokens
        return self.backend.encode(text, add_special_tokens=with_special).ids

    def decode(self, token_ids: Any, skip_special_tokens: bool | None = None) -> str:
        """Return the text of `token_ids`. Appending tokens extends the text, and changes at most its last character.

        With `skip_special_tokens` True or False, this is exactly the text of transformers. With None, the text differs
        if a run of byte tokens is not valid UTF-8: only bytes that form no character become U+FFFD, while transformers
        replaces all bytes of the run.
        """
        ids = self.visible(to_token_ids(token_ids), skip_special_tokens)
        if skip_special_tokens is not None or self._byte_of.keys().isdisjoint(ids):
            return self.backend.decode(ids, skip_special_tokens=False)
        tokens: list[str] = []
        for are_bytes, run in groupby(ids, self._byte_of.__contains__):
            if are_bytes:
                tokens += bytes(self._byte_of[i] for i in run).decode(errors=EACH_BYTE)  # a token per character
            else:
                tokens += filter(None, map(self.backend.id_to_token, run))
        text: str = self.backend.decoder.decode(tokens)
        return text

    def decode_one(self, token_id: int) -> str:
        """Return what a token decodes to in the middle of a text. A final U+FFFD may be part of a character.

        The result is cached, because log-probabilities list the same tokens again and again.
        """
        if token_id not in self._texts:
            num_characters = len(self.anchor_text.rstrip(REPLACEMENT))
            self._texts[token_id] = self.decode([*self.anchor, token_id])[num_characters:]
        return self._texts[token_id]

    def json_without_prefix_space(self) -> str:
        """Return the backend as JSON. Unlike the backend, no step of its sequences prepends a space to a text."""
        text = self.backend.to_str()
        if '"Metaspace"' not in text:
            return text
        spec = json.loads(text)
        for step in (spec["pre_tokenizer"] or {}).get("pretokenizers", []):
            step |= {"prepend_scheme": "never"} if step["type"] == "Metaspace" else {}
        steps = (spec["normalizer"] or {}).get("normalizers", [])
        steps[:] = [step for step in steps if step.get("pattern") != {"Regex": FIRST_SPACE}]
        return json.dumps(spec)

    def visible(self, token_ids: Sequence[int], skip_special_tokens: bool | None = None) -> list[int]:
        """Return `token_ids` without hidden special tokens, and without ids that are not in the vocabulary."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        hidden = self._hidden_ids if skip_special_tokens is None else skipped
        return [i for i in token_ids if i in self._known_ids and i not in hidden]

    def showing_special_tokens(self) -> "HFTokenizer":
        """Return a copy that decodes special tokens to text."""
        other = copy.copy(self)
        other._hidden_ids, other._texts, other.whole_texts = frozenset(), {}, {}  # noqa: SLF001 - of the same class
        return other

    @cached_property
    def anchor(self) -> list[int]:
        """A list with one token of plain text. Tokens after it decode as they do in the middle of a text.

        The list is empty if the vocabulary has no such token.
        """
        ids = sorted(self._known_ids - set(self.backend.get_added_tokens_decoder()))
        return list(islice((i for i in ids if i not in self._byte_of and self.decode([i]).strip(" \ufffd")), 1))

    @cached_property
    def anchor_text(self) -> str:
        return self.decode(self.anchor)

    # Methods of transformers' tokenizers that scripts call

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoding:
        """Return input_ids and attention_mask of a text, or of a list of texts. Raise ValueError for anything else."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens=add_special_tokens)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        if not isinstance(text, list | tuple):
            raise ValueError(f"a tokenizer takes a string or a list of strings, got {type(text).__name__}")
        encodings = [self(item, add_special_tokens) for item in text]
        return Encoding({name: [item[name] for item in encodings] for name in ("input_ids", "attention_mask")})

    def __getattr__(self, name: str) -> Any:
        """Return bos_token, eos_token_id and the like, or None for a special token that the checkpoint lacks."""
        named, key = self.__dict__.get("special_tokens_map", {}), name.removesuffix("_id")
        if key not in TOKEN_NAMES and key not in named:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return named.get(key) if name == key else self._vocab.get(named.get(key))

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Any] | None = None,
        tokenize: bool = True,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> str | list[int] | Encoding:
        """Return the prompt of a conversation: its text, its token ids, or an Encoding."""
        text = apply_chat_template(self, conversation, tools=tools, **kwargs)
        if not tokenize:
            return text
        encoding = self(text, add_special_tokens=False)
        ids: list[int] = encoding["input_ids"]
        return encoding if return_dict else ids

    def batch_decode(self, sequences: Iterable[Any], skip_special_tokens: bool | None = None) -> list[str]:
        """Return the text of each sequence."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Return the tokens of a text, as they are spelled in the vocabulary."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).tokens

    def get_vocab(self) -> dict[str, int]:
        """Return a copy of the vocabulary, including added tokens."""
        return dict(self._vocab)

    @property
    def vocab_size(self) -> int:
        """The number of tokens without the added ones."""
        return self.backend.get_vocab_size(with_added_tokens=False)

    def id_to_token(self, token_id: int) -> str | None:
        """Return a token as it is spelled in the vocabulary, or None."""
        return self.backend.id_to_token(token_id)

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        """Return the token of an id, or the tokens of several."""
        return self.id_to_token(ids) if isinstance(ids, int) else [self.id_to_token(i) for i in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Return the id of a token, or the ids of several. Unknown tokens get the id of unk_token, if there is one."""
        unknown = self._vocab.get(self.special_tokens_map.get("unk_token", ""))
        if isinstance(tokens, str):
            return self._vocab.get(tokens, unknown)
        return [self._vocab.get(token, unknown) for token in tokens]

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of all_special_tokens."""
        return [self._vocab[token] for token in self.all_special_tokens]


def to_token_ids(token_ids: Any) -> Sequence[int]:
    """Convert one token id or several, from any library, to a sequence. Raise ValueError for anything else.

    >>> to_token_ids(5), to_token_ids((5, 6))
    ([5], (5, 6))
    """
    ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids  # numpy, torch
    ids = [ids] if is_id(ids) else ids
    if not isinstance(ids, list | tuple):
        raise ValueError(f"token ids must be integers in a list, got {type(ids).__name__}")
    for token_id in ids:
        if not is_id(token_id):
            raise ValueError(f"a token id must be an integer, got {token_id!r}")
    return ids


def is_id(value: object) -> TypeGuard[int]:
    """Return whether `value` is an integer, from any library, but not a bool."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


@contextmanager
def stderr_without_panics() -> Iterator[None]:
    """Buffer standard error, and discard it if the tokenizers library panics, which prints several lines."""
    with REDIRECT_LOCK:
        try:
            buffer, original = tempfile.TemporaryFile(), os.dup(2)  # noqa: SIM115  # closed below
        except OSError:  # no folder is writable, or standard error is closed
            yield
            return
        os.dup2(buffer.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(original, 2)
            os.close(original)
            with buffer, suppress(OSError):  # the disk behind standard error may be full
                buffer.seek(0)
                if b" panicked at " not in (text := buffer.read()):
                    os.write(2, text)


@stderr_without_panics()
def load_tokenizer(folder: str | Path) -> HFTokenizer | None:
    """Return the tokenizer of a folder, from tokenizer.json or else tokenizer.model, or None if there is neither.

    tokenizer.json comes first, as in transformers, because only it says how to split text and match added tokens. Raise
    ValueError, naming the file and the entry, for a file that cannot be read.
    """
    paths = [Path(folder, name) for name in ("tokenizer.json", "tokenizer.model")]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return None
    try:
        file = TokenizerFile(path) if path == paths[0] else SentencepieceFile(path)
        config = TokenizerConfig.from_folder(path.parent, file)
        tokenizer = HFTokenizer(add_tokens(file.build(config), config), config)
        tokenizer.decode([*tokenizer.anchor, *tokenizer.encode("a b")])  # run each part once, to find those that fail
    except (ValueError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is not an Exception
        raise ValueError(f"{path}: its parts do not fit together: {shorten(str(error))}") from None
    return tokenizer
