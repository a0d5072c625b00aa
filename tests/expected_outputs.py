"""The output that a request must have, which is known in advance: the same as if each sample ran alone."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.plans import TEXTS, EngineOptions, Request
from tests.scripted_llm import Stage, tokens_alone


class Ending(NamedTuple):
    token_ids: list[int]
    finish_reason: str


@dataclass
class ExpectedOutput:
    """A request, and how each of its samples must end unless it is aborted, whatever runs next to it."""

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
        token_ids, reason = completion.token_ids, completion.finish_reason
        ending = self.endings[completion.index]
        message = f"sample {completion.index} of request {request_id}: {token_ids} {reason}; alone: {ending}"
        assert token_ids == ending.token_ids[: len(token_ids)], message
        if reason is None:
            assert len(token_ids) < len(ending.token_ids) or ending.finish_reason == "error", message
        elif not is_aborting or reason != "abort":
            assert (token_ids, reason) == ending or (is_aborting and self.is_refused), message


def expect(
    stage: Stage, options: EngineOptions, request: Request, last_text: list[int], arrival: int
) -> ExpectedOutput:
    """Return the output that a request must have. `last_text` begins its prompt if it follows another request."""
    prompt = [*(last_text if request.follows else TEXTS[request.text][: request.num_shared]), *request.own] or [0]
    room = min(request.max_tokens, options.max_model_len - len(prompt))
    endings = [ending_of(stage, options, request, prompt, room, index) for index in range(request.n)]
    is_refused = room < 1 or (not stage.has_engine and is_too_long(stage, options, prompt, room))
    return ExpectedOutput(arrival, prompt, endings, is_refused)


def ending_of(
    stage: Stage, options: EngineOptions, request: Request, prompt: list[int], room: int, index: int
) -> Ending:
    token_ids, reason = tokens_alone(prompt, max(room, 0), request.seed, index), "length"
    ends = [i + 1 for i, token_id in enumerate(token_ids) if token_id in request.stop_token_ids]
    if ends:
        token_ids, reason = token_ids[: ends[0]], "stop"
    limit = max(options.num_slots + 1 - len(prompt), 0)  # a longer text outgrows the pool
    is_whole = not stage.has_engine or len(token_ids) <= limit
    return Ending(token_ids, reason) if is_whole else Ending(token_ids[:limit], "error")


def is_too_long(stage: Stage, options: EngineOptions, prompt: list[int], room: int) -> bool:
    """Return True if the pool is smaller than the request's full length, which a stage without an engine promises."""
    is_longest = stage.number == 1 and options.reservation == "max_model_len"
    return (options.max_model_len if is_longest else len(prompt) + room) > options.num_slots
