"""Parts of the JSON bodies that several endpoints share: pydantic models for requests, dicts for responses.

The models check types and sizes, refuse unsupported fields that would change the response, and ignore other unknown
fields. SamplingParams checks values. The fields are OpenAI's and vLLM's. `nanovllm batch` reads and writes the same
bodies, so this file, completions.py and chat.py import neither a web server nor torch.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeGuard

from pydantic import BaseModel, Field, PlainValidator, ValidationError, ValidationInfo, field_validator, model_validator

from ..chat.assistant import AssistantParser, MessageDelta, read_message
from ..chat.forced_calls import ForcedCall
from ..chat.formats import MessageFormat, ModelFormats, formats_for
from ..checkpoints.chat_template import choose_template
from ..requests.outputs import CompletionOutput
from ..requests.pooling_params import PoolingParams
from ..requests.prompts import Prompt
from ..requests.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams, check_length

if TYPE_CHECKING:
    from ..checkpoints.tokenizer import HFTokenizer
    from .engine_process import Piece

MAX_CHOICES = 2048  # in one response; the engine creates a sequence for each as soon as the request arrives
MAX_IDS = 1 << 16  # token ids in a list or in logit_bias
MAX_CONSTRAINT = 1 << 16  # characters of a constraint or of bad_words; a longer schema takes half a second to compile
MAX_VALUE = 60  # characters of a value quoted in an error message


# Errors


class InvalidRequest(ValueError):
    """An error in a request's body. `param` names the field."""

    status = 400  # of the HTTP response

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


def shortened(value: Any) -> str:
    """Return a value as JSON, shortened to at most MAX_VALUE characters.

    >>> shortened({"a": None})
    '{"a": null}'
    """
    pieces = json.JSONEncoder(ensure_ascii=False).iterencode(value)
    text = "".join(itertools.islice(pieces, MAX_VALUE + 1))  # stop early: a value can be large
    return text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 3] + "..."


def path_of(location: Sequence[str | int]) -> str:
    """Convert pydantic's location of an error to OpenAI's notation, without the names of union branches.

    >>> path_of(("messages", 0, "content")), path_of(("prompt", "list[int]", 3)), path_of(("prompt", "str"))
    ('messages[0].content', 'prompt[3]', 'prompt')
    """
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in ("str", "int") and "[" not in part:
            path += f".{part[:MAX_VALUE]}"
    return path.removeprefix(".")


def as_invalid_request(error: ValidationError) -> InvalidRequest:
    """Return the most helpful of pydantic's errors. For a union, this comes from the branch that matched furthest."""
    errors = error.errors(include_url=False)
    furthest = max(
        errors, key=lambda each: (not each["type"].endswith("_type"), [i for i in each["loc"] if isinstance(i, int)])
    )
    name, kind = path_of(furthest["loc"]), furthest["type"]
    if isinstance(cause := furthest.get("ctx", {}).get("error"), InvalidRequest):
        return cause
    is_type_error = kind.endswith("_type")
    # Errors of the same kind in the same field: a union has one for each of its branches.
    same = [each for each in errors if path_of(each["loc"]) == name and each["type"].endswith("_type") == is_type_error]
    messages = [each["msg"].removeprefix("Value error, ") for each in same]
    message = " or ".join(dict.fromkeys(messages)).replace(" or Input should be", " or")
    if not name:
        return InvalidRequest(f"Invalid body: {message}.")
    if kind == "missing":
        return InvalidRequest(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    if is_type_error:
        return InvalidRequest(f"Invalid '{name}': {message}, got {shortened(furthest['input'])}.", name, "invalid_type")
    return InvalidRequest(f"Invalid '{name}': {message}.", name, "invalid_value")


# Requests


class Object(BaseModel, strict=True, extra="allow"):
    """A JSON object that keeps its unknown fields."""


TokenIds = Annotated[list[int], Field(fail_fast=True)]  # fail_fast: stop at the first invalid item
Texts = Annotated[list[str], Field(fail_fast=True)]
Prompts = str | TokenIds | Annotated[list[str | TokenIds], Field(fail_fast=True, max_length=MAX_CHOICES)]


def prompts_of(prompt: str | list[int] | list[str | list[int]]) -> list[Prompt]:
    """Return the prompts in a `prompt` field, which holds one or several, as a list.

    >>> prompts_of("a"), prompts_of([5, 6]), prompts_of(["a", [5]])
    (['a'], [[5, 6]], ['a', [5]])
    """
    if isinstance(prompt, str) or is_token_ids(prompt):
        return [prompt]
    return [each for each in prompt if not isinstance(each, int)]


def is_token_ids(prompt: Sequence[Any]) -> TypeGuard[list[int]]:
    """Return whether a validated `prompt` field is one prompt of token ids. An empty prompt counts as one."""
    return not prompt or isinstance(prompt[0], int)


def read_biases(biases: Any) -> dict[int, float]:
    """Return logit_bias with integer token ids and with biases clamped to OpenAI's range, from -100 to 100.

    Raise ValueError at the first invalid entry. pydantic would collect an error for each one.
    """
    if not isinstance(biases, dict) or len(biases) > MAX_IDS:
        raise ValueError(f"Input should be an object with at most {MAX_IDS} entries")
    for id, bias in biases.items():
        if type(bias) not in (int, float) or not (id.isdecimal() and id.isascii() and len(id) < 20):
            raise ValueError(f"Input should map token ids to numbers, got {shortened({id[:MAX_VALUE]: bias})}")
    return {int(id): min(100.0, max(-100.0, bias)) for id, bias in biases.items()}


# Unsupported fields that would change the response, with the values that have no effect. null and these values are
# accepted. All other unknown fields, such as user and store, are ignored.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),  # before vLLM 0.12
    **dict.fromkeys(("chat_template", "web_search_options", "prompt", "previous_response_id", "conversation"), ()),
    **dict.fromkeys(("echo", "use_beam_search", "watermarking", "return_tokens_as_token_ids"), (False,)),
    **dict.fromkeys(("functions", "prompt_embeds"), ([],)),
    **{"suffix": ("",), "function_call": ("none", "auto"), "modalities": (["text"],), "thinking_token_budget": (-1,)},
}


