"""Text to token ids and back, on the tokenizers library; StreamDecoder turns token ids into text as they arrive.

Start with load_tokenizer(). It reads tokenizer.json or tokenizer.model and merges the files next to it as
transformers 5 does, so that special tokens get the same ids and flags. The chain is

    TokenizerFile | SentencepieceFile, TokenizerConfig  ->  tokenizers.Tokenizer  ->  HFTokenizer
"""

import codecs
import copy
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from numbers import Integral
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeGuard

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.processors import TemplateProcessing

from .chat_template import apply_chat_template, find_chat_template
from .entries import Entries, brief

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
HAS_PREFIX = re.compile(r'"continuing_subword_prefix"\s*:\s*"[^"]')
REDIRECTING = Lock()  # one thread at a time redirects standard error
REPLACEMENT = "\ufffd"  # decoded from the bytes of an incomplete character
EACH_BYTE = "nanovllm.each_byte"  # error handler that replaces each invalid byte; "replace" joins some


def replace_byte(error: UnicodeError) -> tuple[str, int]:
    """Replace one byte, and decode the rest again."""
    assert isinstance(error, UnicodeDecodeError), "bytes are decoded, never encoded"
    return REPLACEMENT, error.start + 1


codecs.register_error(EACH_BYTE, replace_byte)


class Encoding(dict[str, Any]):
    """Token ids, as encoding["input_ids"] or encoding.input_ids."""

    __getattr__ = dict.__getitem__


class HFTokenizer:
    """A tokenizer with what the engine needs (encode, decode, visible, anchor) and what scripts expect of transformers.

    Special tokens decode to nothing. The copy from showing_special_tokens() decodes them to text.
    """

    def __init__(self, backend: Tokenizer, config: "TokenizerConfig") -> None:
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
        self._texts: dict[int, str] = {}  # from decode_one()

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_bos: bool = True, add_special_tokens: bool | None = None) -> list[int]:
        """Return the token ids of `text`, with BOS and EOS if the checkpoint adds them and the caller wants them."""
        if not isinstance(text, str):
            raise ValueError(f"a tokenizer takes a string, got {type(text).__name__}")
        with_special = add_bos if add_special_tokens is None else add_special_tokens
        return self.backend.encode(text, add_special_tokens=with_special).ids

    def decode(self, token_ids: Any, skip_special_tokens: bool | None = None) -> str:
        """Return the text of `token_ids`. More tokens extend it, and change at most its last character.

        With `skip_special_tokens` given, the text is transformers'. The two differ only for byte tokens that form no
        character: by default each byte becomes U+FFFD, but transformers turns the whole run into U+FFFD.
        """
        ids = self.visible(to_token_ids(token_ids), skip_special_tokens)
        if skip_special_tokens is not None or self._bytes.keys().isdisjoint(ids):
            return self.backend.decode(ids, skip_special_tokens=False)
        tokens: list[str] = []
        for are_bytes, run in groupby(ids, self._bytes.__contains__):
            if are_bytes:
                tokens += bytes(self._bytes[i] for i in run).decode(errors=EACH_BYTE)  # a token per character
            else:
                tokens += filter(None, map(self.backend.id_to_token, run))
        text: str = self.backend.decoder.decode(tokens)
        return text

    def decode_one(self, token_id: int) -> str:
        """Return the text of a token in the middle of a text. U+FFFD at its end may be part of a character.

        Each token is decoded once, because log-probabilities list the same ones again and again.
        """
        if token_id not in self._texts:
            num_characters = len(self.decode(self.anchor).rstrip(REPLACEMENT))
            self._texts[token_id] = self.decode([*self.anchor, token_id])[num_characters:]
        return self._texts[token_id]

    def within_text(self) -> str:
        """Return the backend as JSON, without steps in a sequence that put a space before a text."""
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
        """Return `token_ids` without hidden special tokens and without ids that are not in the vocabulary."""
        hidden = self._hidden if skip_special_tokens is None else self._special if skip_special_tokens else frozenset()
        return [i for i in token_ids if i in self._known and i not in hidden]

    def showing_special_tokens(self) -> "HFTokenizer":
        """Return a copy that decodes special tokens to text."""
        other = copy.copy(self)
        other._hidden, other._texts = frozenset(), {}  # noqa: SLF001 - of the same class
        return other

    @cached_property
    def anchor(self) -> list[int]:
        """A token of plain text. Tokens that follow it decode as in the middle of a text."""
        ids = sorted(self._known - set(self.backend.get_added_tokens_decoder()))
        return list(islice((i for i in ids if i not in self._bytes and self.decode([i]).strip(" \ufffd")), 1))

    # The calls that scripts make on a tokenizer of transformers

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoding:
        """Return input_ids and attention_mask of a text, or of a list of texts. Raise ValueError for anything else."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens=add_special_tokens)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        if not isinstance(text, list | tuple):
            raise ValueError(f"a tokenizer takes a string or a list of strings, got {type(text).__name__}")
        each = [self(one, add_special_tokens) for one in text]
        return Encoding({name: [one[name] for one in each] for name in ("input_ids", "attention_mask")})

    def __getattr__(self, name: str) -> Any:
        """Return bos_token, eos_token_id and the like. A special token that the checkpoint does not name is None."""
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
    ) -> str | list[int] | Encoding:
        """Return the prompt of a conversation: its text, its token ids, or the same as a call returns."""
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
        """Return the tokens of a text, spelled as in the vocabulary."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).tokens

    def get_vocab(self) -> dict[str, int]:
        """Return a copy of the vocabulary, with added tokens."""
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
    """Return one token id, or several, of any library, as a sequence. Raise ValueError for anything else.

    >>> to_token_ids(5), to_token_ids((5, 6))
    ([5], (5, 6))
    """
    ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids  # numpy, torch
    ids = [ids] if is_id(ids) else ids
    if not isinstance(ids, list | tuple):
        raise ValueError(f"token ids must be integers in a list, got {type(ids).__name__}")
    for each in ids:
        if not is_id(each):
            raise ValueError(f"a token id must be an integer, got {each!r}")
    return ids


