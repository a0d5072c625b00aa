"""The calls that scripts make on a tokenizer of transformers: tokenizer(text), names of special tokens, and so on."""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from .chat_template import apply_chat_template


class TokenizerCalls:
    backend: Tokenizer
    chat_template: str | dict[str, str] | None
    special_tokens_map: dict[str, str]
    all_special_tokens: list[str]
    _vocab: dict[str, int]

    def encode(self, text: str, add_bos: bool = True, add_special_tokens: bool | None = None) -> list[int]:
        raise NotImplementedError

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """{"input_ids": ..., "attention_mask": ...} of a text; of a list of texts, lists of them."""
        if not isinstance(text, str):
            each = [self(one, add_special_tokens) for one in text]
            return {name: [one[name] for one in each] for name in ("input_ids", "attention_mask")}
        ids = self.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> str | list[int]:
        """The prompt that the checkpoint's template makes of the messages; its token ids unless `tokenize` is False."""
        text = apply_chat_template(self, conversation, add_generation_prompt=add_generation_prompt, **kwargs)
        return self.encode(text, add_special_tokens=False) if tokenize else text

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

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens_map.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._vocab.get(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return self._vocab.get(self.eos_token)
