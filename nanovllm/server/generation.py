"""The path of a request through the engine, which completions, chats, responses and embeddings share.

A request's body becomes a Work: requests to the engine, whose outputs come back in pieces. The response is built from
the pieces, as one object or as a stream of events.
"""

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..chat.assistant import MessageDelta
from ..chat.formats import MessageFormat
from ..log import logger
from ..requests.sampling_params import RequestOutputKind, SamplingParams
from ..requests.tokens import Logprob
from .bodies import Chat, ChunkedBody, InvalidRequest, MessageStream, ParsedRequest, StreamOptions, usage, whole_message
from .engine_client import EngineClient
from .engine_process import Add, Delta, Piece, join_pieces
from .errors import ApiError
from .limits import HttpProtocol, check_load, check_size, read_as
from .logprobs import echoed_logprobs
from .served_model import TokenizedPrompt
from .state import ServerState
from .streaming import Events, error_event, event_of, stream, to_json, unless_hung_up

NO_STREAM_INTERVAL = 1 << 30  # tokens: a stream_interval that is never reached, for responses sent as one object
DONE = b"data: [DONE]\n\n"
MARK = "\0"  # a text that occurs nowhere else in a chunk


# From a body to the engine and back


class EventBuilder(Protocol):
    """A builder of a stream's events: add() returns those of a choice's next piece, and end() the last ones."""

    def add(self, index: int, is_first: bool, piece: Piece) -> bytes: ...
    def end(self) -> bytes: ...


