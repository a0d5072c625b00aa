"""The bodies of OpenAI's API: requests as pydantic models, responses as dicts. `nanovllm batch` uses them too.

A model checks types and sizes, and ignores unknown fields. SamplingParams checks the values. The fields are OpenAI's
and vLLM's.
"""

import base64
import itertools
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeGuard

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ..chat.assistant import AssistantParser, MessageDelta, ToolCallDelta, read_message
from ..chat.forced_calls import ForcedCall, forced_call
from ..chat.formats import MessageFormat, Parsers, parsers_for
from ..checkpoints.chat_template import choose_template
from ..requests.outputs import CompletionOutput
from ..requests.pooling_params import PoolingParams
from ..requests.prompts import Prompt
from ..requests.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams, check_length
from ..requests.tokens import Logprob

if TYPE_CHECKING:
    from ..checkpoints.tokenizer import HFTokenizer
    from .engine_process import Piece

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
MAX_CHOICES = 2048  # of one response: the engine holds a sequence for each from the moment the request arrives
MAX_IDS = 1 << 16  # of tokens, in a list or in logit_bias
MAX_FORM = 1 << 16  # characters of a JSON schema: building the grammar of a longer one takes half a second
MAX_SHOWN = 60  # characters of a value in an error message


# Errors


class InvalidRequest(ValueError):
    """An error in a request's body. `param` names the field."""

    status = 400  # of the HTTP response

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


def shortened(value: Any) -> str:
    """Return the JSON of a value, or the beginning of it.

    >>> shortened({"a": None})
    '{"a": null}'
    """
    pieces = json.JSONEncoder(ensure_ascii=False).iterencode(value)
    text = "".join(itertools.islice(pieces, MAX_SHOWN + 1))  # the rest of a large value is never built
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def path_of(location: Sequence[str | int]) -> str:
    """Return pydantic's location of an error as OpenAI writes it, without the branches of unions.

    >>> path_of(("messages", 0, "content")), path_of(("prompt", "list[int]", 3)), path_of(("prompt", "str"))
    ('messages[0].content', 'prompt[3]', 'prompt')
    """
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in ("str", "int") and "[" not in part:
            path += f".{part[:MAX_SHOWN]}"
    return path.removeprefix(".")


