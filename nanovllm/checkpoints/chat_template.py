"""Messages to a prompt: a checkpoint's chat template, rendered as transformers renders it.

Messages may be as in OpenAI's interface. A template sees texts, numbers, lists and dicts, and nothing that has methods
of its own; template_environment.py is where it runs.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jinja2 import nodes

from .entries import Entries, brief, read_json_if_any
from .template_environment import parse, render
from .tool_schema import function_schema


def plain(value: Any) -> Any:
    """Return a copy of `value` in JSON's types; anything else becomes a word that names its type.

    >>> plain({"content": ("a", 1, None), "image": object()})
    {'content': ('a', 1, None), 'image': '<object>'}
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):  # members of an Enum, and the like
        if isinstance(value, kind):
            return getattr(kind, f"__{kind.__name__}__")(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(plain, value))
    if isinstance(value, np.generic):
        return plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):  # of pydantic
        return plain(value.model_dump())
    return f"<{type(value).__name__}>"


TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}


def as_template_expects(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Return the messages as vLLM gives them to a template.

    Contents in parts become one text, unless the template goes through the parts itself. Arguments of calls become
    dicts. A developer's message becomes the system's where the template knows no developer. Raise ValueError for a
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
    """Return the messages with the developer's and the system's as one, at the start."""
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
    """Return an assistant's message with the arguments of its calls as dicts, and without an empty list of calls."""
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
    """Return the arguments of a call. A model may have written something that is no JSON: it then has none."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


@lru_cache(maxsize=32)
def reads_parts(template: str) -> bool:
    """Return whether the template has a loop over a message's content.

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


REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's thoughts; templates read the first
TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # marks where the last message ends


class HasTemplate(Protocol):
    chat_template: str | dict[str, str] | None
    special_tokens_map: dict[str, str]


def render_chat(
    tokenizer: HasTemplate,
    messages: Sequence[Any],
    /,
    *,
    chat_template: str | None = None,
    tools: Sequence[Mapping | Callable] | None = None,
    documents: Sequence[Mapping] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool | str = False,
    **kwargs: Any,
) -> str:
    """Return the prompt of a conversation in OpenAI's form: parts of text, arguments as JSON.

    Raise ValueError for a conversation that cannot be rendered; with the template's own words if it raises.
    """
    template = choose_template(tokenizer, chat_template, tools)
    return apply_chat_template(
        tokenizer,
        as_template_expects(checked_messages(messages), template),
        chat_template=template,
        tools=tools,
        documents=documents,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **kwargs,
    )


def apply_chat_template(
    tokenizer: HasTemplate,
    messages: Sequence[Any],
    /,
    *,
    chat_template: str | None = None,
    tools: Sequence[Mapping | Callable] | None = None,
    documents: Sequence[Mapping] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool | str = False,
    **kwargs: Any,
) -> str:
    """Return the prompt of a conversation. The template gets the messages as they are.

    `kwargs` are names that the template knows, as enable_thinking; they come before the tokenizer's special tokens.
    """
    if "messages" in kwargs:
        raise ValueError("messages is the template's name for the conversation: no other value may have it")
    for name, given in (("tools", tools), ("documents", documents)):
        if given is not None and not isinstance(given, list | tuple):
            raise ValueError(f"{name} must be a list, not {type(given).__name__}")
    template = choose_template(tokenizer, chat_template, tools)
    chat = [with_reasoning(message) for message in checked_messages(messages)]
    field = "content" if continue_final_message is True else continue_final_message
    if field and add_generation_prompt:
        raise ValueError("continue_final_message goes on with the last message, add_generation_prompt begins a new one")
    last = mark_end(chat[-1], field, template) if field else ""
    values = {
        "messages": chat,
        "tools": None if tools is None else plain([tool_schema(tool) for tool in tools]),
        "documents": None if documents is None else plain([checked_document(each) for each in documents]),
        "add_generation_prompt": add_generation_prompt,
    }
    text = render(template, {**tokenizer.special_tokens_map, **plain(kwargs), **values})
    return cut_at_mark(text, last) if field else text


def choose_template(tokenizer: HasTemplate, given: str | None, tools: object) -> str:
    """Return the template to use. `given` is one, or the name of one of the tokenizer's."""
    if given is not None and not isinstance(given, str):
        raise ValueError(f"chat_template must be a text, not {type(given).__name__}")
    known = tokenizer.chat_template
    if isinstance(known, dict):
        if given is None and tools is not None and "tool_use" in known:
            return known["tool_use"]
        if given is None and "default" not in known:
            raise ValueError(f"the checkpoint has no default chat template: name one of {', '.join(sorted(known))}")
        return known["default"] if given is None else known.get(given, given)
    if given is None and known is None:
        raise ValueError("the checkpoint has no chat template: give one as chat_template")
    return known if given is None else given


def checked_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return copies of the messages, without entries that are None."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise ValueError("the conversation is empty: at least 1 message is needed")
    chat = [plain(message) for message in messages]
    for i, message in enumerate(chat):
        if not isinstance(message, dict):
            raise ValueError(f'message {i} must be as {{"role": "user", "content": ...}}, not {brief(messages[i])}')
    return [{name: value for name, value in message.items() if value is not None} for message in chat]


def with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its thoughts under all of the names that templates read."""
    thoughts = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


def tool_schema(tool: Mapping | Callable) -> Any:
    if isinstance(tool, Mapping):
        return tool
    if callable(tool):
        return function_schema(tool)
    raise ValueError(f"a tool must be a JSON schema or a function, not {type(tool).__name__}")


def checked_document(document: Mapping) -> Mapping:
    if isinstance(document, Mapping):
        return document
    raise ValueError(f'a document must be as {{"title": ..., "text": ...}}, not {type(document).__name__}')


def mark_end(message: dict[str, Any], field: str, template: str) -> str:
    """Put the tag behind the text that is to go on, and return the text."""
    value = message.get(field)
    names = [name for name in REASONING if message.get(name) == value] if field in REASONING else [field]
    if value is None:
        raise ValueError(f"continue_final_message: the last message has no {field} to go on with")
    if not any(name in template for name in names):
        raise ValueError(f"continue_final_message: the chat template does not read {field}")
    if isinstance(value, str):
        message.update({name: value + TAG for name in names})
        return value
    part = next((part for part in reversed(value) if isinstance(part, dict) and "text" in part), None)
    if part is None:
        raise ValueError("continue_final_message: the last message has no text to go on with")
    text = part["text"]
    part["text"] = text + TAG
    return text


def cut_at_mark(text: str, last: str) -> str:
    if last.strip() not in text or TAG.strip() not in text:
        raise ValueError("continue_final_message: the chat template leaves out the end of the last message")
    end = text.rindex(TAG.strip())
    is_whole = text.startswith(TAG, end)
    return text[:end] if is_whole else text[:end].rstrip()  # a template that trims the message has trimmed the tag


def find_chat_template(folder: Path, config: Entries) -> str | dict[str, str] | None:
    """Return the folder's chat template, or its templates by name. Their own files win over tokenizer_config.json."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files = {"default": folder / "chat_template.jinja"} | files
    templates = {name: read_text(path) for name, path in files.items()}
    if templates:
        return templates["default"] if [*templates] == ["default"] else templates
    older = Entries(read_json_if_any(folder / "chat_template.json"), folder / "chat_template.json")
    holder = config if "chat_template" in config else older
    value = holder.values.get("chat_template")
    if isinstance(value, list):
        entries = [Entries({"": each}, holder.path, f"chat_template[{i}]").entries("") for i, each in enumerate(value)]
        return {entry.text("name"): entry.text("template") for entry in entries}
    if isinstance(value, dict):
        return {name: holder.entries("chat_template").text(name) for name in value}
    return holder.text("chat_template") if value else None


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
