"""/v1/embeddings: its request body, handler and response."""

import base64
import struct
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..requests.pooling_params import PoolingParams
from .bodies import Body, ParsedRequest, Prompts, prompts_of
from .generation import started_work
from .limits import read_as
from .streaming import unless_hung_up

EMBEDDINGS = "/v1/embeddings"


class EmbeddingRequest(Body):
    """The body of /v1/embeddings."""

    field_names: ClassVar = dict.fromkeys(("prompt", "max_tokens"), "input")
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = "right"  # vLLM's default for embeddings

    def parsed(self) -> ParsedRequest:
        """Translate the body for the engine."""
        options = {"add_special_tokens": self.add_special_tokens is not False, **self.request_fields()}
        pooling_params = PoolingParams(self.use_activation, self.dimensions)
        return ParsedRequest(prompts_of(self.input), {"max_tokens": 1}, pooling_params=pooling_params, **options)


async def create_embedding(request: Request) -> Response:
    """Return an embedding for each input."""
    body = await read_as(EmbeddingRequest, request)
    async with started_work(request, body.parsed(), "embd-") as (work, engine):
        await unless_hung_up(request.receive, work.samples(engine))
    data = [embedding_object(each, index, body.encoding_format) for index, each in sorted(work.embeddings.items())]
    return JSONResponse({**work.head("list"), "data": data, "usage": work.usage()})


def embedding_object(embedding: list[float], index: int, encoding_format: str | None) -> dict[str, Any]:
    """Return the entry for input number `index`: its embedding as numbers, or as base64 of little-endian float32.

    >>> embedding_object([1.0], 0, "base64")
    {'object': 'embedding', 'index': 0, 'embedding': 'AACAPw=='}
    """
    packed = struct.pack(f"<{len(embedding)}f", *embedding) if encoding_format == "base64" else None
    value = embedding if packed is None else base64.b64encode(packed).decode()
    return {"object": "embedding", "index": index, "embedding": value}
