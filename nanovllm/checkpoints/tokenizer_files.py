"""Files of a tokenizer into a tokenizers.Tokenizer: tokenizer.json or tokenizer.model, and the files beside it.

They are merged as transformers 5 does, so that special tokens get the same ids and the same flags. tokenizer.json is
taken as it is, or its vocabulary is built anew by the class that the folder names; sentencepiece's file always is.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.processors import TemplateProcessing

from .chat_template import find_chat_template
from .entries import Entries, brief, read_json, read_json_if_any

MAX_TOKEN_ID = 2**24
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
DEFAULTS = {  # special tokens of a class, where no file names others
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
}


class VocabularyFile(Protocol):
    """tokenizer.json or tokenizer.model."""

    is_byte_level: bool  # its pieces are spelled in bytes
    says_bos: bool  # it says itself where BOS and EOS go
    added: dict[int, AddedToken]  # tokens beside its vocabulary
    named: dict[str, str]  # its special tokens by name
    extra: list[AddedToken]  # special tokens without a name


@dataclass
class TokenizerConfig:
    entries: Entries  # of tokenizer_config.json
    tokenizer_class: str
    named: dict[str, AddedToken]  # "bos_token" and its token; a model's own names, as "image_token", too
    extra: list[AddedToken]
    added: dict[int, AddedToken]
    add_bos: bool
    add_eos: bool
    chat_template: str | dict[str, str] | None  # or templates by name

    @classmethod
    def from_folder(cls, folder: Path, file: VocabularyFile) -> "TokenizerConfig":
        path = folder / "tokenizer_config.json"
        config = Entries(read_json_if_any(path), path)
        is_bare = not path.exists() and not file.says_bos  # a tokenizer.model alone: Llama's conventions hold
        name = "LlamaTokenizer" if is_bare else tokenizer_class(folder, config, file.is_byte_level)
        older = {} if "added_tokens_decoder" in config else read_json_if_any(folder / "special_tokens_map.json")
        files = Files(config, Entries(older, folder / "special_tokens_map.json"))
        added = files.added(file.added)
        defaults = file.named if is_bare else DEFAULTS.get(name, file.named)
        add_bos, add_eos = config.flag("add_bos_token", is_bare), config.flag("add_eos_token", False)
        return cls(
            config,
            name,
            files.named(added, defaults),
            files.extra(file.extra),
            added,
            add_bos and not file.says_bos,  # transformers 5 leaves out the flags beside a tokenizer.json
            add_eos and not file.says_bos,
            find_chat_template(folder, config),
        )


def tokenizer_class(folder: Path, config: Entries, is_byte_level: bool) -> str:
    """Return the class that AutoTokenizer takes. Some build the tokenizer anew of its vocabulary, others keep it."""
    model = Entries(read_json_if_any(folder / "config.json"), folder / "config.json")
    family = model.values.get("model_type")
    holder = config if config.values.get("tokenizer_class") else model
    name = holder.text("tokenizer_class").removesuffix("Fast") if holder.values.get("tokenizer_class") else ""
    if family == "qwen2" or (family == "qwen3" and not name):
        return "Qwen2Tokenizer"
    if family == "mistral" or (name == "LlamaTokenizer" and is_byte_level):
        return "TokenizersBackend"
    return name if name in DEFAULTS else "TokenizersBackend"


class Files(NamedTuple):
    """tokenizer_config.json, and special_tokens_map.json, whose entries win where it is read at all."""

    config: Entries
    older: Entries

    def holder(self, name: str) -> Entries:
        return self.older if name in self.older.values else self.config

    def named(self, added: dict[int, AddedToken], defaults: dict[str, str]) -> dict[str, AddedToken]:
        """Return special tokens by name. A name that a file sets to null has none."""
        known = {token.content: token for token in added.values()}
        values = {name: AddedToken(text, special=True) for name, text in defaults.items()}
        for name in [*self.config.values, *self.older.values]:
            value = self.holder(name).values[name]
            if name in NAMED or (name.endswith("_token") and isinstance(value, str | dict)):
                values[name] = None if value in (None, "") else as_token(self.holder(name), name, value)
        extra = self.holder("extra_special_tokens")
        if isinstance(by_name := extra.values.get("extra_special_tokens"), dict):
            values |= {name: as_token(extra, f"extra_special_tokens.{name}", by_name[name]) for name in by_name}
        named = {name: values[name] for name in [*NAMED, *values] if values.get(name)}
        return {name: known.get(token.content, token) if name in NAMED else token for name, token in named.items()}

    def extra(self, in_file: list[AddedToken]) -> list[AddedToken]:
        """Return special tokens without a name, from the first file with a list. `in_file` are the vocabulary's own."""
        name = "additional_special_tokens"
        return self.listed() or in_file or (tokens_of(self.older, name) if name in self.older else [])

    def listed(self) -> list[AddedToken]:
        holder = self.holder("extra_special_tokens")
        if isinstance(holder.values.get("extra_special_tokens"), list):
            return tokens_of(holder, "extra_special_tokens")
        return tokens_of(self.config, name) if (name := "additional_special_tokens") in self.config else []

    def added(self, in_file: dict[int, AddedToken]) -> dict[int, AddedToken]:
        """Return the tokens that tokenizer_config.json adds; without that list, added_tokens.json's and `in_file`."""
        if "added_tokens_decoder" in self.config:
            decoder = self.config.entries("added_tokens_decoder")
            return {
                token_id(decoder, key): as_token(decoder, key, decoder.entries(key).values) for key in decoder.values
            }
        path = self.config.path.with_name("added_tokens.json")
        by_text = Entries(read_json_if_any(path), path)
        ids = {text: by_text.integer(text, least=0, most=MAX_TOKEN_ID) for text in by_text.values}
        special = {token.content for name, token in self.named({}, {}).items() if name in NAMED}
        special |= {token.content for token in self.listed()}
        listed = {
            i: AddedToken(text, normalized=text not in special, special=text in special) for text, i in ids.items()
        }
        return listed | in_file


