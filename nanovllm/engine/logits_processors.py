"""Logits processors: they change the logits of a sequence, as SamplingParams asks, before a token is sampled.

make_processors() puts them in vLLM's order:

    tokens that are banned        allowed_token_ids, bad_words, min_tokens
    tokens with another weight    logit_bias, then repetition_penalty, then frequency_penalty and presence_penalty
    tokens that are too unlikely  min_p, which knows the temperature

Top-k and top-p follow in the sampler. A processor needs nothing but the tokens of the output so far, so a sequence that
was preempted or forked goes on as before.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from ..checkpoints.tokenizer import HFTokenizer
from .sampling_params import SamplingParams


class LogitsProcessor(Protocol):
    def apply(self, logits: Tensor, output_token_ids: list[int]) -> None:
        """Change a row in place. logits float32 [vocab_size]"""


class AllowedTokens:
    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = torch.tensor(token_ids)  # [num_allowed]

    def apply(self, logits: Tensor, output_token_ids: list[int]) -> None:
        token_ids = self._token_ids.to(logits.device)
        allowed = logits[token_ids]  # [num_allowed], a copy
        logits.fill_(-math.inf)
        logits[token_ids] = allowed


class BadWords:
    """Words that must not be completed: the last token of one is banned where its others came before."""

    def __init__(self, words: list[list[int]]) -> None:
        """Each word as its token ids."""
        self._words = words

    def apply(self, logits: Tensor, output_token_ids: list[int]) -> None:
        for *beginning, last in self._words:
            if output_token_ids[len(output_token_ids) - len(beginning) :] == beginning:
                logits[last] = -math.inf


class MinTokens:
    def __init__(self, min_tokens: int, stop_token_ids: set[int], may_restore: bool = False) -> None:
        """Ban the stop tokens. With `may_restore` they stay if nothing else is left: a grammar may demand the end."""
        self._min_tokens = min_tokens
        self._stop_token_ids = torch.tensor(sorted(stop_token_ids), dtype=torch.int64)  # [num_stop_tokens]
        self._may_restore = may_restore

    def apply(self, logits: Tensor, output_token_ids: list[int]) -> None:
        if len(output_token_ids) >= self._min_tokens:
            return
        token_ids = self._stop_token_ids.to(logits.device)
        kept = logits[token_ids]  # [num_stop_tokens], a copy
        logits[token_ids] = -math.inf
        if self._may_restore and logits.isneginf().all():
            logits[token_ids] = kept


class LogitBias:
    def __init__(self, biases: dict[int, float]) -> None:
        self._token_ids = torch.tensor([*biases])  # [num_biases]
        self._biases = torch.tensor([*biases.values()], dtype=torch.float32)  # [num_biases]

    def apply(self, logits: Tensor, output_token_ids: list[int]) -> None:
        logits[self._token_ids.to(logits.device)] += self._biases.to(logits.device)


class RepetitionPenalty:
    """Weaken each token of the prompt and the output. Keskar et al. 2019 (arXiv:1909.05858)."""

    def __init__(self, penalty: float, prompt_token_ids: list[int]) -> None:
        self._penalty = penalty
        self._prompt_token_ids = torch.tensor(prompt_token_ids).unique()

    def apply(self, logits: Tensor, output_token_ids: list[int]) -> None:
        output = torch.tensor(output_token_ids, dtype=torch.int64)
        token_ids = torch.cat([self._prompt_token_ids, output]).unique().to(logits.device)  # [num_seen]
        seen = logits[token_ids]  # [num_seen]
        logits[token_ids] = torch.where(seen > 0, seen / self._penalty, seen * self._penalty)


class OutputPenalties:
    """Weaken each token of the output, once for being there and once for each time that it is there."""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = presence, frequency

    def apply(self, logits: Tensor, output_token_ids: list[int]) -> None:
        token_ids, counts = torch.tensor(output_token_ids, dtype=torch.int64).unique(return_counts=True)
        logits[token_ids.to(logits.device)] -= (self._frequency * counts + self._presence).to(logits.device)


class MinP:
    """Leave tokens whose probability is at least min_p of the likeliest one's. Nguyen et al. 2024 (arXiv:2407.01082).

    p / p_max = exp((logit - logit_max) / temperature), so there is no softmax to compute.
    """

    def __init__(self, min_p: float, temperature: float) -> None:
        self._gap = temperature * math.log(min_p)

    def apply(self, logits: Tensor, output_token_ids: list[int]) -> None:
        logits[logits < logits.max() + self._gap] = -math.inf


def make_processors(
    params: SamplingParams, prompt_token_ids: list[int], stop_token_ids: set[int], bad_words: list[list[int]]
) -> list[LogitsProcessor]:
    """Return the processors of parameters that are not at their defaults.

    `stop_token_ids` are all that min_tokens holds back, the EOS among them.
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
    if params.min_p and params.temperature > 0:
        processors.append(MinP(params.min_p, params.temperature))
    return processors


def bad_words_token_ids(words: list[str], tokenizer: HFTokenizer | None, vocab_size: int) -> list[list[int]]:
    """Return the tokens of each word at the start of a text, and behind a space where it has other tokens.

    The second form counts if it has as many tokens as the first and another first one: else the space is a token of its
    own, and the first form finds the word behind it. Raise ValueError for a word without tokens.
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
