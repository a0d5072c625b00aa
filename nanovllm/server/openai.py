"""OpenAI's endpoints that generate text: /v1/completions, /v1/chat/completions and /v1/responses.

A body becomes Work: requests to the engine, whose outputs come back in pieces. The response is built from the pieces,
as one object or as a stream of events.
"""

import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..engine.outputs import Logprob
from ..engine.sampling_params import RequestOutputKind, SamplingParams
from .engine_client import EngineClient
from .engine_process import Add, Delta, Piece, joined
from .errors import ApiError, as_error
from .limits import check_load, check_size, read_body
from .protocol import (
    Chat,
    ChatCompletionRequest,
    CompletionRequest,
    ParsedRequest,
    ResponsesRequest,
    StreamOptions,
    chat_choice,
    chat_chunk_choice,
    chat_logprobs,
    completion_choice,
    echoed,
    prompt_logprobs,
    usage,
)
from .served_model import Tokens
from .streaming import event_of, stream, unless_hung_up

if TYPE_CHECKING:
    from .app import ServerState

NEVER = 1 << 30  # tokens between two outputs of a response that is sent whole
DONE = b"data: [DONE]\n\n"


# From a body to the engine and back


@dataclass
class Work:
    """A body's requests to the engine, and the counts for its response."""

    body: ParsedRequest
    model: str  # the name in the response
    prompts: list[Tokens]
    params: SamplingParams
    id: str
    is_prompt_only: bool = False  # the response echoes the prompt; the engine generates a token, which is dropped
    created: int = field(default_factory=lambda: int(time.time()))
    num_generated: int = 0  # tokens
    started: set[int] = field(default_factory=set)  # choices with a piece
    prompt_logprobs: dict[int, Sequence[dict[int, Logprob] | None]] = field(default_factory=dict)  # by prompt
    num_cached: dict[str, int] = field(default_factory=dict)  # prompt tokens, by request

    @property
    def requests(self) -> list[Add]:
        """One request for each prompt."""
        ids = [self.id] if len(self.prompts) == 1 else [f"{self.id}-{i}" for i in range(len(self.prompts))]
        pairs = zip(ids, self.prompts, strict=True)
        return [Add(id, tokens.token_ids, self.params, tokens.text) for id, tokens in pairs]

    async def pieces(self, engine: EngineClient) -> AsyncGenerator[tuple[int, Piece], None]:
        """Run the requests. Yield each piece with the index of its choice: a prompt's choices are neighbors.

        Raise what engine.generate() raises.
        """
        requests = self.requests
        prompts = {request.request_id: i for i, request in enumerate(requests)}
        echoes: dict[int, Piece] = {}  # by prompt
        async with aclosing(engine.generate(requests)) as deltas:
            async for delta in deltas:
                prompt = prompts[delta.request_id]
                self.num_cached[delta.request_id] = delta.num_cached_tokens
                if delta.prompt_logprobs and "prompt_logprobs" in self.body.params:
                    self.prompt_logprobs[prompt] = delta.prompt_logprobs
                if self.body.echo and prompt not in echoes:
                    echoes[prompt] = echo_of(self.prompts[prompt], delta)
                for piece in delta.pieces:
                    if self.is_prompt_only:
                        piece = Piece(piece.sample, "", [], piece.logprobs and [], "length", None)
                    self.num_generated += len(piece.token_ids)
                    index = prompt * self.params.n + piece.sample
                    is_first = index not in self.started
                    self.started.add(index)
                    yield index, joined(echoes[prompt], piece) if self.body.echo and is_first else piece

    async def samples(self, engine: EngineClient) -> dict[int, Piece]:
        """Run the requests. Return the whole output of each choice."""
        samples: dict[int, Piece] = {}
        async with aclosing(self.pieces(engine)) as pieces:
            async for index, piece in pieces:
                samples[index] = joined(samples[index], piece) if index in samples else piece
        return dict(sorted(samples.items()))

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far."""
        num_prompt_tokens = sum(len(each.token_ids) for each in self.prompts)
        return usage(num_prompt_tokens, self.num_generated, sum(self.num_cached.values()))

    def head(self, kind: str) -> dict[str, Any]:
        """Return the fields that each object of the response begins with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def echo_of(prompt: Tokens, delta: Delta) -> Piece:
    """Return the prompt as the beginning of an output. The first delta has the prompt's log-probabilities."""
    places, text = delta.prompt_logprobs, prompt.text or ""
    logprobs = echoed(prompt.token_ids, places, text, prompt.first_text) if places else None
    return Piece(0, text, prompt.token_ids, logprobs, None, None)