class Body(Object):
    """The JSON body of a request."""

    model: str | None = None
    field_names: ClassVar[dict[str, str]] = {}  # {engine's name: body's name}, where they differ
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,200}$")] | None = None  # one short line, for the log
    cache_salt: Annotated[str, Field(min_length=1)] | None = None

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse and validate a JSON body. Raise an InvalidRequest that names the invalid field."""
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
        """Return the names of unknown fields that are set but ignored."""
        return {name for name, value in (self.model_extra or {}).items() if value is not None} - UNSUPPORTED.keys()

    def request_fields(self) -> dict[str, Any]:
        """Return `field_names`, and the fields of the body that ParsedRequest has under the same names."""
        fields = {name: value for name, value in self.__dict__.items() if value is not None and name in REQUEST_FIELDS}
        return fields | {"field_names": self.field_names}


class StreamOptions(BaseModel, strict=True):
    """The stream_options of a request."""

    include_usage: bool | None = None  # send token counts in a final event
    continuous_usage_stats: bool | None = None  # send the token counts so far in each event
    include_obfuscation: Literal[False] | None = None


@dataclass(frozen=True)
class Chat:
    """A conversation, and options for the chat template that turns it into a prompt."""

    messages: list[dict[str, Any]]
    options: dict[str, Any]


@dataclass(frozen=True)
class ToolUse:
    """The tool calls that a chat allows."""

    functions: Sequence[Mapping[str, Any]] = ()  # the functions that the model may call
    forced: ForcedCall | None = None  # set if the model must make a call
    parallel_tool_calls: bool = True


@dataclass(frozen=True)
class ParsedRequest:
    """A request body, translated for the engine."""

    prompts: list[Prompt] | Chat
    params: dict[str, Any]  # the fields of SamplingParams that the body sets
    model: str | None = None
    stream: StreamOptions | None = None  # None: the response is one object
    echo: bool = False  # the response repeats the prompt before the output
    add_special_tokens: bool = True  # to text prompts
    pooling_params: PoolingParams | None = None  # set if the body asks for embeddings
    request_id: str | None = None  # from the client; the response's id ends with it
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None  # tokens of a prompt to keep; -1: all that leave room for the output
    truncation_side: Literal["left", "right"] = "left"  # the side on which tokens are dropped
    return_token_ids: bool = False
    tool_use: ToolUse = ToolUse()
    include_reasoning: bool = True  # in the response
    field_names: Mapping[str, str] = field(default_factory=dict)  # {engine's name: body's name}, where they differ

    def invalid_request(self, error: ValueError) -> InvalidRequest:
        """Convert an error that begins with the engine's name for a value to one that names the body's field."""
        name, code = getattr(error, "param", None), getattr(error, "code", None)
        if name is None and (match := re.match(r"(?:the )?(\w+)", str(error))) and match[1] in ENGINE_FIELDS:
            name = match[1]
        return InvalidRequest(str(error), self.field_names.get(name or "", name), code)

    @property
    def is_chat(self) -> bool:
        """True if the prompt is a conversation."""
        return isinstance(self.prompts, Chat)

    def sampling_params(
        self, recommended: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Return the arguments of SamplingParams: the body's, else `defaults`, else the checkpoint's `recommended`.

        Without max_tokens, a chat's output may fill the model's context.
        """
        unlimited = {"max_tokens": None} if self.is_chat else {}
        return {**recommended, **unlimited, **defaults, **self.params}

    def message_format(self, formats: ModelFormats, prompt: str, params: SamplingParams) -> MessageFormat | None:
        """Return the format of the outputs for a chat's rendered prompt, or None if they are plain text.

        Adapt `params` to the format: keep special tokens in the text, and start structured outputs after the thought.
        Instead of a structured output, the model may write a tool call.
        """
        if not isinstance(self.prompts, Chat):
            return None
        if self.prompts.options.get("continue_final_message"):
            formats = replace(formats, reasoning_format=None)  # the thought is in the prompt
        if self.params.get("skip_special_tokens") is False:
            formats = replace(formats, special_tokens=())
        functions, forced = self.tool_use.functions, self.tool_use.forced
        names = [function["name"] for function in functions]
        format = formats.for_prompt(prompt, names, forced, self.tool_use.parallel_tool_calls)
        if format is not None:
            params.skip_special_tokens = False
            thought, calls = format.reasoning_format, None if forced else format.tool_format
            if params.structured_outputs is None and (grammar := formats.strict_grammar(functions)):
                params.structured_outputs, calls = structured_outputs("tools", {"grammar": grammar}), None
            if params.structured_outputs is not None:
                params.structured_outputs = replace(
                    params.structured_outputs,
                    reasoning_start_str=None if thought is None or format.starts_in_thought else thought.start,
                    reasoning_end_str=None if thought is None else thought.end,
                    tool_call_start_str=None if calls is None else calls.start,
                )
        return format