def is_id(value: object) -> TypeGuard[int]:
    """Return whether `value` is an integer of any library, and not a bool."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


@contextmanager
def stderr_without_panics() -> Iterator[None]:
    """Hold back standard error, and drop it if the tokenizers library has panicked: it prints several lines."""
    with REDIRECTING:
        try:
            held, stderr = tempfile.TemporaryFile(), os.dup(2)  # noqa: SIM115  # closed below
        except OSError:  # no folder is writable, or standard error is closed
            yield
            return
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            with held, suppress(OSError):  # the disk behind standard error may be full
                held.seek(0)
                if b" panicked at " not in (text := held.read()):
                    os.write(2, text)


@stderr_without_panics()
def load_tokenizer(folder: str | Path) -> HFTokenizer | None:
    """Return the tokenizer of a folder, from tokenizer.json or else from tokenizer.model; None if it has neither.

    tokenizer.json wins, as in transformers, because only it says how to split text and match added tokens. Raise
    ValueError, naming the file and the entry, for a file that cannot be read.
    """
    paths = [Path(folder, name) for name in ("tokenizer.json", "tokenizer.model")]
    path = next((each for each in paths if each.exists()), None)
    if path is None:
        return None
    try:
        file = TokenizerFile(path) if path == paths[0] else SentencepieceFile(path)
        config = TokenizerConfig.from_folder(path.parent, file)
        tokenizer = HFTokenizer(add_tokens(file.build(config), config), config)
        tokenizer.decode([*tokenizer.anchor, *tokenizer.encode("a b")])  # text gets through all parts
    except (ValueError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is not an Exception
        raise ValueError(f"{path}: its parts do not fit together: {brief(str(error))}") from None
    return tokenizer


# Text as tokens arrive

MAX_HELD_BACK = 3  # bytes of a character of 4
MAX_WINDOW = 32  # tokens; half of it holds 3 characters of 4 bytes and one that was cut
MAX_BEFORE = 4  # previous tokens that the text of one can depend on, because a character has at most 4 bytes


class StreamDecoder:
    """The text of a growing list of token ids, in pieces that add up to the text of the whole.

    A token cannot be decoded alone: its leading space depends on the text before it, and a character can span several
    byte tokens. So decode a window that ends in the new token:

        | anchor, or the start of the text | tokens whose text can still change |

    Text up to the last complete character is final, so it is returned and the window starts again after it. Bytes that
    form no character are final too, except for the last three. This bounds the window.
    """

    def __init__(self, tokenizer: HFTokenizer, prompt_token_ids: list[int]) -> None:
        """Start after the prompt, so that the first word keeps its space."""
        self._tokenizer = tokenizer
        self._window = tokenizer.visible(prompt_token_ids)
        self._shorten(MAX_WINDOW // 2, tokenizer.decode(self._window[-MAX_WINDOW:]) or self._text())
        self._returned = self._text()  # the part of the window's text that push() has returned

    def push(self, *token_ids: int) -> str:
        """Return the text that `token_ids` complete. It can be empty."""
        new = self._tokenizer.visible(token_ids)
        if not new:
            return ""
        if len(new) == 1 and self._window == self._tokenizer.anchor and not self._returned.endswith(REPLACEMENT):
            piece = self._tokenizer.decode_one(new[0])  # almost always, so a token is decoded only once
            if not piece.endswith(REPLACEMENT):
                return piece
        self._window += new
        text = self._text()
        num_held_back = min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_HELD_BACK)
        piece = self._return(text, len(text) - num_held_back)
        if num_held_back == 0:
            self._shorten(0, text)
            self._returned = self._text()
        elif len(self._window) > MAX_WINDOW:
            num_left = len(text) - len(self._returned)
            self._shorten(MAX_WINDOW // 2, text)
            text = self._text()
            self._returned = text[: len(text) - num_left]
        return piece

    def flush(self) -> str:
        """Return the rest after the last token: the bytes of an incomplete character, as U+FFFD."""
        text = self._text()
        return self._return(text, len(text))

    def _text(self) -> str:
        return self._tokenizer.decode(self._window)

    def _return(self, text: str, end: int) -> str:
        """Return the new part of text[:end]. `text` is the window's."""
        while not text.startswith(self._returned):  # bytes at the end of the prompt became a character
            self._returned = self._returned[:-1]
        piece = text[len(self._returned) : end]
        self._returned += piece
        return piece

    def _shorten(self, keep: int, text: str) -> None:
        """Keep the last `keep` tokens of the window, after an anchor if the window has a `text`."""
        if text:
            self._window = self._tokenizer.anchor + self._window[max(0, len(self._window) - keep) :]
        else:
            self._window = self._window[-1:]  # a space that starts the text: it is dropped, but not the next one


