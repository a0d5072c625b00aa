"""OpenAI's endpoints that generate text: /v1/completions, /v1/chat/completions and /v1/responses.

A body becomes Work: requests to the engine, whose outputs come back in pieces. The response is built from the pieces,
as one object or as a stream of events.
"""

import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..chat.assistant import MessageDelta, ToolCallDelta
from ..chat.formats import MessageFormat
from ..log import logger
from ..requests.sampling_params import RequestOutputKind, SamplingParams
from ..requests.tokens import Logprob
from .engine_client import EngineClient
from .engine_process import Add, Delta, Piece, joined
from .errors import ApiError, as_error
from .limits import check_load, check_size, read_as
from .protocol import (
    Chat,
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    InvalidRequest,
    MessageStream,
    ParsedRequest,
    ResponsesRequest,
    StreamOptions,
    chat_choice,
    chat_chunk_choice,
    chat_logprobs,
    completion_choice,
    echoed,
    embedding_object,
    prompt_logprobs,
    usage,
    whole_message,
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
    id: str  # of the response
    engine_id: str  # of the request in the engine; clients may send the same request_id twice
    format: MessageFormat | None = None  # of a chat's messages; None: the text is the content
    is_prompt_only: bool = False  # the response echoes the prompt; the engine generates a token, which is dropped
    created: int = field(default_factory=lambda: int(time.time()))
    num_generated: int = 0  # tokens
    started: set[int] = field(default_factory=set)  # choices with a piece
    prompt_logprobs: dict[int, Sequence[dict[int, Logprob] | None]] = field(default_factory=dict)  # by prompt
    embeddings: dict[int, list[float]] = field(default_factory=dict)  # by prompt
    num_cached: dict[str, int] = field(default_factory=dict)  # prompt tokens, by request
    num_cached_tokens: int = 0  # their sum
    messages: dict[int, MessageStream] = field(default_factory=dict)  # of a stream, by choice
    thought_tags: tuple[int | None, int | None] = (None, None)  # tokens that begin and end a thought
    is_thinking: dict[int, bool] = field(default_factory=dict)  # by choice
    num_reasoning: int | None = None  # tokens; None if they are not counted

    @property
    def requests(self) -> list[Add]:
        """One request for each prompt."""
        name, salt, pooling = self.engine_id, self.body.cache_salt, self.body.pooling_params
        ids = [name] if len(self.prompts) == 1 else [f"{name}-{i}" for i in range(len(self.prompts))]
        pairs = zip(ids, self.prompts, strict=True)
        return [Add(id, tokens.token_ids, self.params, tokens.text, pooling, salt) for id, tokens in pairs]

    async def pieces(self, engine: EngineClient) -> AsyncGenerator[tuple[int, Piece], None]:
        """Run the requests. Yield each piece with the index of its choice: a prompt's choices are neighbors.

        Raise the errors of engine.generate().
        """
        requests = self.requests
        prompts = {request.request_id: i for i, request in enumerate(requests)}
        echoes: dict[int, Piece] = {}  # by prompt
        async with aclosing(engine.generate(requests)) as deltas:
            async for delta in deltas:
                prompt = prompts[delta.request_id]
                self.num_cached_tokens += delta.num_cached_tokens - self.num_cached.get(delta.request_id, 0)
                self.num_cached[delta.request_id] = delta.num_cached_tokens
                if delta.prompt_logprobs and "prompt_logprobs" in self.body.params:
                    self.prompt_logprobs[prompt] = delta.prompt_logprobs
                if delta.embedding is not None:
                    self.embeddings[prompt] = delta.embedding
                if self.body.echo and prompt not in echoes:
                    echoes[prompt] = echo_of(self.prompts[prompt], delta)
                for piece in delta.pieces:
                    if self.is_prompt_only:
                        piece = Piece(piece.sample, "", [], piece.logprobs and [], "length", None)
                    self.num_generated += len(piece.token_ids)
                    index = prompt * self.params.n + piece.sample
                    self._count_reasoning(index, piece.token_ids)
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

    def message_part(self, index: int, piece: Piece) -> MessageDelta | None:
        """Return the part of a choice's message in the next piece of a stream, or None if the text is the content."""
        if self.format is None:
            return None
        if index not in self.messages:
            self.messages[index] = MessageStream(self.format, self.body.include_reasoning)
        return self.messages[index].take(piece)

    def message(self, sample: Piece) -> MessageDelta | None:
        """Return the message of a whole output, or None if the text is the content."""
        return None if self.format is None else whole_message(sample, self.format, self.body.include_reasoning)

    def token_ids(self, index: int, piece: Piece, is_first: bool = True) -> dict[str, Any]:
        """Return a choice's fields for return_token_ids. A completion's first piece has the prompt's tokens, too."""
        if not self.body.return_token_ids:
            return {}
        prompt, own = self.prompts[index // self.params.n].token_ids, piece.token_ids
        own = own[len(prompt) :] if self.body.echo and is_first else own
        return {"token_ids": own} | ({"prompt_token_ids": prompt} if is_first and not self.body.is_chat else {})

    def prompt_token_ids(self) -> dict[str, Any]:
        """Return the field of a chat's response for return_token_ids."""
        return {"prompt_token_ids": self.prompts[0].token_ids} if self.body.return_token_ids else {}

    def _count_reasoning(self, index: int, token_ids: list[int]) -> None:
        """Count new tokens of a choice that belong to its thought, if a token ends the thought."""
        start, end = self.thought_tags
        if self.format is None or self.format.reasoning is None or end is None:
            return
        if index not in self.is_thinking:
            self.is_thinking[index] = self.format.starts_in_thought or start in token_ids[:1]
        count = token_ids.index(end) if end in token_ids else len(token_ids)
        self.num_reasoning = (self.num_reasoning or 0) + (count if self.is_thinking[index] else 0)
        self.is_thinking[index] = self.is_thinking[index] and end not in token_ids

    @cached_property
    def num_prompt_tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.prompts)

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far."""
        return usage(self.num_prompt_tokens, self.num_generated, self.num_cached_tokens, self.num_reasoning)

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
    if body.pooling_params is not None:
        params.max_tokens = 0  # the engine generates nothing
    params.output_kind = RequestOutputKind.DELTA
    params.stream_interval = params.stream_interval if body.stream else NEVER
    given = [body.prompts] if isinstance(body.prompts, Chat) else body.prompts
    limit = model.max_characters if body.truncate_prompt_tokens is None else None
    prompts = [await model.tokens(each, body.add_special_tokens, limit) for each in given]
    format = body.message_format(model.parsers, prompts[0].text or "", params)
    if (most := body.truncate_prompt_tokens) is not None:
        room = model.max_model_len - (1 if params.max_tokens is None else params.max_tokens)
        if max(most, 1) > room:
            message = f"Invalid 'truncate_prompt_tokens': at most {room} tokens leave room for the output, got {most}."
            raise InvalidRequest(message, "truncate_prompt_tokens", "invalid_value")
        prompts = [each.truncated(room if most < 0 else most, body.truncation_side) for each in prompts]
    if body.echo:
        params.prompt_logprobs = params.logprobs if params.prompt_logprobs is None else params.prompt_logprobs
        prompts = [model.with_text(each) for each in prompts]
    id += body.request_id or uuid.uuid4().hex
    engine_id = f"{id}-{uuid.uuid4().hex[:8]}" if body.request_id else id
    work = Work(body, model.name, prompts, params, id, engine_id, format, is_prompt_only)
    if format is not None and format.reasoning is not None:
        token_id = model.require_tokenizer().backend.token_to_id
        work.thought_tags = token_id(format.reasoning.start), token_id(format.reasoning.end)
    check_size(work.requests, state.options, model.max_model_len)
    check_load(work.requests, state.options, state.engine, state.rejections)
    num_tokens, limits = sum(len(each.token_ids) for each in prompts), f"n {params.n}, max_tokens {params.max_tokens}"
    logger.debug(f"request {work.engine_id}: {num_tokens} tokens in {len(prompts)} prompts, {limits}")
    return work


@contextmanager
def naming(body: ParsedRequest) -> Iterator[None]:
    """Name the body's field in the errors of a `with` block about a value."""
    try:
        yield
    except ValueError as error:
        raise body.named(error) from None


# /v1/completions and /v1/chat/completions


async def create_completion(request: Request) -> Response:
    """Complete one prompt or several."""
    return await create(request, (await read_as(CompletionRequest, request)).parsed(), "cmpl-")


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    return await create(request, (await read_as(ChatCompletionRequest, request)).parsed(), "chatcmpl-")


async def create(request: Request, body: ParsedRequest, id: str) -> Response:
    """Return the response, whole or as a stream."""
    state: ServerState = request.app.state.server
    with naming(body):
        work = await start_work(state, body, id)
        if body.stream:
            return await stream(events_of(state.engine, work, body.stream), error_event, request.receive)
        samples = await unless_hung_up(request.receive, work.samples(state.engine))
    chat_prompt = prompt_logprobs(work.prompt_logprobs.get(0)) | work.prompt_token_ids() if body.is_chat else {}
    choices = [choice(work, index, sample) for index, sample in samples.items()]
    head = work.head("chat.completion" if body.is_chat else "text_completion")
    return JSONResponse({**head, "choices": choices, "usage": work.usage(), **chat_prompt})


def choice(work: Work, index: int, sample: Piece) -> dict[str, Any]:
    """Return a choice of a whole response."""
    if work.body.is_chat:
        choice = chat_choice(sample, index, work.params.num_logprobs, work.message(sample))
    else:
        choice = completion_choice(sample, index) | prompt_logprobs(work.prompt_logprobs.get(index // work.params.n))
    return choice | work.token_ids(index, sample)


def error_event(error: Exception) -> bytes:
    """Return the event that replaces the rest of a stream. No [DONE] follows it."""
    return event_of(as_error(error)[1])


async def events_of(engine: EngineClient, work: Work, options: StreamOptions) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream. Raise the errors of engine.generate()."""
    head = work.head("chat.completion.chunk" if work.body.is_chat else "text_completion")
    offsets: dict[int, int] = {}  # of each choice's next token: its text may lag behind the tokens

    def event(choice: dict[str, Any], **fields: Any) -> bytes:
        chunk = {**head, "choices": [choice], **fields}
        if options.continuous_usage_stats:
            chunk["usage"] = work.usage()
        elif options.include_usage:
            chunk["usage"] = None
        return event_of(chunk)

    async with aclosing(work.pieces(engine)) as pieces:
        async for index, piece in pieces:
            is_first, start = index not in offsets, offsets.setdefault(index, 0)
            if not work.body.is_chat:
                choice = completion_choice(piece, index, start) | work.token_ids(index, piece, is_first)
                if logprobs := choice["logprobs"]:
                    offsets[index] = start + sum(map(len, logprobs["tokens"]))
                yield event(choice)
                continue
            role = {"role": "assistant", "content": ""}
            first = {"index": index, "delta": role, "logprobs": None, "finish_reason": None}
            part, new, ids = work.message_part(index, piece), b"", work.token_ids(index, piece)
            if part is None or part != MessageDelta() or piece.logprobs or piece.finish_reason or ids:
                has_calls = part is not None and work.messages[index].has_calls
                new = event(chat_chunk_choice(piece, index, work.params.num_logprobs, part, has_calls) | ids)
            if new := event(first, **work.prompt_token_ids()) + new if is_first else new:
                yield new
    if options.include_usage:
        yield event_of({**head, "choices": [], "usage": work.usage()})
    yield DONE


# /v1/responses


async def create_response(request: Request) -> Response:
    """Answer a conversation through OpenAI's newer Responses API. It takes text only, and nothing is stored."""
    state: ServerState = request.app.state.server
    body = await read_as(ResponsesRequest, request)
    with naming(parsed := body.parsed()):
        work = await start_work(state, parsed, "resp_")
        builder = ResponseBuilder(work, body.repeated())
        if parsed.stream:
            return await stream(response_events(state.engine, work, builder), builder.error_event, request.receive)
        samples = await unless_hung_up(request.receive, work.samples(state.engine))
    builder.take(samples[0], work.message(samples[0]))
    builder.ending(samples[0].finish_reason)
    return JSONResponse(builder.response())


async def response_events(engine: EngineClient, work: Work, builder: "ResponseBuilder") -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream. Raise the errors of engine.generate()."""
    last: Piece | None = None
    async with aclosing(work.pieces(engine)) as pieces:
        async for _, piece in pieces:
            before = builder.beginning() if last is None else b""
            last = piece
            if events := before + builder.take(piece, work.message_part(0, piece)):
                yield events
    assert last is not None, "a request ends with an output"
    yield builder.ending(last.finish_reason)


class ResponseBuilder:
    """A builder for the objects of one response. Its output is a list of items: reasoning, messages and calls."""

    def __init__(self, work: Work, repeated: dict[str, Any]) -> None:
        """Store the fields of the body that the response repeats."""
        self._work, self._repeated = work, repeated
        self._output: list[dict[str, Any]] = []  # only the last item can be in progress
        self._logprobs: list[dict[str, Any]] = []  # of tokens that come before a message
        self._status = "in_progress"
        self._numbers = itertools.count()

    def response(self) -> dict[str, Any]:
        """Return the response, with its output once it has ended."""
        work, status = self._work, self._status
        has_ended = status != "in_progress"
        return {
            "id": work.id,
            "object": "response",
            "created_at": work.created,
            "status": status,
            "model": work.model,
            "output": self._output if has_ended else [],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": response_usage(work.usage()) if has_ended else None,
            "temperature": work.params.temperature,
            "top_p": work.params.top_p,
            "previous_response_id": None,
            "background": False,
            "store": False,
            "truncation": "disabled",
        } | self._repeated

    def beginning(self) -> bytes:
        """Return the events before the first item."""
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=self.response()) for kind in kinds)

    def take(self, piece: Piece, message: MessageDelta | None) -> bytes:
        """Add a piece to the output. Return its events: none while a character or a tag may be incomplete.

        `message` has the parts of the piece, if it isn't plain text.
        """
        part = MessageDelta(content=piece.text) if message is None else message
        if piece.logprobs is not None:
            self._logprobs += chat_logprobs(piece.token_ids, piece.logprobs, self._work.params.num_logprobs or 0)
        events = self._add_text("reasoning", part.reasoning) if part.reasoning else b""
        if part.content or (message is None and self._logprobs):
            events += self._add_text("message", part.content)
        return events + b"".join(map(self._add_call, part.tool_calls))

    def ending(self, finish_reason: str | None) -> bytes:
        """Return the events after the last piece."""
        self._status = "incomplete" if finish_reason == "length" else "completed"
        events = b"" if self._output else self._open("message")
        if self._output[-1]["type"] == "message":
            self._output[-1]["content"][0]["logprobs"] += self._logprobs
        return events + self._close(self._status) + self._event(f"response.{self._status}", response=self.response())

    def error_event(self, error: Exception) -> bytes:
        """Return the event that replaces the rest of a stream."""
        fields = as_error(error)[1]["error"]
        return self._event("error", code=fields["type"], message=fields["message"], param=fields["param"])

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event_of({"type": kind, "sequence_number": next(self._numbers), **fields}, kind)

    def _add_text(self, kind: str, text: str) -> bytes:
        """Add text to the item in progress if it is of this kind, or else to a new one."""
        is_open = bool(self._output) and self._output[-1]["type"] == kind
        events = b"" if is_open else self._open(kind)
        part = self._output[-1]["content"][0]
        part["text"] += text
        new: dict[str, Any] = {"delta": text}
        if kind == "message":
            part["logprobs"] += self._logprobs
            new["logprobs"], self._logprobs = self._logprobs, []
        return events + self._event(f"response.{part['type']}.delta", **self._place(), **new)

    def _add_call(self, call: ToolCallDelta) -> bytes:
        """Add the new part of a call, which begins with its name."""
        events = b""
        if call.name is not None:
            head = {"id": f"fc_{uuid.uuid4().hex}", "call_id": call.id, "name": call.name, "arguments": ""}
            events = self._append({"type": "function_call", "status": "in_progress", **head})
        if not call.arguments:
            return events
        self._output[-1]["arguments"] += call.arguments
        place = self._place(has_parts=False)
        return events + self._event("response.function_call_arguments.delta", **place, delta=call.arguments)

    def _open(self, kind: str) -> bytes:
        """Begin a message or reasoning, with an empty text."""
        item: dict[str, Any]
        if kind == "message":
            item = {"id": f"msg_{uuid.uuid4().hex}", "role": "assistant"}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"id": f"rs_{uuid.uuid4().hex}", "summary": [], "encrypted_content": None}
            part = {"type": "reasoning_text", "text": ""}
        events = self._append({"type": kind, "status": "in_progress", **item, "content": []})
        events += self._event("response.content_part.added", **self._place(), part=part)
        self._output[-1]["content"] = [part]
        return events

    def _append(self, item: dict[str, Any]) -> bytes:
        """End the item in progress, and begin another one."""
        events = self._close("completed")
        self._output.append(item)
        return events + self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _close(self, status: str) -> bytes:
        """End the item in progress, if there is one."""
        if not self._output:
            return b""
        item, events = self._output[-1], b""
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events = self._event("response.function_call_arguments.done", **self._place(has_parts=False), **done)
        else:
            [part] = item["content"]
            text = {name: part[name] for name in ("text", "logprobs") if name in part}
            events = self._event(f"response.{part['type']}.done", **self._place(), **text)
            events += self._event("response.content_part.done", **self._place(), part=part)
        return events + self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _place(self, has_parts: bool = True) -> dict[str, Any]:
        """Return where an event's text belongs: the last item, and its only part if it has parts."""
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return place | {"content_index": 0} if has_parts else place


def response_usage(used: dict[str, Any]) -> dict[str, Any]:
    """Return token counts under the names of /v1/responses."""
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": used.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": used["total_tokens"],
    }


# /v1/embeddings


async def create_embedding(request: Request) -> Response:
    """Return the embeddings of one input or several."""
    state: ServerState = request.app.state.server
    body = await read_as(EmbeddingRequest, request)
    with naming(parsed := body.parsed()):
        work = await start_work(state, parsed, "embd-")
        await unless_hung_up(request.receive, work.samples(state.engine))
    data = [embedding_object(each, index, body.encoding_format) for index, each in sorted(work.embeddings.items())]
    return JSONResponse({**work.head("list"), "data": data, "usage": work.usage()})
