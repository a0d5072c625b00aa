"""RequestStream: what the engine has said of the requests of one body, and nobody has read yet."""

import asyncio

from .messages import Delta, Piece


class RequestStream:
    """A reader that is slow gets one delta of a request for all that came meanwhile."""

    def __init__(self) -> None:
        self._deltas: dict[str, Delta] = {}  # by request
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, delta: Delta) -> None:
        before = self._deltas.get(delta.request_id)
        self._deltas[delta.request_id] = delta if before is None else merged(before, delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        """What has come before is read first."""
        self._error = error
        self._wake()

    async def get(self) -> list[Delta]:
        """What is new, when there is something. Raises the error that came in its place."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        deltas, self._deltas = self._deltas, {}
        return list(deltas.values())

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def merged(first: Delta, second: Delta) -> Delta:
    """Both as one."""
    pieces = {piece.sample: piece for piece in first.pieces}
    for piece in second.pieces:
        before = pieces.get(piece.sample)
        pieces[piece.sample] = piece if before is None else joined(before, piece)
    told = first.prompt_logprobs or second.prompt_logprobs
    return second._replace(pieces=list(pieces.values()), prompt_logprobs=told)


def joined(first: Piece, second: Piece) -> Piece:
    """
    >>> joined(Piece(0, "a", [1], None, None, None), Piece(0, "b", [2], None, "stop", None))
    Piece(sample=0, text='ab', token_ids=[1, 2], logprobs=None, finish_reason='stop', stop_reason=None)
    """
    logprobs = None if second.logprobs is None else [*(first.logprobs or []), *second.logprobs]
    text, token_ids = first.text + second.text, [*first.token_ids, *second.token_ids]
    return second._replace(text=text, token_ids=token_ids, logprobs=logprobs)