async def start_work(state: "ServerState", body: ParsedRequest, id: str) -> Work:
    """Check a body and tokenize its prompts. Raise ValueError or ApiError if it cannot be served."""
    if state.is_stopping:
        raise ApiError("The server is shutting down.", 503)
    model = state.model
    model.check_name(body.model)
    arguments = body.sampling_params(model.recommended)
    is_prompt_only = body.echo and arguments.get("max_tokens") == 0
    params = SamplingParams(**arguments | ({"max_tokens": 1} if is_prompt_only else {}))
    params.output_kind = RequestOutputKind.DELTA
    params.stream_interval = None if body.stream else NEVER
    given = [body.prompts] if isinstance(body.prompts, Chat) else body.prompts
    prompts = [await model.tokens(each, body.add_special_tokens, model.max_characters) for each in given]
    if body.echo:
        params.prompt_logprobs = params.logprobs if params.prompt_logprobs is None else params.prompt_logprobs
        prompts = [model.with_text(each) for each in prompts]
    work = Work(body, model.name, prompts, params, f"{id}{uuid.uuid4().hex}", is_prompt_only)
    check_size(work.requests, state.options, model.max_model_len)
    check_load(work.requests, state.options, state.engine, state.rejections)
    return work


# /v1/completions and /v1/chat/completions


async def create_completion(request: Request) -> Response:
    """Complete one prompt or several."""
    return await create(request, CompletionRequest.parse(await read_body(request)).parsed(), "cmpl-")


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    return await create(request, ChatCompletionRequest.parse(await read_body(request)).parsed(), "chatcmpl-")


async def create(request: Request, body: ParsedRequest, id: str) -> Response:
    """Return the response, whole or as a stream."""
    state: ServerState = request.app.state.server
    work = await start_work(state, body, id)
    if body.stream:
        return await stream(events_of(state.engine, work, body.stream), error_event, request.receive)
    samples = await unless_hung_up(request.receive, work.samples(state.engine))
    chat_prompt = prompt_logprobs(work.prompt_logprobs.get(0)) if body.is_chat else {}
    choices = [choice(work, index, sample) for index, sample in samples.items()]
    head = work.head("chat.completion" if body.is_chat else "text_completion")
    return JSONResponse({**head, "choices": choices, "usage": work.usage(), **chat_prompt})


