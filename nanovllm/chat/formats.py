"""The formats in which models write thoughts and tool calls, under vLLM's names for their parsers.

| parser        | a call                                                                                           |
|---------------|--------------------------------------------------------------------------------------------------|
| `hermes`      | `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`                                  |
| `llama3_json` | `{"name": "add", "parameters": {"a": 1}}`, after an optional `<|python_tag|>`; `;` between calls |
| `mistral`     | `[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]` or `[TOOL_CALLS]add[ARGS]{"a": 1}`       |

`qwen3` and `deepseek_r1` both read thoughts in the form `<think>...</think>`. They differ in how an output begins: a
model with `deepseek_r1` always thinks first, even if neither the prompt nor the output has the opening tag.
"""

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .forced_calls import ForcedCall, parameters_of

T = TypeVar("T")


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls."""

    start: str  # the tag before a call, or before a list of calls
    end: str = ""  # the tag after a call
    separators: str = ""  # characters between calls, besides whitespace
    takes_bare_calls: bool = False  # calls need no tag at the start of a message or after a call
    takes_names: bool = False  # a name may precede the arguments, as in add[ARGS]{"a": 1}
    has_short_ids: bool = False  # the chat template accepts only call ids of nine letters and digits
    key: str = "arguments"  # the JSON key of a call's arguments
    layout: str = ""  # the order of text and calls in an output: the start rule in strict_grammar()

    @property
    def tags(self) -> set[str]:
        """All tags around and inside calls."""
        return {self.start, self.end, *(("[CALL_ID]", "[ARGS]") if self.takes_names else ())} - {""}


@dataclass(frozen=True)
class ReasoningFormat:
    """A format of thoughts."""

    start: str = "<think>"
    end: str = "</think>"
    always_thinks: bool = False  # an output begins inside a thought, even without the opening tag


TOOL_FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>", layout=r'(head "\n" call "\n" end)* TEXT?'),
    "llama3_json": ToolFormat(
        "<|python_tag|>", "", ";", takes_bare_calls=True, key="parameters", layout=r"head? call (/;\s?/ call)* | TEXT?"
    ),
    "mistral": ToolFormat(
        "[TOOL_CALLS]", takes_names=True, has_short_ids=True, layout=r'(head / ?\[/ call (", " call)* "]")* TEXT?'
    ),
}
REASONING_FORMATS = {"qwen3": ReasoningFormat(), "deepseek_r1": ReasoningFormat(always_thinks=True)}


@dataclass(frozen=True)
class MessageFormat:
    """The format of one request's outputs, for the AssistantParser of each sample."""

    reasoning_format: ReasoningFormat | None = None
    starts_in_thought: bool = False  # the prompt opened the thought, or the model always thinks
    tool_format: ToolFormat | None = None
    tool_names: Collection[str] = ()  # the tools that the model may call
    forced: ForcedCall | None = None  # set if tool_choice forces a call
    parallel_tool_calls: bool = True  # False keeps only the first call
    special_tokens: Collection[str] = ()  # texts that never reach the client

    def new_id(self) -> str:
        """Return a new random id for a call, in vLLM's format unless the chat template requires short ids."""
        has_short_ids = self.tool_format is not None and self.tool_format.has_short_ids
        return secrets.token_hex(5)[:9] if has_short_ids else f"chatcmpl-tool-{secrets.token_hex(16)}"


@dataclass(frozen=True)
class ModelFormats:
    """The formats in which one model writes tool calls and thoughts."""

    tool_format: ToolFormat | None  # None: calls are plain text
    reasoning_format: ReasoningFormat | None  # None: thoughts are plain text
    special_tokens: Collection[str] = ()
    token_ids: Mapping[str, int] = field(default_factory=dict)  # by text, for tags that are single tokens

    def strict_grammar(self, functions: Sequence[Mapping[str, Any]]) -> str | None:
        """Return a grammar that makes calls of strict functions follow their schemas, or None if it isn't needed."""
        if self.tool_format is None or not any(function.get("strict") for function in functions):
            return None
        return strict_grammar(functions, self.tool_format, self.token_ids)

    def for_prompt(
        self,
        prompt: str,
        tool_names: Collection[str] = (),
        forced: ForcedCall | None = None,
        parallel_tool_calls: bool = True,
    ) -> MessageFormat | None:
        """Return the format of the outputs for a rendered prompt, or None if they are plain text.

        `tool_names` are the tools that the model may call: none for tool_choice "none". If the prompt ends with the
        opening tag of a thought, outputs begin inside the thought. If the prompt ends with the closing tag, as with
        enable_thinking=false, outputs have no thought.
        """
        thought, prompt = self.reasoning_format, prompt.rstrip()
        if thought is not None and prompt.endswith(thought.end):
            thought = None
        calls = self.tool_format if tool_names else None
        if thought is None and calls is None and forced is None:
            return None
        is_inside = thought is not None and (thought.always_thinks or prompt.endswith(thought.start))
        return MessageFormat(thought, is_inside, calls, tool_names, forced, parallel_tool_calls, self.special_tokens)


