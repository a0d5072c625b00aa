"""Which fields a body may have. One that nobody knows is told, with the nearest that there is."""

import difflib
from collections.abc import Iterable
from typing import Any, get_type_hints

from ...api import SamplingParams
from .json_values import shortened

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NOT_OF_A_REQUEST = {"output_kind", "stream_interval", "skip_clone", "flat_logprobs"}  # of how a program wants it
PARAMS = {name: hint for name, hint in get_type_hints(SamplingParams).items() if name not in NOT_OF_A_REQUEST}
OF_BOTH = {"model", "stream", "stream_options", "response_format", "add_special_tokens", *PARAMS}
OF_COMPLETIONS = {"prompt", "suffix", "best_of", "echo"}
OF_CHAT = {
    *("messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "modalities"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents", "reasoning_effort"),
}
NOT_A_MATTER_OF_TOKENS = {  # taken, and without a meaning here
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
}
ONLY_AT: dict[str, tuple[Any, ...]] = {  # what is not served here may be said at the value that asks for nothing
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
}


def check_body(body: dict[str, Any], url: str) -> None:
    """Raises ValueError for the first field that is not known, or asks for what is not served."""
    own = OF_COMPLETIONS if url == COMPLETIONS else OF_CHAT
    check_names(body, sorted(OF_BOTH | own | NOT_A_MATTER_OF_TOKENS), "a body may have")
    for name, allowed in ONLY_AT.items():
        if name in body and body[name] not in allowed:
            raise ValueError(f"{name} {shortened(body[name])} is not served here: leave it out")
    if body.get("best_of", 1) not in (1, body.get("n", 1)):
        raise ValueError("best_of is not served here: ask for n samples, and choose among them")


def check_names(names: Iterable[str], known: Iterable[str], says: str) -> None:
    """Raises ValueError for the first name that is not known, with the nearest that is."""
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name[:60], known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"{says} {', '.join(known)}"
            raise ValueError(f"unknown field {shortened_name(name)}: {hint}")


def shortened_name(name: str) -> str:
    return repr(name if len(name) <= 60 else name[:57] + "...")
