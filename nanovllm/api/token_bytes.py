"""The bytes that each token of a vocabulary adds to a text, which is what a grammar sees of it."""

from typing import Any

from ..checkpoints.hf_tokenizer import BYTE_TOKEN, HFTokenizer

# Vocabularies of bytes write each byte as a character that can be seen: Radford et al. 2019, the code of GPT-2.
VISIBLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
BYTE_OF = {chr(byte): byte for byte in VISIBLE} | {chr(256 + place): byte for place, byte in enumerate(HIDDEN)}


def token_bytes(tokenizer: HFTokenizer) -> list[bytes]:
    """Of each token id; nothing for an id that the tokenizer does not have."""
    backend: Any = tokenizer.backend
    vocab, added = backend.get_vocab(), backend.get_added_tokens_decoder()
    is_byte_level = b"ByteLevel" in (backend.decoder.__getstate__() if backend.decoder else b"")
    found = [b""] * (max(vocab.values()) + 1)
    for token, token_id in vocab.items():
        found[token_id] = bytes_of_bytes(token) if is_byte_level else bytes_of_piece(token)
    before = tokenizer.decode(tokenizer.anchor)
    for token_id in added:  # these are texts; a decoder may put a space before one
        found[token_id] = tokenizer.decode([*tokenizer.anchor, token_id])[len(before) :].encode()
    return found


def bytes_of_bytes(token: str) -> bytes:
    """
    >>> bytes_of_bytes("\u0120fox")
    b' fox'
    """
    return bytes(BYTE_OF[character] for character in token if character in BYTE_OF)


def bytes_of_piece(token: str) -> bytes:
    """
    >>> bytes_of_piece("\u2581fox"), bytes_of_piece("<0x0A>")
    (b' fox', b'\\n')
    """
    byte = BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()
