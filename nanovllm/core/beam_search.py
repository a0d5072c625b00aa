"""Beam search: of all continuations of a prompt, keep the `beam_width` likeliest, and go on from each by a token.

    the cat     sat (-1.2)    ran (-1.9)    is (-2.0)       width 2: these two are left, "is" is dropped
                 |              |
                on (-1.5)     off (-2.3)   to (-2.6)        two come from "sat": it is forked
                by (-2.1)

A beam is a sequence. It is forked for each continuation that is kept, and gives its blocks back once they hold them.
Wu et al. 2016 (arXiv:1609.08144); scores and the rules that end a search are those of transformers' `generate`.
"""

import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

from .engine import LLMEngine
from .input_processor import Prompt
from .outputs import RequestOutput
from .sampling import SampledToken, SamplingParams
from .sequence import Sequence, request_output


@dataclass(frozen=True)
class BeamSearchParams:
    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    length_penalty: float = 1.0  # a score is the logprob / length ** this; above 0 favours long outputs
    early_stopping: bool | str = False  # True: once beam_width have ended; False, "never": once none can become better

    def __post_init__(self) -> None:
        """Raises ValueError, naming the parameter and its value."""
        if self.beam_width < 1:
            raise ValueError(f"beam_width must be at least 1, not {self.beam_width}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise ValueError(f'early_stopping must be True, False or "never", not {self.early_stopping!r}')


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
        self.best: list[Hypothesis] = []  # first
        self._params = params

    def add(self, token_ids: list[int], logprob: float) -> None:
        hypothesis = Hypothesis(self._score(logprob, len(token_ids)), token_ids, logprob)
        self.best = sorted([*self.best, hypothesis], key=lambda h: -h.score)[: self._params.beam_width]

    def are_final(self, logprob: float, num_tokens: int, max_tokens: int) -> bool:
        """Whether to stop, while the likeliest beam has this logprob and so many tokens, and may come to max_tokens.

        The prompt's tokens do not count in either.
        """
        if len(self.best) < self._params.beam_width:
            return False
        if self._params.early_stopping is True:
            return True
        may_be_longer = self._params.early_stopping == "never" and self._params.length_penalty > 0
        return self._score(logprob, max_tokens if may_be_longer else num_tokens) <= self.best[-1].score

    def _score(self, logprob: float, num_tokens: int) -> float:
        """The prompt's tokens do not count."""
        return logprob / num_tokens**self._params.length_penalty


class BeamSearch:
    """One prompt at a time, with an engine's pool and model, and nobody beside."""

    def __init__(self, engine: LLMEngine, params: BeamSearchParams) -> None:
        """Raises ValueError if the engine may not run as many sequences."""
        if params.beam_width > engine.config.max_num_seqs:
            raise ValueError(f"beam_width is {params.beam_width}, max_num_seqs is {engine.config.max_num_seqs}")
        self._engine, self._params = engine, params
        self._block_manager = engine.block_manager
        self._max_num_batched_tokens = engine.config.max_num_batched_tokens

    def run(self, request_id: str, prompt: Prompt) -> RequestOutput:
        """Its completions are the hypotheses, the best first.

        Raises ValueError for a prompt that cannot be served, NoFreeBlocks if the pool is too small, and then holds
        nothing.
        """
        [root] = self._process(request_id, prompt, n=1)
        # so many that enough are left if all that can end with a stop token do
        num_candidates = self._params.beam_width * max(2, 1 + len(root.stop_token_ids))
        root.params = replace(root.params, logprobs=num_candidates)
        beams, hypotheses = [root], Hypotheses(self._params)
        try:
            self._block_manager.allocate(root)
            self._block_manager.collect(wait=True)  # what of the prompt was found on the host must be there first
            self._prefill(root)
            while kept := self._choose(likeliest(beams, self._compute(beams), num_candidates), hypotheses):
                beams = self._continue(beams, kept)
        finally:
            for beam in beams:
                if beam.block_table:
                    self._block_manager.free(beam)
        completions = self._process(request_id, prompt, n=len(hypotheses.best))
        for seq, hypothesis in zip(completions, hypotheses.best, strict=True):
            for token_id in hypothesis.token_ids:
                seq.append_token(SampledToken(token_id, 0.0))
            seq.cumulative_logprob = hypothesis.logprob
        return request_output(completions)

    def _process(self, request_id: str, prompt: Prompt, n: int) -> list[Sequence]:
        params = SamplingParams(
            n=n, temperature=0.0, max_tokens=self._params.max_tokens, ignore_eos=self._params.ignore_eos, seed=0
        )
        return self._engine.input_processor.process(request_id, prompt, params)

    def _prefill(self, root: Sequence) -> None:
        """All but what fits into one step."""
        while root.num_uncomputed_tokens > self._max_num_batched_tokens:
            self._run([root])

    def _compute(self, beams: list[Sequence]) -> list[SampledToken]:
        """What each would say next, and the likeliest beside it. First copies the blocks that they are to write to."""
        copies = [self._block_manager.append_slot(beam) for beam in beams]
        self._engine.kv_cache.copy_blocks({needed.target: needed.source for needed in copies if needed})
        size = self._max_num_batched_tokens
        return [token for start in range(0, len(beams), size) for token in self._run(beams[start : start + size])]

    def _run(self, beams: list[Sequence]) -> list[SampledToken]:
        """A step of the model. Returns a token for each beam that is then complete."""
        batch = [(beam, min(beam.num_uncomputed_tokens, self._max_num_batched_tokens)) for beam in beams]
        sampled = self._engine.model_runner.run(batch)
        for beam, num_tokens in batch:
            beam.num_computed_tokens += num_tokens
        self._engine.note_peak()
        return [token for tokens in sampled for token in tokens]

    def _choose(self, candidates: list[Candidate], hypotheses: Hypotheses) -> list[Candidate]:
        """The beam_width likeliest that have not ended, to go on with; none if the search is over.

        Those that have ended become hypotheses if they are among the beam_width likeliest of all.
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

    def _continue(self, beams: list[Sequence], kept: list[Candidate]) -> list[Sequence]:
        """A fork of its parent for each, with its token and its logprob. What only the parents held is free again."""
        children = []
        for parent, token_id, logprob in kept:
            child = copy.copy(parent)
            child.token_ids = [*parent.token_ids, token_id]
            child.cumulative_logprob = logprob
            self._block_manager.fork(parent, child, parent.num_computed_tokens)
            children.append(child)
        for parent in beams:
            self._block_manager.free(parent)
        return children


def likeliest(beams: list[Sequence], tokens: list[SampledToken], count: int) -> list[Candidate]:
    """The `count` likeliest, in order, of all continuations of all beams by a token.

    tokens: one a beam, with the `count` likeliest in its place beside it.
    """
    candidates = [
        Candidate(beam, token_id, beam.cumulative_logprob + logprob.logprob)
        for beam, token in zip(beams, tokens, strict=True)
        for token_id, logprob in (token.logprobs or {}).items()
    ]
    return sorted(candidates, key=lambda candidate: -candidate.logprob)[:count]
