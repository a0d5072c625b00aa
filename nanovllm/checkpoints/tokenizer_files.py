"""The files of a tokenizer, merged as in transformers 5, so that special tokens get the same ids and flags."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.processors import TemplateProcessing

from .chat_template import find_chat_template
from .entries import Entries, shorten

TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
HAS_SUBWORD_PREFIX = re.compile(r'"continuing_subword_prefix"\s*:\s*"[^"]')
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
DEFAULT_TOKENS = {  # tokenizer class: its special tokens, unless a file names others
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
}


@dataclass
class TokenizerConfig:
    """tokenizer_config.json, merged with the other files of the folder."""

    entries: Entries
    tokenizer_class: str
    named: dict[str, AddedToken]  # by name: "bos_token", and model-specific names such as "image_token"
    extra: list[AddedToken]  # special tokens without a name
    added: dict[int, AddedToken]  # by token id
    add_bos: bool
    add_eos: bool
    chat_template: str | dict[str, str] | None  # one template, or several by name

    @classmethod
    def from_folder(cls, folder: Path, file: "TokenizerFile | SentencepieceFile") -> "TokenizerConfig":
        """Read the files next to `file`. Raise ValueError, naming the file and the entry, for an invalid value."""
        path = folder / "tokenizer_config.json"
        config = Entries.read_if_exists(path)
        is_bare = not path.exists() and not file.is_json  # then Llama's conventions apply
        name = "LlamaTokenizer" if is_bare else find_tokenizer_class(folder, config, file.is_byte_level)
        older_path = folder / "special_tokens_map.json"
        has_decoder = "added_tokens_decoder" in config
        files = TokenFiles(config, Entries({}, older_path) if has_decoder else Entries.read_if_exists(older_path))
        added, extra = files.added(file.added), file.extra
        if isinstance(file, SentencepieceFile) and name not in BUILDERS:
            extra = [token for token in extra if token.special]  # the backend already splits at user-defined pieces
            if file.adds_prefix:  # text between added tokens gets a leading space: match them in the original text
                added = {i: AddedToken(**token.__getstate__() | {"normalized": False}) for i, token in added.items()}
        defaults = file.named if is_bare else DEFAULT_TOKENS.get(name, file.named)
        add_bos, add_eos = config.flag("add_bos_token", is_bare), config.flag("add_eos_token", False)
        return cls(
            config,
            name,
            files.named(added, defaults),
            files.extra(extra),
            added,
            add_bos and not file.is_json,  # transformers 5 ignores the flags next to a tokenizer.json
            add_eos and not file.is_json,
            find_chat_template(folder, config),
        )


def find_tokenizer_class(folder: Path, config: Entries, is_byte_level: bool) -> str:
    """Return the name of the class that AutoTokenizer uses: one in BUILDERS, or TokenizersBackend."""
    model_config = Entries.read_if_exists(folder / "config.json")
    model_type = model_config.values.get("model_type")
    source = config if config.values.get("tokenizer_class") else model_config
    name = source.text("tokenizer_class").removesuffix("Fast") if source.values.get("tokenizer_class") else ""
    if model_type == "qwen2" or (model_type == "qwen3" and not name):
        return "Qwen2Tokenizer"
    if model_type == "mistral" or (name == "LlamaTokenizer" and is_byte_level):
        return "TokenizersBackend"
    return name if name in DEFAULT_TOKENS else "TokenizersBackend"


class TokenFiles(NamedTuple):
    """tokenizer_config.json and the older special_tokens_map.json.

    The latter is read only if the former has no added_tokens_decoder. Then its entries take precedence.
    """

    config: Entries
    older: Entries

    def source(self, name: str) -> Entries:
        """Return the file that an entry is read from."""
        return self.older if name in self.older.values else self.config

    def named(self, added: dict[int, AddedToken], defaults: dict[str, str]) -> dict[str, AddedToken]:
        """Return special tokens by name. A null in a file removes the default token of that name."""
        known = {token.content: token for token in added.values()}
        values: dict[str, AddedToken | None] = {name: AddedToken(text, special=True) for name, text in defaults.items()}
        for name in [*self.config.values, *self.older.values]:
            value = self.source(name).values[name]
            if name in TOKEN_NAMES or (name.endswith("_token") and isinstance(value, str | dict)):
                values[name] = None if value in (None, "") else as_token(self.source(name), name, value)
        extra = self.source("extra_special_tokens")
        if isinstance(by_name := extra.values.get("extra_special_tokens"), dict):
            values |= {name: as_token(extra, f"extra_special_tokens.{name}", by_name[name]) for name in by_name}
        named = {name: token for name in [*TOKEN_NAMES, *values] if (token := values.get(name))}
        return named | {name: known.get(token.content, token) for name, token in named.items() if name in TOKEN_NAMES}

    def extra(self, in_vocabulary: list[AddedToken]) -> list[AddedToken]:
        """Return the special tokens without a name, from the first of three places that lists any."""
        name = "additional_special_tokens"
        return self.listed() or in_vocabulary or (tokens_of(self.older, name) if name in self.older else [])

    def listed(self) -> list[AddedToken]:
        """Return the special tokens that tokenizer_config.json lists."""
        source = self.source("extra_special_tokens")
        if isinstance(source.values.get("extra_special_tokens"), list):
            return tokens_of(source, "extra_special_tokens")
        return tokens_of(self.config, name) if (name := "additional_special_tokens") in self.config else []

    def added(self, in_vocabulary: dict[int, AddedToken]) -> dict[int, AddedToken]:
        """Return added tokens by id, from added_tokens_decoder or else from added_tokens.json and the vocabulary."""
        if "added_tokens_decoder" in self.config:
            decoder = self.config.entries("added_tokens_decoder")
            return {
                token_id(decoder, key): as_token(decoder, key, decoder.entries(key).values) for key in decoder.values
            }
        by_text = Entries.read_if_exists(self.config.path.with_name("added_tokens.json"))
        ids = {text: by_text.integer(text, minimum=0) for text in by_text.values}
        special = {token.content for name, token in self.named({}, {}).items() if name in TOKEN_NAMES}
        special |= {token.content for token in self.listed()}
        listed = {
            i: AddedToken(text, normalized=text not in special, special=text in special) for text, i in ids.items()
        }
        return listed | in_vocabulary


def tokens_of(source: Entries, name: str) -> list[AddedToken]:
    """Return the tokens in the list `name` of a file."""
    values = source.values[name]
    if not isinstance(values, list):
        raise source.error(name, "a list of tokens")
    return [as_token(source, f"{name}[{i}]", value) for i, value in enumerate(values)]


def token_id(decoder: Entries, key: str) -> int:
    """Return a key of added_tokens_decoder as an integer. Raise ValueError if it is not a token id."""
    if not key.isdecimal() or len(key) > 8:
        raise ValueError(f"{decoder.path}: added_tokens_decoder has the key {key[:80]!r}, which is not a token id")
    return int(key)


def as_token(source: Entries, name: str, value: Any) -> AddedToken:
    """Return a token, given as a string or as {"content": string} with flags. An error names the file and `name`."""
    if isinstance(value, str) and value:
        value = {"content": value, "special": True}
    if not isinstance(value, dict):
        raise Entries({name: value}, source.path, source.prefix).error(name, "a string or an object")
    entry = Entries(value, source.path, f"{source.prefix}{name}.")
    flags = {flag: entry.flag(flag, False) for flag in TOKEN_FLAGS}
    # Without this flag, a token is special, unless it is in added_tokens_decoder.
    flags["special"] = entry.flag("special", "added_tokens_decoder" not in source.prefix)
    flags["normalized"] = entry.flag("normalized", not flags["special"])
    try:
        return AddedToken(entry.text("content"), **flags)
    except UnicodeEncodeError:
        raise entry.error("content", "valid Unicode text") from None


# Building a tokenizers.Tokenizer from a vocabulary, as transformers' classes do

Vocabulary = dict[str, int]
Merges = list[tuple[str, str]]

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def llama_bpe(vocab: Vocabulary, merges: Merges, entries: Entries) -> Tokenizer:
    """Build transformers' LlamaTokenizer. It writes spaces as U+2581, and prepends a space to the text.

    With the entry `legacy`, it also adds a space after each special token.
    """
    adds_prefix = entries.flag("add_prefix_space", True)
    scheme = "never" if not adds_prefix else "always" if entries.flag("legacy", False) else "first"
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", left=1)] if adds_prefix else steps)
    return backend


def qwen2_bpe(vocab: Vocabulary, merges: Merges, entries: Entries) -> Tokenizer:
    """Build transformers' Qwen2Tokenizer, a byte-level BPE."""
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, continuing_subword_prefix="", end_of_word_suffix=""))
    backend.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated")
    adds_prefix = entries.flag("add_prefix_space", False)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=adds_prefix, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def gpt2_bpe(vocab: Vocabulary, merges: Merges, entries: Entries) -> Tokenizer:
    """Build transformers' GPT2Tokenizer, a byte-level BPE."""
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, continuing_subword_prefix="", end_of_word_suffix=""))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=entries.flag("add_prefix_space", False))
    backend.decoder = decoders.ByteLevel()
    return backend