def choice(work: Work, index: int, sample: Piece) -> dict[str, Any]:
    """Return a choice of a whole response."""
    if work.body.is_chat:
        return chat_choice(sample, index, work.params.num_logprobs)
    return completion_choice(sample, index) | prompt_logprobs(work.prompt_logprobs.get(index // work.params.n))


def error_event(error: Exception) -> bytes:
    """Return the event that replaces the rest of a stream. No [DONE] follows it."""
    return event_of(as_error(error)[1])


async def events_of(engine: EngineClient, work: Work, options: StreamOptions) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream. Raise what engine.generate() raises."""
    head = work.head("chat.completion.chunk" if work.body.is_chat else "text_completion")
    offsets: dict[int, int] = {}  # of each choice's next token: its text may lag behind the tokens

    def event(choice: dict[str, Any]) -> bytes:
        chunk = {**head, "choices": [choice]}
        if options.continuous_usage_stats:
            chunk["usage"] = work.usage()
        elif options.include_usage:
            chunk["usage"] = None
        return event_of(chunk)

    async with aclosing(work.pieces(engine)) as pieces:
        async for index, piece in pieces:
            is_first, start = index not in offsets, offsets.setdefault(index, 0)
            if not work.body.is_chat:
                choice = completion_choice(piece, index, start)
                if logprobs := choice["logprobs"]:
                    offsets[index] = start + sum(map(len, logprobs["tokens"]))
                yield event(choice)
                continue
            role = {"role": "assistant", "content": ""}
            first = {"index": index, "delta": role, "logprobs": None, "finish_reason": None}
            content = event(chat_chunk_choice(piece, index, work.params.num_logprobs))
            yield event(first) + content if is_first else content
    if options.include_usage:
        yield event_of({**head, "choices": [], "usage": work.usage()})
    yield DONE


# /v1/responses


async def create_response(request: Request) -> Response:
    """Answer a conversation through OpenAI's newer Responses API. It takes text only, and nothing is stored."""
    state: ServerState = request.app.state.server
    body = ResponsesRequest.parse(await read_body(request))
    work = await start_work(state, body.parsed(), "resp_")
    builder = ResponseBuilder(work, body.repeated())
    if work.body.stream:
        return await stream(response_events(state.engine, work, builder), builder.error_event, request.receive)
    samples = await unless_hung_up(request.receive, work.samples(state.engine))
    return JSONResponse(builder.response(status_of(samples[0]), samples[0]))


async def response_events(engine: EngineClient, work: Work, builder: "ResponseBuilder") -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream. Raise what engine.generate() raises."""
    sample: Piece | None = None
    async with aclosing(work.pieces(engine)) as pieces:
        async for _, piece in pieces:
            before = builder.beginning() if sample is None else b""
            sample = piece if sample is None else joined(sample, piece)
            if event := before + builder.delta(piece):
                yield event
    assert sample is not None, "a request ends with an output"
    yield builder.ending(sample)


class ResponseBuilder:
    """A builder for the objects of one response, which has one message with one text."""

    def __init__(self, work: Work, repeated: dict[str, Any]) -> None:
        """Store the fields of the body that the response repeats."""
        self._work, self._repeated = work, repeated
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self._place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        self._numbers = itertools.count()

    def response(self, status: str, sample: Piece | None = None) -> dict[str, Any]:
        """Return the response, with its output if there is one yet."""
        work = self._work
        return {
            "id": work.id,
            "object": "response",
            "created_at": work.created,
            "status": status,
            "model": work.model,
            "output": [] if sample is None else [self._message(sample, status)],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": None if sample is None else response_usage(work.usage()),
            "temperature": work.params.temperature,
            "top_p": work.params.top_p,
            "previous_response_id": None,
            "background": False,
            "store": False,
            "truncation": "disabled",
        } | self._repeated

    def beginning(self) -> bytes:
        """Return the events before the first text."""
        message = self._message(None, "in_progress")
        events = [
            self._event("response.created", response=self.response("in_progress")),
            self._event("response.in_progress", response=self.response("in_progress")),
            self._event("response.output_item.added", output_index=0, item=message),
            self._event("response.content_part.added", **self._place, part=self._part(None)),
        ]
        return b"".join(events)

    def delta(self, piece: Piece) -> bytes:
        """Return the event for new text. It is empty while a character or a stop string may be incomplete."""
        if not piece.text and not piece.logprobs:
            return b""
        logprobs = self._part(piece)["logprobs"]
        return self._event("response.output_text.delta", **self._place, delta=piece.text, logprobs=logprobs)

    def ending(self, sample: Piece) -> bytes:
        """Return the events after the last text."""
        status, part = status_of(sample), self._part(sample)
        text = {"text": part["text"], "logprobs": part["logprobs"]}
        events = [
            self._event("response.output_text.done", **self._place, **text),
            self._event("response.content_part.done", **self._place, part=part),
            self._event("response.output_item.done", output_index=0, item=self._message(sample, status)),
            self._event(f"response.{status}", response=self.response(status, sample)),
        ]
        return b"".join(events)

    def error_event(self, error: Exception) -> bytes:
        """Return the event that replaces the rest of a stream."""
        fields = as_error(error)[1]["error"]
        return self._event("error", code=fields["type"], message=fields["message"], param=fields["param"])

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event_of({"type": kind, "sequence_number": next(self._numbers), **fields}, kind)

    def _message(self, sample: Piece | None, status: str) -> dict[str, Any]:
        content = [] if sample is None else [self._part(sample)]
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, sample: Piece | None) -> dict[str, Any]:
        logprobs: list[dict[str, Any]] = []
        if sample is not None and sample.logprobs is not None:
            logprobs = chat_logprobs(sample.token_ids, sample.logprobs, self._work.params.num_logprobs or 0)
        return {"type": "output_text", "text": sample.text if sample else "", "annotations": [], "logprobs": logprobs}


def response_usage(used: dict[str, Any]) -> dict[str, Any]:
    """Return token counts under the names of /v1/responses."""
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": used["total_tokens"],
    }


def status_of(sample: Piece) -> str:
    """Return the status of a whole response."""
    return "incomplete" if sample.finish_reason == "length" else "completed"