class SamplingBody(Body):
    """The fields shared by all endpoints that generate text."""

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
    logit_bias: Annotated[dict[int, float], PlainValidator(read_biases)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(max_length=MAX_IDS)] | None = None
    bad_words: Annotated[Texts, Field(max_length=128)] | None = None
    skip_reading_prefix_cache: bool | None = None
    include_reasoning: bool | None = None
    repetition_detection: RepetitionDetectionParams | None = None

    @field_validator("stop", "bad_words")
    @classmethod
    def check_texts(cls, texts: str | list[str] | None, field: ValidationInfo) -> str | list[str] | None:
        """Raise ValueError if the strings of a field are too long. Long bad_words would take long to tokenize."""
        limit = {"limit": MAX_CONSTRAINT} if field.field_name == "bad_words" else {}
        check_length(f"{field.field_name}", texts or (), **limit)
        return texts

    def params(self, num_logprobs: int | None, constraint: Mapping[str, Any], field_name: str) -> dict[str, Any]:
        """Return the arguments of SamplingParams that the body sets.

        `constraint` holds the arguments of StructuredOutputsParams that follow from the body's field `field_name`.
        Raise InvalidRequest for conflicting fields, or if the constraint is invalid or too large.
        """
        params = {name: value for name, value in self.__dict__.items() if value is not None and name in SAMPLING_FIELDS}
        if params.get("logprob_token_ids"):
            if num_logprobs is None:
                raise InvalidRequest("'logprob_token_ids' requires 'logprobs'.", "logprob_token_ids")
        elif num_logprobs is not None:
            params["logprobs"] = num_logprobs
        if constraint and self.structured_outputs:
            raise InvalidRequest(f"Set '{field_name}' or 'structured_outputs', not both.", field_name)
        if constraint or self.structured_outputs is not None:
            name = field_name if constraint else "structured_outputs"
            params["structured_outputs"] = structured_outputs(name, constraint or self.structured_outputs or {})
        return params


# Fields that ParsedRequest has under the same names, those of SamplingParams, and names that begin the engine's errors.
REQUEST_FIELDS = {"model", "request_id", "cache_salt", "truncate_prompt_tokens", "truncation_side", "return_token_ids"}
SAMPLING_FIELDS = {each.name for each in fields(SamplingParams)} - {"logprobs", "structured_outputs"}
ENGINE_FIELDS = SAMPLING_FIELDS | {"logprobs", "structured_outputs", "prompt", "dimensions"}


