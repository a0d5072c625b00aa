"""Messages as OpenAI's interface has them, in the form that a template of texts expects."""

import json
from functools import lru_cache
from typing import Any

from jinja2 import nodes

from .template_environment import parse

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}


def as_template_expects(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """The messages as vLLM gives them to a template.

    Contents in parts become one text, unless the template goes through the parts itself. Arguments of calls become
    dicts. A developer's message becomes the system's where the template knows no developer. Raises ValueError for a
    part that is no text.
    """
    takes_parts = reads_parts(template)
    converted = []
    for i, message in enumerate(messages):
        content = contents(message.get("content", []), takes_parts and message.get("role") != "tool", f"message {i}")
        converted.append(with_arguments({**message, "content": content}, i))
    is_known = "'developer'" in template or '"developer"' in template
    has_developer = any(message.get("role") == "developer" for message in converted)
    return merge_systems(converted) if has_developer and not is_known else converted


def contents(content: Any, takes_parts: bool, where: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ValueError(f"{where}: content must be a text or a list of parts, not {type(content).__name__}")
    texts = [text_of(part, where) for part in content]
    return [{"type": "text", "text": text} for text in texts] if takes_parts else "\n".join(texts)


def merge_systems(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The developer's and the system's messages as one, at the start."""
    systems = [message for message in messages if message.get("role") in ("system", "developer")]
    texts = [content_text for message in systems if (content_text := joined(message["content"]))]
    others = [message for message in messages if message.get("role") not in ("system", "developer")]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def joined(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def text_of(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    name = TEXT_PARTS.get(kind) if isinstance(part, dict) else None
    if name is None:
        raise ValueError(f"{where}: a part of type {kind!r} is no text, and the model reads only text")
    if not isinstance(part.get(name), str):
        raise ValueError(f"{where}: a part of type {kind!r} must have a text as its {name!r}")
    return part[name]


def with_arguments(message: dict[str, Any], i: int) -> dict[str, Any]:
    """The arguments of an assistant's calls as dicts. An empty list of calls is left out."""
    calls = message.get("tool_calls")
    if message.get("role") != "assistant" or not isinstance(calls, list):
        return message
    if not calls:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    converted = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ValueError(f'message {i}: a tool call must be as {{"type": "function", "function": {{...}}}}')
        converted.append({**call, "function": {**function, "arguments": arguments_of(function.get("arguments"))}})
    return {**message, "tool_calls": converted}


def arguments_of(value: Any) -> dict[str, Any]:
    """What a model once wrote stays in the conversation: arguments that are no JSON object are taken for none."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


@lru_cache(maxsize=32)
def reads_parts(template: str) -> bool:
    """True if the template has a loop over a message's content.

    >>> reads_parts("{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}")
    True
    >>> reads_parts("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    False
    """
    tree = parse(template)
    names = {"content"}  # and the names that stand for it
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node, names):
            names.add(assign.target.name)
    for macro in tree.find_all(nodes.Macro):
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                given = zip(call.args, macro.args, strict=False)
                names |= {parameter.name for value, parameter in given if is_content(value, names)}
    return any(is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def is_content(node: nodes.Node | None, names: set[str]) -> bool:
    while isinstance(node, nodes.Filter | nodes.Test):
        node = node.node
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return is_content(node.node, names)
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Name) and node.name in names
