"""Beam search: keep the `beam_width` most likely continuations of a prompt, and extend each by one token at a time.

    the cat     sat (-1.2)    ran (-1.9)    is (-2.0)       width 2: two are kept, "is" is dropped
                 |              |
                on (-1.5)     off (-2.3)   to (-2.6)        the best two both come from "sat", which is forked
                by (-2.1)

A beam is a sequence. It is forked once for each continuation that is kept, and then freed. The algorithm is by Wu et
al. 2016 (arXiv:1609.08144); scores and stopping follow transformers' generate().
"""

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .backends.torch.sampler import top_logprobs
from .checks import AT_LEAST_1, Rule, check_fields, check_unsupported
from .distributed.rank_group import RankError
from .engine.executor import Scheduled
from .engine.interrupts import interrupts_held_back
from .engine.sequence import Sequence, request_output
from .llm_engine import LLMEngine
from .requests.outputs import Position, RequestOutput
from .requests.prompts import ParsedPrompt, parts_of
from .requests.sampling_params import SamplingParams
from .requests.tokens import SampledToken


@dataclass(frozen=True)
class BeamSearchParams:
    """The options of a beam search: how many beams to keep, how to score them, and when to stop."""

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    length_penalty: float = 1.0  # score = logprob / length ** length_penalty; above 0 favors long outputs
    # True: stop at beam_width finished outputs. False: also wait until no running beam scores higher than the worst of
    # them. "never": also wait until no running beam could score higher at any length.
    early_stopping: bool | str = False

    # Only the defaults are supported, except for skip_special_tokens, which affects the text of a BeamSearchSequence.
    temperature: float = field(default=0.0, kw_only=True)
    include_stop_str_in_output: bool = field(default=False, kw_only=True)
    structured_outputs: str | None = field(default=None, kw_only=True)
    skip_special_tokens: bool = field(default=True, kw_only=True)
    watermarking: bool | None = field(default=None, kw_only=True)

    RULES: ClassVar[dict[str, Rule]] = {
        "beam_width": AT_LEAST_1,
        "max_tokens": AT_LEAST_1,
        "length_penalty": ("from -16 to 16", lambda value: abs(value) <= 16),  # so length ** penalty fits a float
        "early_stopping": ('True, False or "never"', lambda value: value in (True, False, "never")),
    }

    def __post_init__(self) -> None:
        """Check the fields. Raise ValueError with the name and value of an invalid one."""
        check_unsupported(temperature=self.temperature, include_stop_str_in_output=self.include_stop_str_in_output)
        check_unsupported(structured_outputs=self.structured_outputs, watermarking=self.watermarking)
        check_fields(self, self.RULES)


