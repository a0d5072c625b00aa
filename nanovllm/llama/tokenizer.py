"""Text to token ids and back, with sentencepiece and Llama's conventions."""

import re
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

from sentencepiece import SentencePieceProcessor

from .entries import Entries, read_json_if_any

MAX_TOKEN_ID = 2**24


class AddedToken(NamedTuple):
    """A token beside the sentencepiece model. A special one, as the end of a turn, is not part of the text."""

    text: str
    token_id: int
    is_special: bool


class Tokenizer:
    """tokenizer.model, and the tokens that the folder adds to it."""

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / "tokenizer.model"
        if not path.exists():
            raise ValueError(f"{folder} has no tokenizer.model")
        try:
            self._sp = SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{path} is not a sentencepiece model: {error}") from None
        self._num_pieces: int = self._sp.get_piece_size()
        self.bos_token_id: int = self._sp.bos_id()
        self.eos_token_id: int = self._sp.eos_id()
        config = read_if_any(path.with_name("tokenizer_config.json"))
        self._starts_with_bos = self.bos_token_id >= 0 and config.flag("add_bos_token", True)
        added = added_tokens(config)
        self.specials = self._control_tokens() | {token.text: token.token_id for token in added if token.is_special}
        self._hidden = set(self.specials.values())
        shown = {token.text: token.token_id for token in added if token.token_id not in self._hidden}
        self._added_texts = {token_id: text.replace("\u2581", " ") for text, token_id in shown.items()}
        self._ids = self.specials | shown  # of all that encode() cuts out
        longest_first = sorted(map(re.escape, self._ids), key=len, reverse=True)
        self._split = re.compile("(" + "|".join(longest_first) + ")") if longest_first else None
        plain = (i for i in range(self._num_pieces) if i not in self._hidden and self._sp.decode([i]).strip())
        self.anchor = list(islice(plain, 1))  # put before other tokens, it is a text that they go on from

    def __len__(self) -> int:
        return max([self._num_pieces - 1, *self._ids.values()]) + 1

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Token ids of `text`, after BOS unless the caller or the checkpoint wants none.

        sentencepiece would spell the text "<s>" in ordinary pieces: special and added tokens are cut out first. Its
        dummy prefix (the space before the first word) goes to the start of the text only.
        """
        ids = [self.bos_token_id] if add_bos and self._starts_with_bos else []
        segments = self._split.split(text) if self._split else [text]
        for i, segment in enumerate(segments):
            if segment in self._ids:
                ids.append(self._ids[segment])
            elif segment and i == 0:
                ids += self._sp.encode(segment)
            elif segment:
                ids += self._encode_inner(segment)
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """The text of `token_ids`; special tokens give none, and added ones that are not special give their own."""
        text = ""
        for is_added, run in groupby(self.visible(token_ids), key=self._added_texts.__contains__):
            ids = list(run)
            if is_added:
                text += "".join(self._added_texts[i] for i in ids)
            else:
                text += self._decode_inner(ids) if text else self._sp.decode(ids)
        return text

    def visible(self, token_ids: list[int]) -> list[int]:
        """`token_ids` without the special ones, and without ids that the tokenizer does not have."""
        known, hidden = self._num_pieces, self._hidden
        return [i for i in token_ids if i in self._added_texts or (i < known and i not in hidden)]

    def _encode_inner(self, segment: str) -> list[int]:
        """Pieces of a segment that does not start the text: encode it behind a marker, which takes the dummy prefix."""
        marker = "\n"
        return self._sp.encode(marker + segment)[len(self._sp.encode(marker)) :]

    def _decode_inner(self, token_ids: list[int]) -> str:
        """Text of tokens that do not start the text, and whose first word keeps its space."""
        return self._sp.decode(self.anchor + token_ids)[len(self._sp.decode(self.anchor)) :]

    def _control_tokens(self) -> dict[str, int]:
        ids = range(self._num_pieces)
        return {self._sp.id_to_piece(i): i for i in ids if self._sp.is_control(i) or self._sp.is_unknown(i)}


def read_if_any(path: Path) -> Entries:
    return Entries(read_json_if_any(path), path)


def added_tokens(config: Entries) -> list[AddedToken]:
    """The tokens of added_tokens.json, and those of `config`, tokenizer_config.json, which says more of each."""
    by_text = read_if_any(config.path.with_name("added_tokens.json"))
    named = special_texts(config) | special_texts(read_if_any(config.path.with_name("special_tokens_map.json")))
    ids = {text: by_text.integer(text, least=0, most=MAX_TOKEN_ID) for text in by_text.values if text}
    tokens = {text: AddedToken(text, token_id, text in named) for text, token_id in ids.items()}
    decoder = config.entries("added_tokens_decoder")
    for token_id in decoder.values:
        if not token_id.isdecimal() or len(token_id) > 8:
            raise ValueError(f"{config.path}: added_tokens_decoder has {token_id[:80]!r} in place of a token id")
        entry = decoder.entries(token_id)
        text = entry.text("content")
        tokens[text] = AddedToken(text, int(token_id), entry.flag("special", False) or text in named)
    return list(tokens.values())


def special_texts(config: Entries) -> set[str]:
    """Texts that a file names as special: "eos_token": "</s>", or {"content": "</s>"}, or a list of such."""

    def texts(value: Any) -> Iterator[str]:
        for each in value if isinstance(value, list) else [value]:
            content = each.get("content") if isinstance(each, dict) else each
            if isinstance(content, str):
                yield content

    names = [name for name in config.values if name.endswith(("_token", "_special_tokens"))]
    return {text for name in names for text in texts(config.values[name])}
