"""The answer to a request: it is known beforehand, as if each of its samples were alone."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.plans import TEXTS, Ask, Knobs
from tests.scripted_llm import Stage, said_alone


class Ending(NamedTuple):
    said: list[int]
    reason: str


@dataclass
class Asked:
    """A request, and how each of its samples ends, whatever runs beside it, unless it is aborted."""

    arrival: int
    prompt: list[int]
    endings: list[Ending]
    is_refused: bool

    def check_refusal(self, output: Any) -> None:
        [completion] = output.outputs
        assert self.is_refused and output.finished and output.error
        assert completion.finish_reason == "error" and not completion.token_ids

    def check(self, output: Any, is_aborting: bool) -> None:
        if self.is_refused and not is_aborting:
            self.check_refusal(output)
            return
        assert output.prompt_token_ids == self.prompt
        assert len(output.outputs) == (1 if self.is_refused else len(self.endings))
        for index, completion in enumerate(output.outputs):
            assert completion.index == index
            self._check_sample(output.request_id, completion, is_aborting)
        reasons = [completion.finish_reason for completion in output.outputs]
        assert output.finished == (None not in reasons)
        assert (output.error is not None) == ("error" in reasons)

    def _check_sample(self, request_id: str, completion: Any, is_aborting: bool) -> None:
        said, reason = completion.token_ids, completion.finish_reason
        ending = self.endings[completion.index]
        shown = f"sample {completion.index} of request {request_id}: {said} {reason}; alone: {ending}"
        assert said == ending.said[: len(said)], shown
        if reason is None:
            assert len(said) < len(ending.said) or ending.reason == "error", shown
        elif not is_aborting or reason != "abort":
            assert (said, reason) == ending or (is_aborting and self.is_refused), shown


def asked_for(stage: Stage, knobs: Knobs, ask: Ask, last_text: list[int], arrival: int) -> Asked:
    """Return what must come of a request. `last_text`: the beginning of its prompt, if it follows another."""
    prompt = [*(last_text if ask.follows else TEXTS[ask.text][: ask.num_shared]), *ask.own] or [0]
    room = min(ask.max_tokens, knobs.max_model_len - len(prompt))
    endings = [ending(stage, knobs, ask, prompt, room, index) for index in range(ask.n)]
    is_refused = room < 1 or (not stage.has_engine and is_too_long(stage, knobs, prompt, room))
    return Asked(arrival, prompt, endings, is_refused)


def ending(stage: Stage, knobs: Knobs, ask: Ask, prompt: list[int], room: int, index: int) -> Ending:
    said, reason = said_alone(prompt, max(room, 0), ask.seed, index), "length"
    ends = [i + 1 for i, token_id in enumerate(said) if token_id in ask.stop_token_ids]
    if ends:
        said, reason = said[: ends[0]], "stop"
    limit = max(knobs.num_slots + 1 - len(prompt), 0)  # then it has outgrown the pool
    is_whole = not stage.has_engine or len(said) <= limit
    return Ending(said, reason) if is_whole else Ending(said[:limit], "error")


def is_too_long(stage: Stage, knobs: Knobs, prompt: list[int], room: int) -> bool:
    """Return True if the pool is too small for the promise of a stage without an engine: all that may come."""
    is_longest = stage.number == 1 and knobs.reservation == "max_model_len"
    return (knobs.max_model_len if is_longest else len(prompt) + room) > knobs.num_slots