def decoded_token(token_id: int, before: list[int], tokenizer: HFTokenizer) -> str:
    """Return the text of one token, with its leading space. `before` are up to MAX_BEFORE tokens before it.

    The last byte of a character has the text of the character, and the bytes before it have none.
    """
    alone = tokenizer.decode_one(token_id)
    if not alone.endswith(REPLACEMENT):
        return alone
    for count in range(1, len(before) + 1):  # a token that ends in the middle of a character
        earlier = tokenizer.anchor + before[len(before) - count :]
        text = tokenizer.decode([*earlier, token_id])
        if not text.endswith(REPLACEMENT):
            return text[len(tokenizer.decode(earlier).rstrip(REPLACEMENT)) :]
    return ""


# The files of a tokenizer

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
DEFAULTS = {  # special tokens of a tokenizer class that no file names
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
}


@dataclass
class TokenizerConfig:
    """tokenizer_config.json, merged with the other files of the folder."""

    entries: Entries
    tokenizer_class: str
    named: dict[str, AddedToken]  # "bos_token" and its token; also a model's own names, such as "image_token"
    extra: list[AddedToken]
    added: dict[int, AddedToken]
    add_bos: bool
    add_eos: bool
    chat_template: str | dict[str, str] | None  # one, or several by name

    @classmethod
    def from_folder(cls, folder: Path, file: "TokenizerFile | SentencepieceFile") -> "TokenizerConfig":
        """Read the files next to `file`. Raise ValueError, naming the file and the entry, for an invalid value."""
        path = folder / "tokenizer_config.json"
        config = Entries.read_if_exists(path)
        is_bare = not path.exists() and not file.has_template  # tokenizer.model alone follows Llama's conventions
        name = "LlamaTokenizer" if is_bare else find_tokenizer_class(folder, config, file.is_byte_level)
        older_path = folder / "special_tokens_map.json"
        has_decoder = "added_tokens_decoder" in config
        files = TokenFiles(config, Entries({}, older_path) if has_decoder else Entries.read_if_exists(older_path))
        added, extra = files.added(file.added), file.extra
        if isinstance(file, SentencepieceFile) and name not in BUILDERS:
            extra = [token for token in extra if token.special]  # the backend knows the user-defined pieces
            if file.adds_prefix:  # as it does to each text between added tokens, which are therefore found first
                added = {i: AddedToken(**token.__getstate__() | {"normalized": False}) for i, token in added.items()}
        defaults = file.named if is_bare else DEFAULTS.get(name, file.named)
        add_bos, add_eos = config.flag("add_bos_token", is_bare), config.flag("add_eos_token", False)
        return cls(
            config,
            name,
            files.named(added, defaults),
            files.extra(extra),
            added,
            add_bos and not file.has_template,  # transformers 5 ignores the flags next to a tokenizer.json
            add_eos and not file.has_template,
            find_chat_template(folder, config),
        )


