"""StreamDecoder: tokens to text as they come."""

from .tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # how the bytes of a character that is not complete yet decode
MAX_HELD_BACK = 3  # bytes, of a character of 4
MAX_WINDOW = 32  # tokens; half of it has room for 3 characters of 4 bytes, and for one before them that was cut


class StreamDecoder:
    """Text of a growing list of token ids, piece by piece, such that the pieces joined are the text of the whole.

    A token alone cannot be decoded: its leading space depends on whether text came before it, and a character may be
    spread over several byte tokens. So decode a window, which ends in the new token:

        | anchor, or the start of the text | tokens whose text may still change |

    The text up to a whole character is final. It is let out, and the window begins anew behind it. Bytes that make no
    character do not hold back for ever: of those, all but the last three are final, too. So the window is bounded.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int]) -> None:
        """The text goes on from the prompt's, so that its first word keeps its space."""
        self._tokenizer = tokenizer
        self._window = tokenizer.visible(prompt_token_ids)
        self._shorten(MAX_WINDOW // 2, tokenizer.decode(self._window[-MAX_WINDOW:]) or self._text())
        self._out = self._text()  # what of the window's text is out already

    def push(self, *token_ids: int) -> str:
        """The text that `token_ids` complete; may be empty."""
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
        """What is left when no more tokens come: the bytes of a character that never ended, as U+FFFD."""
        text = self._text()
        return self._let_out(text, len(text))

    def _text(self) -> str:
        return self._tokenizer.decode(self._window)

    def _let_out(self, text: str, end: int) -> str:
        """What of text[:end] is not out yet. `text` is the window's."""
        while not text.startswith(self._out):  # bytes at the prompt's end have become a character
            self._out = self._out[:-1]
        piece = text[len(self._out) : end]
        self._out += piece
        return piece

    def _shorten(self, keep: int, text: str) -> None:
        """Leave of the window its last `keep` tokens, behind an anchor if it has a `text`."""
        if text:
            self._window = self._tokenizer.anchor + self._window[max(0, len(self._window) - keep) :]
        else:
            self._window = self._window[-1:]  # a space that starts the text: it gives none itself, but the next does