BUILDERS: dict[str, Callable[[Vocabulary, Merges, Entries], Tokenizer]] = {
    "LlamaTokenizer": llama_bpe,
    "Qwen2Tokenizer": qwen2_bpe,
    "GPT2Tokenizer": gpt2_bpe,
}


class TokenizerFile:
    """A tokenizer.json file. It is used unchanged, unless a function in BUILDERS rebuilds it from its vocabulary."""

    is_json = True

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            text = path.read_text(encoding="utf-8")
            if HAS_SUBWORD_PREFIX.search(text):
                read_merges(json.loads(text)["model"])
            self._backend = Tokenizer.from_str(text)
        except Exception as error:
            Entries.read(path)  # raises a clearer ValueError if it is not JSON
            raise ValueError(f"{path} is unsupported by the tokenizers library: {error}") from None
        self._backend.no_truncation()
        self._backend.no_padding()
        self.is_byte_level = '"ByteLevel"' in text
        self.added = self._backend.get_added_tokens_decoder()
        self.named: dict[str, str] = {}  # special tokens are named only in the other files
        self.extra: list[AddedToken] = []

    def build(self, config: TokenizerConfig) -> Tokenizer:
        """Return the tokenizer without the tokens that `config` adds."""
        builder = BUILDERS.get(config.tokenizer_class)
        model = Entries.read(self.path).values["model"] if builder else {}
        if not builder or "merges" not in model:
            return self._backend
        backend = builder(model["vocab"], read_merges(model), config.entries)
        if self._backend.post_processor:
            backend.post_processor = self._backend.post_processor
        return backend


