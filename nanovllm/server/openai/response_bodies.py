"""The body of /v1/responses, read as that of a chat: nothing is stored, so each brings its whole conversation."""

from dataclasses import dataclass
from typing import Any

from .chats import check_message
from .elsewhere import ELSEWHERE, OF_RESPONSES_ELSEWHERE
from .fields import NOT_A_MATTER_OF_TOKENS, PARAMS, check_names, check_only_at
from .json_values import read_field, shortened
from .params import KINDS

Message = dict[str, Any]
SAME = {  # as a chat has them
    *("model", "stream", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
    *(NOT_A_MATTER_OF_TOKENS | PARAMS.keys() - {"n", "max_tokens", "logprobs", "prompt_logprobs"}),
}
OWN = {"input", "instructions", "max_output_tokens", "text", "top_logprobs", "include", "reasoning", "tools"}
NOT_HERE = ELSEWHERE | OF_RESPONSES_ELSEWHERE
TEXT, REASONING = ("format", "verbosity"), ("effort", "summary", "generate_summary")
STORED = {"previous_response_id", "conversation", "prompt"}  # of an earlier answer
LOGPROBS = "message.output_text.logprobs"
INCLUDED = {LOGPROBS, "reasoning.encrypted_content"}  # no model here has any reasoning of its own


@dataclass(frozen=True)
class ResponseBody:
    chat: dict[str, Any]  # a body of /v1/chat/completions
    told: dict[str, Any]  # fields that the answer repeats


def read_response_body(body: dict[str, Any]) -> ResponseBody:
    """Raises ValueError, naming the field and the value."""
    body = {name: each for name, each in body.items() if each is not None}
    check_fields(body)
    chat = {name: each for name, each in body.items() if name in SAME}
    chat["messages"] = messages_of(body)
    if "max_output_tokens" in body:
        most = chat["max_completion_tokens"] = read_field("max_output_tokens", body["max_output_tokens"], int)
        if most < 1:
            raise ValueError(f"max_output_tokens must be at least 1, not {most}")
    tools = [tool_of(each) for each in read_field("tools", body.get("tools", []), list[dict])]
    reasoning = read_field("reasoning", body.get("reasoning", {}), dict)
    check_names(reasoning, REASONING, "reasoning may have")
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    chat |= ({"tools": tools} if tools else {}) | logprobs_of(body) | form_of(body)
    return ResponseBody(chat, told_of(body))


def told_of(body: dict[str, Any]) -> dict[str, Any]:
    """Fields that the answer repeats."""
    unsaid: dict[str, Any] = {"instructions": None, "max_output_tokens": None}
    unsaid |= {"metadata": {}, "tools": [], "text": {}}
    unsaid |= {"tool_choice": "auto", "parallel_tool_calls": True, "top_logprobs": 0, "reasoning": None, "user": None}
    told = {name: body.get(name, each) for name, each in unsaid.items()}
    read_field("metadata", told["metadata"], dict[str, str])
    said = {name: each for name, each in told["text"].items() if each is not None}
    return told | {"text": {"format": {"type": "text"}} | said}


def check_fields(body: dict[str, Any]) -> None:
    check_only_at(body, NOT_HERE)
    check_names(body, sorted(SAME | OWN | NOT_HERE.keys() | STORED), "a body may have")
    for name in STORED & body.keys():
        raise ValueError(f"{name} is not served here, where no answer is stored: send the whole conversation as input")


def messages_of(body: dict[str, Any]) -> list[Message]:
    if "input" not in body:
        raise ValueError("its body has no input")
    given = read_field("input", body["input"], str | list[dict])
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not items:
        raise ValueError("input is empty: an answer needs a question")
    messages = [message_of(f"input[{i}]", item) for i, item in enumerate(items)]
    for i, message in enumerate(messages):
        check_message(f"input[{i}]", message)
    if "instructions" in body:
        instructions = read_field("instructions", body["instructions"], str)
        messages.insert(0, {"role": "system", "content": instructions})
    return messages


def message_of(name: str, item: dict[str, Any]) -> Message:
    """A message, a call that the model has made, or what has come of one."""
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    if kind == "function_call":
        function = {key: read_field(f"{name}.{key}", item.get(key), str) for key in ("name", "arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    raise ValueError(f"{name}: an item of type {shortened(kind)} is not served here")


def tool_of(tool: dict[str, Any]) -> dict[str, Any]:
    """As a chat has it."""
    if tool.get("type") != "function":
        raise ValueError(f"a tool of type {shortened(tool.get('type'))} is not served here")
    return {"type": "function", "function": {name: each for name, each in tool.items() if name != "type"}}


def logprobs_of(body: dict[str, Any]) -> dict[str, Any]:
    included = read_field("include", body.get("include", []), list[str])
    check_names(included, INCLUDED, "include may have")
    top = read_field("top_logprobs", body.get("top_logprobs", 0), int)
    return {"logprobs": True, "top_logprobs": top} if top or LOGPROBS in included else {}


def form_of(body: dict[str, Any]) -> dict[str, Any]:
    """text.format as response_format."""
    text = read_field("text", body.get("text", {}), dict)
    check_names(text, TEXT, "text may have")
    check_only_at({f"text.{name}": each for name, each in text.items()}, {"text.verbosity": ("medium", None)})
    form = read_field("text.format", text.get("format") or {"type": "text"}, dict)
    if form.get("type") not in KINDS:
        raise ValueError(f"text.format.type must be one of {', '.join(KINDS)}, not {shortened(form.get('type'))}")
    if form["type"] != "json_schema":
        return {"response_format": form}
    schema = {name: each for name, each in form.items() if name != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}
