"""A line of OpenAI's batches: {"custom_id": ..., "method": "POST", "url": "/v1/completions", "body": {...}}."""

from typing import Any

from ..core.input_processor import Prompt
from .json_values import read_field, shortened
from .request import PARAMS, Chat, Defaults, Request, check_names, make_params

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LINE = {"custom_id": str, "method": str, "url": str, "body": dict}
NOT_A_MATTER_OF_TOKENS = {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
ONLY_AT: dict[str, tuple[Any, ...]] = {  # what is not served here may be said at the value that asks for nothing
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
CHAT_PARAMS = PARAMS | {"logprobs": bool, "max_completion_tokens": int, "top_logprobs": int}


def is_openai_line(value: dict[str, Any]) -> bool:
    return not value.keys().isdisjoint({"custom_id", "body", "url"})


def read_openai(index: int, value: dict[str, Any], defaults: Defaults) -> Request:
    """Raises ValueError, naming the field and the value. null is as good as not said."""
    check_names(value, LINE, "a line of a batch has")
    for name, hint in LINE.items():
        if name not in value and name != "method":
            raise ValueError(f"it has no {name}")
        read_field(name, value.get(name, "POST"), hint)
    if value.get("method", "POST") != "POST":
        raise ValueError(f"method must be POST, not {shortened(value['method'])}")
    url, body = value["url"], {name: each for name, each in value["body"].items() if each is not None}
    if url not in (COMPLETIONS, CHAT):
        raise ValueError(f"url must be {COMPLETIONS} or {CHAT}, not {shortened(url)}")
    check_body(body, url)
    is_chat = url == CHAT
    given = chat_params_of(body) if is_chat else params_of(body)
    unsaid = {**defaults.recommended, **({"max_tokens": None} if is_chat else {}), **defaults.params}
    params = make_params(index, given, defaults._replace(params=unsaid))
    return Request(value["custom_id"], index, chat_of(body) if is_chat else prompt_of(body), params, url)


def check_body(body: dict[str, Any], url: str) -> None:
    own = ["prompt"] if url == COMPLETIONS else ["messages", "chat_template_kwargs", *CHAT_PARAMS]
    check_names(body, [*own, *PARAMS, *NOT_A_MATTER_OF_TOKENS, *ONLY_AT, "best_of"], "a body may have")
    for name, allowed in ONLY_AT.items():
        if name in body and body[name] not in allowed:
            raise ValueError(f"{name} {shortened(body[name])} is not served here: leave it out")
    if body.get("best_of", 1) not in (1, body.get("n", 1)):
        raise ValueError("best_of is not served here: ask for n samples, and choose among them")


def prompt_of(body: dict[str, Any]) -> Prompt:
    if "prompt" not in body:
        raise ValueError("its body has no prompt")
    prompt = body["prompt"]
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise ValueError(f"prompt has {len(prompt)} prompts: give each a line of its own")
        prompt = prompt[0]
    return read_field("prompt", prompt, str | list[int])


def params_of(body: dict[str, Any]) -> dict[str, Any]:
    return {name: read_field(name, each, PARAMS[name]) for name, each in body.items() if name in PARAMS}


def chat_params_of(body: dict[str, Any]) -> dict[str, Any]:
    """logprobs is true or false there, and how many are told has a name of its own."""
    given = {name: read_field(name, each, CHAT_PARAMS[name]) for name, each in body.items() if name in CHAT_PARAMS}
    if "max_completion_tokens" in given:
        given["max_tokens"] = given.pop("max_completion_tokens")
    is_told, count = given.pop("logprobs", False), given.pop("top_logprobs", None)
    if count and not is_told:
        raise ValueError("top_logprobs needs logprobs to be true")
    return given | ({"logprobs": count or 0} if is_told else {})


def chat_of(body: dict[str, Any]) -> Chat:
    messages = read_field("messages", body.get("messages"), list[dict])
    if not messages:
        raise ValueError("messages is empty: an answer needs a question")
    options = read_field("chat_template_kwargs", body.get("chat_template_kwargs", {}), dict)
    for number, message in enumerate(messages):
        check_message(f"messages[{number}]", message)
    return Chat(messages, options)


def check_message(name: str, message: dict[str, Any]) -> None:
    """Content is a text, or parts that are texts."""
    read_field(f"{name}.role", message.get("role"), str)
    content = message.get("content")
    if not isinstance(content, list):
        read_field(f"{name}.content", content, str)
        return
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"{name}.content has a part that is no text: {shortened(part)}")
