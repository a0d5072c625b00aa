"""What a caller may give LLM.chat(): messages, or a list of conversations, and a template."""

from collections import abc
from pathlib import Path
from typing import Any

from ..checkpoints.message_contents import contents
from ..checkpoints.template_values import plain

Message = dict[str, Any]  # {"role": "user", "content": "Hello"}


def as_conversations(messages: Any, content_format: str = "auto") -> list[list[Message]]:
    """One conversation, or several, as a list. Raises ValueError, naming the place, for what is none.

    A content may be parts, as OpenAI's clients write it. The format "string" makes one text of them, a part a line,
    "openai" makes parts of a text, and "auto" leaves it to the template.
    """
    if content_format not in ("auto", "string", "openai"):
        raise ValueError(f"chat_template_content_format must be auto, string or openai, not {content_format!r}")
    if not isinstance(messages, list | tuple):
        raise ValueError(f"messages must be a list of messages or of conversations, not {type(messages).__name__}")
    is_one = bool(messages) and all(isinstance(message, abc.Mapping) for message in messages)
    conversations = [messages] if is_one else messages
    for i, conversation in enumerate(conversations):
        check_conversation(conversation, f"conversation {i}")
    return [[in_format(message, content_format) for message in conversation] for conversation in conversations]


def check_conversation(messages: Any, name: str) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"{name} must be a list of messages, at least one, not {messages!r}")
    for i, message in enumerate(messages):
        if not isinstance(message, abc.Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f'{name}: a message must be a dictionary with a text as its "role", not {message!r}')
        if isinstance(content := message.get("content"), str | None):
            continue
        if not isinstance(content, list | tuple):
            kind = type(content).__name__
            raise ValueError(f"{name}, message {i}: content must be a text or a list of parts, not {kind}")
        contents(plain(content), takes_parts=False, where=f"{name}, message {i}")  # raises for a part that is no text


def in_format(message: Message, content_format: str) -> Message:
    """
    >>> in_format({"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}, "string")["content"]
    'a\\nb'
    """
    content = message.get("content")
    if content_format == "openai" and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    elif content_format == "string" and isinstance(content, list | tuple):
        content = contents(plain(content), takes_parts=False, where="content")
    return {**message, "content": content} if "content" in message else {**message}


def read_template(template: str | Path | None) -> str | None:
    """The template itself, or a file's. Raises ValueError if it is neither."""
    if not isinstance(template, str | Path | None):
        raise ValueError(f"chat_template must be a template or a file's name, not {template!r}")
    if template is None or (isinstance(template, str) and any(sign in template for sign in "{}\n")):
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template {str(template)!r} is no template, and cannot be read: {error}") from None