def formats_for(
    template: str | None,
    tool_call_parser: str | None = "auto",
    reasoning_parser: str | None = "auto",
    special_tokens: Collection[str] = (),
    token_ids: Mapping[str, int] | None = None,
) -> ModelFormats:
    """Return the formats that the named parsers read: "auto" detects one from the chat template, None turns it off.

    Raise ValueError for an unknown name.
    """
    template = template or ""
    calls = choose_format("tool_call_parser", tool_call_parser, tool_parser_of(template), TOOL_FORMATS)
    thought = choose_format("reasoning_parser", reasoning_parser, reasoning_parser_of(template), REASONING_FORMATS)
    return ModelFormats(calls, thought, special_tokens, token_ids or {})


def choose_format(argument: str, name: str | None, detected_name: str | None, formats: Mapping[str, T]) -> T | None:
    """Return the format with this name or, for "auto", with the detected name. Return None if the name is None.

    Raise ValueError for an unknown name.
    """
    name = detected_name if name == "auto" else name
    if name is not None and name not in formats:
        raise ValueError(f"{argument} must be one of auto, {', '.join(formats)}, got {name!r}")
    return None if name is None else formats[name]


def tool_parser_of(template: str) -> str | None:
    """Return the name of the format in which a chat template writes calls, or None if it is unknown.

    >>> tool_parser_of("{{ '[TOOL_CALLS] [' }}"), tool_parser_of("{{ message.content }}")
    ('mistral', None)
    """
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:  # some models write XML between the same tags
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    return "llama3_json" if "<|python_tag|>" in template or '"parameters": ' in template else None


def reasoning_parser_of(template: str) -> str | None:
    """Return the name of the format in which a chat template writes thoughts, or None if it doesn't write any."""
    if "</think>" not in template and "<think>" not in template:
        return None
    return "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"


def strict_grammar(functions: Sequence[Mapping[str, Any]], format: ToolFormat, token_ids: Mapping[str, int]) -> str:
    """Return a Lark grammar for text and calls in which the arguments of strict functions follow their schemas.

    A function is strict if its field `strict` is true. `token_ids` maps each tag that is a single token to its id.
    """

    def terminal(tag: str) -> str:
        return f"<[{token_ids[tag]}]>" if tag in token_ids else json.dumps(tag)

    calls, writes_names = [], format.takes_names and "[ARGS]" in token_ids
    for function in functions:
        name = json.dumps(function["name"])
        schema = parameters_of(function) if function.get("strict") else {"type": "object"}
        arguments = f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': ' ?'}})}"
        opening = json.dumps(f'{{"name": {name}, "{format.key}": ')
        calls.append(f"{name} {terminal('[ARGS]')} {arguments}" if writes_names else f'{opening} {arguments} "}}"')
    head, layout = f"head: TEXT? {terminal(format.start)}", "(head call)* TEXT?" if writes_names else format.layout
    if format.start not in token_ids:  # find the tag in the text; bare calls need no tag
        head, layout = rf"head[lazy]: /(.|\n)*{re.escape(format.start)}/", layout.removeprefix("head? ")
    text = r"\s*[^{\s](.|\n)*" if format.takes_bare_calls else r"(.|\n)+"
    rules = f"start: {layout}", head, f"call: {' | '.join(calls)}", f"end: {terminal(format.end)}", f"TEXT: /{text}/"
    return "\n".join(rules)
