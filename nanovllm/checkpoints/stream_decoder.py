"""StreamDecoder: text from token ids as they arrive."""

from .tokenizer import REPLACEMENT, HFTokenizer

MAX_HELD_BACK = 3  # bytes: a UTF-8 character has at most 4, so an incomplete one has at most 3
MAX_WINDOW = 32  # tokens; half of them have room for three 4-byte characters and the rest of a character that was cut
MAX_BEFORE = 4  # number of preceding tokens that can affect a token's text: a character has at most 4 bytes


class StreamDecoder:
    """An incremental decoder of token ids. The pieces that it returns add up to the whole text.

    A token cannot be decoded in isolation: its leading space depends on the text before it, and a character can span
    several byte tokens. So decode a window that ends in the new token:

        | anchor, or the start of the text | tokens whose text can still change |

    The anchor is a token of plain text. After it, tokens decode as they do in the middle of a text.

    Text up to the last complete character is final, so push() returns it, and a new window starts after it. Bytes that
    form no character are final too, except for the last three. This keeps the window short.
    """

    def __init__(self, tokenizer: HFTokenizer, prompt_token_ids: list[int]) -> None:
        """Start after the prompt, so that the first word keeps its space."""
        self._tokenizer = tokenizer
        self._window = tokenizer.visible(prompt_token_ids[-4 * MAX_WINDOW :])
        if len(self._window) < MAX_WINDOW and len(prompt_token_ids) > 4 * MAX_WINDOW:  # special tokens may be hidden
            self._window = tokenizer.visible(prompt_token_ids)
        text = tokenizer.decode_one(self._window[-1]) if self._window else ""
        if not text.strip() or text.endswith(REPLACEMENT):  # then it may matter what comes before the last token
            text = tokenizer.decode(self._window[-MAX_WINDOW:]) or self._text()
        self._shorten(0 if text and not text.endswith(REPLACEMENT) else MAX_WINDOW // 2, text)
        self._returned = self._text()  # the part of the window's text that is in the prompt or was returned
        self._note_window()

    def push(self, token_ids: list[int]) -> str:
        """Return the text that `token_ids` complete. It can be empty."""
        if self._is_after_plain_text and len(token_ids) == 1:  # the usual case
            text_of_one = self._tokenizer.whole_texts.get(token_ids[0])
            if text_of_one is not None:
                return text_of_one
        new_ids = self._tokenizer.visible(token_ids)
        if not new_ids:
            return ""
        if self._is_after_plain_text and len(new_ids) == 1:
            piece = self._tokenizer.decode_one(new_ids[0])
            if not piece.endswith(REPLACEMENT):
                self._tokenizer.whole_texts[new_ids[0]] = piece
                return piece
        self._window += new_ids
        text = self._text()
        num_held_back = min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_HELD_BACK)
        piece = self._return(text, len(text) - num_held_back)
        if num_held_back == 0:
            self._shorten(0, text)
            self._returned = self._text()
        elif len(self._window) > MAX_WINDOW:
            num_unreturned = len(text) - len(self._returned)
            self._shorten(MAX_WINDOW // 2, text)
            text = self._text()
            self._returned = text[: len(text) - num_unreturned]
        self._note_window()
        return piece

    def flush(self) -> str:
        """Return the remaining text after the last token: the bytes of an incomplete character, as U+FFFD."""
        if self._is_after_plain_text:
            return ""
        text = self._text()
        return self._return(text, len(text))

    def _note_window(self) -> None:
        """Note whether the window is only an anchor, so that the text of a token does not depend on others."""
        is_anchor = self._window == self._tokenizer.anchor
        self._is_after_plain_text = is_anchor and not self._returned.endswith(REPLACEMENT)

    def _text(self) -> str:
        is_anchor = self._window == self._tokenizer.anchor
        return self._tokenizer.anchor_text if is_anchor else self._tokenizer.decode(self._window)

    def _return(self, text: str, end: int) -> str:
        """Return the part of text[:end] that was not returned before, where `text` is the window's text."""
        while not text.startswith(self._returned):  # bytes at the end of the prompt became a character
            self._returned = self._returned[:-1]
        piece = text[len(self._returned) : end]
        self._returned += piece
        return piece

    def _shorten(self, num_kept: int, text: str) -> None:
        """Keep the last `num_kept` tokens of the window, after an anchor. If the window has no `text`, keep one."""
        if text:
            self._window = self._tokenizer.anchor + self._window[max(0, len(self._window) - num_kept) :]
        else:
            self._window = self._window[-1:]  # a leading space decodes to nothing, but the space after it does not


def decoded_token(token_id: int, before: list[int], tokenizer: HFTokenizer) -> str:
    """Return the text of one token, with its leading space. `before` has up to MAX_BEFORE preceding tokens.

    The token that completes a character has the character as its text, and the character's other tokens have none.
    """
    text = tokenizer.decode_one(token_id)
    if not text.endswith(REPLACEMENT):
        return text
    for num_before in range(1, len(before) + 1):  # until the tokens end in a complete character
        context = tokenizer.anchor + before[len(before) - num_before :]
        text = tokenizer.decode([*context, token_id])
        if not text.endswith(REPLACEMENT):
            return text[len(tokenizer.decode(context).rstrip(REPLACEMENT)) :]
    return ""
