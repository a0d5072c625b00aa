"""What came of a request, in the form of a line of OpenAI's batches."""

import time
from typing import Any

from ..api import RequestOutput
from ..core import CompletionOutput
from .openai_lines import CHAT
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
    return {
        "id": f"{name}-{request.index}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [(chat_choice if is_chat else choice)(each) for each in output.outputs],
        "usage": usage(output),
    }


def usage(output: RequestOutput) -> dict[str, Any]:
    prompt, made = len(output.prompt_token_ids), sum(len(each.token_ids) for each in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }


def choice(output: CompletionOutput) -> dict[str, Any]:
    return {"index": output.index, "text": output.text, "logprobs": None, "finish_reason": output.finish_reason}


def chat_choice(output: CompletionOutput) -> dict[str, Any]:
    message = {"role": "assistant", "content": output.text, "refusal": None}
    return {"index": output.index, "message": message, "logprobs": None, "finish_reason": output.finish_reason}