def as_invalid_request(error: ValidationError) -> InvalidRequest:
    """Return the most helpful error: for a union, the one of the branch that matched the longest part."""
    errors = error.errors(include_url=False)
    furthest = max(
        errors, key=lambda each: (not each["type"].endswith("_type"), [i for i in each["loc"] if isinstance(i, int)])
    )
    name, kind = path_of(furthest["loc"]), furthest["type"]
    if isinstance(cause := furthest.get("ctx", {}).get("error"), InvalidRequest):
        return cause
    is_type = kind.endswith("_type")
    same = [each for each in errors if path_of(each["loc"]) == name and each["type"].endswith("_type") == is_type]
    messages = [each["msg"].removeprefix("Value error, ") for each in same]
    message = " or ".join(dict.fromkeys(messages)).replace(" or Input should be", " or")
    if not name:
        return InvalidRequest(f"Invalid body: {message}.")
    if kind == "missing":
        return InvalidRequest(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    if is_type:
        return InvalidRequest(f"Invalid '{name}': {message}, got {shortened(furthest['input'])}.", name, "invalid_type")
    return InvalidRequest(f"Invalid '{name}': {message}.", name, "invalid_value")


# Requests


class Object(BaseModel):
    """A JSON object, which keeps unknown fields."""

    model_config = ConfigDict(strict=True, extra="allow")


Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Prompts = str | TokenIds | Annotated[list[str | TokenIds], Field(fail_fast=True, max_length=MAX_CHOICES)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def read_biases(biases: Any) -> dict[int, float]:
    """Return a logit_bias within OpenAI's bounds. pydantic itself would collect the errors of all entries."""
    if not isinstance(biases, dict) or len(biases) > MAX_IDS:
        raise ValueError(f"Input should be an object with at most {MAX_IDS} entries")
    for id, bias in biases.items():
        if type(bias) not in (int, float) or not (id.isdecimal() and id.isascii() and len(id) < 20):
            raise ValueError(f"Input should map token ids to numbers, got {shortened({id[:MAX_SHOWN]: bias})}")
    return {int(id): min(100.0, max(-100.0, bias)) for id, bias in biases.items()}


Biases = Annotated[dict[int, float], PlainValidator(read_biases)]


# Unsupported fields that would change the answer, with the values that have no effect. All other unknown fields, such
# as user and store, are ignored.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),  # before vLLM 0.12
    **dict.fromkeys(("chat_template", "web_search_options", "prompt", "previous_response_id", "conversation"), ()),
    **dict.fromkeys(("echo", "use_beam_search", "watermarking", "return_tokens_as_token_ids"), (False,)),
    **dict.fromkeys(("functions", "prompt_embeds"), ([],)),
    **{"suffix": ("",), "function_call": ("none", "auto"), "modalities": (["text"],), "thinking_token_budget": (-1,)},
}


class Body(Object):
    """A request's body."""

    model: str | None = None
    names: ClassVar[dict[str, str]] = {}  # of fields, by the engine's names for them, where these differ
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,200}$")] | None = None  # it is logged on one line
    cache_salt: Annotated[str, Field(min_length=1)] | None = None

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Return the body that JSON holds. Raise InvalidRequest, naming the field."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise as_invalid_request(error) from None

    @model_validator(mode="after")
    def check_unsupported(self) -> Self:
        """Raise InvalidRequest for an unsupported field, unless its value has no effect."""
        unknown = self.model_extra or {}
        for name in UNSUPPORTED.keys() & unknown.keys():
            if unknown[name] is not None and unknown[name] not in UNSUPPORTED[name]:
                message = f"Unsupported value: this server does not support '{name}' = {shortened(unknown[name])}."
                raise InvalidRequest(message, name, "unsupported_value")
        return self

    def unknown_fields(self) -> set[str]:
        """Return the names of the fields that are set and ignored."""
        return {name for name, value in (self.model_extra or {}).items() if value is not None} - UNSUPPORTED.keys()

    def handling(self) -> dict[str, Any]:
        """Return the fields of ParsedRequest that have the same names as the body's."""
        fields = {name: value for name, value in self.__dict__.items() if value is not None and name in HANDLING}
        return fields | {"names": self.names}


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None  # in a final event
    continuous_usage_stats: bool | None = None  # the usage so far, in each event
    include_obfuscation: Literal[False] | None = None


@dataclass(frozen=True)
class Chat:
    """A conversation, and options for the chat template that turns it into a prompt."""

    messages: list[dict[str, Any]]
    options: dict[str, Any]


@dataclass(frozen=True)
class ToolUse:
    """The tool calls that a chat allows."""

    functions: Sequence[Mapping[str, Any]] = ()  # that the model may call
    forced: ForcedCall | None = None
    parallel_tool_calls: bool = True