def find_tokenizer_class(folder: Path, config: Entries, is_byte_level: bool) -> str:
    """Return the class that AutoTokenizer uses. Some classes rebuild the tokenizer from its vocabulary."""
    model = Entries.read_if_exists(folder / "config.json")
    family = model.values.get("model_type")
    holder = config if config.values.get("tokenizer_class") else model
    name = holder.text("tokenizer_class").removesuffix("Fast") if holder.values.get("tokenizer_class") else ""
    if family == "qwen2" or (family == "qwen3" and not name):
        return "Qwen2Tokenizer"
    if family == "mistral" or (name == "LlamaTokenizer" and is_byte_level):
        return "TokenizersBackend"
    return name if name in DEFAULTS else "TokenizersBackend"


class TokenFiles(NamedTuple):
    """tokenizer_config.json, and the older special_tokens_map.json, whose entries win if it is read at all."""

    config: Entries
    older: Entries

    def holder(self, name: str) -> Entries:
        """Return the file that holds an entry."""
        return self.older if name in self.older.values else self.config

    def named(self, added: dict[int, AddedToken], defaults: dict[str, str]) -> dict[str, AddedToken]:
        """Return special tokens by name. A name that is null in a file has no token."""
        known = {token.content: token for token in added.values()}
        values: dict[str, AddedToken | None] = {name: AddedToken(text, special=True) for name, text in defaults.items()}
        for name in [*self.config.values, *self.older.values]:
            value = self.holder(name).values[name]
            if name in NAMED or (name.endswith("_token") and isinstance(value, str | dict)):
                values[name] = None if value in (None, "") else as_token(self.holder(name), name, value)
        extra = self.holder("extra_special_tokens")
        if isinstance(by_name := extra.values.get("extra_special_tokens"), dict):
            values |= {name: as_token(extra, f"extra_special_tokens.{name}", by_name[name]) for name in by_name}
        named = {name: token for name in [*NAMED, *values] if (token := values.get(name))}
        return {name: known.get(token.content, token) if name in NAMED else token for name, token in named.items()}

    def extra(self, in_vocabulary: list[AddedToken]) -> list[AddedToken]:
        """Return special tokens without a name, from the first place with a list."""
        name = "additional_special_tokens"
        return self.listed() or in_vocabulary or (tokens_of(self.older, name) if name in self.older else [])

    def listed(self) -> list[AddedToken]:
        """Return the special tokens that tokenizer_config.json lists."""
        holder = self.holder("extra_special_tokens")
        if isinstance(holder.values.get("extra_special_tokens"), list):
            return tokens_of(holder, "extra_special_tokens")
        return tokens_of(self.config, name) if (name := "additional_special_tokens") in self.config else []

    def added(self, in_vocabulary: dict[int, AddedToken]) -> dict[int, AddedToken]:
        """Return added tokens by id: added_tokens_decoder's, or else those of added_tokens.json and the vocabulary."""
        if "added_tokens_decoder" in self.config:
            decoder = self.config.entries("added_tokens_decoder")
            return {
                token_id(decoder, key): as_token(decoder, key, decoder.entries(key).values) for key in decoder.values
            }
        by_text = Entries.read_if_exists(self.config.path.with_name("added_tokens.json"))
        ids = {text: by_text.integer(text, minimum=0) for text in by_text.values}
        special = {token.content for name, token in self.named({}, {}).items() if name in NAMED}
        special |= {token.content for token in self.listed()}
        listed = {
            i: AddedToken(text, normalized=text not in special, special=text in special) for text, i in ids.items()
        }
        return listed | in_vocabulary


