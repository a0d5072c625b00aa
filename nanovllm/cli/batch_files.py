"""The files of nanovllm batch: requests as JSON lines or one document, and results as JSON lines.

A request is in nanovllm's format, {"prompt": ..., "max_tokens": ...}, or in OpenAI's batch format,
{"custom_id": ..., "url": "/v1/completions", "body": {...}}. Its result is in the same format. JSON lines of any number
take little memory: the whole file is checked first, and read again line by line while its requests are served.
"""

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

from ..chat.assistant import MessageDelta
from ..chat.formats import MessageFormat
from ..checks import short_repr
from ..requests.outputs import CompletionOutput, RequestOutput
from ..requests.prompts import Prompt
from ..requests.sampling_params import RepetitionDetectionParams, SamplingParams
from ..requests.tokens import Logprob
from ..server.bodies import Body, Chat, ParsedRequest, usage, whole_message
from ..server.chat import CHAT, ChatCompletionRequest, chat_choice
from ..server.completions import CompletionRequest, completion_choice
from ..server.logprobs import prompt_logprobs

MAX_LINE_BYTES = 1 << 28


@dataclass(frozen=True)
class Request:
    """A request from a file."""

    id: str
    index: int  # position in the file, from 0
    prompt: Prompt | Chat
    params: SamplingParams
    url: str | None = None  # endpoint of OpenAI's API; None in nanovllm's format
    body: ParsedRequest | None = None  # in OpenAI's format
    format: MessageFormat | None = None  # format of a chat's messages, known once its prompt is rendered


@dataclass(frozen=True)
class Defaults:
    """Sampling parameters for requests that leave them out."""

    params: Mapping[str, Any]  # from the command line
    seed: int = 0  # the seeds of requests without a seed are derived from this one
    recommended: Mapping[str, Any] = field(default_factory=dict)  # by the checkpoint, for requests in OpenAI's format


# Requests


class OpenAILine(Body):
    """A request in OpenAI's batch format."""

    custom_id: str
    method: Literal["POST"] = "POST"
    url: Literal["/v1/completions", "/v1/chat/completions"]
    body: dict[str, Any]


class RequestsFile:
    """The requests of a file, in order. Each iteration reads the file again."""

    def __init__(self, name: str, stream: IO[bytes], copy: IO[bytes] | None, defaults: Defaults) -> None:
        """Check all requests. A stream that can be read only once, such as a pipe, is copied to `copy`.

        Raise ValueError for the first invalid request, naming the file, the request, the field and the value.
        """
        self._name, self._defaults = name, defaults
        self._stream, self._start = copy or stream, 0 if copy else stream.tell()
        self.ids: dict[str, None] = {}  # in the order of the file
        self.has_chats = False
        for request, place in self._read(read_lines(stream, copy)):
            if request.id in self.ids:
                raise ValueError(f"{name}: {place}: id {request.id!r} is already the id of an earlier request")
            self.ids[request.id] = None
            self.has_chats = self.has_chats or isinstance(request.prompt, Chat)
        if not self.ids:
            raise ValueError(f"{name} has no requests")

    def recommend(self, params: Mapping[str, Any]) -> None:
        """Set the checkpoint's sampling parameters. From now on, they apply to requests in OpenAI's format."""
        self._defaults = replace(self._defaults, recommended=params)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests. Raise OSError if the file has changed since it was checked."""
        self._stream.seek(self._start)
        requests = self._read(read_lines(self._stream))
        try:
            for id in self.ids:
                request, _ = next(requests, (None, ""))
                if request is None or request.id != id:
                    raise ValueError(f"request {id!r} is missing")
                yield request
        except ValueError as error:
            raise OSError(f"{self._name} has changed: {str(error).removeprefix(f'{self._name}: ')}") from None

    def _read(self, lines: Iterable[bytes]) -> Iterator[tuple[Request, str]]:
        """Yield each request with its place in the file, for error messages."""
        place = ""
        try:
            for index, (line, value) in enumerate(json_values(lines)):
                place = f"request {index}{line}"
                yield read_request(index, value, self._defaults), place
                place = ""
        except ValueError as error:
            raise ValueError(f"{self._name}: {place}{place and ': '}{error}") from None


@contextmanager
def open_requests(file: str, defaults: Defaults) -> Iterator[RequestsFile]:
    """Open a file of requests, or standard input for `-`. Raise OSError if it cannot be read."""
    with ExitStack() as files:
        stream = sys.stdin.buffer if file == "-" else files.enter_context(open(file, "rb"))
        copy = None if stream.seekable() else files.enter_context(tempfile.TemporaryFile())
        yield RequestsFile("standard input" if file == "-" else file, stream, copy, defaults)


def read_request(index: int, value: Any, defaults: Defaults) -> Request:
    """Read a request in either format. Raise ValueError, naming the invalid field and its value."""
    if not isinstance(value, dict):
        raise ValueError(f"a request must be an object with a prompt, got {short_repr(value)}")
    is_openai = not value.keys().isdisjoint({"custom_id", "body", "url"})
    return read_openai(index, value, defaults) if is_openai else read_native(index, value, defaults)


def read_native(index: int, value: dict[str, Any], defaults: Defaults) -> Request:
    """Read a request in nanovllm's format: a prompt, and any fields of SamplingParams."""
    params = {name: field for name, field in value.items() if name not in ("id", "prompt")}
    if "prompt" not in value:
        raise ValueError("prompt is missing")
    id, prompt = value.get("id", str(index)), value["prompt"]
    if not isinstance(id, str):
        raise ValueError(f"id must be a string, got {short_repr(id)}")
    is_token_ids = isinstance(prompt, list) and {*map(type, prompt)} <= {int}
    if not isinstance(prompt, str) and not is_token_ids:
        raise ValueError(f"prompt must be a string or a list of integers, got {short_repr(prompt)}")
    return Request(id, index, prompt, make_params(index, {**defaults.params, **params}, defaults.seed))


