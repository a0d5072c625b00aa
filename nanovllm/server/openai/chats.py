"""A conversation in a body, and what the chat template is told beside it."""

from dataclasses import dataclass
from typing import Any

from ...checkpoints.chat_template import TEXT_PARTS
from .json_values import read_field, shortened

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
NOT_THE_TEMPLATES = {  # names that render_chat has for other things
    *("messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
}


@dataclass(frozen=True)
class Chat:
    """What a chat template makes a prompt of."""

    messages: list[dict[str, Any]]
    options: dict[str, Any]  # of the template


def chat_of(body: dict[str, Any]) -> Chat:
    """Raises ValueError, naming the field and the value."""
    messages = read_field("messages", body.get("messages"), list[dict])
    if not messages:
        raise ValueError("messages is empty: an answer needs a question")
    for number, message in enumerate(messages):
        check_message(f"messages[{number}]", message)
    return Chat(messages, template_options(body))


def template_options(body: dict[str, Any]) -> dict[str, Any]:
    """What render_chat is to be called with."""
    options = read_field("chat_template_kwargs", body.get("chat_template_kwargs", {}), dict)
    for name in options:
        if name in NOT_THE_TEMPLATES:
            raise ValueError(f"chat_template_kwargs may not have {name}: it is not a name of the template's")
    given = dict(options)
    for name in ("tools", "documents"):
        if value := read_field(name, body.get(name, []), list[dict]):
            given[name] = value
    for number, tool in enumerate(given.get("tools", [])):
        check_tool(f"tools[{number}]", tool)
    if "reasoning_effort" in body:
        effort = given["reasoning_effort"] = effort_of(body["reasoning_effort"])
        given.setdefault("enable_thinking", effort != "none")
    if read_field("continue_final_message", body.get("continue_final_message", False), bool):
        given["continue_final_message"] = True
    is_new = body.get("add_generation_prompt", not given.get("continue_final_message", False))
    if not read_field("add_generation_prompt", is_new, bool):
        given["add_generation_prompt"] = False
    return given


def effort_of(value: Any) -> str:
    if value not in EFFORTS:
        raise ValueError(f"reasoning_effort must be one of {', '.join(EFFORTS)}, not {shortened(value)}")
    return value


def check_tool(name: str, tool: dict[str, Any]) -> None:
    """A template reads a function's name, at least."""
    if tool.get("type") != "function":
        raise ValueError(f'{name}.type must be "function", not {shortened(tool.get("type"))}')
    function = read_field(f"{name}.function", tool.get("function"), dict)
    read_field(f"{name}.function.name", function.get("name"), str)


def check_message(name: str, message: dict[str, Any]) -> None:
    """Content is a text, or parts that are texts; an assistant that has called a tool may have said nothing."""
    role = read_field(f"{name}.role", message.get("role"), str)
    content = message.get("content")
    read_field(f"{name}.tool_calls", message.get("tool_calls"), list[dict] | None)
    if not isinstance(content, list):
        read_field(f"{name}.content", content, str | None if role == "assistant" else str)
        return
    for part in content:
        if not is_text_part(part):
            raise ValueError(f"{name}.content has a part that is no text: {shortened(part)}")


def is_text_part(part: Any) -> bool:
    """
    >>> is_text_part({"type": "text", "text": "a"}), is_text_part({"type": "image_url"}), is_text_part({"type": [1]})
    (True, False, False)
    """
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in TEXT_PARTS and isinstance(part.get(TEXT_PARTS[kind]), str)
