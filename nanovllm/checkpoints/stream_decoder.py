"""StreamDecoder: text from token ids as they arrive."""

from .tokenizer import REPLACEMENT, HFTokenizer

MAX_HELD_BACK = 3  # bytes: a UTF-8 character has at most 4, so an incomplete one has at most 3
MAX_WINDOW = 32  # tokens; half of it has room for three 4-byte characters and one that was cut
MAX_BEFORE = 4  # tokens before one that can affect its text: a character has at most 4 bytes


class StreamDecoder:
    """An incremental decoder of token ids. The pieces that it returns add up to the whole text.

    A token cannot be decoded in isolation: its leading space depends on the text before it, and a character can span
    several byte tokens. So decode a window that ends in the new token:

        | anchor, or the start of the text | tokens whose text can still change |

    Text up to the last complete character is final, so push() returns it, and a new window starts after it. Bytes that
    form no character are final too, except for the last three. This keeps the window short.
    """

    def __init__(self, tokenizer: HFTokenizer, prompt_token_ids: list[int]) -> None:
        """Start after the prompt, so that the first word keeps its space."""
        self._tokenizer = tokenizer
        self._window = tokenizer.visible(prompt_token_ids)
        self._shorten(MAX_WINDOW // 2, tokenizer.decode(self._window[-MAX_WINDOW:]) or self._text())
        self._returned = self._text()  # the part of the window's text that push() has returned

    def push(self, *token_ids: int) -> str:
        """Return the text that `token_ids` complete. It can be empty."""
        new = self._tokenizer.visible(token_ids)
        if not new:
            return ""
        if len(new) == 1 and self._window == self._tokenizer.anchor and not self._returned.endswith(REPLACEMENT):
            piece = self._tokenizer.decode_one(new[0])  # the usual case, with a cached text
            if not piece.endswith(REPLACEMENT):
                return piece
        self._window += new
        text = self._text()
        num_held_back = min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_HELD_BACK)
        piece = self._return(text, len(text) - num_held_back)
        if num_held_back == 0:
            self._shorten(0, text)
            self._returned = self._text()
        elif len(self._window) > MAX_WINDOW:
            num_left = len(text) - len(self._returned)
            self._shorten(MAX_WINDOW // 2, text)
            text = self._text()
            self._returned = text[: len(text) - num_left]
        return piece

    def flush(self) -> str:
        """Return the remaining text after the last token: the bytes of an incomplete character, as U+FFFD."""
        text = self._text()
        return self._return(text, len(text))

    def _text(self) -> str:
        return self._tokenizer.decode(self._window)

    def _return(self, text: str, end: int) -> str:
        """Return the part of text[:end] that was not returned before. `text` is the window's text."""
        while not text.startswith(self._returned):  # bytes at the end of the prompt became a character
            self._returned = self._returned[:-1]
        piece = text[len(self._returned) : end]
        self._returned += piece
        return piece

    def _shorten(self, keep: int, text: str) -> None:
        """Keep the last `keep` tokens of the window, after an anchor if the window's `text` is not empty."""
        if text:
            self._window = self._tokenizer.anchor + self._window[max(0, len(self._window) - keep) :]
        else:
            self._window = self._window[-1:]  # a leading space: it decodes to nothing, but the next one does not


def decoded_token(token_id: int, before: list[int], tokenizer: HFTokenizer) -> str:
    """Return the text of one token, with its leading space. `before` holds up to MAX_BEFORE tokens before it.

    The token that completes a character has the character as its text, and the byte tokens before it have none.
    """
    text = tokenizer.decode_one(token_id)
    if not text.endswith(REPLACEMENT):
        return text
    for count in range(1, len(before) + 1):  # a token that ends in the middle of a character
        earlier = tokenizer.anchor + before[len(before) - count :]
        text = tokenizer.decode([*earlier, token_id])
        if not text.endswith(REPLACEMENT):
            return text[len(tokenizer.decode(earlier).rstrip(REPLACEMENT)) :]
    return ""