def tokens_of(holder: Entries, name: str) -> list[AddedToken]:
    values = holder.values[name]
    if not isinstance(values, list):
        raise holder.error(name, "a list of tokens")
    return [as_token(holder, f"{name}[{i}]", value) for i, value in enumerate(values)]


def token_id(decoder: Entries, key: str) -> int:
    if not key.isdecimal() or len(key) > 8:
        raise ValueError(f"{decoder.path}: added_tokens_decoder has {key[:80]!r} in place of a token id")
    return int(key)


def as_token(holder: Entries, name: str, value: Any) -> AddedToken:
    """Return a token, which is a text, or {"content": text} with flags."""
    if isinstance(value, str) and value:
        value = {"content": value, "special": True}
    if not isinstance(value, dict):
        raise Entries({name: value}, holder.path, holder.within).error(name, "a text or an object")
    entry = Entries(value, holder.path, f"{holder.within}{name}.")
    flags = {flag: entry.flag(flag, False) for flag in FLAGS}
    # what names a special token without flags makes it one; in added_tokens_decoder the flag says so
    flags["special"] = entry.flag("special", "added_tokens_decoder" not in holder.within)
    flags["normalized"] = entry.flag("normalized", not flags["special"])
    try:
        return AddedToken(entry.text("content"), **flags)
    except UnicodeEncodeError:
        raise entry.error("content", "a text of whole characters") from None


Vocabulary = dict[str, int]
Merges = list[tuple[str, str]]

QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PARTS = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model", "truncation", "padding")


def llama(vocab: Vocabulary, merges: Merges, entries: Entries) -> Tokenizer:
    """Build Llama's. A space is "\u2581"; one is put before the text, with `legacy` also behind each special token."""
    adds_prefix = entries.flag("add_prefix_space", True)
    scheme = "never" if not adds_prefix else "always" if entries.flag("legacy", False) else "first"
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", left=1)] if adds_prefix else steps)
    return backend


def qwen2(vocab: Vocabulary, merges: Merges, entries: Entries) -> Tokenizer:
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, continuing_subword_prefix="", end_of_word_suffix=""))
    backend.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated")
    adds_prefix = entries.flag("add_prefix_space", False)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=adds_prefix, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def gpt2(vocab: Vocabulary, merges: Merges, entries: Entries) -> Tokenizer:
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
    """tokenizer.json."""

    says_bos = True

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            text = path.read_text(encoding="utf-8")
            self._backend = Tokenizer.from_str(text)
        except Exception:
            raise cause(path) from None
        self._backend.no_truncation()
        self._backend.no_padding()
        self.is_byte_level = '"ByteLevel"' in text
        self.added = self._backend.get_added_tokens_decoder()
        self.named: dict[str, str] = {}  # the files beside it say that
        self.extra: list[AddedToken] = []

    def build(self, config: TokenizerConfig) -> Tokenizer:
        build = BUILDERS.get(config.tokenizer_class)
        model = read_json(self.path)["model"] if build else {}
        if not build or "merges" not in model:
            return self._backend
        merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
        backend = build(model["vocab"], merges, config.entries)
        if self._backend.post_processor:
            backend.post_processor = self._backend.post_processor
        return backend


def add_tokens(backend: Tokenizer, config: TokenizerConfig) -> Tokenizer:
    """Add the special and added tokens that the backend lacks, in the order in which transformers adds them."""
    backend.encode_special_tokens = config.entries.flag("split_special_tokens", False)
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    tokens = [token for _, token in sorted(config.added.items(), key=lambda item: item[0]) if repr(token) not in known]
    texts = {token.content for token in [*backend.get_added_tokens_decoder().values(), *tokens]}
    for token in [*config.named.values(), *config.extra]:
        if token.content not in texts:
            tokens.append(token)
            texts.add(token.content)
    by_name = {token.content for token in config.named.values()}
    for token in tokens:
        token.special = token.special or token.content in by_name
    backend.add_tokens(tokens)
    if config.tokenizer_class == "Qwen2Tokenizer":
        backend.add_tokens([AddedToken(token.content, special=True) for token in special_tokens(config)])
    if config.add_bos or config.add_eos:
        add_template(backend, config)
    return backend


