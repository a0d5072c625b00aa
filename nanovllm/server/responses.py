"""/v1/responses: its request body (a chat in another format), its handler, and its response as items and events."""

import itertools
import uuid
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..chat.assistant import MessageDelta, ToolCallDelta
from .bodies import Chat, Object, ParsedRequest, ResponseFormat, SamplingBody, StreamOptions, shortened
from .chat import Effort, Message, constraint_of, template_options, tool_use
from .engine_process import Piece
from .errors import as_error
from .generation import Work, started_work
from .limits import read_as
from .logprobs import chat_logprobs
from .streaming import event_of, stream, unless_hung_up

RESPONSES = "/v1/responses"
REPEATED_FIELDS: dict[str, Any] = {  # fields of the request that the response repeats, with their defaults
    **dict.fromkeys(("instructions", "max_output_tokens", "reasoning", "user")),
    **{"metadata": {}, "tools": [], "text": {"format": {"type": "text"}}, "tool_choice": "auto"},
    **{"parallel_tool_calls": True, "top_logprobs": 0},
}


# The request


def message_of(item: Any) -> Any:
    """Convert an input item (a message, reasoning, a tool call or a tool's output) to a chat message.

    Raise ValueError for an item of another type. Return anything else unchanged, for pydantic to check.
    """
    match item:
        case {"type": "function_call", "name": str(name), "arguments": str(arguments)}:
            function = {"name": name, "arguments": arguments}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case {"type": "function_call_output", "output": output}:
            return {"role": "tool", "content": output, "tool_call_id": item.get("call_id")}
        case {"type": "reasoning", "summary": [*summary]}:
            content = item.get("content")
            parts = content if content and isinstance(content, list) else summary
            texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
            return {"role": "assistant", "reasoning": "\n".join(texts)}
        case {"type": kind} if kind != "message":
            choices = "a message, reasoning, function_call or function_call_output"
            raise ValueError(f"Input should be {choices}, got {shortened(item)}")
        case {"role": role, "content": content}:
            return {"role": role, "content": content}
    return item


def merge_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge consecutive items of the assistant (reasoning, text, tool calls) into one chat message.

    >>> merge_messages([{"role": "assistant", "reasoning": "Hm"}, {"role": "assistant", "content": "Hi"}])
    [{'role': 'assistant', 'reasoning': 'Hm', 'content': 'Hi'}]
    """
    result: list[dict[str, Any]] = []
    for message in messages:
        last = result[-1] if result else {}
        follows = bool(message.get("tool_calls")) or ("content" in message and last.keys() == {"role", "reasoning"})
        if follows and last.get("role") == message["role"] == "assistant":
            calls = last.get("tool_calls") or message.get("tool_calls")
            if calls is not message.get("tool_calls"):
                calls += message["tool_calls"]  # in place: a conversation may have thousands of calls
            result[-1] = {**last, **message, **({"tool_calls": calls} if calls else {})}
        elif message.get("reasoning") != "":  # reasoning without text comes from a model that hides it
            result.append(message)
    return result


class ResponseTool(Object):
    """A tool. Unlike in a chat, the fields of its function are at the top level."""

    type: Literal["function"]
    name: str
    parameters: dict[str, Any] | None = None


class Text(Object):
    """The request's `text` field: the format of the response's text."""

    format: ResponseFormat | None = None


class Reasoning(Object):
    """The request's `reasoning` field."""

    effort: Effort | None = None


Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
Items = Annotated[list[Annotated[Message, BeforeValidator(message_of)]], Field(fail_fast=True, max_length=1 << 13)]


class ResponsesRequest(SamplingBody):
    """The body of /v1/responses. The server stores nothing, so each request carries the whole conversation."""

    field_names: ClassVar = {"prompt": "input", "logprobs": "top_logprobs", "max_tokens": "max_output_tokens"}
    input: str | Annotated[Items, Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: Text | None = None
    top_logprobs: int | None = None
    include: Annotated[list[Include], Field(fail_fast=True)] | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True, max_length=1 << 10)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=1 << 10)] | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None  # the limit is OpenAI's
    user: str | None = None

    def parsed(self) -> ParsedRequest:
        """Translate the body to a chat for the engine. Raise an InvalidRequest that names the invalid field."""
        wants_logprobs = self.top_logprobs or "message.output_text.logprobs" in (self.include or ())
        text_constraint = self.text.format.constraint() if self.text and self.text.format else {}
        tools = tool_use(self.functions(), self.tool_choice, self.parallel_tool_calls)
        constraint = constraint_of(tools, text_constraint, "text.format")
        params = self.params(self.top_logprobs or 0 if wants_logprobs else None, *constraint)
        if self.max_output_tokens is not None:
            params["max_tokens"] = self.max_output_tokens
        return ParsedRequest(
            prompts=self.chat(),
            params=params,
            **self.request_fields(),
            stream=StreamOptions() if self.stream else None,
            add_special_tokens=False,
            tool_use=tools,
            include_reasoning=self.include_reasoning is not False,
        )

    def functions(self) -> list[dict[str, Any]]:
        """Return the functions of the request's tools."""
        tools = self.model_dump(include={"tools"}, exclude_unset=True).get("tools") or ()
        return [{name: tool[name] for name in tool if name != "type"} for tool in tools]

    def chat(self) -> Chat:
        """Return the input as a conversation."""
        messages = self.model_dump(include={"input"}, exclude_unset=True)["input"]
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if self.instructions is not None:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        tools = [{"type": "function", "function": function} for function in self.functions()]
        effort = self.reasoning.effort if self.reasoning else None
        return Chat(merge_messages(messages), template_options(self.chat_template_kwargs, tools, effort))

    def repeated(self) -> dict[str, Any]:
        """Return the fields that the response repeats."""
        sent = self.model_dump(include=set(REPEATED_FIELDS), exclude_unset=True, by_alias=True)
        return REPEATED_FIELDS | {name: value for name, value in sent.items() if value is not None}


