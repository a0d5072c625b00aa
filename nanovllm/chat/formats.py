"""The formats in which models write thoughts and tool calls, under vLLM's names, and how to detect them.

| parser        | a call                                                                                           |
|---------------|--------------------------------------------------------------------------------------------------|
| `hermes`      | `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`                                  |
| `llama3_json` | `{"name": "add", "parameters": {"a": 1}}`, after an optional `<|python_tag|>`; `;` between calls |
| `mistral`     | `[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]` or `[TOOL_CALLS]add[ARGS]{"a": 1}`       |

`qwen3` and `deepseek_r1` write thoughts as `<think>...</think>`. They differ in how an output begins: a
`deepseek_r1` model always thinks first, even if neither the prompt nor the output has the opening tag.
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
    takes_bare_calls: bool = False  # a call needs no tag at the start of a message or after another call
    takes_names: bool = False  # a name may precede the arguments, as in add[ARGS]{"a": 1}
    has_short_ids: bool = False  # the chat template accepts only call ids of nine letters and digits
    key: str = "arguments"  # the key of a call's arguments
    layout: str = ""  # the order of text and calls in an output, as a rule of a Lark grammar

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

    reasoning: ReasoningFormat | None = None
    starts_in_thought: bool = False  # the prompt opened the thought, or the model always thinks
    tools: ToolFormat | None = None
    tool_names: Collection[str] = ()  # names of the request's tools
    forced: ForcedCall | None = None
    parallel_tool_calls: bool = True  # False keeps only the first call
    special_tokens: Collection[str] = ()  # texts that never reach the client

    def new_id(self) -> str:
        """Return a new id for a call, in vLLM's format."""
        has_short_ids = self.tools is not None and self.tools.has_short_ids
        return secrets.token_hex(5)[:9] if has_short_ids else f"chatcmpl-tool-{secrets.token_hex(16)}"


@dataclass(frozen=True)
class Parsers:
    """The formats of one model."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    special_tokens: Collection[str] = ()
    token_ids: Mapping[str, int] = field(default_factory=dict)  # of the tags that are single tokens

    def strict_grammar(self, functions: Sequence[Mapping[str, Any]]) -> str | None:
        """Return a grammar that makes calls of strict functions follow their schemas, or None if it isn't needed."""
        if self.tools is None or not any(function.get("strict") for function in functions):
            return None
        return strict_grammar(functions, self.tools, self.token_ids)

    def for_prompt(
        self,
        prompt: str,
        tool_names: Collection[str] = (),
        forced: ForcedCall | None = None,
        parallel_tool_calls: bool = True,
    ) -> MessageFormat | None:
        """Return the format of the outputs for a rendered prompt, or None if they are plain text.

        `tool_names` are the tools that the model may call: none for tool_choice "none". If the prompt ends with the
        opening tag of a thought, outputs begin inside the thought. If it ends with the closing tag, as with
        enable_thinking=false, outputs have no thought.
        """
        reasoning, prompt = self.reasoning, prompt.rstrip()
        if reasoning is not None and prompt.endswith(reasoning.end):
            reasoning = None
        tools = self.tools if tool_names else None
        if reasoning is None and tools is None and forced is None:
            return None
        is_inside = reasoning is not None and (reasoning.always_thinks or prompt.endswith(reasoning.start))
        return MessageFormat(reasoning, is_inside, tools, tool_names, forced, parallel_tool_calls, self.special_tokens)


def parsers_for(
    template: str | None,
    tool_call_parser: str | None = "auto",
    reasoning_parser: str | None = "auto",
    special_tokens: Collection[str] = (),
    token_ids: Mapping[str, int] | None = None,
) -> Parsers:
    """Return the parsers with these names. "auto" detects them from the chat template, and None turns them off.

    Raise ValueError for an unknown name.
    """
    template = template or ""
    tools = choose("tool_call_parser", tool_call_parser, tool_parser_of(template), TOOL_FORMATS)
    reasoning = choose("reasoning_parser", reasoning_parser, reasoning_parser_of(template), REASONING_FORMATS)
    return Parsers(tools, reasoning, special_tokens, token_ids or {})


def choose(argument: str, name: str | None, detected: str | None, formats: Mapping[str, T]) -> T | None:
    """Return the format with this name, or the detected one if it is "auto". Raise ValueError for an unknown name."""
    name = detected if name == "auto" else name
    if name is not None and name not in formats:
        raise ValueError(f"{argument} must be one of auto, {', '.join(formats)}, got {name!r}")
    return None if name is None else formats[name]


def tool_parser_of(template: str) -> str | None:
    """Return the name of the format in which a chat template writes calls, or None for an unknown format.

    >>> tool_parser_of("{{ '[TOOL_CALLS] [' }}"), tool_parser_of("{{ message.content }}")
    ('mistral', None)
    """
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:  # some families write XML between the same tags
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    return "llama3_json" if "<|python_tag|>" in template or '"parameters": ' in template else None


def reasoning_parser_of(template: str) -> str | None:
    """Return the name of the format in which a chat template writes thoughts, or None if it doesn't write any."""
    if "</think>" not in template and "<think>" not in template:
        return None
    return "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"


def strict_grammar(functions: Sequence[Mapping[str, Any]], tools: ToolFormat, token_ids: Mapping[str, int]) -> str:
    """Return a Lark grammar for text and calls in which the arguments of strict functions follow their schemas.

    `token_ids` has the ids of the tags that are single tokens.
    """

    def terminal(tag: str) -> str:
        return f"<[{token_ids[tag]}]>" if tag in token_ids else json.dumps(tag)

    calls, takes_names = [], tools.takes_names and "[ARGS]" in token_ids
    for function in functions:
        name = json.dumps(function["name"])
        schema = parameters_of(function) if function.get("strict") else {"type": "object"}
        arguments = f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': ' ?'}})}"
        opening = json.dumps(f'{{"name": {name}, "{tools.key}": ')
        calls.append(f"{name} {terminal('[ARGS]')} {arguments}" if takes_names else f'{opening} {arguments} "}}"')
    head, layout = f"head: TEXT? {terminal(tools.start)}", "(head call)* TEXT?" if takes_names else tools.layout
    if tools.start not in token_ids:  # find the tag in the text; bare calls need none
        head, layout = rf"head[lazy]: /(.|\n)*{re.escape(tools.start)}/", layout.removeprefix("head? ")
    text = r"\s*[^{\s](.|\n)*" if tools.takes_bare_calls else r"(.|\n)+"
    rules = f"start: {layout}", head, f"call: {' | '.join(calls)}", f"end: {terminal(tools.end)}", f"TEXT: /{text}/"
    return "\n".join(rules)