def read_openai(index: int, value: dict[str, Any], defaults: Defaults) -> Request:
    """Read a request in OpenAI's batch format."""
    line = OpenAILine.parse(json.dumps(value).encode())
    request_type = ChatCompletionRequest if line.url == CHAT else CompletionRequest
    body = request_type.parse(json.dumps(line.body).encode()).parsed()
    for name in ("stream", "echo", "return_token_ids", "truncate_prompt_tokens"):
        if (value := getattr(body, name)) is not None and value is not False:
            raise ValueError(f"{name} is unsupported in a batch, got {value!r}")
    if body.add_special_tokens == body.is_chat:
        raise ValueError(f"add_special_tokens must be {str(not body.is_chat).lower()} in a batch")
    if not isinstance(body.prompts, Chat) and len(body.prompts) != 1:
        raise ValueError(f"prompt must be a single prompt, got {len(body.prompts)}: put each one on its own line")
    prompt = body.prompts if isinstance(body.prompts, Chat) else body.prompts[0]
    params = body.sampling_params(defaults.recommended, defaults.params)
    return Request(line.custom_id, index, prompt, make_params(index, params, defaults.seed), line.url, body)


def make_params(index: int, params: dict[str, Any], seed: int) -> SamplingParams:
    """Return the sampling parameters of request `index`. A missing seed is derived from `seed` and `index`."""
    if params.get("seed") in (None, -1):
        params = params | {"seed": seed_of(seed, index)}
    if isinstance(repetition := params.get("repetition_detection"), dict):
        try:
            params = params | {"repetition_detection": RepetitionDetectionParams(**repetition)}
        except TypeError as error:
            raise ValueError(f"repetition_detection: {error}") from None
    return SamplingParams(**params)


def seed_of(seed: int, index: int) -> int:
    """Return a 62-bit seed for request `index`.

    >>> seed_of(0, 5) == seed_of(0, 5) != seed_of(0, 6)
    True
    """
    return int.from_bytes(hashlib.blake2b(f"{seed},{index}".encode(), digest_size=8).digest()) >> 2


# JSON


