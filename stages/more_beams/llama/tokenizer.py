"""Tokenizer: text to token ids and back, with sentencepiece. StreamDecoder: token ids to text as they arrive."""

import re
from pathlib import Path

from sentencepiece import SentencePieceProcessor

REPLACEMENT = "\ufffd"  # stands for bytes that do not form a complete character
NUM_BEFORE = 5  # preceding tokens that can affect a new token's text: the bytes of a character, and the word before it


class Tokenizer:
    """The tokenizer.model of a checkpoint."""

    def __init__(self, folder: str | Path) -> None:
        self._sp = SentencePieceProcessor(model_file=str(Path(folder) / "tokenizer.model"))
        self._num_pieces: int = self._sp.get_piece_size()
        self.bos_token_id: int = self._sp.bos_id()
        self.eos_token_id: int = self._sp.eos_id()
        pieces = {self._sp.id_to_piece(i): i for i in range(self._num_pieces)}
        self.specials = {piece: i for piece, i in pieces.items() if self._sp.is_control(i) or self._sp.is_unknown(i)}
        self._split = re.compile("(" + "|".join(map(re.escape, self.specials)) + ")")

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Return the token ids of `text`, after BOS if `add_bos` is set.

        sentencepiece would encode the text "<s>" as ordinary pieces, so cut out special tokens first. It also puts a
        space before each segment, which belongs only at the start of the text: elsewhere, encode a newline first to
        absorb the space, and drop the newline's ids.
        """
        ids = [self.bos_token_id] if add_bos else []
        for i, segment in enumerate(self._split.split(text)):
            if segment in self.specials:
                ids.append(self.specials[segment])
            else:
                marker = "\n" if i else ""
                ids += self._sp.encode(marker + segment)[len(self._sp.encode(marker)) :]
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of `token_ids`. Special tokens, and ids that are not in the vocabulary, have no text."""
        hidden = self.specials.values()
        return str(self._sp.decode([i for i in token_ids if 0 <= i < self._num_pieces and i not in hidden]))


class StreamDecoder:
    """An incremental decoder, which returns the text of a growing list of token ids piece by piece.

    A token cannot be decoded in isolation: its leading space depends on the token before it, and a character may span
    several byte tokens. So decode the last tokens without and with the new ones: the difference is the new text (as in
    the detokenizers of Text Generation Inference and vLLM).

        | prompt and output ... | from _start: returned, can affect the next text | from _end: not returned yet |
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int]) -> None:
        """Start after the prompt, so that the first word keeps its space."""
        self._tokenizer = tokenizer
        self._token_ids = list(prompt_token_ids)
        self._start, self._end = max(0, len(prompt_token_ids) - NUM_BEFORE), len(prompt_token_ids)

    def push(self, token_id: int) -> str:
        """Return the text that this token completes. It may be empty."""
        self._token_ids.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT):  # the next byte may complete the character
            return ""
        if text:
            self._start, self._end = self._end, len(self._token_ids)
        return text

    def flush(self) -> str:
        """Return the remaining text after the last token: the bytes of an incomplete character."""
        return self._new_text()

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._token_ids[self._start : self._end])
        text = self._tokenizer.decode(self._token_ids[self._start :])
        while not text.startswith(before):  # bytes at the end of the prompt have become a character
            before = before[:-1]
        return text[len(before) :]
