"""bad_words as token ids."""

from ..llama import Tokenizer


def bad_words_token_ids(words: list[str], tokenizer: Tokenizer | None, vocab_size: int) -> list[list[int]]:
    """Each word as it is spelled at the start of a text, and as it is behind a space where that has other tokens.

    The second form counts if it has as many tokens as the first and another first one: else the space is a token of its
    own, and the first form finds the word behind it. Raises ValueError for a word without tokens.
    """
    spelled: list[list[int]] = []
    for word in words:
        at_start, behind_space = (tokenizer.encode(space + word.lstrip(), add_bos=False) for space in ("", " "))
        if not at_start:
            raise ValueError(f"bad_words: {word!r} has no tokens")
        spelled.append(at_start)
        if len(behind_space) == len(at_start) and behind_space[0] != at_start[0]:
            spelled.append(behind_space)
    unknown = [token_id for word in spelled for token_id in word if token_id >= vocab_size]
    if unknown:
        raise ValueError(f"bad_words: token id {unknown[0]} is not from 0 to {vocab_size - 1}")
    return spelled
