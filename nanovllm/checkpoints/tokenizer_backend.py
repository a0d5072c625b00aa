"""The tokenizers.Tokenizer of a folder: as tokenizer.json has it, or built anew of its vocabulary by its class."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from .entries import Entries, brief, read_json
from .tokenizer_config import TokenizerConfig

Vocabulary = dict[str, int]
Merges = list[tuple[str, str]]

QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PARTS = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model", "truncation", "padding")


def llama(vocab: Vocabulary, merges: Merges, entries: Entries) -> Tokenizer:
    """A space is "\u2581". One is put before the text; where `legacy` is set, also behind each special token."""
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
    """Each once: those with a name, then those without."""
    tokens: dict[str, AddedToken] = {}
    for token in [*config.named.values(), *config.extra]:
        tokens.setdefault(token.content, token)
    return list(tokens.values())


def add_template(backend: Tokenizer, config: TokenizerConfig) -> None:
    """Let it put BOS before a text, and EOS after it, as far as the folder has them and wants them."""
    bos = config.named.get("bos_token") if config.add_bos else None
    eos = config.named.get("eos_token") if config.add_eos else None
    texts = [token.content if token else "" for token in (bos, eos)]
    template = [text for text in (texts[0], "$A", texts[1]) if text]
    tokens = [(text, backend.token_to_id(text)) for text in dict.fromkeys(filter(None, texts))]
    backend.post_processor = TemplateProcessing(single=template, special_tokens=tokens)


def cause(path: Path) -> ValueError:
    """Why tokenizer.json cannot be read: it is no JSON, or one of its entries is none that the library knows."""
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