# The handler


async def create_response(request: Request) -> Response:
    """Answer a conversation in OpenAI's newer Responses API. Only text is supported, and nothing is stored."""
    body = await read_as(ResponsesRequest, request)
    async with started_work(request, body.parsed(), "resp_") as (work, engine):
        builder = ResponseBuilder(work, body.repeated())
        if work.body.stream:
            return await stream(work.events(engine, builder, request), builder.error_event, request.receive)
        samples = await unless_hung_up(request.receive, work.samples(engine))
    builder.add_piece(samples[0], work.message(samples[0]))
    builder.end()
    return JSONResponse(builder.response())


# The response


class ResponseBuilder:
    """An EventBuilder for one response. Its output is a list of items: reasoning, messages and tool calls."""

    def __init__(self, work: Work, repeated: dict[str, Any]) -> None:
        """Create an empty response. It repeats some fields of the request: `repeated`."""
        self._work, self._repeated = work, repeated
        self._output: list[dict[str, Any]] = []  # only the last item can be in progress
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose message has not begun yet
        self._status = "in_progress"
        self._sequence_numbers = itertools.count()

    def response(self) -> dict[str, Any]:
        """Return the response object. It includes the output only once the response has ended."""
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

    def add(self, index: int, is_first: bool, piece: Piece) -> bytes:
        """Return the events of the next piece. Those of the first piece begin with two that open the response."""
        kinds = ("response.created", "response.in_progress") if is_first else ()
        opening = b"".join([self._event(kind, response=self.response()) for kind in kinds])
        return opening + self.add_piece(piece, self._work.message_part(index, piece))

    def add_piece(self, piece: Piece, message: MessageDelta | None) -> bytes:
        """Add a piece to the output. Return its events, or b"" as long as a character or a tag may be incomplete.

        `message` is the parsed piece, or None if the piece is plain text.
        """
        if piece.finish_reason is not None:
            self._status = "incomplete" if piece.finish_reason == "length" else "completed"
        part = MessageDelta(content=piece.text) if message is None else message
        if piece.logprobs is not None:
            self._logprobs += chat_logprobs(piece.token_ids, piece.logprobs, self._work.params.num_logprobs or 0)
        events = self._add_text("reasoning", part.reasoning) if part.reasoning else b""
        if part.content or (message is None and self._logprobs):
            events += self._add_text("message", part.content)
        return events + b"".join(map(self._add_call, part.tool_calls))

    def end(self) -> bytes:
        """End the response, and return the events that come after the last piece."""
        events = b"" if self._output else self._open("message")
        if self._output[-1]["type"] == "message":
            self._output[-1]["content"][0]["logprobs"] += self._logprobs
        return events + self._close(self._status) + self._event(f"response.{self._status}", response=self.response())

    def error_event(self, error: Exception) -> bytes:
        """Return the event of an error, which ends the stream."""
        fields = as_error(error)[1]["error"]
        return self._event("error", code=fields["type"], message=fields["message"], param=fields["param"])

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event_of({"type": kind, "sequence_number": next(self._sequence_numbers), **fields}, kind)

    def _add_text(self, kind: str, text: str) -> bytes:
        """Add text to the item in progress if it is of this kind, or else to a new item. Return the events."""
        is_open = bool(self._output) and self._output[-1]["type"] == kind
        events = b"" if is_open else self._open(kind)
        part = self._output[-1]["content"][0]
        part["text"] += text
        fields: dict[str, Any] = {"delta": text}
        if kind == "message":
            part["logprobs"] += self._logprobs
            fields["logprobs"], self._logprobs = self._logprobs, []
        return events + self._event(f"response.{part['type']}.delta", **self._place(), **fields)

    def _add_call(self, call: ToolCallDelta) -> bytes:
        """Add the new part of a tool call, and return the events. The first part has the name, and creates the item."""
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
        """Begin a message or reasoning item with empty text, and return the events."""
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
        """End the item in progress, begin another one, and return the events."""
        events = self._close("completed")
        self._output.append(item)
        return events + self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _close(self, status: str) -> bytes:
        """End the item in progress, if there is one, and return the events."""
        if not self._output:
            return b""
        item, events = self._output[-1], b""
        item["status"] = status
        if item["type"] == "function_call":
            call = {"name": item["name"], "arguments": item["arguments"]}
            events = self._event("response.function_call_arguments.done", **self._place(has_parts=False), **call)
        else:
            [part] = item["content"]
            text = {name: part[name] for name in ("text", "logprobs") if name in part}
            events = self._event(f"response.{part['type']}.done", **self._place(), **text)
            events += self._event("response.content_part.done", **self._place(), part=part)
        return events + self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _place(self, has_parts: bool = True) -> dict[str, Any]:
        """Return the fields that locate an event's text: the last item and, if it has parts, its only part."""
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return place | {"content_index": 0} if has_parts else place


def response_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return a chat's token counts under the names that /v1/responses has for them."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": usage["total_tokens"],
    }
