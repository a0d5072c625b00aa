"""Text to token ids and back, with sentencepiece and Llama's conventions."""

import re
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor

from .config import read_json_if_any

REPLACEMENT = "\ufffd"  # how the bytes of a character that is not complete yet decode
CONTEXT_TOKENS = 8  # more than the bytes of any character


class Tokenizer:
    """tokenizer.model, and the special tokens that the folder adds to it."""

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / "tokenizer.model"
        if not path.exists():
            raise ValueError(f"{folder} has no tokenizer.model")
        try:
            self._sp = SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{path} is not a sentencepiece model: {error}") from None
        self.bos_token_id: int = self._sp.bos_id()
        self.eos_token_id: int = self._sp.eos_id()
        config = read_json_if_any(path.with_name("tokenizer_config.json"))
        self._starts_with_bos = self.bos_token_id >= 0 and config.get("add_bos_token", True)
        self.specials = self._control_tokens() | added_tokens(config, path.parent)  # text -> id
        self._special_texts = {token_id: text for text, token_id in self.specials.items()}
        longest_first = sorted(map(re.escape, self.specials), key=len, reverse=True)
        self._split = re.compile("(" + "|".join(longest_first) + ")") if longest_first else None

    def __len__(self) -> int:
        return max([self._sp.get_piece_size() - 1, *self._special_texts]) + 1

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Token ids of `text`, after BOS unless the caller or the checkpoint wants none.

        sentencepiece would spell the text "<s>" in ordinary pieces: special tokens are cut out first. Its dummy
        prefix (the space before the first word) goes to the start of the text only.
        """
        ids = [self.bos_token_id] if add_bos and self._starts_with_bos else []
        segments = self._split.split(text) if self._split else [text]
        for i, segment in enumerate(segments):
            if segment in self.specials:
                ids.append(self.specials[segment])
            elif segment and i == 0:
                ids += self._sp.encode(segment)
            elif segment:
                ids += self._encode_inner(segment)
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """The text of `token_ids`; special tokens give none."""
        return self._sp.decode([i for i in token_ids if i not in self._special_texts and i < self._sp.get_piece_size()])

    def _encode_inner(self, segment: str) -> list[int]:
        """Pieces of a segment that does not start the text: encode it behind a marker, which takes the dummy prefix."""
        marker = "\n"
        return self._sp.encode(marker + segment)[len(self._sp.encode(marker)) :]

    def _control_tokens(self) -> dict[str, int]:
        ids = range(self._sp.get_piece_size())
        return {self._sp.id_to_piece(i): i for i in ids if self._sp.is_control(i) or self._sp.is_unknown(i)}


def added_tokens(config: dict[str, Any], folder: Path) -> dict[str, int]:
    """Special tokens beside the sentencepiece model: text -> id, from tokenizer_config.json and added_tokens.json."""
    decoder = config.get("added_tokens_decoder") or {}
    tokens = {entry["content"]: int(token_id) for token_id, entry in decoder.items()}
    return tokens | read_json_if_any(folder / "added_tokens.json")


class StreamDecoder:
    """Text of a growing list of token ids, piece by piece, such that the pieces joined are the text of the whole.

    A token alone cannot be decoded: its leading space depends on its neighbours, and a character may be spread over
    several byte tokens. So decode a window of the last tokens with and without the new ones, and emit the difference
    once it ends in a whole character (the offsets of Hugging Face TGI and vLLM).
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int]) -> None:
        """The text goes on from the prompt's last tokens, so that its first word keeps its space."""
        self._tokenizer = tokenizer
        self._ids = prompt_token_ids[-CONTEXT_TOKENS:]
        self._prefix = 0  # the window starts here
        self._read = len(self._ids)  # text up to here is out

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; may be empty."""
        self._ids.append(token_id)
        text = self._pending()
        if text.endswith(REPLACEMENT):
            return ""
        if text.strip():  # a window of spaces and special tokens alone would cost the next word its space
            self._prefix = self._read
        self._read = len(self._ids)
        return text

    def flush(self) -> str:
        """What is left when no more tokens come: the bytes of a character that never ended, as U+FFFD."""
        text = self._pending()
        self._prefix = self._read = len(self._ids)
        return text

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._ids[self._prefix : self._read])
        text = self._tokenizer.decode(self._ids[self._prefix :])
        while not text.startswith(before):  # bytes at the prompt's end have become a character
            before = before[:-1]
        return text[len(before) :]