@dataclass
class Work:
    """The requests to the engine for one body, and the counts and state that its response needs."""

    body: ParsedRequest
    model: str  # the name of the model in the response
    prompts: list[TokenizedPrompt]
    params: SamplingParams
    id: str  # of the response
    engine_id: str  # of the request in the engine; clients may send the same request_id twice
    format: MessageFormat | None = None  # of the messages in a chat; None means plain text
    is_prompt_only: bool = False  # only echo the prompt; the one token that the engine generates is dropped
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time in seconds
    num_generated: int = 0  # tokens of all choices
    prompt_logprobs: dict[int, Sequence[dict[int, Logprob] | None]] = field(default_factory=dict)  # by prompt
    embeddings: dict[int, list[float]] = field(default_factory=dict)  # by prompt
    num_cached: dict[str, int] = field(default_factory=dict)  # cached prompt tokens, by engine request
    num_cached_tokens: int = 0  # the sum over all engine requests
    messages: dict[int, MessageStream] = field(default_factory=dict)  # of a stream, by choice
    started: set[int] = field(default_factory=set)  # choices with a piece
    echoes: dict[int, Piece] = field(default_factory=dict)  # by prompt
    offsets: dict[int, int] = field(default_factory=dict)  # where the next token begins in the text, by choice
    thought_tags: tuple[int | None, int | None] = (None, None)  # ids of the tokens that begin and end a thought
    is_thinking: dict[int, bool] = field(default_factory=dict)  # by choice
    num_reasoning: int | None = None  # tokens; None if they are not counted

    @cached_property
    def prompt_indexes(self) -> dict[str, int]:
        """The index of each request's prompt."""
        return {request.request_id: i for i, request in enumerate(self.requests)}

    @property
    def requests(self) -> list[Add]:
        """The requests to the engine, one for each prompt."""
        name, salt, pooling = self.engine_id, self.body.cache_salt, self.body.pooling_params
        ids = [name] if len(self.prompts) == 1 else [f"{name}-{i}" for i in range(len(self.prompts))]
        pairs = zip(ids, self.prompts, strict=True)
        return [Add(id, tokens.token_ids, self.params, tokens.text, pooling, salt) for id, tokens in pairs]

    def pieces(self, delta: Delta) -> Iterator[tuple[int, bool, Piece]]:
        """Count a delta. Yield its pieces, as (choice's index, whether this is the choice's first piece, piece).

        Choices of the same prompt have consecutive indexes.
        """
        i = self.prompt_indexes[delta.request_id]
        if (before := self.num_cached.get(delta.request_id, 0)) != delta.num_cached_tokens:
            self.num_cached_tokens += delta.num_cached_tokens - before
            self.num_cached[delta.request_id] = delta.num_cached_tokens
        if delta.prompt_logprobs and "prompt_logprobs" in self.body.params:
            self.prompt_logprobs[i] = delta.prompt_logprobs
        if delta.embedding is not None:
            self.embeddings[i] = delta.embedding
        if self.body.echo and i not in self.echoes:
            self.echoes[i] = echo_of(self.prompts[i], delta)
        for piece in delta.pieces:
            if self.is_prompt_only:
                piece = Piece(piece.sample, "", [], piece.logprobs and [], "length", None)
            self.num_generated += len(piece.token_ids)
            index = i * self.params.n + piece.sample
            if self.thought_tags[1] is not None:
                self._count_reasoning(index, piece.token_ids)
            is_first = index not in self.started
            self.started.add(index)
            yield index, is_first, join_pieces(self.echoes[i], piece) if self.body.echo and is_first else piece

    async def samples(self, engine: EngineClient) -> dict[int, Piece]:
        """Run the requests. Return the whole output of each choice, by index. Raise the errors of engine.generate()."""
        samples: dict[int, Piece] = {}
        async with aclosing(engine.generate(self.requests)) as deltas:
            async for delta in deltas:
                for index, is_first, piece in self.pieces(delta):
                    samples[index] = piece if is_first else join_pieces(samples[index], piece)
        return dict(sorted(samples.items()))

    async def events(self, engine: EngineClient, builder: EventBuilder, request: Request) -> Events:
        """Run the requests. Yield their events. Raise the errors of engine.generate().

        While the client reads, most events are written to its connection at once instead of being yielded: the way
        through generators, tasks and layers of middleware takes several times as long.
        """
        connection: HttpProtocol | None = getattr(request.state, "connection", None)  # None on Ray Serve

        def write(delta: Delta) -> bool:
            if connection is None or not connection.can_write():
                return False
            if events := b"".join([builder.add(*each) for each in self.pieces(delta)]):
                connection.write(events)
            return True

        async with aclosing(engine.generate(self.requests, write)) as deltas:
            async for delta in deltas:
                if events := b"".join([builder.add(*each) for each in self.pieces(delta)]):
                    yield events
        yield builder.end()

    def message_part(self, index: int, piece: Piece) -> MessageDelta | None:
        """Parse the next piece of a choice's stream. Return None for plain text, which needs no parsing."""
        if self.format is None:
            return None
        if index not in self.messages:
            self.messages[index] = MessageStream(self.format, self.body.include_reasoning)
        return self.messages[index].feed(piece)

    def message(self, sample: Piece) -> MessageDelta | None:
        """Parse a whole output. Return None for plain text, which needs no parsing."""
        return None if self.format is None else whole_message(sample, self.format, self.body.include_reasoning)

    def _count_reasoning(self, index: int, token_ids: list[int]) -> None:
        """Count a choice's new tokens that belong to a thought. The vocabulary has a token that ends thoughts."""
        start, end = self.thought_tags
        assert self.format is not None and end is not None
        if index not in self.is_thinking:
            self.is_thinking[index] = self.format.starts_in_thought or start in token_ids[:1]
        count = token_ids.index(end) if end in token_ids else len(token_ids)
        self.num_reasoning = (self.num_reasoning or 0) + (count if self.is_thinking[index] else 0)
        self.is_thinking[index] = self.is_thinking[index] and end not in token_ids

    @property
    def streams_text(self) -> bool:
        """True if the chunks of a choice differ in their text alone, apart from its first and last one."""
        return self.format is None and self.params.num_logprobs is None and not self.body.return_token_ids

    @cached_property
    def num_prompt_tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.prompts)

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far."""
        return usage(self.num_prompt_tokens, self.num_generated, self.num_cached_tokens, self.num_reasoning)

    def head(self, object_name: str) -> dict[str, Any]:
        """Return the first fields of each object in the response."""
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}


def echo_of(prompt: TokenizedPrompt, delta: Delta) -> Piece:
    """Return the prompt as the first piece of an output. `delta`, the request's first, has its log-probabilities."""
    positions, text = delta.prompt_logprobs, prompt.text or ""
    logprobs = echoed_logprobs(prompt.token_ids, positions, text, prompt.first_text) if positions else None
    return Piece(0, text, prompt.token_ids, logprobs, None, None)


