"""What came of a request, in the form of a line of OpenAI's batches."""

import time
from typing import Any

from ..engine.outputs import CompletionOutput, RequestOutput
from ..server.openai.choices import chat_choice, completion_choice, told_of_prompt, usage
from ..server.openai.fields import CHAT
from .request import Request


def openai_result(request: Request, output: RequestOutput, model: str) -> dict[str, Any]:
    """A request that could not be served has status 400 if it came to no token, and 500 if it broke off."""
    if output.error is None:
        status, body = 200, response_body(request, output, model)
    else:
        status = 500 if output.outputs[0].token_ids else 400
        kind = "server_error" if status == 500 else "invalid_request_error"
        body = {"error": {"message": output.error, "type": kind, "param": None, "code": None}}
    response = {"status_code": status, "request_id": f"req_{request.index}", "body": body}
    return {"id": f"batch_req_{request.index}", "custom_id": request.id, "response": response, "error": None}


def response_body(request: Request, output: RequestOutput, model: str) -> dict[str, Any]:
    is_chat = request.url == CHAT
    kind, name = ("chat.completion", "chatcmpl") if is_chat else ("text_completion", "cmpl")
    made = sum(len(each.token_ids) for each in output.outputs)
    choices = [choice(each, request) for each in output.outputs]
    told = told_of_prompt(output.prompt_logprobs)
    return {
        "id": f"{name}-{request.index}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices if is_chat else [each | told for each in choices],
        "usage": usage(len(output.prompt_token_ids), made, output.num_cached_tokens),
        **(told if is_chat else {}),
    }


def choice(output: CompletionOutput, request: Request) -> dict[str, Any]:
    if request.url == CHAT:
        return chat_choice(output, output.index, request.params.num_logprobs)
    return completion_choice(output, output.index)