def special_tokens(config: TokenizerConfig) -> list[AddedToken]:
    """Return the special tokens, each once: those with a name, then those without."""
    tokens: dict[str, AddedToken] = {}
    for token in [*config.named.values(), *config.extra]:
        tokens.setdefault(token.content, token)
    return list(tokens.values())


def add_template(backend: Tokenizer, config: TokenizerConfig) -> None:
    """Make the backend put BOS before a text, and EOS after it, if the folder has them and wants them."""
    bos = config.named.get("bos_token") if config.add_bos else None
    eos = config.named.get("eos_token") if config.add_eos else None
    texts = [token.content if token else "" for token in (bos, eos)]
    template = [text for text in (texts[0], "$A", texts[1]) if text]
    tokens = [(text, backend.token_to_id(text)) for text in dict.fromkeys(filter(None, texts))]
    backend.post_processor = TemplateProcessing(single=template, special_tokens=tokens)


def cause(path: Path) -> ValueError:
    """Return why tokenizer.json cannot be read: it is no JSON, or the library does not know one of its entries."""
    try:
        state = read_json(path)
    except ValueError as error:
        return error
    least: dict[str, Any] = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}
    for name in PARTS:
        try:
            if name in state:
                Tokenizer.from_str(json.dumps(least | {name: state[name]}))
        except Exception as error:
            return ValueError(f"{path}: {name} is not what the tokenizers library reads: {error}")
    return ValueError(
        f"{path}: model is missing" if "model" not in state else f"{path} cannot be read: {brief(list(state))}"
    )


UNIGRAM, CONTROL, USER_DEFINED = 1, 3, 4  # as in sentencepiece's own schema of the file


class SentencepieceFile:
    """tokenizer.model: its pieces, and a few fields of its training. The library checks the file."""

    says_bos = is_byte_level = False

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = path.read_bytes()
            self._sp = SentencePieceProcessor()
            self._sp.load_from_serialized_proto(data)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{path} is not a sentencepiece model: {error}") from None
        file = list(fields(data))
        trainer, normalizer = (dict(fields(next((value for i, value in file if i == n), b""))) for n in (2, 3))
        self._is_unigram = trainer.get(3, UNIGRAM) == UNIGRAM
        self._has_bytes = bool(trainer.get(35, 0))
        self._charsmap = normalizer.get(2, b"")
        types = [dict(fields(value)).get(3, 1) for i, value in file if i == 1]
        named = {"bos_token": self._sp.bos_id(), "eos_token": self._sp.eos_id(), "unk_token": self._sp.unk_id()}
        self.named = {name: self._sp.id_to_piece(i) for name, i in named.items() if i >= 0}
        self.added: dict[int, AddedToken] = {}
        self.extra = [
            AddedToken(self._sp.id_to_piece(i), normalized=False, special=type == CONTROL)
            for i, type in enumerate(types)
            if type in (CONTROL, USER_DEFINED)
        ]

    def build(self, config: TokenizerConfig) -> Tokenizer:
        """Build it with the class that the folder names."""
        vocab = {self._sp.id_to_piece(i): i for i in range(len(self._sp))}
        build = BUILDERS.get(config.tokenizer_class)
        if build:
            return build(vocab, merges_of(vocab), config.entries)
        return self._build_plain(vocab, config)

    def _build_plain(self, vocab: Vocabulary, config: TokenizerConfig) -> Tokenizer:
        """Build one that puts no space before the text, as transformers does for folders that name no class."""
        if self._is_unigram:
            scored = [(piece, self._sp.get_score(i)) for piece, i in vocab.items()]
            backend = Tokenizer(Unigram(scored, unk_id=self._sp.unk_id(), byte_fallback=self._has_bytes))
        else:
            names = {i: token.content for i, token in config.added.items() if token.content not in vocab}
            vocab = {names.get(i, piece): i for piece, i in vocab.items()}
            unk = self.named.get("unk_token")
            bpe = BPE(vocab, merges_of(vocab), unk_token=unk, fuse_unk=True, byte_fallback=self._has_bytes)
            backend = Tokenizer(bpe)
        steps = [normalizers.Precompiled(self._charsmap)] if self._charsmap else []
        backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
        ends = [decoders.ByteFallback(), decoders.Fuse()] if self._has_bytes else []
        backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), *ends])
        return backend


def merges_of(vocab: Vocabulary) -> Merges:
    """Return all pairs of pieces that make a piece, those of an earlier piece first: sentencepiece stores no merges.

    >>> merges_of({"a": 0, "b": 1, "ab": 2, "aab": 3, "aa": 4})
    [('a', 'b'), ('a', 'ab'), ('aa', 'b'), ('a', 'a')]
    """
    splits = ((piece[:i], piece[i:]) for piece in sorted(vocab, key=vocab.__getitem__) for i in range(1, len(piece)))
    return [(left, right) for left, right in splits if left in vocab and right in vocab]


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protobuf message by number: integers, and bytes of texts, floats and messages inside.

    >>> list(fields(bytes([8, 150, 1, 18, 2, 72, 105])))
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