@dataclass(frozen=True)
class ParsedRequest:
    """A body, translated for the engine."""

    prompts: list[Prompt] | Chat
    params: dict[str, Any]  # the fields of SamplingParams that the body sets
    model: str | None = None
    stream: StreamOptions | None = None  # None: the response is one object
    echo: bool = False  # the prompt's text precedes the output's
    add_special_tokens: bool = True  # to a prompt that is a text
    pooling_params: PoolingParams | None = None  # set if the body wants embeddings
    request_id: str | None = None  # the end of the response's id
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None  # most tokens of a prompt; -1: as many as leave room for the output
    truncation_side: Literal["left", "right"] = "left"  # where the other tokens are dropped
    return_token_ids: bool = False
    tools: ToolUse = ToolUse()
    include_reasoning: bool = True  # in the response
    # of the body's fields, by the engine's names, where these differ
    names: Mapping[str, str] = field(default_factory=dict)

    def named(self, error: ValueError) -> InvalidRequest:
        """Return an error about a value with the name of the body's field. The engine's errors begin with theirs."""
        name, code = getattr(error, "param", None), getattr(error, "code", None)
        if name is None and (match := re.match(r"(?:the )?(\w+)", str(error))) and match[1] in ENGINE_NAMES:
            name = match[1]
        return InvalidRequest(str(error), self.names.get(name or "", name), code)

    @property
    def is_chat(self) -> bool:
        """True if the prompt is a conversation."""
        return isinstance(self.prompts, Chat)

    def sampling_params(
        self, recommended: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Return the arguments of SamplingParams: the body's, else `defaults`, else the checkpoint's `recommended`.

        A chat has no max_tokens of its own, so its output may fill the model's context.
        """
        unlimited = {"max_tokens": None} if self.is_chat else {}
        return {**recommended, **unlimited, **defaults, **self.params}

    def message_format(self, parsers: Parsers, prompt: str, params: SamplingParams) -> MessageFormat | None:
        """Return the format of the outputs for a chat's rendered prompt, or None if they are plain text.

        Set `params`: outputs with a format show their special tokens, and structured outputs begin after the thought.
        A call may take their place.
        """
        if not isinstance(self.prompts, Chat):
            return None
        if self.prompts.options.get("continue_final_message"):
            parsers = replace(parsers, reasoning=None)  # the thought is in the prompt
        if self.params.get("skip_special_tokens") is False:
            parsers = replace(parsers, special_tokens=())
        use, names = self.tools, [each["name"] for each in self.tools.functions]
        format = parsers.for_prompt(prompt, names, use.forced, use.parallel_tool_calls)
        if format is not None:
            params.skip_special_tokens = False
            thought, tools = format.reasoning, None if format.forced else format.tools
            if params.structured_outputs is None and (grammar := parsers.strict_grammar(use.functions)):
                params.structured_outputs, tools = structured_outputs("tools", {"grammar": grammar}), None
            if params.structured_outputs is not None:
                params.structured_outputs = replace(
                    params.structured_outputs,
                    reasoning_start_str=None if thought is None or format.starts_in_thought else thought.start,
                    reasoning_end_str=None if thought is None else thought.end,
                    tool_call_start_str=None if tools is None else tools.start,
                )
        return format


class SamplingBody(Body):
    """The fields that all endpoints that generate text share."""

    stream: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Annotated[Texts, Field(max_length=32)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_IDS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logprob_token_ids: Annotated[TokenIds, Field(max_length=128)] | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: Annotated[TokenIds, Field(max_length=MAX_IDS)] | None = None
    bad_words: Annotated[Texts, Field(max_length=128)] | None = None
    skip_reading_prefix_cache: bool | None = None
    include_reasoning: bool | None = None
    repetition_detection: RepetitionDetectionParams | None = None

    @field_validator("stop", "bad_words")
    @classmethod
    def check_texts(cls, texts: str | list[str] | None, field: ValidationInfo) -> str | list[str] | None:
        """Raise ValueError if the strings are too long: bad_words take long to tokenize."""
        most = {"most": MAX_FORM} if field.field_name == "bad_words" else {}
        check_length(f"{field.field_name}", texts or (), **most)
        return texts

    def params(self, num_logprobs: int | None, form: Mapping[str, Any], form_name: str) -> dict[str, Any]:
        """Return the arguments of SamplingParams that the body sets.

        `form` has the arguments of StructuredOutputsParams for the field `form_name`.
        """
        params = {name: value for name, value in self.__dict__.items() if value is not None and name in SAMPLING}
        if params.get("logprob_token_ids"):
            if num_logprobs is None:
                raise InvalidRequest("'logprob_token_ids' requires 'logprobs'.", "logprob_token_ids")
        elif num_logprobs is not None:
            params["logprobs"] = num_logprobs
        if form and self.structured_outputs:
            raise InvalidRequest(f"Set '{form_name}' or 'structured_outputs', not both.", form_name)
        if form or self.structured_outputs is not None:
            name, given = (form_name, form) if form else ("structured_outputs", self.structured_outputs or {})
            params["structured_outputs"] = structured_outputs(name, given)
        return params


HANDLING = {"model", "request_id", "cache_salt", "truncate_prompt_tokens", "truncation_side", "return_token_ids"}
SAMPLING = {each.name for each in fields(SamplingParams)} - {"logprobs", "structured_outputs"}
ENGINE_NAMES = SAMPLING | {"logprobs", "structured_outputs", "prompt", "dimensions"}


def structured_outputs(name: str, form: Mapping[str, Any]) -> StructuredOutputsParams:
    """Return the form of an output. Raise InvalidRequest if it is invalid or too large."""
    if (size := len(json.dumps(form))) > MAX_FORM:
        raise InvalidRequest(f"Invalid '{name}': it must have at most {MAX_FORM} characters, got {size}.", name)
    try:
        return StructuredOutputsParams.of(dict(form))
    except ValueError as error:
        raise InvalidRequest(f"Invalid '{name}': {error}", name) from None


class Schema(Object):
    """A JSON schema with a name."""

    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class Format(Schema):
    """A response_format or a text.format. The schema of the latter has no object of its own."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @model_validator(mode="after")
    def check_schema(self) -> Self:
        """Raise ValueError if the schema is missing."""
        if self.type == "json_schema" and (self.json_schema or self).schema_ is None:
            raise ValueError("a json_schema requires a schema")
        return self

    def form(self) -> dict[str, Any]:
        """Return the arguments of StructuredOutputsParams."""
        if self.type == "json_schema":
            return {"json": (self.json_schema or self).schema_}
        return {"json_object": True} if self.type == "json_object" else {}


class StreamableBody(SamplingBody):
    """The fields that completions and chats share."""

    n: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    stream_options: StreamOptions | None = None
    response_format: Format | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    stream_interval: Annotated[int, Field(ge=1)] | None = None

    def checked_stream_options(self) -> StreamOptions | None:
        """Return the options of the stream, or None if the response isn't streamed."""
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("'prompt_logprobs' requires 'stream' to be false.", "prompt_logprobs")
        options = self.stream_options or StreamOptions()
        if not self.stream and options != StreamOptions():
            raise InvalidRequest("'stream_options' requires 'stream' to be true.", "stream_options")
        return options if self.stream else None

    def form(self) -> dict[str, Any]:
        """Return response_format as arguments of StructuredOutputsParams."""
        return self.response_format.form() if self.response_format else {}


class CompletionRequest(StreamableBody):
    """The body of /v1/completions."""

    prompt: Prompts
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None

    def parsed(self) -> ParsedRequest:
        """Translate the body for the engine. Raise InvalidRequest, naming the field."""
        if self.best_of is not None and self.best_of > (n := self.n or 1):
            message = f"Unsupported value: 'best_of' must be at most 'n', which is {n}, got {self.best_of}."
            raise InvalidRequest(message, "best_of", "unsupported_value")
        return ParsedRequest(
            prompts=prompts_of(self.prompt),
            params=self.params(self.logprobs, self.form(), "response_format"),
            **self.handling(),
            stream=self.checked_stream_options(),
            echo=self.echo is True,
            add_special_tokens=self.add_special_tokens is not False,
        )


def prompts_of(prompt: str | list[int] | list[str | list[int]]) -> list[Prompt]:
    """Return one prompt, or several, as a list.

    >>> prompts_of("a"), prompts_of([5, 6]), prompts_of(["a", [5]])
    (['a'], [[5, 6]], ['a', [5]])
    """
    if isinstance(prompt, str) or is_token_ids(prompt):
        return [prompt]
    return [each for each in prompt if not isinstance(each, int)]


def is_token_ids(prompt: Sequence[Any]) -> TypeGuard[list[int]]:
    """Return whether a validated prompt is one list of token ids."""
    return not prompt or isinstance(prompt[0], int)


class Part(Object):
    """A part of a message's content."""

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


class Function(Object):
    """A function that a model may call."""

    name: str
    parameters: dict[str, Any] | None = None  # a JSON schema


class Tool(Object):
    """A tool of a chat."""

    type: Literal["function"]
    function: Function


def tool_use(
    functions: Sequence[Mapping[str, Any]], choice: str | dict[str, Any] | None, parallel_tool_calls: bool | None
) -> ToolUse:
    """Return the calls that a tool_choice allows, in the form of a chat or of a response.

    `functions` are those of the body's tools. Raise InvalidRequest if the choice is invalid or names no tool.
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
            kinds = "'none', 'auto', 'required', a function or allowed_tools"
            raise ValueError(f"Input should be {kinds}, got {shortened(choice)}")
        forced = forced_call(functions, name, is_parallel)
    except ValueError as error:
        raise InvalidRequest(f"Invalid 'tool_choice': {error}.", "tool_choice", "invalid_value") from None
    if not any(each.get("strict") for each in functions if name in (None, each["name"])):
        forced = replace(forced, schema={**forced.schema, "x-guidance": {"lenient": True}})  # ignore unknown keywords
    return ToolUse(tuple(functions), forced, is_parallel)


def function_name(value: Any) -> str | None:
    """Return the name of the function in a tool or in a tool_choice, in the form of a chat or of a response.

    >>> function_name({"type": "function", "name": "add"}), function_name("auto")
    ('add', None)
    """
    match value:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    return None


def parsers_of(
    tokenizer: "HFTokenizer | None",
    chat_template: str | None,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
) -> Parsers:
    """Return the parsers for a model's chats. "auto" takes them from the chat template, and "none" turns them off."""
    template, special, token_ids = None, [], {}
    if tokenizer is not None:
        with suppress(ValueError):  # there is no template
            template = choose_template(tokenizer, chat_template, tools=())
        added = tokenizer.backend.get_added_tokens_decoder()
        special = [token.content for token in added.values() if token.special]
        token_ids = {token.content: token_id for token_id, token in added.items()}
    tools, reasoning = (None if name == "none" else name for name in (tool_call_parser, reasoning_parser))
    return parsers_for(template, tools, reasoning, special, token_ids)


def form_of(tools: ToolUse, form: Mapping[str, Any], form_name: str) -> tuple[Mapping[str, Any], str]:
    """Return the form of an output, as arguments of StructuredOutputsParams, with the field that sets it.

    A forced call replaces the form of the content. Its JSON has at most a space between its parts: a small model could
    write spaces forever.
    """
    if tools.forced is None:
        return form, form_name
    return {"json": tools.forced.schema, "whitespace_pattern": " ?"}, "tools"


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=1 << 13)]
RESERVED = {  # arguments of render_chat, which are not variables of a template
    *("messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
}


class ChatBody(Body):
    """A conversation, and the options of its template."""

    names: ClassVar = {"prompt": "messages", "logprobs": "top_logprobs"}
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=1 << 10)] | None = None
    documents: Annotated[Objects, Field(max_length=1 << 13)] | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=1 << 10)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def chat(self) -> Chat:
        """Return the conversation. Raise InvalidRequest, naming the field."""
        dicts = self.model_dump(include={"messages", "tools"}, exclude_unset=True)
        options = template_options(self.chat_template_kwargs, dicts.get("tools"), self.reasoning_effort)
        if self.documents:
            options["documents"] = self.documents
        if self.continue_final_message:
            options["continue_final_message"] = True
        is_new = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        if not is_new:
            options["add_generation_prompt"] = False
        return Chat(dicts["messages"], options)