def json_values(source: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    """Yield the place and the JSON value of each request. The place is " (line 3)", for example, or "" in a document.

    If the first line is the JSON of a request, each line has one, and only one line is in memory at a time. Otherwise,
    the file is one document, {"requests": [...]}. Raise ValueError if it is neither.
    """
    lines = enumerate(source, start=1)
    nonblank_lines = ((number, line) for number, line in lines if not line.isspace())
    number, first = next(nonblank_lines, (0, b""))
    if not first:
        return
    try:
        value = parse_json(first, number)
    except ValueError:
        value = parse_json(b"".join([first, *(line for _, line in lines)]), number)
    if not (isinstance(value, dict) and "requests" in value):
        yield f" (line {number})", value
        for number, line in nonblank_lines:
            yield f" (line {number})", parse_json(line, number)
        return
    if len(value) > 1:
        raise ValueError(f'a document must have only "requests", got {[*value]}')
    if extra := next(nonblank_lines, None):
        raise ValueError(f'line {extra[0]}: unexpected text after {{"requests": [...]}}')
    if not isinstance(value["requests"], list):
        raise ValueError(f'"requests" must be a list, got {short_repr(value["requests"])}')
    yield from (("", request) for request in value["requests"])


def parse_json(text: bytes, line: int) -> Any:
    """Parse JSON that starts at `line` of the file. Raise ValueError with the place of a syntax error."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {line + error.lineno - 1}, column {error.colno}"
        raise ValueError(f"{place}: invalid JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, an integer with thousands of digits, or deep nesting
        raise ValueError(f"line {line}: {error}") from None


def read_lines(stream: IO[bytes], copy: IO[bytes] | None = None) -> Iterator[bytes]:
    """Yield the lines of a stream, and write them to `copy`. Raise ValueError for an endless line, as in /dev/zero."""
    while line := stream.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"a line must have at most {MAX_LINE_BYTES:,} bytes")
        if copy:
            copy.write(line)
        yield line


# Results


def result_line(request: Request, output: RequestOutput, model: str) -> str:
    """Return the result of a request, in the request's format. In OpenAI's format, it contains the name `model`."""
    fields = openai_result(request, output, model) if request.url else native_result(request, output)
    valid = json.loads(json.dumps(fields), parse_constant=lambda _: None)  # NaN and infinity become null
    return json.dumps(valid) + "\n"


def native_result(request: Request, output: RequestOutput) -> dict[str, Any]:
    """Return a result in nanovllm's format, without the fields that are None."""
    start, metrics = output.metrics.arrival_time, output.metrics
    samples = [vars(sample) | {"logprobs": json_logprobs(sample.logprobs)} for sample in output.outputs]
    fields = {
        "id": request.id,
        "index": request.index,
        "prompt": request.prompt,
        "error": output.error,
        "outputs": [drop_none(sample) for sample in samples],
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "prompt_logprobs": json_logprobs(output.prompt_logprobs),
        "ttft": None if metrics.first_token_time is None else metrics.first_token_time - start,  # seconds
        "seconds": None if metrics.finished_time is None else metrics.finished_time - start,
    }
    return drop_none(fields)


def json_logprobs(
    positions: Iterable[dict[int, Logprob] | None] | None,
) -> list[dict[int, dict[str, Any]] | None] | None:
    """Return log-probabilities as a JSON object for each position, by token id. A prompt's first position has None."""
    if positions is None:
        return None
    return [None if top is None else {id: logprob._asdict() for id, logprob in top.items()} for top in positions]


def drop_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def openai_result(request: Request, output: RequestOutput, model: str) -> dict[str, Any]:
    """Return a result in OpenAI's batch format. An error has status 400 before the first token, and 500 after it."""
    if output.error is None:
        status, body = 200, response_body(request, output, model)
    else:
        status = 500 if output.outputs[0].token_ids else 400
        kind = "server_error" if status == 500 else "invalid_request_error"
        body = {"error": {"message": output.error, "type": kind, "param": None, "code": None}}
    response = {"status_code": status, "request_id": f"req_{request.index}", "body": body}
    return {"id": f"batch_req_{request.index}", "custom_id": request.id, "response": response, "error": None}


def response_body(request: Request, output: RequestOutput, model: str) -> dict[str, Any]:
    """Return the body of the response that the server would have sent."""
    is_chat = request.url == CHAT
    kind, prefix = ("chat.completion", "chatcmpl") if is_chat else ("text_completion", "cmpl")
    num_tokens = sum(len(sample.token_ids) for sample in output.outputs)
    prompt_fields = prompt_logprobs(output.prompt_logprobs)
    if is_chat:
        choices = [
            chat_choice(sample, sample.index, request.params.num_logprobs, message_of(request, sample))
            for sample in output.outputs
        ]
    else:
        choices = [completion_choice(sample, sample.index) | prompt_fields for sample in output.outputs]
    return {
        "id": f"{prefix}-{request.index}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage(len(output.prompt_token_ids), num_tokens, output.num_cached_tokens),
        **(prompt_fields if is_chat else {}),
    }


def message_of(request: Request, sample: CompletionOutput) -> MessageDelta | None:
    """Return the parsed message of a chat's output, or None if the text is all of the message's content."""
    if request.format is None or request.body is None:
        return None
    return whole_message(sample, request.format, request.body.include_reasoning)


# The file of results


def check_output(output: str, file: str, overwrite: bool, resume: bool) -> None:
    """Raise ValueError, before anything is computed, if results could not be written or would replace a file."""
    path = Path(output)
    if resume and (overwrite or output == "-"):
        raise ValueError("--resume needs --output, and excludes --overwrite: it continues a file of results")
    if output == "-":
        return
    if path.exists() and not (overwrite or resume):
        raise ValueError(f"{output} exists: use --resume to continue it, or --overwrite to replace it")
    if path.exists() and resume and not path.is_file():
        raise ValueError(f"{output} is not a regular file: --resume cannot continue it")
    if path.exists() and file != "-" and Path(file).exists() and path.samefile(file):
        raise ValueError(f"{output} is the file of requests: write the results to a different file")
    if not path.parent.is_dir():
        raise ValueError(f"the folder {path.parent} for {path.name} does not exist")


def read_done(output: str, requests: RequestsFile) -> tuple[set[str], int]:
    """Return the ids of requests that have results in the file `output`, and the size of its complete lines in bytes.

    A last line that is cut off is ignored. Raise ValueError for a line that is not a result of one of the
    requests, for a second result of the same request, and for a result whose prompt is not the request's.
    """
    prompt_hashes: dict[str, int | None] = {}  # by id, of the prompt in the result; None if it has no prompt
    num_bytes = 0
    if not Path(output).exists():
        return set(), 0
    with open(output, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                value = json.loads(line)
                id = value.get("custom_id", value.get("id")) if isinstance(value, dict) else None
                if not isinstance(id, str):
                    raise ValueError("the result has no id: remove the line, or use --overwrite")
                if id not in requests.ids:
                    raise ValueError(f"there is no request {id!r}: the result belongs to another file")
                if id in prompt_hashes:
                    raise ValueError(f"a second result of request {id!r}: use --overwrite")
            except ValueError as error:
                raise ValueError(f"{output}, line {number}: {error}") from None
            prompt_hashes[id] = hash(repr(value["prompt"])) if "prompt" in value else None
            num_bytes += len(line)
    for request in requests if prompt_hashes else ():
        if prompt_hashes.get(request.id) not in (None, hash(repr(request.prompt))):
            raise ValueError(f"{output}: request {request.id!r} has a different prompt in this result")
    return {*prompt_hashes}, num_bytes


def open_output(output: str, overwrite: bool, num_bytes: int | None) -> AbstractContextManager[IO[bytes]]:
    """Open the file of results, unbuffered. To continue a file, keep its first `num_bytes` bytes."""
    if output == "-":
        sys.stdout.flush()
        return nullcontext(getattr(sys.stdout.buffer, "raw", sys.stdout.buffer))
    if num_bytes is None:
        return open(output, "wb" if overwrite else "xb", buffering=0)
    stream = open(output, "ab", buffering=0)  # noqa: SIM115  # the caller closes it
    if stream.seek(0, os.SEEK_END) > num_bytes:
        stream.truncate(num_bytes)
    return stream


def write_line(stream: IO[bytes], line: str) -> None:
    """Write a line. Raise OSError if that fails, and remove the partial line, so that a full disk leaves none."""
    end = stream.seek(0, os.SEEK_END) if stream.seekable() else None  # tell() may be 0 in a file opened to append
    unwritten = memoryview(line.encode())
    try:
        while unwritten:
            unwritten = unwritten[stream.write(unwritten) :]
    except OSError:
        if end is not None:
            with suppress(OSError):  # /dev/full is seekable, but cannot be truncated
                stream.truncate(end)
        raise
