"""/v1/chat/completions: its request and response bodies. /v1/responses and /tokenize reuse parts of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from ..chat.assistant import MessageDelta, ToolCallDelta
from ..chat.forced_calls import forced_call
from .bodies import Body, Chat, ChunkedBody, InvalidRequest, Object, ParsedRequest, Sample, ToolUse, ending, shortened
from .logprobs import chat_logprobs, prompt_logprobs

if TYPE_CHECKING:  # `nanovllm batch` imports this file without torch or the extra "serve"
    from .engine_process import Piece
    from .generation import Work

CHAT = "/v1/chat/completions"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
RESERVED_OPTIONS = {  # arguments of render_chat that are not template variables
    *("messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
}


# The request

Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class Part(Object):
    """A part of a message's content. All these types are text."""

    type: Literal["text", "input_text", "output_text", "refusal", "thinking"]


class Message(Object):
    """A message of a chat."""

    role: str
    content: Annotated[str | list[Part] | None, Field(validate_default=True)] = None
    tool_calls: Objects | None = None

    @field_validator("content")
    @classmethod
    def check_content(cls, content: Any, message: ValidationInfo) -> Any:
        """Raise ValueError if the content is missing. Only an assistant's message may omit it."""
        if content is None and message.data.get("role") != "assistant":
            raise ValueError("Input should be a string or a list of parts, got null")
        return content


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=1 << 13)]


class Function(Object):
    """A function that a model may call."""

    name: str
    parameters: dict[str, Any] | None = None  # a JSON schema


class Tool(Object):
    """A tool of a chat."""

    type: Literal["function"]
    function: Function


class ChatBody(Body):
    """A conversation, and options for the chat template."""

    field_names: ClassVar = {"prompt": "messages", "logprobs": "top_logprobs"}
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=1 << 10)] | None = None
    documents: Annotated[Objects, Field(max_length=1 << 13)] | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=1 << 10)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def chat(self) -> Chat:
        """Return the conversation. Raise an InvalidRequest that names the invalid field."""
        fields = self.model_dump(include={"messages", "tools"}, exclude_unset=True)
        options = template_options(self.chat_template_kwargs, fields.get("tools"), self.reasoning_effort)
        if self.documents:
            options["documents"] = self.documents
        if self.continue_final_message:
            options["continue_final_message"] = True
        goes_on = self.continue_final_message if self.add_generation_prompt is None else not self.add_generation_prompt
        if goes_on:  # with the last message, instead of starting a new one
            options["add_generation_prompt"] = False
        return Chat(fields["messages"], options)


