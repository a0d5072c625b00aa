"""StreamDecoder: tokens to text as they come; and the text of one token behind others."""

from typing import Protocol

REPLACEMENT = "\ufffd"  # how the bytes of a character that is not complete yet decode
MAX_HELD_BACK = 3  # bytes, of a character of 4
MAX_WINDOW = 32  # tokens; half of it has room for 3 characters of 4 bytes, and for one before them that was cut
MAX_BEFORE = 4  # tokens that the text of one may depend on: a character has 4 bytes at most


class Tokenizer(Protocol):
    """A tokenizer whose text grows with its token ids: HFTokenizer."""

    @property
    def anchor(self) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...

    def visible(self, token_ids: list[int]) -> list[int]: ...


class StreamDecoder:
    """Text of a growing list of token ids, piece by piece, such that the pieces joined are the text of the whole.

    A token alone cannot be decoded: its leading space depends on whether text came before it, and a character may be
    spread over several byte tokens. So decode a window, which ends in the new token:

        | anchor, or the start of the text | tokens whose text may still change |

    The text up to a whole character is final. It is let out, and the window begins anew behind it. Bytes that make no
    character do not hold back for ever: of those, all but the last three are final, too. So the window is bounded.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int]) -> None:
        """Start behind the prompt, so that the first word keeps its space."""
        self._tokenizer = tokenizer
        self._window = tokenizer.visible(prompt_token_ids)
        self._shorten(MAX_WINDOW // 2, tokenizer.decode(self._window[-MAX_WINDOW:]) or self._text())
        self._out = self._text()  # what of the window's text is out already

    def push(self, *token_ids: int) -> str:
        """Return the text that `token_ids` complete; it may be empty."""
        new = self._tokenizer.visible([*token_ids])
        if not new:
            return ""
        self._window += new
        text = self._text()
        num_held_back = min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_HELD_BACK)
        piece = self._let_out(text, len(text) - num_held_back)
        if num_held_back == 0:
            self._shorten(0, text)
            self._out = self._text()
        elif len(self._window) > MAX_WINDOW:
            num_not_out = len(text) - len(self._out)
            self._shorten(MAX_WINDOW // 2, text)
            text = self._text()
            self._out = text[: len(text) - num_not_out]
        return piece

    def flush(self) -> str:
        """Return what is left when no more tokens come: the bytes of an incomplete character, as U+FFFD."""
        text = self._text()
        return self._let_out(text, len(text))

    def _text(self) -> str:
        return self._tokenizer.decode(self._window)

    def _let_out(self, text: str, end: int) -> str:
        """Return the part of text[:end] that is not out yet. `text` is the window's."""
        while not text.startswith(self._out):  # bytes at the prompt's end have become a character
            self._out = self._out[:-1]
        piece = text[len(self._out) : end]
        self._out += piece
        return piece

    def _shorten(self, keep: int, text: str) -> None:
        """Cut the window to its last `keep` tokens, behind an anchor if it has a `text`."""
        if text:
            self._window = self._tokenizer.anchor + self._window[max(0, len(self._window) - keep) :]
        else:
            self._window = self._window[-1:]  # a space that starts the text: it gives none itself, but the next does


def decoded_token(token_id: int, before: list[int], tokenizer: Tokenizer) -> str:
    """Return the text of a token with its leading space. A byte has that of the character that it completes, else none.

    `before` are up to MAX_BEFORE tokens before it.
    """
    for count in range(len(before) + 1):
        earlier = tokenizer.anchor + before[len(before) - count :]
        text = tokenizer.decode([*earlier, token_id])
        if not text.endswith(REPLACEMENT):
            return text[len(tokenizer.decode(earlier).rstrip(REPLACEMENT)) :]
    return ""
