"""Beam search: keep the `beam_width` most likely continuations of a prompt, and extend each by one token at a time.

    the cat     sat (-1.2)    ran (-1.9)    is (-2.0)       width 2: two are kept, "is" is dropped
                 |              |
                on (-1.5)     off (-2.3)   to (-2.6)        the best two both come from "sat", which is forked
                by (-2.1)

A beam is a sequence. It is forked for each continuation that is kept, and then it is freed.
Wu et al. 2016 (arXiv:1609.08144). Scores, and the rules that end a search, are those of transformers' `generate`.
"""

import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .engine import LLMEngine
from .input_processor import Prompt
from .outputs import RequestOutput
from .sampling import SampledToken, SamplingParams
from .sequence import Sequence, request_output


@dataclass(frozen=True)
class BeamSearchParams:
    """The options of a beam search."""

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    length_penalty: float = 1.0  # a score is logprob / length ** length_penalty: above 0 favors long outputs
    early_stopping: bool | str = False  # True: stop at beam_width hypotheses; False, "never": once none can improve

    def __post_init__(self) -> None:
        if self.beam_width < 1 or self.max_tokens < 1:
            raise ValueError(f"beam_width {self.beam_width} and max_tokens {self.max_tokens} must be at least 1")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f'early_stopping must be True, False or "never", not {self.early_stopping!r}')


class PoolTooSmall(Exception):
    """The beams need more blocks than are free."""


class Candidate(NamedTuple):
    """A beam and one more token."""

    parent: Sequence
    token_id: int
    logprob: float  # of the whole output

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
    """The best beam_width outputs that have ended."""

    def __init__(self, params: BeamSearchParams) -> None:
        self.best: list[Hypothesis] = []  # best first
        self._params = params

    def add(self, token_ids: list[int], logprob: float) -> None:
        """Keep an output that has ended, if it is one of the best beam_width."""
        hypothesis = Hypothesis(self._score(logprob, len(token_ids)), token_ids, logprob)
        self.best = sorted([*self.best, hypothesis], key=lambda h: -h.score)[: self._params.beam_width]

    def are_final(self, logprob: float, num_tokens: int, max_tokens: int) -> bool:
        """Return True if no running beam can become one of the best. The likeliest has this logprob and length.

        With fewer than beam_width hypotheses, any beam can. With as many, early_stopping decides: True ends the search.
        False compares the score that the likeliest has now with the worst hypothesis, and "never" the best score that
        its logprob can have at any length up to max_tokens. An equal score is not better.
        """
        if len(self.best) < self._params.beam_width:
            return False
        if self._params.early_stopping is True:
            return True
        may_gain_by_length = self._params.early_stopping == "never" and self._params.length_penalty > 0
        return self._score(logprob, max_tokens if may_gain_by_length else num_tokens) <= self.best[-1].score

    def _score(self, logprob: float, num_tokens: int) -> float:
        return logprob / num_tokens**self._params.length_penalty


