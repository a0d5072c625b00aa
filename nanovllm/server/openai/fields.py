"""Which fields a body may have. One that nobody knows is told, with the nearest that there is."""

import difflib
from collections.abc import Iterable
from typing import Any, get_type_hints

from ...engine.sampling_params import SamplingParams
from .elsewhere import ELSEWHERE, OF_CHAT_ELSEWHERE, OF_COMPLETIONS_ELSEWHERE
from .json_values import shortened

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONGEST = 60  # characters of a name that is told whole, and compared with others
NOT_OF_A_REQUEST = {"output_kind", "stream_interval", "skip_clone", "flat_logprobs"}  # of how a program wants it
PARAMS = {name: hint for name, hint in get_type_hints(SamplingParams).items() if name not in NOT_OF_A_REQUEST}
OF_BOTH = {"model", "stream", "stream_options", "response_format", "add_special_tokens", *PARAMS}
OF_COMPLETIONS = {"prompt", "best_of", "echo"}
OF_CHAT = {
    *("messages", "max_completion_tokens", "top_logprobs", "tools", "reasoning_effort"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents"),
}
NOT_A_MATTER_OF_TOKENS = {  # taken, and without a meaning here
    *("user", "metadata", "store", "service_tier", "safety_identifier", "session_id"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
}


def check_body(body: dict[str, Any], url: str) -> None:
    """Raises ValueError for the first field that is not known, or asks for what is not served."""
    own, elsewhere = (OF_COMPLETIONS, OF_COMPLETIONS_ELSEWHERE) if url == COMPLETIONS else (OF_CHAT, OF_CHAT_ELSEWHERE)
    elsewhere = ELSEWHERE | elsewhere
    check_only_at(body, elsewhere)
    check_names(body, sorted(OF_BOTH | own | NOT_A_MATTER_OF_TOKENS | elsewhere.keys()), "a body may have")
    if body.get("best_of", 1) not in (1, body.get("n", 1)):
        raise ValueError("best_of is not served here: ask for n samples, and choose among them")


def check_only_at(body: dict[str, Any], elsewhere: dict[str, tuple[Any, ...]]) -> None:
    """Raises ValueError for the first field that asks for what is served elsewhere only."""
    for name, allowed in elsewhere.items():
        if name in body and body[name] not in allowed:
            raise ValueError(f"{name} {shortened(body[name])} is not served here: leave it out")


def check_names(names: Iterable[str], known: Iterable[str], says: str) -> None:
    """Raises ValueError for the first name that is not known, with the nearest that is."""
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) if len(name) <= LONGEST else []
            hint = f"did you mean {near[0]}?" if near else f"{says} {', '.join(known)}"
            raise ValueError(f"unknown field {shortened_name(name)}: {hint}")


def shortened_name(name: str) -> str:
    return repr(name if len(name) <= LONGEST else name[: LONGEST - 3] + "...")
