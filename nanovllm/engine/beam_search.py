"""Beam search: of all continuations of a prompt, keep the `beam_width` likeliest, and go on from each by a token.

    the cat     sat (-1.2)    ran (-1.9)    is (-2.0)       width 2: these two are left, "is" is dropped
                 |              |
                on (-1.5)     off (-2.3)   to (-2.6)        two come from "sat": it is forked
                by (-2.1)

A beam is a sequence. It is forked for each continuation that is kept, and gives its blocks back once they hold them.
Wu et al. 2016 (arXiv:1609.08144); scores and the rules that end a search are those of transformers' `generate`.
"""

import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import AT_LEAST_1, Rule, check_fields
from .engine import LLMEngine
from .input_processor import Prompt
from .interrupts import interrupts_held_back
from .outputs import RequestOutput
from .sampling_params import SampledToken, SamplingParams
from .sequence import Sequence

RULES: dict[str, Rule] = {
    "beam_width": AT_LEAST_1,
    "max_tokens": AT_LEAST_1,
    "early_stopping": ('True, False or "never"', lambda value: value in (True, False, "never")),
}


@dataclass(frozen=True)
class BeamSearchParams:
    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    length_penalty: float = 1.0  # a score is the logprob / length ** this; above 0 favours long outputs
    early_stopping: bool | str = False  # True: once beam_width have ended; False, "never": once none can become better

    def __post_init__(self) -> None:
        """Raises ValueError, naming the parameter and its value."""
        check_fields(self, RULES)


class Candidate(NamedTuple):
    """A beam and one more token."""

    parent: Sequence
    token_id: int
    logprob: float  # of all its tokens

    @property
    def output(self) -> list[int]:
        return [*self.parent.token_ids[self.parent.num_prompt_tokens :], self.token_id]

    @property
    def has_ended(self) -> bool:
        return self.token_id in self.parent.stop_token_ids or self.parent.num_tokens + 1 == self.parent.max_num_tokens


class Hypothesis(NamedTuple):
    """An output that has ended."""

    score: float
    token_ids: list[int]
    logprob: float


class Hypotheses:
    """The beam_width best outputs that have ended."""

    def __init__(self, params: BeamSearchParams) -> None:
        self.best: list[Hypothesis] = []  # the best is the first
        self._params = params

    def add(self, token_ids: list[int], logprob: float) -> None:
        hypothesis = Hypothesis(self._score(logprob, len(token_ids)), token_ids, logprob)
        self.best = sorted([*self.best, hypothesis], key=lambda h: -h.score)[: self._params.beam_width]

    def are_final(self, logprob: float, num_tokens: int, max_tokens: int) -> bool:
        """Whether to stop, while the likeliest beam has this logprob and num_tokens, and may come to max_tokens.

        The prompt's tokens do not count in either.
        """
        if len(self.best) < self._params.beam_width:
            return False
        if self._params.early_stopping is True:
            return True
        may_be_longer = self._params.early_stopping == "never" and self._params.length_penalty > 0
        return self._score(logprob, max_tokens if may_be_longer else num_tokens) <= self.best[-1].score

    def _score(self, logprob: float, num_tokens: int) -> float:
        return logprob / num_tokens**self._params.length_penalty


