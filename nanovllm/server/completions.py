"""/v1/completions: its request and response bodies."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .bodies import ChunkedBody, InvalidRequest, ParsedRequest, Prompts, Sample, ending, prompts_of
from .logprobs import completion_logprobs, prompt_logprobs

if TYPE_CHECKING:  # `nanovllm batch` imports this file without torch or the extra "serve"
    from .engine_process import Piece
    from .generation import Work

COMPLETIONS = "/v1/completions"


class CompletionRequest(ChunkedBody):
    """The body of /v1/completions."""

    prompt: Prompts
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None

    def parsed(self) -> ParsedRequest:
        """Translate the body for the engine. Raise an InvalidRequest that names the invalid field."""
        if self.best_of is not None and self.best_of > (n := self.n or 1):
            message = f"Unsupported value: 'best_of' must be at most 'n', which is {n}, got {self.best_of}."
            raise InvalidRequest(message, "best_of", "unsupported_value")
        return ParsedRequest(
            prompts=prompts_of(self.prompt),
            params=self.params(self.logprobs, self.constraint(), "response_format"),
            **self.request_fields(),
            stream=self.checked_stream_options(),
            echo=self.echo is True,
            add_special_tokens=self.add_special_tokens is not False,
        )


def completion(work: "Work", samples: "Mapping[int, Piece]") -> dict[str, Any]:
    """Return a complete, non-streaming response."""
    choices = [
        completion_choice(sample, index)
        | prompt_logprobs(work.prompt_logprobs.get(index // work.params.n))
        | token_ids(work, index, True, sample)
        for index, sample in samples.items()
    ]
    return {**work.head("text_completion"), "choices": choices, "usage": work.usage()}


def completion_chunks(work: "Work", index: int, is_first: bool, piece: "Piece") -> list[dict[str, Any]]:
    """Return the stream's chunk for a choice's next piece, in a list. A token's text may come in a later chunk."""
    start = work.offsets.get(index, 0)
    choice = completion_choice(piece, index, start) | token_ids(work, index, is_first, piece)
    if logprobs := choice["logprobs"]:
        work.offsets[index] = start + sum(map(len, logprobs["tokens"]))
    return [{"choices": [choice]}]


def token_ids(work: "Work", index: int, is_first: bool, piece: "Piece") -> dict[str, Any]:
    """Return the fields that return_token_ids adds to a choice: for its first piece, also the prompt's tokens."""
    if not work.body.return_token_ids:
        return {}
    prompt_ids, ids = work.prompts[index // work.params.n].token_ids, piece.token_ids
    ids = ids[len(prompt_ids) :] if work.body.echo and is_first else ids
    return {"token_ids": ids} | ({"prompt_token_ids": prompt_ids} if is_first else {})


def completion_choice(sample: Sample, index: int, start: int = 0) -> dict[str, Any]:
    """Return a choice of a completion. The sample begins at character `start` of the choice's text."""
    logprobs = None if sample.logprobs is None else completion_logprobs(sample.token_ids, sample.logprobs, start)
    return {"index": index, "text": sample.text, "logprobs": logprobs} | ending(sample)
