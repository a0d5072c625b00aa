"""Text to token ids and back, by the tokenizers library."""

import copy
import re
from functools import cached_property
from itertools import islice

from tokenizers import Tokenizer

from .tokenizer_backend import special_tokens
from .tokenizer_calls import TokenizerCalls
from .tokenizer_config import TokenizerConfig

BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


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
        self._bytes = frozenset(i for text, i in self._vocab.items() if has_bytes and BYTE_TOKEN.fullmatch(text))

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_bos: bool = True, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids of `text`, between BOS and EOS where the checkpoint wants them and the caller does."""
        wants = add_bos if add_special_tokens is None else add_special_tokens
        return self.backend.encode(text, add_special_tokens=wants).ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool | None = None) -> str:
        """The text of `token_ids`. Without `skip_special_tokens`, special tokens give a text if this one shows them."""
        ids = self.visible(token_ids, skip_special_tokens)
        return self.backend.decode(ids, skip_special_tokens=False)

    def visible(self, token_ids: list[int], skip_special_tokens: bool | None = None) -> list[int]:
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
        return list(islice((i for i in ids if not self.is_byte(i) and self.decode([i]).strip(" \ufffd")), 1))

    def is_byte(self, token_id: int) -> bool:
        """True of <0x00> to <0xFF>: a run of them is text only as a whole."""
        return token_id in self._bytes