def read_merges(model: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the merges of a BPE model as pairs of tokens. Raise ValueError if a second token lacks the prefix.

    The tokenizers library strips continuing_subword_prefix from the second token without a check, and aborts the
    process if that splits a character.
    """
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model.get("merges", [])]
    prefix = model.get("continuing_subword_prefix") or ""
    for merge in merges:
        if not merge[-1].startswith(prefix):
            raise ValueError(f"{shorten(merge[-1])} in model.merges lacks continuing_subword_prefix {shorten(prefix)}")
    return merges


FIRST_SPACE = "\\A\u2581"  # the regular expression for a space at the start of a text
UNIGRAM = 1  # a model type in sentencepiece_model.proto
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # types of pieces in sentencepiece_model.proto


class SentencepieceFile:
    """A tokenizer.model file: its pieces, and a few of its settings. The sentencepiece library validates the file."""

    is_json = is_byte_level = False

    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor  # takes longer than all other modules of the tokenizer

        self.path = path
        try:
            data = path.read_bytes()
            self._sp = SentencePieceProcessor()
            self._sp.load_from_serialized_proto(data)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{path} is not a sentencepiece model: {error}") from None
        file = list(protobuf_fields(data))  # fields by number, as in sentencepiece_model.proto
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
        builder = BUILDERS.get(config.tokenizer_class)
        if builder:
            return builder(vocab, derive_merges(vocab), config.entries)
        return self._build_plain(vocab, config)

    def _build_plain(self, vocab: Vocabulary, config: TokenizerConfig) -> Tokenizer:
        """Build a tokenizer that encodes as sentencepiece does. transformers uses it for classes not in BUILDERS."""
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
            if legacy:  # Metaspace prepends no space to a text that begins with one
                steps.append(normalizers.Replace(Regex(FIRST_SPACE), "\u2581\u2581"))
            scheme = "always" if legacy else "first"
            before.append(pre_tokenizers.Metaspace("\u2581", prepend_scheme=scheme, split=False))
        if user_defined := [piece for i, piece in pieces.items() if self._types[i] == USER_DEFINED]:
            pattern = "|".join(re.escape(piece) for piece in sorted(user_defined, key=len, reverse=True))
            before.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))  # never merged
        if after or self.adds_prefix:
            after.append(decoders.Fuse())
        if self.adds_prefix:
            after.append(decoders.Strip(" ", left=1))
        backend.normalizer = normalizers.Sequence(steps)
        backend.pre_tokenizer = pre_tokenizers.Sequence(before) if before else None
        backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), *after])
        return backend

    def _plain_model(self, pieces: dict[int, str]) -> BPE | Unigram:
        """Return the tokenizer's model. A BPE merges only into normal pieces, highest scores first."""
        scores = {i: self._sp.get_score(i) for i in pieces}
        if self._is_unigram:
            scored = [(piece, scores[i]) for i, piece in pieces.items()]
            return Unigram(scored, unk_id=self._sp.unk_id(), byte_fallback=self._has_bytes)
        normal = sorted((i for i in pieces if self._types[i] == NORMAL), key=lambda i: (-scores[i], i))
        return BPE(
            {piece: i for i, piece in pieces.items()},
            derive_merges({pieces[i]: rank for rank, i in enumerate(normal)}),
            unk_token=self.named.get("unk_token"),
            fuse_unk=True,
            byte_fallback=self._has_bytes,
            ignore_merges=USER_DEFINED in self._types,
        )


def derive_merges(vocab: Vocabulary) -> Merges:
    """Return every pair of pieces that forms a piece, ordered by the piece it forms. sentencepiece stores no merges.

    >>> derive_merges({"a": 0, "b": 1, "ab": 2, "aab": 3, "aa": 4})
    [('a', 'b'), ('a', 'ab'), ('aa', 'b'), ('a', 'a')]
    """
    splits = ((piece[:i], piece[i:]) for piece in sorted(vocab, key=vocab.__getitem__) for i in range(1, len(piece)))
    return [(left, right) for left, right in splits if left in vocab and right in vocab]


def protobuf_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each field of a protobuf message. A value is an int, or else bytes.

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
    """Add the special and added tokens that `backend` lacks, in the order in which transformers adds them."""
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
    """Return each special token once. Tokens that have a name come first."""
    tokens: dict[str, AddedToken] = {}
    for token in [*config.named.values(), *config.extra]:
        tokens.setdefault(token.content, token)
    return list(tokens.values())


def add_bos_and_eos(backend: Tokenizer, config: TokenizerConfig) -> None:
    """Make `backend` add BOS before a text and EOS after it, if the checkpoint sets the flags and names the tokens."""
    bos = [config.named["bos_token"].content] if config.add_bos and "bos_token" in config.named else []
    eos = [config.named["eos_token"].content] if config.add_eos and "eos_token" in config.named else []
    tokens = [(text, backend.token_to_id(text)) for text in dict.fromkeys(bos + eos)]
    backend.post_processor = TemplateProcessing(single=[*bos, "$A", *eos], special_tokens=tokens)
