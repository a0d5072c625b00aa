"""/tokenize and /detokenize, as vLLM has them."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..requests import read_json
from .chats import Chat, chat_of
from .fields import check_names
from .json_values import read_field
from .served import ServedModel

OF_CHATS = {
    *("messages", "tools", "documents", "chat_template_kwargs", "reasoning_effort"),
    *("add_generation_prompt", "continue_final_message"),
}
TO_TOKENS = {"model", "prompt", "add_special_tokens", "return_token_strs", *OF_CHATS}
TO_TEXT = {"model", "tokens"}


async def tokenize(request: Request) -> Response:
    """A text or a conversation as token ids."""
    model: ServedModel = request.app.state.server.model
    body = await read_body(request, model, TO_TOKENS)
    if ("prompt" in body) == ("messages" in body):
        raise ValueError("give a prompt or messages, one of the two")
    prompt: str | Chat = read_field("prompt", body["prompt"], str) if "prompt" in body else chat_of(body)
    special = read_field("add_special_tokens", body.get("add_special_tokens", "prompt" in body), bool)
    is_shown = read_field("return_token_strs", body.get("return_token_strs", False), bool)
    ids = (await model.tokens(prompt, special)).token_ids
    strings = [model.tokenizer.backend.id_to_token(i) for i in ids] if is_shown else None
    return JSONResponse({"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, "token_strs": strings})


async def detokenize(request: Request) -> Response:
    """Token ids as a text."""
    model: ServedModel = request.app.state.server.model
    body = await read_body(request, model, TO_TEXT)
    ids = read_field("tokens", body.get("tokens"), list[int])
    if model.tokenizer is None:
        raise ValueError("the model has no tokenizer")
    if wrong := [i for i in ids if not 0 <= i < len(model.tokenizer)]:
        raise ValueError(f"token id {wrong[0]} is not from 0 to {len(model.tokenizer) - 1}")
    return JSONResponse({"prompt": model.tokenizer.decode(ids, skip_special_tokens=False)})


async def read_body(request: Request, model: ServedModel, names: set[str]) -> dict[str, Any]:
    body = {name: each for name, each in (await read_json(request)).items() if each is not None}
    check_names(body, sorted(names), "a body may have")
    model.check_name(read_field("model", body.get("model"), str | None))
    return body
