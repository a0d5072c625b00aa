"""Speculation: guess the next tokens of a sequence from its own text, and let the model check the guesses in one step.

    tokens     the cat sat . the cat        "the cat" occurred before, and "sat . the" followed it: the draft
    step       cat  sat  .  the             the newest token and the draft, computed in one step
    sampled    sat  .    a   ...            "the" was wrong: "sat . a" are new tokens, and the last one is dropped

A step that computes a few tokens reads the same weights as a step that computes one, so right guesses are almost free.
The output never changes: each position is sampled by the request's own parameters, with noise that depends only on seed
and position, and a draft's token is accepted only if it equals the token that is sampled at its position. No rejection
sampler is needed.

Drafting from the text itself is prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from ..checks import AT_LEAST_1, Rule, check_fields, did_you_mean

DEFAULT_SUFFIX_TOKENS = 5  # as in vLLM
RATE_WINDOW = 8  # about how many of the latest guesses the success rate covers
MIN_PROBABILITY = 0.5  # on a CPU, it isn't worth computing a row of logits for a guess that is less likely to be right


@dataclass(frozen=True)
class SpeculativeConfig:
    """The entries of the option speculative_config, with vLLM's names and defaults."""

    method: str
    num_speculative_tokens: int  # maximum length of a draft
    prompt_lookup_max: int | None = None  # longest suffix to look up; default: prompt_lookup_min, or else 5
    prompt_lookup_min: int | None = None  # shortest suffix to look up; default: prompt_lookup_max

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Self:
        """Build the config from a dictionary. Raise ValueError for an unknown, missing or invalid entry."""
        keys = [entry.name for entry in fields(cls)]
        for name in entries:
            if name not in keys:
                hint = did_you_mean(str(name), keys) or f"; its keys are {', '.join(keys)}"
                raise ValueError(f"speculative_config has no key {name!r}{hint}")
        for name in ("method", "num_speculative_tokens"):
            if name not in entries:
                raise ValueError(f"speculative_config must have the key {name!r}, got {dict(entries)!r}")
        return cls(**entries)

    def __post_init__(self) -> None:
        try:
            check_fields(self, RULES)
        except ValueError as error:
            raise ValueError(f"speculative_config: {error}") from None
        if self.min_suffix_tokens > self.max_suffix_tokens:
            limit = f"at most prompt_lookup_max, {self.max_suffix_tokens}"
            raise ValueError(f"speculative_config: prompt_lookup_min must be {limit}, got {self.min_suffix_tokens}")

    @property
    def max_suffix_tokens(self) -> int:
        return self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_SUFFIX_TOKENS

    @property
    def min_suffix_tokens(self) -> int:
        return self.prompt_lookup_min or self.max_suffix_tokens


RULES: dict[str, Rule] = {
    "method": ("'ngram'", lambda method: method == "ngram"),
    "num_speculative_tokens": AT_LEAST_1,
    "prompt_lookup_max": AT_LEAST_1,
    "prompt_lookup_min": AT_LEAST_1,
}


class NgramDrafter:
    """A drafter for one sequence, which looks up the latest tokens in the text before them.

    A wrong guess wastes a row of logits, and later guesses of a draft are less likely to be right than earlier ones.
    So the drafter compares its guesses, even those that it cut off, with the tokens that the model then chose, and cuts
    off a draft where a guess is no longer likely to be right. Drafts are long while the model copies text, and rare in
    new text.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._text = ""  # the tokens as characters: Python searches a string much faster than a list
        self._guesses: list[int] = []  # the last draft before it was cut off
        self._success_rate = 1.0  # moving average of the share of correct guesses

    def propose(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """Return up to `max_tokens` tokens that may follow `token_ids`. Between calls, the list may only grow.

        As in vLLM, these are the tokens after the first occurrence of the longest suffix that has occurred before.

        >>> drafter = NgramDrafter(SpeculativeConfig("ngram", 3, prompt_lookup_max=4, prompt_lookup_min=2))
        >>> drafter.propose([5, 6, 7, 8, 9, 6, 7], max_tokens=8)
        [8, 9, 6]
        """
        new_token_ids = token_ids[len(self._text) :]
        for guess, token_id in zip(self._guesses, new_token_ids, strict=False):
            self._success_rate += ((guess == token_id) - self._success_rate) / RATE_WINDOW
            if guess != token_id:
                break
        self._text += "".join(map(chr, new_token_ids))
        self._guesses = draft = self._look_up()
        num_likely = sum(self._success_rate**length >= MIN_PROBABILITY for length in range(1, len(draft) + 1))
        return draft[: min(max_tokens, num_likely)]

    def _look_up(self) -> list[int]:
        # An earlier occurrence of the suffix must end before the last token.
        text, end = self._text, len(self._text) - 1
        for suffix_len in range(min(self._config.max_suffix_tokens, end), self._config.min_suffix_tokens - 1, -1):
            if (start := text.find(text[-suffix_len:], 0, end)) >= 0:
                return [*map(ord, text[start + suffix_len :][: self._config.num_speculative_tokens])]
        return []
