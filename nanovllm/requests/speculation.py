"""Speculation: guess the next tokens of a sequence from its own text, and let the model check the guesses in one step.

    tokens     the cat sat . the cat        "the cat" occurred before, and "sat . the" followed it: the draft
    step       cat  sat  .  the             the newest token and the draft, computed together
    sampled    sat  .    a   ...            "the" was wrong: "sat . a" are new tokens, and the rest is dropped

A step that computes a few tokens reads the same weights as a step that computes one, so right guesses are almost free.
The output never changes: each position is sampled by the request's own parameters, with noise that depends only on seed
and position, and a draft's token counts only if it is the token that was sampled there. No rejection sampler is needed.

Drafting from the text itself is prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from ..checks import AT_LEAST_1, Rule, check_fields, nearest

DEFAULT_LOOKUP = 5  # vLLM's
MEMORY = 8  # guesses that a drafter remembers, roughly
LEAST_LIKELY = 0.5  # the probability at which a guess is worth its row of logits on a CPU


@dataclass(frozen=True)
class SpeculativeConfig:
    """The entries of the option speculative_config, with vLLM's names and defaults."""

    method: str
    num_speculative_tokens: int  # longest draft
    prompt_lookup_max: int | None = None  # the longest and the shortest suffix to look up in the text;
    prompt_lookup_min: int | None = None  # each one's default is the other one

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Self:
        """Build it from a dictionary. Raise ValueError for an unknown, missing or invalid entry."""
        known = [entry.name for entry in fields(cls)]
        for name in entries:
            if name not in known:
                hint = nearest(str(name), known) or f"; its keys are {', '.join(known)}"
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
        if self.min_tokens > self.max_tokens:
            sizes = f"{self.max_tokens}, got {self.min_tokens}"
            raise ValueError(f"speculative_config: prompt_lookup_min must be at most prompt_lookup_max, {sizes}")

    @property
    def max_tokens(self) -> int:
        return self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_LOOKUP

    @property
    def min_tokens(self) -> int:
        return self.prompt_lookup_min or self.max_tokens


RULES: dict[str, Rule] = {
    "method": ("'ngram'", lambda method: method == "ngram"),
    "num_speculative_tokens": AT_LEAST_1,
    "prompt_lookup_max": AT_LEAST_1,
    "prompt_lookup_min": AT_LEAST_1,
}


class NgramDrafter:
    """A source of drafts for one sequence.

    A wrong guess costs the time of a row, and the longer a draft, the less likely is its end. So the drafter compares
    its guesses with the tokens that follow, whether they were in a draft or not, and cuts drafts off where a token is
    no longer likely to be right. While a text is copied, drafts have full length; in new text, there are hardly any.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._text = ""  # the tokens as characters: Python searches a string much faster than a list
        self._guess: list[int] = []  # what may follow that text
        self._rate = 1.0  # the share of guesses that were right, of the recent ones above all

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """Return at most `most` tokens that may follow `token_ids`, which has only grown since the last call.

        They are what followed the first occurrence of the longest possible ending, as in vLLM.

        >>> drafter = NgramDrafter(SpeculativeConfig("ngram", 3, prompt_lookup_max=4, prompt_lookup_min=2))
        >>> drafter.propose([5, 6, 7, 8, 9, 6, 7], most=8)
        [8, 9, 6]
        """
        new = token_ids[len(self._text) :]
        for guess, token_id in zip(self._guess, new, strict=False):
            self._rate += ((guess == token_id) - self._rate) / MEMORY
            if guess != token_id:
                break
        self._text += "".join(map(chr, new))
        self._guess = draft = self._look_up()
        return draft[: min(most, sum(self._rate**count >= LEAST_LIKELY for count in range(1, len(draft) + 1)))]

    def _look_up(self) -> list[int]:
        text, end = self._text, len(self._text) - 1  # an occurrence ends before the last token
        for size in range(min(self._config.max_tokens, end), self._config.min_tokens - 1, -1):
            if (start := text.find(text[-size:], 0, end)) >= 0:
                return [ord(character) for character in text[start + size :][: self._config.num_speculative_tokens]]
        return []