def template_options(
    kwargs: dict[str, Any] | None, tools: list[dict[str, Any]] | None, effort: str | None
) -> dict[str, Any]:
    """Return the options of render_chat that all chats share."""
    options = dict(kwargs or {})
    for name in RESERVED & options.keys():
        raise InvalidRequest(f"'chat_template_kwargs' must not set '{name}'.", "chat_template_kwargs")
    if tools:
        options["tools"] = tools
    if effort is not None:
        options["reasoning_effort"] = effort
        options.setdefault("enable_thinking", effort != "none")
    return options


class ChatCompletionRequest(StreamableBody, ChatBody):
    """The body of /v1/chat/completions."""

    messages: Messages
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def parsed(self) -> ParsedRequest:
        """Translate the body for the engine. Raise InvalidRequest, naming the field."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("'top_logprobs' requires 'logprobs' to be true.", "top_logprobs")
        functions = [tool.function.model_dump() for tool in self.tools or ()]
        tools = tool_use(functions, self.tool_choice, self.parallel_tool_calls)
        form = form_of(tools, self.form(), "response_format")
        params, handling = self.params(self.top_logprobs or 0 if self.logprobs else None, *form), self.handling()
        if self.max_completion_tokens is not None:
            params["max_tokens"] = self.max_completion_tokens
            handling["names"] = {**self.names, "max_tokens": "max_completion_tokens"}
        return ParsedRequest(
            prompts=self.chat(),
            params=params,
            **handling,
            stream=self.checked_stream_options(),
            add_special_tokens=self.add_special_tokens is True,
            tools=tools,
            include_reasoning=self.include_reasoning is not False,
        )


def message_of(item: Any) -> Any:
    """Return an item of an input as a message of a chat: a message, reasoning, a tool call, or a tool's output."""
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
            kinds = "a message, reasoning, function_call or function_call_output"
            raise ValueError(f"Input should be {kinds}, got {shortened(item)}")
        case {"role": role, "content": content}:
            return {"role": role, "content": content}
    return item


def merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge an assistant's reasoning, text and calls, three items of an input, into one message of a chat.

    >>> merged([{"role": "assistant", "reasoning": "Hm"}, {"role": "assistant", "content": "Hi"}])
    [{'role': 'assistant', 'reasoning': 'Hm', 'content': 'Hi'}]
    """
    result: list[dict[str, Any]] = []
    for message in messages:
        last = result[-1] if result else {}
        follows = bool(message.get("tool_calls")) or ("content" in message and last.keys() == {"role", "reasoning"})
        if follows and last.get("role") == message["role"] == "assistant":
            calls = last.get("tool_calls") or message.get("tool_calls")
            if calls is not message.get("tool_calls"):
                calls += message["tool_calls"]  # in place: a conversation may have thousands
            result[-1] = {**last, **message, **({"tool_calls": calls} if calls else {})}
        elif message.get("reasoning") != "":  # of a model that hides its reasoning
            result.append(message)
    return result


class ResponseTool(Object):
    """A tool of a response. Its function has no object of its own."""

    type: Literal["function"]
    name: str
    parameters: dict[str, Any] | None = None


class Text(Object):
    """The form of a response's text."""

    format: Format | None = None


class Reasoning(Object):
    """Options of a response's reasoning."""

    effort: Effort | None = None


Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
Items = Annotated[list[Annotated[Message, BeforeValidator(message_of)]], Field(fail_fast=True, max_length=1 << 13)]
REPEATED: dict[str, Any] = {  # fields that a response repeats, with their defaults
    **dict.fromkeys(("instructions", "max_output_tokens", "reasoning", "user")),
    **{"metadata": {}, "tools": [], "text": {"format": {"type": "text"}}, "tool_choice": "auto"},
    **{"parallel_tool_calls": True, "top_logprobs": 0},
}


