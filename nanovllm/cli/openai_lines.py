"""A line of OpenAI's batches: {"custom_id": ..., "method": "POST", "url": "/v1/completions", "body": {...}}."""

from typing import Any

from ..server.openai.bodies import Body, Unsaid, read_body
from ..server.openai.chats import Chat
from ..server.openai.fields import CHAT, COMPLETIONS, check_names
from ..server.openai.json_values import read_field, shortened
from .request import Defaults, Request, make_params

LINE = {"custom_id": str, "method": str, "url": str, "body": dict}


def is_openai_line(value: dict[str, Any]) -> bool:
    return not value.keys().isdisjoint({"custom_id", "body", "url"})


def read_openai(index: int, value: dict[str, Any], defaults: Defaults) -> Request:
    """Raises ValueError, naming the field and the value."""
    check_names(value, LINE, "a line of a batch has")
    for name, hint in LINE.items():
        if name not in value and name != "method":
            raise ValueError(f"it has no {name}")
        read_field(name, value.get(name, "POST"), hint)
    if value.get("method", "POST") != "POST":
        raise ValueError(f"method must be POST, not {shortened(value['method'])}")
    url = value["url"]
    if url not in (COMPLETIONS, CHAT):
        raise ValueError(f"url must be {COMPLETIONS} or {CHAT}, not {shortened(url)}")
    body = read_body(url, value["body"], Unsaid(defaults.params, defaults.recommended))
    check_served(body)
    prompt = body.prompts if isinstance(body.prompts, Chat) else body.prompts[0]
    return Request(
        value["custom_id"], index, prompt, make_params(index, body.params, defaults._replace(params={})), url
    )


def check_served(body: Body) -> None:
    """Raises ValueError for what only the server does."""
    if body.stream:
        raise ValueError("stream true is not served here: leave it out")
    if body.echo:
        raise ValueError("echo true is not served here: leave it out")
    if not isinstance(body.prompts, Chat) and len(body.prompts) > 1:
        raise ValueError(f"prompt has {len(body.prompts)} prompts: give each a line of its own")
    if body.add_special_tokens == body.is_chat:
        raise ValueError(f"add_special_tokens {str(body.is_chat).lower()} is not served here: leave it out")
