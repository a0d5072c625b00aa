"""What the files beside a tokenizer say of it: its class, its flags, its special and added tokens.

They are merged as transformers 5 does, so that special tokens get the same ids and the same flags.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tokenizers import AddedToken

from .chat_template import find_chat_template
from .entries import Entries, read_json_if_any

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
    """The class that AutoTokenizer takes. Some build the tokenizer anew of its vocabulary; with others it stays."""
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
        """Special tokens by name. A name that a file sets to null has none."""
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
        """Special tokens without a name: of the first file that lists them. `in_file` are the vocabulary's own."""
        name = "additional_special_tokens"
        return self.listed() or in_file or (tokens_of(self.older, name) if name in self.older else [])

    def listed(self) -> list[AddedToken]:
        holder = self.holder("extra_special_tokens")
        if isinstance(holder.values.get("extra_special_tokens"), list):
            return tokens_of(holder, "extra_special_tokens")
        return tokens_of(self.config, name) if (name := "additional_special_tokens") in self.config else []

    def added(self, in_file: dict[int, AddedToken]) -> dict[int, AddedToken]:
        """The tokens that tokenizer_config.json adds; without that list, those of added_tokens.json and `in_file`."""
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
    """A text, or {"content": text} with flags."""
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
