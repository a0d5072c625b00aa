"""The answer of /v1/responses, and the events of its stream."""

import itertools
import uuid
from typing import Any

from ..errors import as_error
from ..messages import Piece
from .logprobs import chat_logprobs
from .response_bodies import ResponseBody
from .streaming import event_of
from .work import Work


class ResponseObjects:
    """Makes the objects of one answer: it has one message, and that has one text."""

    def __init__(self, work: Work, body: ResponseBody) -> None:
        self._work, self._body = work, body
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self._numbers = itertools.count()

    def response(self, status: str, sample: Piece | None = None) -> dict[str, Any]:
        """With the output, if there is one yet."""
        work = self._work
        is_cut = status == "incomplete"
        return {
            "id": work.id,
            "object": "response",
            "created_at": work.created,
            "status": status,
            "model": work.model,
            "output": [] if sample is None else [self._message(sample, status)],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": None if sample is None else self._usage(),
            "temperature": work.params.temperature,
            "top_p": work.params.top_p,
            "previous_response_id": None,
            "background": False,
            "store": False,
            "truncation": "disabled",
        } | self._body.told

    def beginning(self) -> bytes:
        """What comes before the first text."""
        item = {"id": self._message_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        events = [
            self.event("created", response=self.response("in_progress")),
            self.event("in_progress", response=self.response("in_progress")),
            self.event("output_item.added", output_index=0, item=item),
            self.event("content_part.added", **self._place(), part=self._part("", [])),
        ]
        return b"".join(events)

    def delta(self, piece: Piece) -> bytes:
        """Nothing, if nothing is to be said yet: a character is not whole, or a stop string may have begun."""
        if not piece.text and not piece.logprobs:
            return b""
        return self.event("output_text.delta", **self._place(), delta=piece.text, logprobs=self._logprobs(piece))

    def ending(self, sample: Piece) -> bytes:
        """What comes behind the last text."""
        status = status_of(sample)
        told = self._logprobs(sample)
        events = [
            self.event("output_text.done", **self._place(), text=sample.text, logprobs=told),
            self.event("content_part.done", **self._place(), part=self._part(sample.text, told)),
            self.event("output_item.done", output_index=0, item=self._message(sample, status)),
            self.event(status, response=self.response(status, sample)),
        ]
        return b"".join(events)

    def event(self, kind: str, **fields: Any) -> bytes:
        return self._event(f"response.{kind}", fields)

    def as_event(self, error: Exception) -> bytes:
        """In place of the rest."""
        told = as_error(error)[1]["error"]
        return self._event("error", {"code": told["type"], "message": told["message"], "param": told["param"]})

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        value = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return event_of(value, name=f"event: {kind}\n".encode())

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _message(self, sample: Piece, status: str) -> dict[str, Any]:
        part = self._part(sample.text, self._logprobs(sample))
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": [part]}

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, sample: Piece) -> list[dict[str, Any]]:
        if sample.logprobs is None:
            return []
        return chat_logprobs(sample.token_ids, sample.logprobs, self._work.params.num_logprobs or 0)

    def _usage(self) -> dict[str, Any]:
        used = self._work.usage()
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used["total_tokens"],
        }


def status_of(sample: Piece) -> str:
    return "incomplete" if sample.finish_reason == "length" else "completed"
