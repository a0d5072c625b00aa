"""Logits processors: they edit the logits of a sequence before a token is sampled, as its SamplingParams require.

make_processors() returns them in vLLM's order:

    bans           allowed_token_ids, bad_words, min_tokens
    adjustments    logit_bias, then repetition_penalty, then frequency_penalty and presence_penalty

Temperature, min_p, top-k and top-p follow in the sampler. The only state that a processor needs is the output so far,
so preempted and forked sequences continue unchanged.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from ..checkpoints.tokenizer import HFTokenizer
from .sampling_params import SamplingParams


class LogitsProcessor(Protocol):
    def apply(self, logits: Tensor, output_token_ids: list[int]) -> None:
        """Edit one row of logits in place, float32 [vocab_size]."""


class AllowedTokens:
    """A ban on every token that is not in allowed_token_ids."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = torch.tensor(token_ids).unique()  # [num_allowed]

    def apply(self, logits: Tensor, output_token_ids: list[int]) -> None:
        token_ids = self._token_ids.to(logits.device)
        allowed_logits = logits[token_ids]  # [num_allowed], a copy
        logits.fill_(-math.inf)
        logits[token_ids] = allowed_logits


class BadWords:
    """A ban on the last token of each bad word, while the output ends in the word's other tokens."""

    def __init__(self, words: list[list[int]]) -> None:
        """`words` holds the token ids of each word."""
        self._words = words

    def apply(self, logits: Tensor, output_token_ids: list[int]) -> None:
        for *beginning, last_token_id in self._words:
            if output_token_ids[len(output_token_ids) - len(beginning) :] == beginning:
                logits[last_token_id] = -math.inf


class MinTokens:
    """A ban on stop tokens until the output has min_tokens tokens."""

    def __init__(self, min_tokens: int, stop_token_ids: set[int], allow_if_required: bool = False) -> None:
        """Take the tokens to ban. With `allow_if_required`, lift the ban if no other token is allowed.

        A grammar may allow only EOS, for example.
        """
        self._min_tokens = min_tokens
        self._stop_token_ids = torch.tensor(sorted(stop_token_ids), dtype=torch.int64)  # [num_stop_tokens]
        self._allow_if_required = allow_if_required

    def apply(self, logits: Tensor, output_token_ids: list[int]) -> None:
        if len(output_token_ids) >= self._min_tokens:
            return
        token_ids = self._stop_token_ids.to(logits.device)
        saved_logits = logits[token_ids]  # [num_stop_tokens], a copy
        logits[token_ids] = -math.inf
        if self._allow_if_required and logits.isneginf().all():
            logits[token_ids] = saved_logits


class LogitBias:
    """A bias on the logits of some tokens."""

    def __init__(self, biases: dict[int, float]) -> None:
        self._token_ids = torch.tensor([*biases])  # [num_biases]
        self._biases = torch.tensor([*biases.values()], dtype=torch.float32)  # [num_biases]

    def apply(self, logits: Tensor, output_token_ids: list[int]) -> None:
        logits[self._token_ids.to(logits.device)] += self._biases.to(logits.device)


class RepetitionPenalty:
    """A penalty on each token of the prompt and the output. Keskar et al. 2019 (arXiv:1909.05858)."""

    def __init__(self, penalty: float, prompt_token_ids: list[int]) -> None:
        self._penalty = penalty
        self._prompt_token_ids = torch.tensor(prompt_token_ids).unique()

    def apply(self, logits: Tensor, output_token_ids: list[int]) -> None:
        output = torch.tensor(output_token_ids, dtype=torch.int64)  # [num_output_tokens]
        token_ids = torch.cat([self._prompt_token_ids, output]).unique().to(logits.device)  # [num_seen]
        seen = logits[token_ids]  # [num_seen]
        logits[token_ids] = torch.where(seen > 0, seen / self._penalty, seen * self._penalty)


class OutputPenalties:
    """Two penalties on each token of the output: one subtracted once, and one subtracted for each occurrence."""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = presence, frequency

    def apply(self, logits: Tensor, output_token_ids: list[int]) -> None:
        token_ids, counts = torch.tensor(output_token_ids, dtype=torch.int64).unique(return_counts=True)
        logits[token_ids.to(logits.device)] -= (self._frequency * counts + self._presence).to(logits.device)


def make_processors(
    params: SamplingParams, prompt_token_ids: list[int], stop_token_ids: set[int], bad_words: list[list[int]]
) -> list[LogitsProcessor]:
    """Return the processors for the parameters that differ from their defaults.

    `stop_token_ids` holds all tokens that min_tokens bans, including EOS. `bad_words` holds the token ids of each word.
    """
    processors: list[LogitsProcessor] = []
    if params.allowed_token_ids:
        processors.append(AllowedTokens(params.allowed_token_ids))
    if bad_words:
        processors.append(BadWords(bad_words))
    if params.min_tokens and stop_token_ids:
        processors.append(MinTokens(params.min_tokens, stop_token_ids, params.structured_outputs is not None))
    if params.logit_bias:
        processors.append(LogitBias(params.logit_bias))
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenalty(params.repetition_penalty, prompt_token_ids))
    if params.presence_penalty or params.frequency_penalty:
        processors.append(OutputPenalties(params.presence_penalty, params.frequency_penalty))
    return processors


def bad_words_token_ids(words: list[str], tokenizer: HFTokenizer | None, vocab_size: int) -> list[list[int]]:
    """Return the tokens of each word at the start of a text, and after a space if they differ there.

    The second spelling is used only if it has as many tokens as the first but starts with a different one. Otherwise,
    the space is a separate token, and the first spelling matches after it. Raise ValueError for a word without tokens,
    or with a token id outside the vocabulary.
    """
    if tokenizer is None:
        return []  # the caller has checked that `words` is empty
    spellings: list[list[int]] = []
    for word in words:
        at_start, after_space = (tokenizer.encode(space + word.lstrip(), add_bos=False) for space in ("", " "))
        if not at_start:
            raise ValueError(f"bad_words: {word!r} has no tokens")
        spellings.append(at_start)
        if len(after_space) == len(at_start) and after_space[0] != at_start[0]:
            spellings.append(after_space)
    invalid_ids = [token_id for spelling in spellings for token_id in spelling if token_id >= vocab_size]
    if invalid_ids:
        raise ValueError(f"bad_words: a token id must be from 0 to {vocab_size - 1}, got {invalid_ids[0]}")
    return spellings
