"""Speculation: guess the next tokens of a sequence from its own text, and let the model check the guesses in one step.

    tokens     the cat sat . the cat        "the cat" occurred before, and "sat . the" followed it: the draft
    step       cat  sat  .  the             the newest token and the draft, computed in one step
    sampled    sat  .    a   ...            "the" was wrong: "sat . a" are new tokens, and the last one is dropped

A step that computes a few tokens reads the same weights as a step that computes one, so right guesses are almost free.

Drafting from the text itself is prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding).
"""


def propose(token_ids: list[int], suffix_len: int, max_tokens: int) -> list[int]:
    """Return up to `max_tokens` tokens: those that followed the first occurrence of the last `suffix_len` tokens.

    The list is empty if these tokens have not occurred before.

    >>> propose([5, 6, 7, 8, 9, 6, 7], suffix_len=2, max_tokens=3)
    [8, 9, 6]
    """
    suffix = token_ids[-suffix_len:]
    for end in range(suffix_len, len(token_ids)):
        if token_ids[end - suffix_len : end] == suffix:
            return token_ids[end : end + max_tokens]
    return []