class BeamSearch:
    """One prompt at a time, with an engine's pool and model, and nobody beside."""

    def __init__(self, engine: LLMEngine, params: BeamSearchParams) -> None:
        """Raises ValueError if the engine may not run that many sequences."""
        if params.beam_width > engine.config.max_num_seqs:
            raise ValueError(f"beam_width is {params.beam_width}, max_num_seqs is {engine.config.max_num_seqs}")
        self._engine, self._kv_cache_manager, self._params = engine, engine.kv_cache_manager, params
        self._max_num_batched_tokens = engine.config.max_num_batched_tokens

    def run(self, request_id: str, prompt: Prompt) -> RequestOutput:
        """Its completions are the hypotheses, the best first. If it cannot be served, the output says why."""
        asked = self._params
        params = SamplingParams(n=asked.beam_width, max_tokens=asked.max_tokens, ignore_eos=asked.ignore_eos, seed=0)
        try:
            completions = self._engine.input_processor.process(request_id, prompt, params)
            hypotheses = self._search(completions[0])
        except Exception as error:
            return RequestOutput.failed(request_id, prompt, str(error))
        for seq, hypothesis in zip(completions, hypotheses, strict=False):  # there may be fewer hypotheses
            for token_id in hypothesis.token_ids:
                seq.append_token(SampledToken(token_id, 0.0))
            seq.cumulative_logprob = hypothesis.logprob
        return self._engine.build_output(completions[: len(hypotheses)])

    def _search(self, root: Sequence) -> list[Hypothesis]:
        """However it ends, no beam holds a block then. Raises NoFreeBlocks if the pool is too small."""
        beams, hypotheses = [root], Hypotheses(self._params)
        with interrupts_held_back() as between_steps:
            self._kv_cache_manager.allocate(root)
            try:
                self._kv_cache_manager.collect_loads(wait=True)  # nobody else could run meanwhile
                while beams:
                    between_steps.let_through()
                    between_steps.hold_back()
                    beams = self._step(beams, hypotheses)
            finally:
                for beam in beams:
                    self._kv_cache_manager.free(beam)
        return hypotheses.best

    def _step(self, beams: list[Sequence], hypotheses: Hypotheses) -> list[Sequence]:
        """The next beams, forked from these; none if the search is over. These give their blocks back.

        A prompt longer than a step may be is computed in chunks: before the last one the beams stay as they are.
        """
        if beams[0].num_uncomputed_tokens > self._max_num_batched_tokens:  # a chunk of the prompt
            self._compute(beams)
            return beams
        children = [self._fork(candidate) for candidate in self._choose(self._likeliest(beams), hypotheses)]
        for beam in beams:
            self._kv_cache_manager.free(beam)
        return children

    def _likeliest(self, beams: list[Sequence]) -> list[Candidate]:
        """The likeliest continuations of all beams by a token, in order. Each beam has its slot then, copies made.

        They are beam_width times 1 + the number of stop tokens, twice the width at least: so many that beam_width go on
        even if all that can end with a stop token do. The model gets at most max_num_batched_tokens beams at a time.
        """
        copies = [self._kv_cache_manager.append_slot(beam) for beam in beams]
        self._engine.kv_cache.copy_blocks([each for each in copies if each])
        size = self._max_num_batched_tokens
        logprobs = torch.cat([self._compute(beams[start : start + size]) for start in range(0, len(beams), size)])
        count = self._params.beam_width * max(2, 1 + len(beams[0].stop_token_ids))
        top = logprobs.topk(min(count, logprobs.shape[1]))  # [num_beams, count]
        candidates = [
            Candidate(beam, token_id, beam.cumulative_logprob + logprob)
            for beam, token_ids, values in zip(beams, top.indices.tolist(), top.values.tolist(), strict=True)
            for token_id, logprob in zip(token_ids, values, strict=True)
        ]
        return sorted(candidates, key=lambda candidate: -candidate.logprob)[:count]

    @torch.inference_mode()
    def _compute(self, beams: list[Sequence]) -> Tensor:
        """A step of the model: each beam's logprobs of the token that comes next, float32 [num_beams, vocab_size]."""
        runner = self._engine.model_runner
        batch = [(beam, min(beam.num_uncomputed_tokens, self._max_num_batched_tokens)) for beam in beams]
        hidden, step = runner.compute(batch)
        logits = runner.compute_logits(hidden, step, list(range(len(beams))))
        for beam, num_tokens in batch:
            beam.num_computed_tokens += num_tokens
        return logits.float().log_softmax(dim=-1)

    def _choose(self, candidates: list[Candidate], hypotheses: Hypotheses) -> list[Candidate]:
        """The beam_width likeliest that have not ended, to go on with; none if the search is over.

        A candidate that has ended becomes a hypothesis if it is among the beam_width likeliest of all.
        """
        width = self._params.beam_width
        for candidate in candidates[:width]:
            if candidate.has_ended:
                hypotheses.add(candidate.output, candidate.logprob)
        kept = [candidate for candidate in candidates if not candidate.has_ended][:width]
        if not kept:
            return []
        best = kept[0]
        max_tokens = best.parent.max_num_tokens - best.parent.num_prompt_tokens
        return [] if hypotheses.are_final(best.logprob, len(best.output), max_tokens) else kept

    def _fork(self, candidate: Candidate) -> Sequence:
        """A beam that shares all that its parent has computed, and has the candidate's token."""
        child = copy.copy(candidate.parent)
        child.token_ids = [*child.token_ids, candidate.token_id]
        child.cumulative_logprob = candidate.logprob
        self._kv_cache_manager.fork(candidate.parent, child)
        return child
