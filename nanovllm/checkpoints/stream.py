"""Tokens to text as they come, where a token may be a byte."""

from ..core.llama import StreamDecoder as CoreStreamDecoder
from .hf_tokenizer import HFTokenizer


class StreamDecoder(CoreStreamDecoder):
    """The decoder of core. But a run of byte tokens, <0xE6> and the like, is held back until it ends.

    The tokenizers library decodes a run as a whole: one byte that fits nowhere makes all of it U+FFFD.
    """

    _tokenizer: HFTokenizer  # type: ignore[assignment]  # in place of core's

    def push(self, token_id: int) -> str:
        if self._tokenizer.is_byte(token_id):
            self._window.append(token_id)
            return ""
        return super().push(token_id)