class ResponsesRequest(SamplingBody):
    """The body of /v1/responses. Nothing is stored here, so each request carries its whole conversation."""

    names: ClassVar = {"prompt": "input", "logprobs": "top_logprobs", "max_tokens": "max_output_tokens"}
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
        """Translate the body for the engine, as a chat. Raise InvalidRequest, naming the field."""
        wants_logprobs = self.top_logprobs or "message.output_text.logprobs" in (self.include or ())
        text_form = self.text.format.form() if self.text and self.text.format else {}
        tools = tool_use(self.functions(), self.tool_choice, self.parallel_tool_calls)
        form = form_of(tools, text_form, "text.format")
        params = self.params(self.top_logprobs or 0 if wants_logprobs else None, *form)
        if self.max_output_tokens is not None:
            params["max_tokens"] = self.max_output_tokens
        return ParsedRequest(
            prompts=self.chat(),
            params=params,
            **self.handling(),
            stream=StreamOptions() if self.stream else None,
            add_special_tokens=False,
            tools=tools,
            include_reasoning=self.include_reasoning is not False,
        )

    def functions(self) -> list[dict[str, Any]]:
        """Return the functions of the tools."""
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
        return Chat(merged(messages), template_options(self.chat_template_kwargs, tools, effort))

    def repeated(self) -> dict[str, Any]:
        """Return the fields that the response repeats."""
        sent = self.model_dump(include=set(REPEATED), exclude_unset=True, by_alias=True)
        return REPEATED | {name: value for name, value in sent.items() if value is not None}


