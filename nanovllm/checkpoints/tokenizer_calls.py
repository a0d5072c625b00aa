"""The calls that scripts make on a tokenizer of transformers: tokenizer(text), special tokens by name, and so on."""

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from tokenizers import Tokenizer

from .chat_template import apply_chat_template
from .tokenizer_config import NAMED


class Encoded(dict):
    """encoded["input_ids"], or encoded.input_ids."""

    __getattr__ = dict.__getitem__


class TokenizerCalls:
    backend: Tokenizer
    chat_template: str | dict[str, str] | None
    special_tokens_map: dict[str, str]  # "bos_token": its text
    all_special_tokens: list[str]
    _vocab: dict[str, int]

    def encode(self, text: str, add_bos: bool = True, add_special_tokens: bool | None = None) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Any, skip_special_tokens: bool | None = None) -> str:
        raise NotImplementedError

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoded:
        """input_ids and attention_mask of a text; of a list of texts, lists of them. Raises ValueError for others."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens=add_special_tokens)
            return Encoded(input_ids=ids, attention_mask=[1] * len(ids))
        if not isinstance(text, list | tuple):
            raise ValueError(f"a tokenizer takes a text or a list of texts, not {type(text).__name__}")
        each = [self(one, add_special_tokens) for one in text]
        return Encoded({name: [one[name] for one in each] for name in ("input_ids", "attention_mask")})

    def __getattr__(self, name: str) -> Any:
        """bos_token, eos_token_id and the like. None if the folder names no such token."""
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
        """The prompt that the chat template makes of the messages: its text, or its token ids as from a call."""
        text = apply_chat_template(self, conversation, tools=tools, **kwargs)
        if not tokenize:
            return text
        encoded = self(text, add_special_tokens=False)
        return encoded if return_dict else encoded["input_ids"]

    def batch_decode(self, sequences: Iterable[Any], skip_special_tokens: bool | None = None) -> list[str]:
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """The tokens of a text as they stand in the vocabulary."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).tokens

    def get_vocab(self) -> dict[str, int]:
        return dict(self._vocab)

    @property
    def vocab_size(self) -> int:
        """Without the added tokens."""
        return self.backend.get_vocab_size(with_added_tokens=False)

    def id_to_token(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id)

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        return self.id_to_token(ids) if isinstance(ids, int) else [self.id_to_token(i) for i in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """A token that is not in the vocabulary has the id of unk_token, if there is one."""
        unknown = self._vocab.get(self.special_tokens_map.get("unk_token"))
        if isinstance(tokens, str):
            return self._vocab.get(tokens, unknown)
        return [self._vocab.get(token, unknown) for token in tokens]

    @property
    def all_special_ids(self) -> list[int]:
        return [self._vocab[token] for token in self.all_special_tokens]


def listed_ids(token_ids: Any) -> Sequence[int]:
    """A token id, or several, of any library, as a list of them. Raises ValueError for what is none.

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
