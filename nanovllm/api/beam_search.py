"""Beam search with vLLM's parameters and outputs. Scores, and the rules that end a search, are core's."""

from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from ..engine.beam_search import BeamSearch as CoreBeamSearch
from ..engine.beam_search import BeamSearchParams as CoreBeamSearchParams
from ..engine.beam_search import Candidate, Hypotheses
from ..engine.engine import LLMEngine
from ..engine.sequence import Sequence
from ..backends.torch.logprobs import Logprob, top_logprobs
from .only_in_vllm import refuse
from .outputs import RequestOutput
from .prompts import ParsedPrompt


@dataclass(frozen=True)
class BeamSearchParams(CoreBeamSearchParams):
    """vLLM's fields, and core's early_stopping. length_penalty counts the output without the prompt."""

    temperature: float = field(default=0.0, kw_only=True)
    include_stop_str_in_output: bool = field(default=False, kw_only=True)
    structured_outputs: str | None = field(default=None, kw_only=True)
    skip_special_tokens: bool = field(default=True, kw_only=True)
    watermarking: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Raises ValueError, naming the parameter and its value."""
        refuse(temperature=self.temperature, include_stop_str_in_output=self.include_stop_str_in_output)
        refuse(structured_outputs=self.structured_outputs, watermarking=self.watermarking)
        super().__post_init__()


@dataclass
class BeamSearchSequence:
    """A beam, as vLLM has it: its tokens and its text begin with the prompt's."""

    orig_prompt: dict[str, Any]
    tokens: list[int]
    logprobs: list[dict[int, Logprob]]  # of each token of the output, the likeliest in its place
    lora_request: None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class BeamSearchOutput(RequestOutput):
    """A RequestOutput, as generate() gives it, whose outputs are the beams; and vLLM's `sequences` of the same."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)  # the best first; none if it was not served


class BeamSearch(CoreBeamSearch):
    """As core's. It remembers for each beam what was likely in the place of each token."""

    def __init__(self, engine: LLMEngine, params: CoreBeamSearchParams) -> None:
        if not isinstance(params, CoreBeamSearchParams):
            raise ValueError(f"params must be BeamSearchParams, not {type(params).__name__}")
        super().__init__(engine, params)
        self._skips_special_tokens = getattr(params, "skip_special_tokens", True)  # core's own have none
        self._next: dict[Sequence, dict[int, Logprob]] = {}  # of each beam, of the token that comes next
        self._so_far: dict[Sequence, list[dict[int, Logprob]]] = {}  # of each beam, of its tokens
        self._ended: dict[tuple[int, ...], list[dict[int, Logprob]]] = {}  # of each output that has ended

    def search(self, request_id: str, prompt: ParsedPrompt) -> BeamSearchOutput:
        given = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
        output = RequestOutput.of(self.run(request_id, given))
        if isinstance(prompt, dict):
            output = RequestOutput(**vars(output) | {"prompt": prompt.get("prompt")})
        sequences = [] if output.error else [self._sequence(output, i) for i in range(len(output.outputs))]
        self._ended.clear()
        return BeamSearchOutput(**vars(output), sequences=sequences)

    def _sequence(self, output: RequestOutput, i: int) -> BeamSearchSequence:
        beam, tokenizer = output.outputs[i], cast(Any, self._engine.tokenizer)
        tokens = [*output.prompt_token_ids, *beam.token_ids]
        return BeamSearchSequence(
            orig_prompt={"type": "token", "prompt_token_ids": output.prompt_token_ids, "prompt": output.prompt},
            tokens=tokens,
            logprobs=self._ended[tuple(beam.token_ids)],
            cum_logprob=beam.cumulative_logprob,
            text=tokenizer.decode(tokens, skip_special_tokens=self._skips_special_tokens) if tokenizer else None,
        )

    def _step(self, beams: list[Sequence], hypotheses: Hypotheses) -> list[Sequence]:
        children = super()._step(beams, hypotheses)
        self._next.clear()
        self._so_far = {beam: self._so_far.get(beam, []) for beam in children}
        return children

    def _compute(self, beams: list[Sequence]) -> Tensor:
        """float32 [num_beams, vocab_size]"""
        logprobs = super()._compute(beams)
        count = self._params.beam_width * max(2, 1 + len(beams[0].stop_token_ids))  # may be chosen from
        rows = top_logprobs(logprobs, logprobs.argmax(dim=-1).tolist(), count)
        self._next |= zip(beams, rows, strict=True)
        return logprobs

    def _choose(self, candidates: list[Candidate], hypotheses: Hypotheses) -> list[Candidate]:
        for candidate in candidates[: self._params.beam_width]:
            if candidate.has_ended:
                self._ended[tuple(candidate.output)] = self._told(candidate.parent)
        return super()._choose(candidates, hypotheses)

    def _fork(self, candidate: Candidate) -> Sequence:
        child = super()._fork(candidate)
        self._so_far[child] = self._told(candidate.parent)
        return child

    def _told(self, parent: Sequence) -> list[dict[int, Logprob]]:
        """Of a beam that goes on from `parent` by a token."""
        return [*self._so_far.get(parent, []), self._next[parent]]