class TokenizeRequest(ChatBody):
    """The body of /tokenize: a text or a conversation."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    tokens: TokenIds


class EmbeddingRequest(Body):
    """The body of /v1/embeddings."""

    names: ClassVar = dict.fromkeys(("prompt", "max_tokens"), "input")
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = "right"  # vLLM's default for embeddings

    def parsed(self) -> ParsedRequest:
        """Translate the body for the engine."""
        options = {"add_special_tokens": self.add_special_tokens is not False, **self.handling()}
        pooling_params = PoolingParams(self.use_activation, self.dimensions)
        return ParsedRequest(prompts_of(self.input), {"max_tokens": 1}, pooling_params=pooling_params, **options)


# Responses

Sample: TypeAlias = "CompletionOutput | Piece"  # an output, or the new part of one in a stream


def completion_choice(sample: Sample, index: int, start: int = 0) -> dict[str, Any]:
    """Return a choice of a completion. The sample's text begins at character `start` of the whole."""
    logprobs = None if sample.logprobs is None else completion_logprobs(sample.token_ids, sample.logprobs, start)
    return {"index": index, "text": sample.text, "logprobs": logprobs} | ending(sample)


class MessageStream:
    """The message of one sample, as its text arrives."""

    def __init__(self, format: MessageFormat, include_reasoning: bool) -> None:
        self._format, self._parser, self._include_reasoning = format, AssistantParser(format), include_reasoning
        self.has_calls = False  # so far

    def take(self, sample: Sample) -> MessageDelta:
        """Return the part of the message in new text."""
        part = self._parser.feed(sample.text, sample.finish_reason is not None, is_cut(sample, self._format))
        self.has_calls |= bool(part.tool_calls)
        return part if self._include_reasoning else replace(part, reasoning="")


def is_cut(sample: Sample, format: MessageFormat) -> bool:
    """Return whether the sample ended midway. If a grammar forces calls, a stop string can end one, too."""
    return sample.finish_reason == "length" or format.forced is not None


def whole_message(sample: Sample, format: MessageFormat, include_reasoning: bool) -> MessageDelta:
    """Return the message of an output that is sent whole."""
    message = read_message(sample.text, format, is_cut(sample, format))
    return message if include_reasoning else replace(message, reasoning="")


def chat_choice(
    sample: Sample, index: int, top_logprobs: int | None, message: MessageDelta | None = None
) -> dict[str, Any]:
    """Return a choice of a chat, with the `top_logprobs` most likely tokens at each position.

    Without a `message`, its content is the sample's text.
    """
    fields: dict[str, Any] = {"content": sample.text} if message is None else {"content": None, **fields_of(message)}
    if message is not None and message.tool_calls:
        fields["tool_calls"] = [tool_call(each) for each in message.tool_calls]
    full, has_calls = {"role": "assistant", **fields, "refusal": None}, message is not None and bool(message.tool_calls)
    return {"index": index, "message": full, "logprobs": logprobs_of(sample, top_logprobs)} | ending(sample, has_calls)


def chat_chunk_choice(
    sample: Sample,
    index: int,
    top_logprobs: int | None,
    message: MessageDelta | None = None,
    has_calls: bool = False,
) -> dict[str, Any]:
    """Return a choice of a streamed chat's chunk."""
    delta: dict[str, Any] = {"content": sample.text} if message is None else fields_of(message)
    if message is not None and message.tool_calls:
        delta["tool_calls"] = [{"index": each.index, **tool_call(each)} for each in message.tool_calls]
    return {"index": index, "delta": delta, "logprobs": logprobs_of(sample, top_logprobs)} | ending(sample, has_calls)


def fields_of(message: MessageDelta) -> dict[str, Any]:
    """Return the texts of a message that are not empty. Reasoning has both names that clients know."""
    reasoning = {"reasoning_content": message.reasoning, "reasoning": message.reasoning} if message.reasoning else {}
    return ({"content": message.content} if message.content else {}) | reasoning


def tool_call(call: ToolCallDelta) -> dict[str, Any]:
    """Return a call, or the new part of one. Its first part has the id and the name."""
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def ending(sample: Sample, has_calls: bool = False) -> dict[str, Any]:
    """Return the reasons why a sample ended, both None while it is running."""
    reason = "tool_calls" if has_calls and sample.finish_reason == "stop" else sample.finish_reason
    return {"finish_reason": reason, "stop_reason": sample.stop_reason}


