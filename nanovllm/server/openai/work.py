"""Work: what a body asks of the engine, and what has come of it."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...engine.outputs import Logprob
from ...engine.sampling_params import RequestOutputKind, SamplingParams
from ..messages import Add, Delta, Piece
from ..request_stream import joined
from .bodies import Body
from .chats import Chat
from .choices import usage
from .logprobs import echoed
from .served import Tokens

if TYPE_CHECKING:
    from ..app import State

WHOLE = 1 << 30  # tokens between two outputs of an answer that nobody reads before it is whole


@dataclass
class Work:
    body: Body
    model: str  # the name that the answer tells
    prompts: list[Tokens]
    params: SamplingParams
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    num_made: int = 0  # tokens
    begun: set[int] = field(default_factory=set)  # choices
    prompt_logprobs: dict[int, Sequence[dict[int, Logprob] | None]] = field(
        default_factory=dict
    )  # by prompt, if they are to be told
    num_cached: dict[str, int] = field(default_factory=dict)  # tokens of each request's prompt

    @property
    def requests(self) -> list[Add]:
        """One for each prompt."""
        names = [self.id] if len(self.prompts) == 1 else [f"{self.id}-{i}" for i in range(len(self.prompts))]
        pairs = zip(names, self.prompts, strict=True)
        return [Add(name, tokens.token_ids, self.params, tokens.text) for name, tokens in pairs]

    async def pieces(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[tuple[int, Piece], None]:
        """What is new, with the index of its choice: those of a prompt stand together."""
        places = {request.request_id: place for place, request in enumerate(self.requests)}
        echoes: dict[int, Piece] = {}  # by prompt
        async for delta in deltas:
            self.num_cached[delta.request_id] = delta.num_cached_tokens
            place = places[delta.request_id]
            if delta.prompt_logprobs and "prompt_logprobs" in self.body.params:
                self.prompt_logprobs[place] = delta.prompt_logprobs
            if self.body.echo and place not in echoes:
                echoes[place] = echo_of(self.prompts[place], delta)
            for piece in delta.pieces:
                piece = without_output(piece) if self.is_prompt_alone else piece
                self.num_made += len(piece.token_ids)
                index = place * self.params.n + piece.sample
                is_first = index not in self.begun
                self.begun.add(index)
                yield index, joined(echoes[place], piece) if self.body.echo and is_first else piece

    @property
    def is_prompt_alone(self) -> bool:
        """The answer is what is told of the prompt. The engine makes a token all the same."""
        return self.body.echo and self.body.params.get("max_tokens") == 0

    def usage(self) -> dict[str, Any]:
        """So far."""
        return usage(sum(len(each.token_ids) for each in self.prompts), self.num_made, sum(self.num_cached.values()))

    def head(self, kind: str) -> dict[str, Any]:
        """What each object of the answer begins with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def echo_of(prompt: Tokens, delta: Delta) -> Piece:
    """The prompt as the beginning of an output. Its request's first delta has what is told of its tokens."""
    places, text = delta.prompt_logprobs, prompt.text or ""
    told = places and echoed(prompt.token_ids, places, text, prompt.first_text)
    return Piece(0, text, prompt.token_ids, told, None, None)


def without_output(piece: Piece) -> Piece:
    return Piece(piece.sample, "", [], piece.logprobs and [], "length", None)


async def work_of(state: "State", body: Body) -> Work:
    """Raises ValueError for parameters or a prompt that cannot be, and NotServed for another model."""
    state.model.check_name(body.model)
    is_prompt_alone = body.echo and body.params.get("max_tokens") == 0
    params = SamplingParams(**body.params | ({"max_tokens": 1} if is_prompt_alone else {}))
    params.output_kind = RequestOutputKind.DELTA
    params.stream_interval = None if body.stream else WHOLE
    given = [body.prompts] if isinstance(body.prompts, Chat) else body.prompts
    most = state.model.most_characters
    prompts = [await state.model.tokens(each, body.add_special_tokens, most) for each in given]
    if body.echo:
        params.prompt_logprobs = params.logprobs if params.prompt_logprobs is None else params.prompt_logprobs
        prompts = [state.model.with_text(each) for each in prompts]
    return Work(body, state.model.name, prompts, params, new_id("chatcmpl" if body.is_chat else "cmpl"))


def new_id(kind: str, between: str = "-") -> str:
    return f"{kind}{between}{uuid.uuid4().hex}"
