"""Replicas of the server on Ray Serve: `serve run nanovllm.cluster.ray_serve:app model=FOLDER min_replicas=2`.

    client -- HTTP --> Ingress: parses the body -- handle --> ReplicaRouter: picks by prefix --> Replica: engine, API

A replica holds the whole application of ../server, so its API is the same. Requests and responses pass through Ray as
ASGI messages. Ray starts replicas as the queues grow, checks their health, replaces replicas that die, and lets
replicas finish their requests before it stops them.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from ..async_llm import EngineDeadError
from ..checkpoints.chat_template import read_template
from ..engine.prefix_cache import BlockHash, extend_block_hashes
from ..llm_engine import LLMEngine
from ..options.config import EngineConfig
from ..options.engine_args import EngineArgs
from ..server.app import make_apps
from ..server.engine_client import EngineClient, start_engine
from ..server.errors import ApiError, error_response
from ..server.options import ServerOptions
from ..server.run import GRACE_SECONDS, make_state
from ..server.streaming import error_event
from .routing import PrefixRouter

CHUNK_BYTES = 64  # of a prompt per hash: about the text in a block of 16 tokens
MAX_PREFIX_BYTES = 1 << 15  # of a prompt that are hashed; the rest doesn't affect the choice of a replica
PROMPT_FIELDS = ("cache_salt", "tools", "instructions", "prompt", "messages", "input")  # in the order of the prompt
MAX_ONGOING_REQUESTS = 10_000  # per replica, practically no limit: the engine has its own queue and limits


def prefix_of(body: bytes | bytearray) -> list[BlockHash]:
    """Return a hash for each chunk of the prompt in the body of an OpenAI request, or [] if it has no prompt.

    >>> first, second = (prefix_of(json.dumps({"prompt": "once " * 50 + end}).encode()) for end in ("upon", "more"))
    >>> first[:3] == second[:3], first[3] == second[3]
    (True, False)
    """
    try:
        fields = json.loads(body)
        text = "".join(json.dumps(fields[name]) for name in PROMPT_FIELDS if fields.get(name) is not None)
    except (ValueError, AttributeError, RecursionError):
        return []
    hashes: list[BlockHash] = []
    extend_block_hashes(hashes, [*text.encode()[:MAX_PREFIX_BYTES]], CHUNK_BYTES)
    return hashes


@dataclass(frozen=True)
class ForwardedRequest:
    """A request on its way to a replica."""

    scope: dict[str, Any]  # the ASGI scope
    body: bytes
    prefix: list[BlockHash]  # from prefix_of()

    @classmethod
    async def of(cls, request: Request, max_body_bytes: int) -> "ForwardedRequest":
        """Read the body, and copy the needed parts of the scope. Raise ApiError if the body is too large."""
        keys = ["type", "method", "path", "raw_path", "query_string", "headers", "client", "server", "scheme"]
        keys += ["root_path", "http_version"]
        scope = {key: request.scope[key] for key in keys if key in request.scope}
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_body_bytes:
                reason = f"the body has at least {len(body):,} bytes, and at most {max_body_bytes:,} are allowed"
                raise ApiError(reason, 413)
        return cls(scope, bytes(body), prefix_of(body))


class Replica:
    """An engine in its own process, and the application in front of it."""

    async def __init__(self, args: EngineArgs, options: ServerOptions) -> None:  # type: ignore[misc]  # Serve awaits it
        """Start the engine, and wait until it is ready. Raise ValueError for an invalid option or checkpoint."""
        self._engine = EngineClient(*start_engine(args, LLMEngine.from_engine_args))
        template = read_template(options.chat_template)
        self._name = serve.get_replica_context().replica_id.unique_id.encode()
        self._state = await make_state(str(args.model), args, options, template, self._engine)
        self._app, *_ = make_apps(self._state)

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine has ended or is stuck, so that Ray Serve replaces the replica."""
        if self._engine.error is not None:
            raise self._engine.error
        if self._state.is_stuck:
            raise EngineDeadError("the engine is stuck")

    async def __call__(self, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        """Yield the ASGI messages of the response, several at a time if they come faster than Ray moves them.

        The header x-replica names the replica. If the client hangs up, the generator closes and the request is aborted.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        bodies: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> Message:
            # After the body, wait forever: if the client hangs up, the task is canceled.
            return bodies.pop() if bodies else await asyncio.Future()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-replica", self._name)]
            messages.put_nowait(message)

        task = asyncio.ensure_future(self._app(request.scope, receive, send))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            is_running = True
            while is_running:
                batch = [await messages.get()]
                while not messages.empty():
                    batch.append(messages.get_nowait())
                is_running = batch[-1] is not None
                yield [message for message in batch if message is not None]
        finally:
            task.cancel()


class ReplicaRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """A Ray request router that chooses replicas with a PrefixRouter."""

    def initialize_state(self, **options: Any) -> None:
        """Create the PrefixRouter with `options`."""
        self._prefixes: PrefixRouter[ReplicaID] = PrefixRouter(**options)
        self._unfinished: dict[ReplicaID, set[str]] = {}  # by replica, the ids of its requests

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica first, and then the others, in case the chosen one is full."""
        if not candidate_replicas:
            return []
        loads = {each.replica_id: len(self._unfinished.get(each.replica_id, ())) for each in candidate_replicas}
        [request] = pending_request.args if pending_request is not None else [None]
        chosen = self._prefixes.choose(request.prefix if request is not None else [], loads)
        first = [each for each in candidate_replicas if each.replica_id == chosen]
        others = [each for each in candidate_replicas if each.replica_id != chosen]
        return [first, others] if others else [first]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """Count a request that a replica has accepted."""
        self._unfinished.setdefault(replica_id, set()).add(pending_request.metadata.internal_request_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Forget a request that has ended."""
        self._unfinished.get(replica_id, set()).discard(internal_request_id)


class Ingress:
    """The HTTP server, which forwards each request to a replica, and the response to the client."""

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        """Store the handle of the replicas, and the size limit of a body."""
        self._replicas, self._max_body_bytes = replicas.options(stream=True), max_body_bytes

    async def __call__(self, request: Request) -> Response:
        """Return the replica's response, status 413 for a body that is too large, or 503 if the replica dies first."""
        try:
            messages = self._forward(await ForwardedRequest.of(request, self._max_body_bytes))
            start = await anext(messages)
        except ApiError as error:
            return await error_response(request, error)
        except (RayError, RayServeException):
            return await error_response(request, ApiError("The replica has ended.", 503))
        headers = [(name, value) for name, value in start["headers"] if name != b"x-request-id"]  # Serve adds it again
        is_stream = dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")
        response = StreamingResponse(body_of(messages, is_stream), start["status"])
        response.raw_headers = headers
        return response

    async def _forward(self, request: ForwardedRequest) -> AsyncGenerator[Message, None]:
        response = self._replicas.remote(request)
        try:
            async for batch in response:
                for message in batch:
                    yield message
        finally:
            response.cancel()


async def body_of(messages: AsyncGenerator[Message, None], is_stream: bool) -> AsyncGenerator[bytes, None]:
    """Yield the parts of a response body. If the replica dies, a stream of events ends in an error, without [DONE]."""
    async with aclosing(messages):
        try:
            async for message in messages:
                yield message.get("body", b"")
        except RayError:
            if not is_stream:
                raise
            yield error_event(ApiError("The replica has ended.", 503))


def as_object(value: Any) -> Any:
    """Return the value, parsed if it is a string, as from `serve run`. A configuration file has objects already."""
    return json.loads(value) if isinstance(value, str) else value


Options = Annotated[dict[str, Any], BeforeValidator(as_object)]


class Arguments(BaseModel):
    """The arguments of `serve run nanovllm.cluster.ray_serve:app`, as NAME=VALUE or in Serve's configuration file."""

    model_config = ConfigDict(extra="forbid")

    model: str  # folder, or a name on the hub
    min_replicas: int = 1
    max_replicas: int | None = None  # default: min_replicas, so that the number of replicas is fixed
    target_ongoing_requests: float = EngineConfig.max_num_seqs  # per replica; with more, Ray starts another replica
    autoscaling: Options = {}  # further options of Serve's autoscaling_config
    num_cpus: float = 1  # cores per replica
    num_gpus: float = 0
    engine: Options = {}  # options of EngineArgs: engine='{"max_model_len": 1024}'
    server: Options = {}  # options of ServerOptions: server='{"chat_template": "plain"}'
    router: Options = {}  # options of PrefixRouter


def app(arguments: Arguments) -> Any:
    """Return the application for Ray Serve. Raise ValueError for an invalid option, before any replica starts."""
    args = EngineArgs(model=arguments.model, **arguments.engine)
    defaults: Options = {"host": "0.0.0.0"}  # Ray Serve chooses the address, so this one has no effect
    options = ServerOptions(**defaults | arguments.server)
    args.engine_config()
    PrefixRouter(**arguments.router)
    scaling: Mapping[str, Any] = {
        "min_replicas": arguments.min_replicas,
        "max_replicas": arguments.max_replicas or arguments.min_replicas,
        "target_ongoing_requests": arguments.target_ongoing_requests,
        **arguments.autoscaling,
    }
    replicas = serve.deployment(
        Replica,
        autoscaling_config=scaling,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        health_check_period_s=2,
        graceful_shutdown_wait_loop_s=1,
        graceful_shutdown_timeout_s=options.shutdown_timeout + GRACE_SECONDS,
        ray_actor_options={"num_cpus": arguments.num_cpus, "num_gpus": arguments.num_gpus},
        request_router_config={
            "request_router_class": "nanovllm.cluster.ray_serve:ReplicaRouter",
            "request_router_kwargs": arguments.router,
        },
    )
    ingress = serve.deployment(Ingress, max_ongoing_requests=MAX_ONGOING_REQUESTS, ray_actor_options={"num_cpus": 0})
    return ingress.bind(replicas.bind(args, options), options.max_body_bytes)