def tokens_of(holder: Entries, name: str) -> list[AddedToken]:
    """Return the tokens of a list in a file."""
    values = holder.values[name]
    if not isinstance(values, list):
        raise holder.error(name, "a list of tokens")
    return [as_token(holder, f"{name}[{i}]", value) for i, value in enumerate(values)]


def token_id(decoder: Entries, key: str) -> int:
    """Return a key of added_tokens_decoder as a number."""
    if not key.isdecimal() or len(key) > 8:
        raise ValueError(f"{decoder.path}: added_tokens_decoder has the key {key[:80]!r}, which is not a token id")
    return int(key)


def as_token(holder: Entries, name: str, value: Any) -> AddedToken:
    """Return a token from a file, where it is a string, or {"content": string} with flags."""
    if isinstance(value, str) and value:
        value = {"content": value, "special": True}
    if not isinstance(value, dict):
        raise Entries({name: value}, holder.path, holder.prefix).error(name, "a string or an object")
    entry = Entries(value, holder.path, f"{holder.prefix}{name}.")
    flags = {flag: entry.flag(flag, False) for flag in FLAGS}
    # A token is special unless added_tokens_decoder lists it without the flag.
    flags["special"] = entry.flag("special", "added_tokens_decoder" not in holder.prefix)
    flags["normalized"] = entry.flag("normalized", not flags["special"])
    try:
        return AddedToken(entry.text("content"), **flags)
    except UnicodeEncodeError:
        raise entry.error("content", "a string of whole characters") from None


# A tokenizers.Tokenizer from a vocabulary, as transformers' classes build it

Vocabulary = dict[str, int]
Merges = list[tuple[str, str]]

QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def llama(vocab: Vocabulary, merges: Merges, entries: Entries) -> Tokenizer:
    """Build LlamaTokenizer. It writes spaces as U+2581 and puts one before the text.

    With `legacy` it also puts one after each special token.
    """
    adds_prefix = entries.flag("add_prefix_space", True)
    scheme = "never" if not adds_prefix else "always" if entries.flag("legacy", False) else "first"
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", left=1)] if adds_prefix else steps)
    return backend


def qwen2(vocab: Vocabulary, merges: Merges, entries: Entries) -> Tokenizer:
    """Build Qwen2Tokenizer, a byte-level BPE."""
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, continuing_subword_prefix="", end_of_word_suffix=""))
    backend.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated")
    adds_prefix = entries.flag("add_prefix_space", False)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=adds_prefix, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def gpt2(vocab: Vocabulary, merges: Merges, entries: Entries) -> Tokenizer:
    """Build GPT2Tokenizer, a byte-level BPE."""
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, continuing_subword_prefix="", end_of_word_suffix=""))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=entries.flag("add_prefix_space", False))
    backend.decoder = decoders.ByteLevel()
    return backend


BUILDERS: dict[str, Callable[[Vocabulary, Merges, Entries], Tokenizer]] = {
    "LlamaTokenizer": llama,
    "Qwen2Tokenizer": qwen2,
    "GPT2Tokenizer": gpt2,
}


class TokenizerFile:
    """tokenizer.json. It is used as it is, unless a class in BUILDERS rebuilds it from its vocabulary."""

    has_template = True

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            text = path.read_text(encoding="utf-8")
            if HAS_PREFIX.search(text):
                merges_in(json.loads(text)["model"])
            self._backend = Tokenizer.from_str(text)
        except Exception as error:
            Entries.read(path)  # raises ValueError if it is not JSON
            raise ValueError(f"{path} is unsupported by the tokenizers library: {error}") from None
        self._backend.no_truncation()
        self._backend.no_padding()
        self.is_byte_level = '"ByteLevel"' in text
        self.added = self._backend.get_added_tokens_decoder()
        self.named: dict[str, str] = {}  # only the other files name special tokens
        self.extra: list[AddedToken] = []

    def build(self, config: TokenizerConfig) -> Tokenizer:
        """Return the tokenizer without the tokens that `config` adds."""
        build = BUILDERS.get(config.tokenizer_class)
        model = Entries.read(self.path).values["model"] if build else {}
        if not build or "merges" not in model:
            return self._backend
        backend = build(model["vocab"], merges_in(model), config.entries)
        if self._backend.post_processor:
            backend.post_processor = self._backend.post_processor
        return backend