def structured_outputs(name: str, constraint: Mapping[str, Any]) -> StructuredOutputsParams:
    """Return the constraint from the body's field `name`. Raise InvalidRequest if it is invalid or too large."""
    if (size := len(json.dumps(constraint))) > MAX_CONSTRAINT:
        raise InvalidRequest(f"Invalid '{name}': it must have at most {MAX_CONSTRAINT} characters, got {size}.", name)
    try:
        return StructuredOutputsParams.of(dict(constraint))
    except ValueError as error:
        raise InvalidRequest(f"Invalid '{name}': {error}", name) from None


class Schema(Object):
    """An object with a JSON schema in its field `schema`."""

    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(Schema):
    """A response_format, or a text.format: there, the fields of `json_schema` are at the top level."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @model_validator(mode="after")
    def check_schema(self) -> Self:
        """Raise ValueError if the schema is missing."""
        if self.type == "json_schema" and (self.json_schema or self).schema_ is None:
            raise ValueError("a json_schema requires a schema")
        return self

    def constraint(self) -> dict[str, Any]:
        """Return the format as arguments of StructuredOutputsParams."""
        if self.type == "json_schema":
            return {"json": (self.json_schema or self).schema_}
        return {"json_object": True} if self.type == "json_object" else {}


class ChunkedBody(SamplingBody):
    """The fields shared by completions and chats, whose streams consist of chunks."""

    n: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    stream_interval: Annotated[int, Field(ge=1)] | None = None

    def parsed(self) -> ParsedRequest:
        """Translate the body for the engine. Raise an InvalidRequest that names the invalid field."""
        raise NotImplementedError

    def checked_stream_options(self) -> StreamOptions | None:
        """Return the options of the stream, or None without a stream. Raise InvalidRequest for conflicting fields."""
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("'prompt_logprobs' requires 'stream' to be false.", "prompt_logprobs")
        options = self.stream_options or StreamOptions()
        if not self.stream and options != StreamOptions():
            raise InvalidRequest("'stream_options' requires 'stream' to be true.", "stream_options")
        return options if self.stream else None

    def constraint(self) -> dict[str, Any]:
        """Return response_format as arguments of StructuredOutputsParams."""
        return self.response_format.constraint() if self.response_format else {}


def model_formats(
    tokenizer: "HFTokenizer | None",
    chat_template: str | None,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
) -> ModelFormats:
    """Return the formats of a model's chats. "auto" detects a format from the chat template; "none" turns it off."""
    template, special_tokens, token_ids = None, [], {}
    if tokenizer is not None:
        with suppress(ValueError):  # there is no template
            template = choose_template(tokenizer, chat_template, tools=())
        added_tokens = tokenizer.backend.get_added_tokens_decoder()
        special_tokens = [token.content for token in added_tokens.values() if token.special]
        token_ids = {token.content: token_id for token_id, token in added_tokens.items()}
    tools, reasoning = (None if name == "none" else name for name in (tool_call_parser, reasoning_parser))
    return formats_for(template, tools, reasoning, special_tokens, token_ids)


# Responses

Sample: TypeAlias = "CompletionOutput | Piece"  # one sample's whole output, or the new part of it in a stream


class MessageStream:
    """A parser for the message of one sample in a stream."""

    def __init__(self, format: MessageFormat, include_reasoning: bool) -> None:
        self._format, self._parser, self._include_reasoning = format, AssistantParser(format), include_reasoning
        self.has_calls = False  # whether the message so far has a tool call

    def feed(self, sample: Sample) -> MessageDelta:
        """Return the part of the message that the sample's new text completes."""
        part = self._parser.feed(sample.text, sample.finish_reason is not None, is_cut(sample, self._format))
        self.has_calls |= bool(part.tool_calls)
        return part if self._include_reasoning else replace(part, reasoning="")


def is_cut(sample: Sample, format: MessageFormat) -> bool:
    """Return whether the sample's end may cut off a call, as max_tokens can or, in a forced call, a stop string."""
    return sample.finish_reason == "length" or format.forced is not None


def whole_message(sample: Sample, format: MessageFormat, include_reasoning: bool) -> MessageDelta:
    """Return the message of a complete output."""
    message = read_message(sample.text, format, is_cut(sample, format))
    return message if include_reasoning else replace(message, reasoning="")


def ending(sample: Sample, has_calls: bool = False) -> dict[str, Any]:
    """Return the fields that say why a sample ended. Both are None as long as the sample is running."""
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
