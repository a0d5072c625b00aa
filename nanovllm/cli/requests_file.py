"""A file of requests, in little memory however long it is: judged as a whole, then read again while it is served."""

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, Any

from ..server.openai.chats import Chat
from ..server.openai.json_values import shortened
from .ids import Ids
from .openai_lines import is_openai_line, read_openai
from .request import Defaults, Request, read_own
from .request_lines import Source, Spool, values
from .streams import standard_input


class RequestsFile:
    """The requests of a file, in order, as often as they are iterated over: each is read anew."""

    def __init__(self, name: str, stream: IO[bytes], copy: IO[bytes] | None, defaults: Defaults) -> None:
        """`defaults` are the parameters of requests that do not say. What can be read only once goes to `copy` too.

        Raises ValueError for the first request that is wrong, naming the file, its place, the field and the value.
        """
        self._name, self._defaults = name, defaults
        self._stream, self._start = copy or stream, 0 if copy else stream.tell()
        self.ids, self.prompts, self.has_chats = Ids(), Ids(), False
        for request, _ in self._read(Spool(stream, copy) if copy else stream):
            self.ids.add(request.id)
            self.prompts.add(prompt_key(request.id, request.prompt))
            self.has_chats = self.has_chats or isinstance(request.prompt, Chat)
        if not len(self):
            raise ValueError(f"{name}: there are no requests in it")
        if self.ids.repeated:
            self._name_repeated()

    def recommend(self, params: dict[str, Any]) -> None:
        """What the checkpoint recommends counts from here on, where neither a line nor the command says it."""
        self._defaults = self._defaults._replace(recommended=params)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Request]:
        """Raises OSError if the file is no longer the one that was judged."""
        self._stream.seek(self._start)
        num_read = 0
        try:
            for request, _ in itertools.islice(self._read(self._stream), len(self)):
                if request.id not in self.ids:
                    break
                yield request
                num_read += 1
        except ValueError as error:
            told = str(error).removeprefix(f"{self._name}: ")
            raise OSError(f"{self._name}: the file was changed meanwhile: {told}") from None
        if num_read < len(self):
            raise OSError(f"{self._name}: the file was changed meanwhile: request {num_read} is another one")

    def _read(self, source: Source) -> Iterator[tuple[Request, str]]:
        """Each request with its place."""
        place = ""
        try:
            for index, (line, value) in enumerate(values(source)):
                place = f"request {index}{line}: "
                yield read_request(index, value, self._defaults), f"{index}{line}"
                place = ""
        except ValueError as error:
            raise ValueError(f"{self._name}: {place}{error}") from None

    def _name_repeated(self) -> None:
        """Raises ValueError for the first id that is there twice."""
        first: dict[str, int] = {}
        self._stream.seek(self._start)
        for request, place in self._read(self._stream):
            if hash(request.id) in self.ids.repeated:
                if request.id in first:
                    taken = f"id {request.id!r} is taken by request {first[request.id]}"
                    raise ValueError(f"{self._name}: request {place}: {taken}")
                first[request.id] = request.index


def prompt_key(id: str, prompt: Any) -> str:
    """By which a prompt is known to be that of the request `id`."""
    return repr((id, prompt))


@contextmanager
def open_requests(file: str, defaults: Defaults) -> Iterator[RequestsFile]:
    """- is standard input. Raises OSError if the file cannot be read, and as RequestsFile does."""
    with ExitStack() as files:
        stream = standard_input().buffer if file == "-" else files.enter_context(open(file, "rb"))
        copy = None if stream.seekable() else files.enter_context(tempfile.TemporaryFile())
        yield RequestsFile("standard input" if file == "-" else file, stream, copy, defaults)


def read_request(index: int, value: Any, defaults: Defaults) -> Request:
    """Raises ValueError, naming the field and the value."""
    if not isinstance(value, dict):
        raise ValueError(f"a request must be an object with a prompt, not {shortened(value)}")
    return (read_openai if is_openai_line(value) else read_own)(index, value, defaults)