def merges_in(model: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the merges of a BPE: each is a pair, or a string with a space. Raise ValueError if one lacks the prefix.

    The library cuts the prefix off a merge's second token unseen, and aborts the process if it cuts a character in two.
    """
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model.get("merges", [])]
    prefix = model.get("continuing_subword_prefix") or ""
    for merge in merges:
        if not merge[-1].startswith(prefix):
            raise ValueError(f"{brief(merge[-1])} in model.merges lacks continuing_subword_prefix {brief(prefix)}")
    return merges


FIRST_SPACE = "\\A\u2581"
UNIGRAM = 1  # sentencepiece_model.proto: a type of model
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # types of a piece


class SentencepieceFile:
    """tokenizer.model: its pieces, and a few fields of its training. The sentencepiece library checks the file."""

    has_template = is_byte_level = False

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = path.read_bytes()
            self._sp = SentencePieceProcessor()
            self._sp.load_from_serialized_proto(data)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{path} is not a sentencepiece model: {error}") from None
        file = list(protobuf_fields(data))
        trainer, normalizer = (
            dict(protobuf_fields(next((value for i, value in file if i == number), b""))) for number in (2, 3)
        )
        self._is_unigram = trainer.get(3, UNIGRAM) == UNIGRAM
        self._has_bytes = bool(trainer.get(35, 0))
        self._charsmap = normalizer.get(2, b"")
        self.adds_prefix, self._removes_spaces, self._escapes = (bool(normalizer.get(field, 1)) for field in (3, 4, 5))
        self._types = [dict(protobuf_fields(value)).get(3, NORMAL) for i, value in file if i == 1]
        named = {"bos_token": self._sp.bos_id(), "eos_token": self._sp.eos_id(), "unk_token": self._sp.unk_id()}
        self.named = {name: self._sp.id_to_piece(i) for name, i in named.items() if i >= 0}
        self.added: dict[int, AddedToken] = {}
        self.extra = [
            AddedToken(self._sp.id_to_piece(i), normalized=False, special=type == CONTROL)
            for i, type in enumerate(self._types)
            if type in (CONTROL, USER_DEFINED)
        ]

    def build(self, config: TokenizerConfig) -> Tokenizer:
        """Return the tokenizer without the tokens that `config` adds."""
        vocab = {self._sp.id_to_piece(i): i for i in range(len(self._sp))}
        build = BUILDERS.get(config.tokenizer_class)
        if build:
            return build(vocab, merges_of(vocab), config.entries)
        return self._build_plain(vocab, config)

    def _build_plain(self, vocab: Vocabulary, config: TokenizerConfig) -> Tokenizer:
        """Return a tokenizer that encodes as the sentencepiece library does, like transformers if no class is named."""
        pieces = {i: piece for piece, i in vocab.items()}
        names = {i: token.content for i, token in config.added.items()}
        if not self._is_unigram:  # added tokens rename pieces
            kept = {piece for i, piece in pieces.items() if i not in names}
            pieces |= {i: name for i, name in names.items() if i in pieces and name not in kept}
        backend = Tokenizer(self._plain_model(pieces))
        legacy = config.entries.flag("legacy", True)
        steps: list[normalizers.Normalizer] = [normalizers.Precompiled(self._charsmap)] if self._charsmap else []
        before: list[pre_tokenizers.PreTokenizer] = []
        after: list[decoders.Decoder] = [decoders.ByteFallback()] if self._has_bytes else []
        if self._removes_spaces:
            steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        if self._escapes:
            steps.append(normalizers.Replace(" ", "\u2581"))
        if self.adds_prefix:
            if legacy:  # Metaspace adds none to a text that starts with one
                steps.append(normalizers.Replace(Regex(FIRST_SPACE), "\u2581\u2581"))
            scheme = "always" if legacy else "first"
            before.append(pre_tokenizers.Metaspace("\u2581", prepend_scheme=scheme, split=False))
        if user_defined := [piece for i, piece in pieces.items() if self._types[i] == USER_DEFINED]:
            pattern = "|".join(re.escape(piece) for piece in sorted(user_defined, key=len, reverse=True))
            before.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))  # never merged with a neighbor
        if after or self.adds_prefix:
            after.append(decoders.Fuse())
        if self.adds_prefix:
            after.append(decoders.Strip(" ", left=1))
        backend.normalizer = normalizers.Sequence(steps)
        backend.pre_tokenizer = pre_tokenizers.Sequence(before) if before else None
        backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), *after])
        return backend

    def _plain_model(self, pieces: dict[int, str]) -> BPE | Unigram:
        """Return the model, which merges normal pieces only, those with the highest scores first."""
        scores = {i: self._sp.get_score(i) for i in pieces}
        if self._is_unigram:
            scored = [(piece, scores[i]) for i, piece in pieces.items()]
            return Unigram(scored, unk_id=self._sp.unk_id(), byte_fallback=self._has_bytes)
        normal = sorted((i for i in pieces if self._types[i] == NORMAL), key=lambda i: (-scores[i], i))
        return BPE(
            {piece: i for i, piece in pieces.items()},
            merges_of({pieces[i]: rank for rank, i in enumerate(normal)}),
            unk_token=self.named.get("unk_token"),
            fuse_unk=True,
            byte_fallback=self._has_bytes,
            ignore_merges=USER_DEFINED in self._types,
        )


def merges_of(vocab: Vocabulary) -> Merges:
    """Return every pair of pieces that makes a piece, in the order of the pieces: sentencepiece stores no merges.

    >>> merges_of({"a": 0, "b": 1, "ab": 2, "aab": 3, "aa": 4})
    [('a', 'b'), ('a', 'ab'), ('aa', 'b'), ('a', 'a')]
    """
    splits = ((piece[:i], piece[i:]) for piece in sorted(vocab, key=vocab.__getitem__) for i in range(1, len(piece)))
    return [(left, right) for left, right in splits if left in vocab and right in vocab]


def protobuf_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each field of a protobuf message: an int, or bytes for everything else.

    >>> list(protobuf_fields(bytes([8, 150, 1, 18, 2, 72, 105])))
    [(1, 150), (2, b'Hi')]
    """
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while position < len(data):
        key = varint()
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            yield number, varint()
        else:
            size = {1: 8, 5: 4}.get(wire_type) or varint()
            yield number, data[position : position + size]
            position += size


def add_tokens(backend: Tokenizer, config: TokenizerConfig) -> Tokenizer:
    """Add the special and added tokens that are missing in `backend`, in the order in which transformers adds them."""
    backend.encode_special_tokens = config.entries.flag("split_special_tokens", False)
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    tokens = [token for _, token in sorted(config.added.items(), key=lambda item: item[0]) if repr(token) not in known]
    texts = {token.content for token in [*backend.get_added_tokens_decoder().values(), *tokens]}
    tokens += [token for token in special_tokens(config) if token.content not in texts]
    by_name = {token.content for token in config.named.values()}
    for token in tokens:
        token.special = token.special or token.content in by_name
    backend.add_tokens(tokens)
    if config.tokenizer_class == "Qwen2Tokenizer":
        backend.add_tokens([AddedToken(token.content, special=True) for token in special_tokens(config)])
    if config.add_bos or config.add_eos:
        add_bos_and_eos(backend, config)
    return backend


def special_tokens(config: TokenizerConfig) -> list[AddedToken]:
    """Return each special token once, the named ones first."""
    tokens: dict[str, AddedToken] = {}
    for token in [*config.named.values(), *config.extra]:
        tokens.setdefault(token.content, token)
    return list(tokens.values())


def add_bos_and_eos(backend: Tokenizer, config: TokenizerConfig) -> None:
    """Make `backend` put BOS before a text and EOS after it, if the checkpoint adds them and names them."""
    bos = [config.named["bos_token"].content] if config.add_bos and "bos_token" in config.named else []
    eos = [config.named["eos_token"].content] if config.add_eos and "eos_token" in config.named else []
    tokens = [(text, backend.token_to_id(text)) for text in dict.fromkeys(bos + eos)]
    backend.post_processor = TemplateProcessing(single=[*bos, "$A", *eos], special_tokens=tokens)