async def start_work(state: ServerState, body: ParsedRequest, id_prefix: str) -> Work:
    """Check a body and tokenize its prompts. Raise ValueError or ApiError if the request cannot be served.

    The response's id begins with `id_prefix`.
    """
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
    params.stream_interval = params.stream_interval if body.stream else NO_STREAM_INTERVAL
    inputs = [body.prompts] if isinstance(body.prompts, Chat) else body.prompts
    max_characters = model.max_characters if body.truncate_prompt_tokens is None else None
    prompts = [await model.tokenize(each, body.add_special_tokens, max_characters) for each in inputs]
    format = body.message_format(model.formats, prompts[0].text or "", params)
    if (limit := body.truncate_prompt_tokens) is not None:
        room = model.max_model_len - (1 if params.max_tokens is None else params.max_tokens)
        if max(limit, 1) > room:
            message = f"Invalid 'truncate_prompt_tokens': at most {room} tokens leave room for the output, got {limit}."
            raise InvalidRequest(message, "truncate_prompt_tokens", "invalid_value")
        prompts = [each.truncated(room if limit < 0 else limit, body.truncation_side) for each in prompts]
    if body.echo:
        params.prompt_logprobs = params.logprobs if params.prompt_logprobs is None else params.prompt_logprobs
        prompts = [model.with_text(each) for each in prompts]
    id = id_prefix + (body.request_id or uuid.uuid4().hex)
    engine_id = f"{id}-{uuid.uuid4().hex[:8]}" if body.request_id else id
    work = Work(body, model.name, prompts, params, id, engine_id, format, is_prompt_only)
    if format is not None and (thought := format.reasoning_format) is not None:
        token_id = model.require_tokenizer().backend.token_to_id
        work.thought_tags = token_id(thought.start), token_id(thought.end)
    check_size(work.requests, state.options, model.max_model_len)
    check_load(work.requests, state.options, state.engine, state.rejections)
    num_tokens, limits = sum(len(each.token_ids) for each in prompts), f"n {params.n}, max_tokens {params.max_tokens}"
    logger.debug(f"request {work.engine_id}: {num_tokens} tokens in {len(prompts)} prompts, {limits}")
    return work


@asynccontextmanager
async def started_work(
    request: Request, body: ParsedRequest, id_prefix: str
) -> AsyncIterator[tuple[Work, EngineClient]]:
    """Start the Work of a body for an `async with` block. A ValueError, even from the block, names the body's field."""
    state: ServerState = request.app.state.server
    try:
        yield await start_work(state, body, id_prefix), state.engine
    except ValueError as error:
        raise body.invalid_request(error) from None


# From the engine to a completion's or a chat's response

BuildResponse = Callable[[Work, Mapping[int, Piece]], dict[str, Any]]
BuildChunks = Callable[[Work, int, bool, Piece], Iterable[dict[str, Any]]]


def endpoint(
    body_class: type[ChunkedBody], id_prefix: str, build_response: BuildResponse, build_chunks: BuildChunks
) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of an endpoint that takes bodies of `body_class`. Response ids begin with `id_prefix`.

    `build_response` builds a response that is sent as one object. `build_chunks` builds a stream's chunks for a piece.
    """

    async def create(request: Request) -> Response:
        body = (await read_as(body_class, request)).parsed()
        async with started_work(request, body, id_prefix) as (work, engine):
            if body.stream:
                events = work.events(engine, ChunkBuilder(work, build_chunks, body.stream), request)
                return await stream(events, error_event, request.receive)
            samples = await unless_hung_up(request.receive, work.samples(engine))
        return JSONResponse(build_response(work, samples))

    return create


class ChunkBuilder:
    """An EventBuilder for a stream of chunks, as `build_chunks` makes them."""

    def __init__(self, work: Work, build_chunks: BuildChunks, options: StreamOptions) -> None:
        self._work, self._build_chunks, self._options = work, build_chunks, options
        self._head = work.head("chat.completion.chunk" if work.body.is_chat else "text_completion")
        self._frames: dict[int, list[bytes]] = {}  # by choice: the bytes around the text of a chunk that has only text

    def add(self, index: int, is_first: bool, piece: Piece) -> bytes:
        """Return the events of a choice's next piece."""
        if index in self._frames and piece.finish_reason is None:
            before, after = self._frames[index]
            return before + to_json(piece.text).encode() + after
        if is_first and self._work.streams_text and not self._options.continuous_usage_stats:
            [chunk] = self._build_chunks(self._work, index, False, Piece(piece.sample, MARK, [], None, None, None))
            self._frames[index] = self._event(chunk).split(to_json(MARK).encode())
        return b"".join(map(self._event, self._build_chunks(self._work, index, is_first, piece)))

    def end(self) -> bytes:
        """Return the last events."""
        counts = {**self._head, "choices": [], "usage": self._work.usage()}
        return (event_of(counts) if self._options.include_usage else b"") + DONE

    def _event(self, fields: dict[str, Any]) -> bytes:
        has_usage = self._options.continuous_usage_stats or self._options.include_usage
        counts = self._work.usage() if self._options.continuous_usage_stats else None
        return event_of(self._head | fields | ({"usage": counts} if has_usage else {}))