class BeamSearch:
    """A beam search for one prompt at a time, on an engine's pool and model, while no request runs."""

    def __init__(self, engine: LLMEngine, params: BeamSearchParams) -> None:
        if params.beam_width > engine.config.max_num_seqs:
            raise ValueError(f"beam_width is {params.beam_width}, max_num_seqs is {engine.config.max_num_seqs}")
        self._engine, self._kv_cache_manager, self._params = engine, engine.kv_cache_manager, params
        self._max_num_batched_tokens = engine.config.max_num_batched_tokens

    def run(self, request_id: str, prompt: Prompt) -> RequestOutput:
        """Return an output with up to beam_width completions, best first, or with an error if it cannot be served."""
        width, max_tokens, ignore_eos = self._params.beam_width, self._params.max_tokens, self._params.ignore_eos
        params = SamplingParams(n=width, max_tokens=max_tokens, ignore_eos=ignore_eos, seed=0)
        samples = self._engine.input_processor.process(request_id, prompt, params)
        if samples[0].finished:
            return request_output(samples)
        try:
            hypotheses = self._search(samples[0])
        except PoolTooSmall as error:
            samples[0].finish("error", str(error))
            return request_output(samples[:1])
        for seq, hypothesis in zip(samples, hypotheses, strict=False):  # there may be fewer hypotheses
            for token_id in hypothesis.token_ids:
                seq.append_token(SampledToken(token_id, 0.0))
            seq.cumulative_logprob = hypothesis.logprob
        return request_output(samples[: len(hypotheses)])

    def _search(self, root: Sequence) -> list[Hypothesis]:
        """Return the best hypotheses. Raise PoolTooSmall if blocks run out. Free all blocks in either case."""
        beams, hypotheses, manager = [root], Hypotheses(self._params), self._kv_cache_manager
        needed, free = manager.num_needed(root), manager.num_free_blocks
        if needed > free:
            raise PoolTooSmall(f"the prompt needs {needed} blocks, {free} are free")
        manager.allocate(root)
        try:
            while root.num_uncomputed_tokens > self._max_num_batched_tokens:  # a chunk of the prompt
                self._compute([root])
            while beams:
                beams = self.step(beams, hypotheses)
        finally:
            for beam in beams:
                manager.free(beam)
        return hypotheses.best

    def step(self, beams: list[Sequence], hypotheses: Hypotheses) -> list[Sequence]:
        """Compute one step, and return the beams of the next one: none if the search is over.

        Afterwards `beams` hold no blocks. A block that they share with a beam of the next step is never free meanwhile.
        """
        children = [self.fork(candidate) for candidate in self.choose(self.extend(beams), hypotheses)]
        for beam in beams:
            self._kv_cache_manager.free(beam)
        return children

    def append_slots(self, beams: list[Sequence]) -> None:
        """Make sure that the last token of each beam has a slot, in a block that no other beam holds.

        A new block in the place of a shared one has its keys and values. Raise PoolTooSmall if blocks run out.
        """
        copies = []
        for beam in beams:
            if not self._kv_cache_manager.can_append(beam):
                raise PoolTooSmall(f"{len(beams)} beams of {beam.num_tokens} tokens need more blocks than are free")
            copies.append(self._kv_cache_manager.append_slot(beam))
        self._engine.kv_cache.copy_blocks([each for each in copies if each])

    def extend(self, beams: list[Sequence]) -> list[Candidate]:
        """Give each beam a slot (append_slots), compute its last token, and return the likeliest continuations of all.

        The best one is first, by the logprob of its whole output. There are enough for beam_width of them to go on,
        even if all stop tokens of all beams are among them.
        """
        self.append_slots(beams)
        logprobs = self._next_logprobs(beams)  # [num_beams, vocab_size]
        count = self._params.beam_width * max(2, 1 + len(beams[0].stop_token_ids))
        top = logprobs.topk(min(count, logprobs.shape[1]))  # [num_beams, count]
        candidates = [
            Candidate(beam, token_id, beam.cumulative_logprob + logprob)
            for beam, token_ids, values in zip(beams, top.indices.tolist(), top.values.tolist(), strict=True)
            for token_id, logprob in zip(token_ids, values, strict=True)
        ]
        return sorted(candidates, key=lambda candidate: -candidate.logprob)[:count]

    def choose(self, candidates: list[Candidate], hypotheses: Hypotheses) -> list[Candidate]:
        """Return the best beam_width candidates that have not ended, best first, or none if the search is over.

        A candidate that has ended becomes a hypothesis if it is among the best beam_width of all.
        """
        width = self._params.beam_width
        for candidate in candidates[:width]:
            if candidate.has_ended:
                hypotheses.add(candidate.output, candidate.logprob)
        kept = [candidate for candidate in candidates if not candidate.has_ended][:width]
        if not kept:
            return []
        max_tokens = kept[0].parent.max_num_tokens - kept[0].parent.num_prompt_tokens
        return [] if hypotheses.are_final(kept[0].logprob, len(kept[0].output), max_tokens) else kept

    def fork(self, candidate: Candidate) -> Sequence:
        """Return a beam that shares its parent's computed blocks, and ends in the candidate's token.

        Its cumulative_logprob is the candidate's. The parent stays as it is.
        """
        child = copy.copy(candidate.parent)
        child.token_ids, child.cumulative_logprob = [*child.token_ids, candidate.token_id], candidate.logprob
        self._kv_cache_manager.fork(candidate.parent, child)
        return child

    def _next_logprobs(self, beams: list[Sequence]) -> Tensor:
        """Return each beam's logprobs of its next token, float32 [num_beams, vocab_size].

        If a step may not compute a token of each beam, it takes several steps.
        """
        size = self._max_num_batched_tokens
        return torch.cat([self._compute(beams[start : start + size]) for start in range(0, len(beams), size)])

    @torch.inference_mode()
    def _compute(self, beams: list[Sequence]) -> Tensor:
        """Run the model on the next tokens of each beam. Return the logprobs after the last one of each."""
        batch = [(beam, min(beam.num_uncomputed_tokens, self._max_num_batched_tokens)) for beam in beams]
        logits = self._engine.model_runner.compute_logits(batch)  # [num_beams, vocab_size]
        for beam, num_tokens in batch:
            beam.num_computed_tokens += num_tokens
        return logits.float().log_softmax(dim=-1)
