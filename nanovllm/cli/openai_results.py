"""What came of a request, in the form of a line of OpenAI's batches."""

import itertools
import time
from typing import Any, cast

from ..api import CompletionOutput, Logprob, RequestOutput
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
        "choices": [choice(cast(CompletionOutput, each), request) for each in output.outputs],
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


def choice(output: CompletionOutput, request: Request) -> dict[str, Any]:
    ending = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
    is_told = output.logprobs is not None
    if request.url == CHAT:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        told: Any = {"content": chat_logprobs(output, request.params.logprobs)} if is_told else None
        return {"index": output.index, "message": message, "logprobs": told} | ending
    told = completion_logprobs(output) if is_told else None
    return {"index": output.index, "text": output.text, "logprobs": told} | ending


def completion_logprobs(output: CompletionOutput) -> dict[str, Any]:
    """Of each token its text, its log-probability, the likeliest in its place, and where in the text it begins."""
    own = [place[token] for token, place in zip(output.token_ids, output.logprobs, strict=True)]
    tokens = [text_of(each) for each in own]
    likeliest = [{text_of(each): each.logprob for each in place.values()} for place in output.logprobs]
    offsets = list(itertools.accumulate(map(len, tokens), initial=0))[:-1]
    logprobs = [each.logprob for each in own]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": likeliest, "text_offset": offsets}


def chat_logprobs(output: CompletionOutput, count: int) -> list[dict[str, Any]]:
    """Of each token, and of the `count` likeliest in its place."""
    told = []
    for token, place in zip(output.token_ids, output.logprobs, strict=True):
        likeliest = [entry(each) for each in list(place.values())[:count]]
        told.append(entry(place[token]) | {"top_logprobs": likeliest})
    return told


def entry(logprob: Logprob) -> dict[str, Any]:
    text = text_of(logprob)
    return {"token": text, "logprob": logprob.logprob, "bytes": list(text.encode("utf-8", "replace"))}


def text_of(logprob: Logprob) -> str:
    """Empty without a tokenizer."""
    return logprob.decoded_token or ""