def usage(
    num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int, num_reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """Return the token counts of a response.

    >>> usage(3, 2, 0)["total_tokens"]
    5
    """
    reasoning = {"completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens}}
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        **(reasoning if num_reasoning_tokens is not None else {}),
    }


def embedding_object(embedding: list[float], index: int, encoding_format: str | None) -> dict[str, Any]:
    """Return the embedding of the input `index`, as numbers or as base64 of little-endian float32.

    >>> embedding_object([1.0], 0, "base64")
    {'object': 'embedding', 'index': 0, 'embedding': 'AACAPw=='}
    """
    packed = struct.pack(f"<{len(embedding)}f", *embedding) if encoding_format == "base64" else None
    value = embedding if packed is None else base64.b64encode(packed).decode()
    return {"object": "embedding", "index": index, "embedding": value}


# Log-probabilities

Place = dict[int, Logprob]  # the most likely tokens at a position, and the sampled one
LEAST = -9999.0  # OpenAI's value for a token that is impossible: JSON has no infinity


def logprobs_of(sample: Sample, top_logprobs: int | None) -> dict[str, Any] | None:
    """Return the log-probabilities of a chat's choice, or None if they were not requested."""
    if sample.logprobs is None:
        return None
    return {"content": chat_logprobs(sample.token_ids, sample.logprobs, top_logprobs or 0), "refusal": None}


def chat_logprobs(token_ids: Sequence[int], places: Sequence[Place], count: int) -> list[dict[str, Any]]:
    """Return an entry for each token, with the `count` most likely tokens at its position; -1 lists all of them."""
    most = count if count >= 0 else None
    return [
        entry(place[token]) | {"top_logprobs": [entry(each) for each in itertools.islice(place.values(), most)]}
        for token, place in zip(token_ids, places, strict=True)
    ]


def completion_logprobs(token_ids: Sequence[int], places: Sequence[Place], start: int = 0) -> dict[str, Any]:
    """Return each token's text, its offset from `start` on, its log-probability, and the most likely tokens.

    The first token of a prompt has a text only: its log-probability is NaN here, and null in JSON.
    """
    own = [place[token] for token, place in zip(token_ids, places, strict=True)]
    tokens = [text_of(each) for each in own]
    logprobs = [number(each) for each in own]
    top_logprobs = [
        None if logprob is None else {text_of(each): number(each) for each in place.values()}
        for logprob, place in zip(logprobs, places, strict=True)
    ]
    offsets = list(itertools.accumulate(map(len, tokens), initial=start))[:-1]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top_logprobs, "text_offset": offsets}


def prompt_logprobs(places: Sequence[Place | None] | None) -> dict[str, Any]:
    """Return the field prompt_logprobs in vLLM's form, by token id, or nothing if it wasn't requested."""
    if places is None:
        return {}
    entries = [
        {str(token): each._asdict() | {"logprob": number(each)} for token, each in (place or {}).items()}
        for place in places
    ]
    return {"prompt_logprobs": [each or None for each in entries]}


def echoed(token_ids: Sequence[int], places: Sequence[Place | None], text: str, first: str) -> list[Place]:
    """Return the log-probabilities of an echoed prompt. The first token has none, only its text, `first`.

    Some tokenizers put a space before every text. It is removed from the first token, as it is from the text.
    """
    start: Place = {token_ids[0]: Logprob(math.nan, 0, first)}
    result = [start, *(place or {} for place in places[1:])]
    own = [text_of(place[token]) for token, place in zip(token_ids, result, strict=True)]
    if "".join(own) == f" {text}":
        i = next(i for i, each in enumerate(own) if each)
        result[i] = result[i] | {token_ids[i]: result[i][token_ids[i]]._replace(decoded_token=own[i][1:])}
    return result


def entry(logprob: Logprob) -> dict[str, Any]:
    """Return a token of a chat's log-probabilities."""
    text = text_of(logprob)
    return {"token": text, "logprob": number(logprob), "bytes": list(text.encode("utf-8", "replace"))}


def text_of(logprob: Logprob) -> str:
    """Return the token's text, which is empty without a tokenizer."""
    return logprob.decoded_token or ""


def number(logprob: Logprob) -> float | None:
    """Return a log-probability that JSON can hold.

    >>> number(Logprob(-math.inf, 7)), number(Logprob(-0.5, 1)), number(Logprob(math.nan, 0))
    (-9999.0, -0.5, None)
    """
    return None if math.isnan(logprob.logprob) else max(LEAST, logprob.logprob)
