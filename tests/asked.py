"""What must come of a request: it is known beforehand, as if each of its samples were alone."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.plans import TEXTS, Ask, Knobs
from tests.scripted import Stage, said_alone


class Ending(NamedTuple):
    said: list[int]
    reason: str


@dataclass
class Asked:
    """A request, and how each of its samples ends, whatever runs beside it, unless it is aborted or struck."""

    arrival: int
    prompt: list[int]
    endings: list[Ending]
    is_refused: bool
    may_fail: frozenset[int]  # samples that end before they begin if the one that carries them fails by then

    def check_refusal(self, output: Any) -> None:
        [completion] = output.outputs
        assert self.is_refused and output.finished and output.error
        assert completion.finish_reason == "error" and not completion.token_ids

    def check(self, output: Any, is_aborting: bool, struck: set[int]) -> None:
        """`struck`: the samples that were made to fail though nothing ailed them."""
        assert output.prompt_token_ids == self.prompt and len(output.outputs) == len(self.endings)
        for index, completion in enumerate(output.outputs):
            assert completion.index == index
            self._check_sample(output.request_id, completion, is_aborting, struck)
        reasons = [completion.finish_reason for completion in output.outputs]
        assert output.finished == (None not in reasons)
        assert (output.error is not None) == ("error" in reasons)

    def _check_sample(self, request_id: str, completion: Any, is_aborting: bool, struck: set[int]) -> None:
        index, said, reason = completion.index, completion.token_ids, completion.finish_reason
        ending = self.endings[index]
        told = f"sample {index} of request {request_id}: {said} {reason}; alone: {ending}"
        assert said == ending.said[: len(said)], told
        if reason is None:
            assert len(said) < len(ending.said) or ending.reason == "error", told
        elif reason == "abort":
            assert is_aborting, told
        elif (said, reason) != ending:
            assert reason == "error" and (index in struck or (index in self.may_fail and not said)), told


def asked_for(stage: Stage, knobs: Knobs, ask: Ask, last_text: list[int], arrival: int) -> Asked:
    """`last_text`: what the request goes on from, if it follows another."""
    prompt = [*(last_text if ask.follows else TEXTS[ask.text][: ask.num_shared]), *ask.own] or [0]
    room = min(ask.max_tokens, knobs.max_model_len - len(prompt))
    endings = [ending(stage, knobs, ask, prompt, room, index) for index in range(ask.n)]
    may_fail: frozenset[int] = frozenset()
    if ask.poison and ask.poison.num_tokens <= len(prompt) and ask.poison.sample % knobs.max_num_seqs == 0:
        may_fail = frozenset(range(ask.poison.sample + 1, ask.poison.sample + knobs.max_num_seqs))
    is_refused = room < 1 or is_too_long(stage, knobs, prompt, room)
    return Asked(arrival, prompt, endings, is_refused, may_fail)


def ending(stage: Stage, knobs: Knobs, ask: Ask, prompt: list[int], room: int, index: int) -> Ending:
    said, reason = said_alone(prompt, max(room, 0), ask.seed, index), "length"
    ends = [i + 1 for i, token_id in enumerate(said) if token_id in ask.stop_token_ids]
    if ends:
        said, reason = said[: ends[0]], "stop"
    limit = knobs.num_slots + 1 - len(prompt) if stage.has_engine else len(said)  # then it has outgrown the pool
    if ask.poison and ask.poison.sample == index:
        limit = min(limit, max(ask.poison.num_tokens - len(prompt), 0))
    return Ending(said, reason) if len(said) <= limit else Ending(said[:limit], "error")


def is_too_long(stage: Stage, knobs: Knobs, prompt: list[int], room: int) -> bool:
    """Whether it is refused at once: stages without an engine promise a request all that it may come to need."""
    if stage.has_engine:
        return len(prompt) > knobs.num_slots
    is_longest = stage.number == 1 and knobs.reservation == "max_model_len"
    return (knobs.max_model_len if is_longest else len(prompt) + room) > knobs.num_slots
