"""tokenizer.model, the file of sentencepiece, as a tokenizers.Tokenizer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE, Unigram

from .tokenizer_backend import BUILDERS, Merges, Vocabulary
from .tokenizer_config import TokenizerConfig

UNIGRAM, CONTROL, USER_DEFINED = 1, 3, 4  # as in sentencepiece's own schema of the file


class SentencepieceFile:
    """Its pieces, and what of its training matters. The library checks the file; a few fields are read beside it."""

    says_bos = is_byte_level = False

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = path.read_bytes()
            self._sp = SentencePieceProcessor()
            self._sp.load_from_serialized_proto(data)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{path} is not a sentencepiece model: {error}") from None
        file = list(fields(data))
        trainer, normalizer = (dict(fields(next((value for i, value in file if i == n), b""))) for n in (2, 3))
        self._is_unigram = trainer.get(3, UNIGRAM) == UNIGRAM
        self._has_bytes = bool(trainer.get(35, 0))
        self._charsmap = normalizer.get(2, b"")
        types = [dict(fields(value)).get(3, 1) for i, value in file if i == 1]
        named = {"bos_token": self._sp.bos_id(), "eos_token": self._sp.eos_id(), "unk_token": self._sp.unk_id()}
        self.named = {name: self._sp.id_to_piece(i) for name, i in named.items() if i >= 0}
        self.added: dict[int, AddedToken] = {}
        self.extra = [
            AddedToken(self._sp.id_to_piece(i), normalized=False, special=type == CONTROL)
            for i, type in enumerate(types)
            if type in (CONTROL, USER_DEFINED)
        ]

    def build(self, config: TokenizerConfig) -> Tokenizer:
        """With the class that the folder names; its default here is Llama's."""
        vocab = {self._sp.id_to_piece(i): i for i in range(len(self._sp))}
        build = BUILDERS.get(config.tokenizer_class)
        if build:
            return build(vocab, merges_of(vocab), config.entries)
        return self._build_plain(vocab, config)

    def _build_plain(self, vocab: Vocabulary, config: TokenizerConfig) -> Tokenizer:
        """No space is put before the text: transformers makes it so for folders that name no class of their own."""
        if self._is_unigram:
            scored = [(piece, self._sp.get_score(i)) for piece, i in vocab.items()]
            backend = Tokenizer(Unigram(scored, unk_id=self._sp.unk_id(), byte_fallback=self._has_bytes))
        else:
            names = {i: token.content for i, token in config.added.items() if token.content not in vocab}
            vocab = {names.get(i, piece): i for piece, i in vocab.items()}
            unk = self.named.get("unk_token")
            bpe = BPE(vocab, merges_of(vocab), unk_token=unk, fuse_unk=True, byte_fallback=self._has_bytes)
            backend = Tokenizer(bpe)
        steps = [normalizers.Precompiled(self._charsmap)] if self._charsmap else []
        backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
        ends = [decoders.ByteFallback(), decoders.Fuse()] if self._has_bytes else []
        backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), *ends])
        return backend


def merges_of(vocab: Vocabulary) -> Merges:
    """All pairs of pieces that make a piece, the ones of an earlier piece first: sentencepiece stores no merges.

    >>> merges_of({"a": 0, "b": 1, "ab": 2, "aab": 3, "aa": 4})
    [('a', 'b'), ('a', 'ab'), ('aa', 'b'), ('a', 'a')]
    """
    splits = ((piece[:i], piece[i:]) for piece in sorted(vocab, key=vocab.__getitem__) for i in range(1, len(piece)))
    return [(left, right) for left, right in splits if left in vocab and right in vocab]


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message by number: integers, and bytes of texts, floats and messages inside.

    >>> list(fields(bytes([8, 150, 1, 18, 2, 72, 105])))
    [(1, 150), (2, b'Hi')]
    """
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while position < len(data):
        key = varint()
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            yield number, varint()
        else:
            size = {1: 8, 5: 4}.get(wire_type) or varint()
            yield number, data[position : position + size]
            position += size