@dataclass
class BeamSearchSequence:
    """A beam in vLLM's form: the tokens and the text include the prompt."""

    orig_prompt: dict[str, Any]
    tokens: list[int]
    logprobs: list[Position]  # the likeliest tokens at each position of the output, which excludes the prompt
    lora_request: None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput(RequestOutput):
    """A RequestOutput whose `outputs` are the beams. `sequences` holds the same beams in vLLM's form."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)  # best first; empty after an error


class Candidate(NamedTuple):
    """A beam that is extended by one token."""

    parent: Sequence
    token_id: int
    logprob: float  # of the whole output
    position: Position | None = None  # the likeliest tokens at this position

    @property
    def logprobs(self) -> list[Position]:
        return [*self.parent.logprobs, self.position or {}]

    @property
    def output(self) -> list[int]:
        return [*self.parent.token_ids[self.parent.num_prompt_tokens :], self.token_id]

    @property
    def has_ended(self) -> bool:
        return self.token_id in self.parent.stop_token_ids or self.parent.num_tokens + 1 == self.parent.max_num_tokens


class Hypothesis(NamedTuple):
    """A finished output."""

    score: float
    token_ids: list[int]
    logprob: float
    logprobs: list[Position]


class Hypotheses:
    """The beam_width best finished outputs."""

    def __init__(self, params: BeamSearchParams) -> None:
        self.best: list[Hypothesis] = []  # best first
        self._params = params

    def add(self, token_ids: list[int], logprob: float, logprobs: list[Position] | None = None) -> None:
        added = Hypothesis(self._score(logprob, len(token_ids)), token_ids, logprob, logprobs or [])
        self.best = sorted([*self.best, added], key=lambda hypothesis: -hypothesis.score)[: self._params.beam_width]

    def are_final(self, logprob: float, num_tokens: int, max_tokens: int) -> bool:
        """Return True if the search may stop, according to early_stopping.

        `logprob` and `num_tokens` describe the output of the best running beam, which may reach `max_tokens` tokens.
        """
        if len(self.best) < self._params.beam_width:
            return False
        if self._params.early_stopping is True:
            return True
        may_gain_by_length = self._params.early_stopping == "never" and self._params.length_penalty > 0
        return self._score(logprob, max_tokens if may_gain_by_length else num_tokens) <= self.best[-1].score

    def _score(self, logprob: float, num_tokens: int) -> float:
        score: float = logprob / num_tokens**self._params.length_penalty
        return score


class BeamSearch:
    """A beam search for one prompt at a time. It uses the engine's pool and model, so no request may be running."""

    def __init__(self, engine: LLMEngine, params: BeamSearchParams) -> None:
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params must be BeamSearchParams, got {type(params).__name__}")
        if params.beam_width > engine.config.max_num_seqs:
            limit = engine.config.max_num_seqs
            raise ValueError(f"beam_width must be at most max_num_seqs, {limit}, got {params.beam_width}")
        self._engine, self._kv_cache_manager, self._observers = engine, engine.kv_cache_manager, engine.observers
        self._max_num_batched_tokens = engine.config.max_num_batched_tokens
        self._params = params

    def run(self, request_id: str, prompt: ParsedPrompt) -> BeamSearchOutput:
        """Return an output with up to beam_width completions, best first, or with an error.

        Raise RankError if a rank fails.
        """
        self._engine.ranks.send(search, self._params, request_id, prompt)
        params = SamplingParams(
            n=self._params.beam_width, max_tokens=self._params.max_tokens, ignore_eos=self._params.ignore_eos, seed=0
        )
        tokens, text, cache_salt = parts_of(prompt)
        try:
            samples = self._engine.input_processor.process(request_id, tokens, params, cache_salt)
            for seq in samples:
                seq.prompt = text if seq.prompt is None else seq.prompt
            hypotheses = self._search(samples[0])
        except RankError:
            raise
        except Exception as error:
            self._observers.tell("end", error)
            if not isinstance(error, ValueError | RuntimeError | MemoryError):  # a bug, not a request that fails
                raise
            return BeamSearchOutput(**vars(RequestOutput.failed(request_id, prompt, str(error))))
        for seq, hypothesis in zip(samples, hypotheses, strict=False):  # there may be fewer hypotheses than samples
            for token_id in hypothesis.token_ids:
                seq.append_token(SampledToken(token_id, 0.0))
            seq.cumulative_logprob = hypothesis.logprob
            self._observers.tell("finish", seq)
        output = request_output(samples[: len(hypotheses)])
        sequences = [self._as_sequence(output, index, hypothesis) for index, hypothesis in enumerate(hypotheses)]
        return BeamSearchOutput(**vars(output), sequences=sequences)

    def _as_sequence(self, output: RequestOutput, index: int, hypothesis: Hypothesis) -> BeamSearchSequence:
        tokens = [*output.prompt_token_ids, *hypothesis.token_ids]
        text = None
        if self._engine.tokenizer:
            text = self._engine.tokenizer.decode(tokens, skip_special_tokens=self._params.skip_special_tokens)
        return BeamSearchSequence(
            orig_prompt={"type": "token", "prompt_token_ids": output.prompt_token_ids, "prompt": output.prompt},
            tokens=tokens,
            logprobs=hypothesis.logprobs,
            cum_logprob=output.outputs[index].cumulative_logprob,
            text=text,
        )

    def _search(self, root: Sequence) -> list[Hypothesis]:
        """Return the best hypotheses. Raise NoFreeBlocks if the pool is too small. Free all blocks in either case."""
        beams, hypotheses = [root], Hypotheses(self._params)
        with interrupts_held_back() as between_steps:
            self._kv_cache_manager.collect_loads(wait=True)  # loads of aborted requests still hold blocks
            self._allocate(root)
            try:
                while beams:
                    try:
                        self._engine.ranks.call_on_all(between_steps.let_through)
                    finally:  # a second Ctrl-C must not interrupt the cleanup below
                        between_steps.hold_back()
                    self._observers.tell("begin")
                    beams = self._step(beams, hypotheses)
                    self._observers.tell("end", None)
            finally:
                for beam in beams:
                    self._kv_cache_manager.free(beam)
        return hypotheses.best

    def _allocate(self, root: Sequence) -> None:
        """Allocate the blocks of `root`, and wait until the cached ones are loaded. Start over if a load fails."""
        manager, is_loaded = self._kv_cache_manager, False
        while not is_loaded:
            manager.allocate(root, manager.find_hits(root))
            try:
                manager.collect_loads(wait=True)
                is_loaded = root not in manager.broken
            finally:
                if not is_loaded:
                    manager.free(root)

    def _step(self, beams: list[Sequence], hypotheses: Hypotheses) -> list[Sequence]:
        """Compute a step. Return the beams of the next one, or an empty list when the search is over.

        While the prompt is incomplete, these are `beams`. Afterwards they are forked from `beams`, which are freed.
        """
        if beams[0].num_uncomputed_tokens > self._max_num_batched_tokens:  # compute one chunk of the prompt
            self._compute(beams)
            return beams
        children = [self._fork(candidate) for candidate in self._choose(self._most_likely(beams), hypotheses)]
        for beam in beams:
            self._kv_cache_manager.free(beam)
        return children

    def _most_likely(self, beams: list[Sequence]) -> list[Candidate]:
        """Return the most likely continuations of all beams by one token, best first.

        There are enough of them to continue beam_width beams even if all stop tokens of each beam are among them.
        """
        copies = [copy for beam in beams if (copy := self._kv_cache_manager.append_slot(beam))]
        self._engine.kv_cache.copy_blocks(copies)
        self._observers.tell("copy", copies)
        limit = self._max_num_batched_tokens  # beams in a batch, each of which computes one token
        logprobs = torch.cat([self._compute(beams[start : start + limit]) for start in range(0, len(beams), limit)])
        count = self._params.beam_width * max(2, 1 + len(beams[0].stop_token_ids))
        top = logprobs.topk(min(count, logprobs.shape[1]))  # [num_beams, count]
        positions = top_logprobs(logprobs, top.indices[:, 0].tolist(), count)  # the tokens of `top`, with their ranks
        beam_results = zip(beams, positions, top.indices.tolist(), top.values.tolist(), strict=True)
        candidates = [
            Candidate(beam, token_id, beam.cumulative_logprob + logprob, position)
            for beam, position, token_ids, token_logprobs in beam_results
            for token_id, logprob in zip(token_ids, token_logprobs, strict=True)
        ]
        return sorted(candidates, key=lambda candidate: -candidate.logprob)[:count]

    @torch.inference_mode()
    def _compute(self, beams: list[Sequence]) -> Tensor:
        """Run the model. Return the log-probabilities of each beam's next token, float32 [num_beams, vocab_size]."""
        batch: list[Scheduled] = [
            (beam, min(beam.num_uncomputed_tokens, self._max_num_batched_tokens)) for beam in beams
        ]
        next_logits = partial(self._engine.executor.next_logits, batch)
        logits = self._engine.ranks.call_on_all(next_logits)  # [num_beams, vocab_size]
        for beam, num_tokens in batch:
            beam.num_computed_tokens += num_tokens
            self._kv_cache_manager.cache_blocks(beam, num_tokens)
        self._observers.tell("step", batch, [])
        return logits.float().log_softmax(dim=-1)

    def _choose(self, candidates: list[Candidate], hypotheses: Hypotheses) -> list[Candidate]:
        """Return the beam_width best candidates that have not ended, or an empty list when the search is over.

        First add each candidate that has ended to `hypotheses`, if it is among the beam_width best.
        """
        width = self._params.beam_width
        for candidate in candidates[:width]:
            if candidate.has_ended:
                hypotheses.add(candidate.output, candidate.logprob, candidate.logprobs)
        kept = [candidate for candidate in candidates if not candidate.has_ended][:width]
        if not kept:
            return []
        best = kept[0]
        max_tokens = best.parent.max_num_tokens - best.parent.num_prompt_tokens
        return [] if hypotheses.are_final(best.logprob, len(best.output), max_tokens) else kept

    def _fork(self, candidate: Candidate) -> Sequence:
        """Return a beam that shares the blocks of its parent and ends with the candidate's token."""
        child = copy.copy(candidate.parent)
        child.token_ids = [*child.token_ids, candidate.token_id]
        child.cumulative_logprob, child.logprobs = candidate.logprob, candidate.logprobs
        self._kv_cache_manager.fork(candidate.parent, child)
        return child


def search(engine: LLMEngine, params: BeamSearchParams, request_id: str, prompt: ParsedPrompt) -> BeamSearchOutput:
    """Search on an engine without unfinished requests, and return the output."""
    return BeamSearch(engine, params).run(request_id, prompt)