class ChatCompletionRequest(ChunkedBody, ChatBody):
    """The body of /v1/chat/completions."""

    messages: Messages
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def parsed(self) -> ParsedRequest:
        """Translate the body for the engine. Raise an InvalidRequest that names the invalid field."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("'top_logprobs' requires 'logprobs' to be true.", "top_logprobs")
        functions = [tool.function.model_dump() for tool in self.tools or ()]
        tools = tool_use(functions, self.tool_choice, self.parallel_tool_calls)
        constraint = constraint_of(tools, self.constraint(), "response_format")
        params = self.params(self.top_logprobs or 0 if self.logprobs else None, *constraint)
        request_fields = self.request_fields()
        if self.max_completion_tokens is not None:
            params["max_tokens"] = self.max_completion_tokens
            request_fields["field_names"] = {**self.field_names, "max_tokens": "max_completion_tokens"}
        return ParsedRequest(
            prompts=self.chat(),
            params=params,
            **request_fields,
            stream=self.checked_stream_options(),
            add_special_tokens=self.add_special_tokens is True,
            tool_use=tools,
            include_reasoning=self.include_reasoning is not False,
        )


def template_options(
    kwargs: dict[str, Any] | None, tools: list[dict[str, Any]] | None, effort: str | None
) -> dict[str, Any]:
    """Return options for render_chat. `kwargs` is the body's chat_template_kwargs, and `effort` the reasoning effort.

    Raise InvalidRequest if `kwargs` sets a reserved option.
    """
    options = dict(kwargs or {})
    for name in RESERVED_OPTIONS & options.keys():
        raise InvalidRequest(f"'chat_template_kwargs' must not set '{name}'.", "chat_template_kwargs")
    if tools:
        options["tools"] = tools
    if effort is not None:
        options["reasoning_effort"] = effort
        options.setdefault("enable_thinking", effort != "none")
    return options


def tool_use(
    functions: Sequence[Mapping[str, Any]], choice: str | dict[str, Any] | None, parallel_tool_calls: bool | None
) -> ToolUse:
    """Return the tool calls allowed by `choice`, a tool_choice in the format of Chat Completions or Responses.

    `functions` holds the functions of the body's tools. Raise InvalidRequest if the choice is invalid, or requires a
    function that isn't among them. Unknown names in a list of allowed tools are ignored.
    """
    name = function_name(choice)
    mode = "required" if name is not None else choice or "auto"
    match choice:
        case {"type": "allowed_tools", "mode": str(mode), "tools": [*tools]} | {
            "type": "allowed_tools",
            "allowed_tools": {"mode": str(mode), "tools": [*tools]},
        }:
            names = {*map(function_name, tools)}
            functions = [each for each in functions if each["name"] in names]
    is_parallel = parallel_tool_calls is not False
    if mode == "none":
        return ToolUse()
    if mode == "auto":
        return ToolUse(tuple(functions), None, is_parallel)
    try:
        if mode != "required":
            choices = "'none', 'auto', 'required', a function or allowed_tools"
            raise ValueError(f"Input should be {choices}, got {shortened(choice)}")
        forced = forced_call(functions, name, is_parallel)
    except ValueError as error:
        raise InvalidRequest(f"Invalid 'tool_choice': {error}.", "tool_choice", "invalid_value") from None
    if not any(each.get("strict") for each in functions if name in (None, each["name"])):
        forced = replace(forced, schema={**forced.schema, "x-guidance": {"lenient": True}})  # ignore unknown keywords
    return ToolUse(tuple(functions), forced, is_parallel)


def function_name(value: Any) -> str | None:
    """Return the function's name in a tool or a tool_choice, in the format of Chat Completions or Responses.

    >>> function_name({"type": "function", "name": "add"}), function_name("auto")
    ('add', None)
    """
    match value:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    return None


def constraint_of(tools: ToolUse, constraint: Mapping[str, Any], field_name: str) -> tuple[Mapping[str, Any], str]:
    """Return the constraint on the output, as arguments of StructuredOutputsParams, and the field that it comes from.

    `constraint` and `field_name` apply to the content, which a forced call replaces. The JSON of a forced call has at
    most one space between two parts, because a small model could write spaces forever.
    """
    if tools.forced is None:
        return constraint, field_name
    return {"json": tools.forced.schema, "whitespace_pattern": " ?"}, "tools"


# The response


def chat_completion(work: "Work", samples: "Mapping[int, Piece]") -> dict[str, Any]:
    """Return a complete, non-streaming response."""
    choices = [
        chat_choice(sample, index, work.params.num_logprobs, work.message(sample)) | token_ids(work, sample)
        for index, sample in samples.items()
    ]
    prompt_fields = prompt_logprobs(work.prompt_logprobs.get(0)) | prompt_token_ids(work)
    return {**work.head("chat.completion"), "choices": choices, "usage": work.usage(), **prompt_fields}


def chat_chunks(work: "Work", index: int, is_first: bool, piece: "Piece") -> Iterator[dict[str, Any]]:
    """Yield the stream's chunks for a choice's next piece. The choice's first chunk has only the role.

    A piece has no other chunk as long as a character or a tag may be incomplete.
    """
    if is_first:
        role = {"role": "assistant", "content": ""}
        first = {"index": index, "delta": role, "logprobs": None, "finish_reason": None}
        yield {"choices": [first], **prompt_token_ids(work)}
    part, ids = work.message_part(index, piece), token_ids(work, piece)
    if part is None or part != MessageDelta() or piece.logprobs or piece.finish_reason or ids:
        yield {"choices": [chunk_choice(work, index, piece, part) | ids]}


def token_ids(work: "Work", piece: "Piece") -> dict[str, Any]:
    """Return the field that return_token_ids adds to a choice, or no field without that option."""
    return {"token_ids": piece.token_ids} if work.body.return_token_ids else {}


def prompt_token_ids(work: "Work") -> dict[str, Any]:
    """Return the field that return_token_ids adds to the response, or no field without that option."""
    return {"prompt_token_ids": work.prompts[0].token_ids} if work.body.return_token_ids else {}


def chunk_choice(work: "Work", index: int, piece: "Piece", part: MessageDelta | None) -> dict[str, Any]:
    """Return a chunk's entry for one choice. `part` is the parsed piece, or None if the piece is plain text."""
    delta: dict[str, Any] = {"content": piece.text} if part is None else fields_of(part)
    if part is not None and part.tool_calls:
        delta["tool_calls"] = [{"index": each.index, **tool_call(each)} for each in part.tool_calls]
    logprobs = logprobs_of(piece, work.params.num_logprobs)
    has_calls = part is not None and work.messages[index].has_calls
    return {"index": index, "delta": delta, "logprobs": logprobs} | ending(piece, has_calls)


def chat_choice(
    sample: Sample, index: int, top_logprobs: int | None, message: MessageDelta | None = None
) -> dict[str, Any]:
    """Return a choice of a chat, with the `top_logprobs` most likely tokens at each position.

    `message` is the parsed sample. If it is None, the sample's text becomes the content.
    """
    fields: dict[str, Any] = {"content": sample.text} if message is None else {"content": None, **fields_of(message)}
    if message is not None and message.tool_calls:
        fields["tool_calls"] = [tool_call(each) for each in message.tool_calls]
    fields, has_calls = {"role": "assistant", **fields, "refusal": None}, "tool_calls" in fields
    choice = {"index": index, "message": fields, "logprobs": logprobs_of(sample, top_logprobs)}
    return choice | ending(sample, has_calls)


def fields_of(message: MessageDelta) -> dict[str, Any]:
    """Return the non-empty texts of a message. Reasoning appears under both of the names that clients use for it."""
    reasoning = {"reasoning_content": message.reasoning, "reasoning": message.reasoning} if message.reasoning else {}
    return ({"content": message.content} if message.content else {}) | reasoning


def tool_call(call: ToolCallDelta) -> dict[str, Any]:
    """Return a tool call, or the new part of one. Only the first part of a call has the id and the name."""
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def logprobs_of(sample: Sample, top_logprobs: int | None) -> dict[str, Any] | None:
    """Return the log-probabilities of a chat's choice, or None if they were not requested."""
    if sample.logprobs is None:
        return None
    return {"content": chat_logprobs(sample.token_ids, sample.logprobs, top_logprobs or 0), "refusal": None}
