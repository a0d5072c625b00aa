"""Stand-ins for the other engine, without a process: one that a test scripts, and one that computes prompts at once.

Both have the methods of PrefillProcess. Commands and Results are the other engine's ends of the connection.
"""

import pickle
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ..engine import LLMEngine
from ..prefill import NUM_BLOCKS, Prefilled
from ..prefix_cache import BlockHash, extend_block_hashes
from .scripted import BLOCK_SIZE

Command = tuple[str, list[int], list[BlockHash]]


def hashes_of(token_ids: list[int]) -> list[BlockHash]:
    """Return the hashes of the blocks that a request with this prompt can hit: full ones before the last token."""
    hashes: list[BlockHash] = []
    extend_block_hashes(hashes, token_ids[:-1], BLOCK_SIZE)
    return hashes


class ScriptedEngine:
    """An engine that computes nothing: a test says when the blocks of a prompt arrive, and when the process dies.

    A block holds the ids of its tokens, as ScriptedRunner computes them.
    """

    def __init__(self, engine: LLMEngine) -> None:
        """Take the place of the other process of `engine`."""
        self.prompts: dict[str, tuple[list[int], list[BlockHash]]] = {}  # not answered yet: tokens, and wanted blocks
        self.num_sent = self.num_waits = 0
        self.aborted: list[str] = []
        self.is_dead = self.is_closed = False
        self._messages: deque[Prefilled] = deque()
        self._shape = engine.kv_cache.blocks.shape[1:]
        engine.prefill = self  # type: ignore[assignment]

    def send(self, request_id: str, token_ids: list[int], hashes: list[BlockHash]) -> None:
        assert not self.is_closed, f"the process has been closed, and is sent {request_id}"
        assert request_id not in self.prompts, f"{request_id} is sent twice"
        assert hashes, f"{request_id} asks for no block"
        self.prompts[request_id] = token_ids, hashes
        self.num_sent += 1

    def abort(self, request_id: str) -> None:
        assert not self.is_closed, f"the process has been closed, and is sent an abort of {request_id}"
        self.aborted.append(request_id)
        self.prompts.pop(request_id, None)

    def receive(self, wait: bool) -> Prefilled | None:
        assert not self.is_closed, "the process has been closed, and the engine receives from it"
        if wait and not self._messages and not self.is_dead:
            assert self.prompts, "the engine waits for a message, and has asked for nothing"
            self.num_waits += 1
            self.answer(next(iter(self.prompts)))
        if self._messages:
            return self._messages.popleft()
        if self.is_dead:
            raise EOFError
        return None

    def close(self) -> None:
        self.is_closed = True

    def answer(self, request_id: str) -> None:
        """Compute a prompt, and send the wanted blocks: each step receives NUM_BLOCKS of them."""
        token_ids, hashes = self.prompts.pop(request_id)
        self.deliver(request_id, token_ids, hashes)

    def refuse(self, request_id: str) -> None:
        """Send no block of a prompt."""
        del self.prompts[request_id]
        self._messages.append(Prefilled([], torch.empty(0), request_id))

    def deliver(self, request_id: str, token_ids: list[int], hashes: list[BlockHash]) -> None:
        """Send the blocks of `token_ids` with these hashes, the last one first. The last message has the request_id."""
        contents = {each: index * BLOCK_SIZE for index, each in enumerate(hashes_of(token_ids))}
        ordered = hashes[::-1]
        for start in range(0, len(ordered), NUM_BLOCKS):
            part = ordered[start : start + NUM_BLOCKS]
            blocks = torch.full((len(part), *self._shape), -1.0)
            for block, first in zip(blocks, (contents[each] for each in part), strict=True):
                block[0, 0, :, 0, 0] = torch.tensor(token_ids[first : first + BLOCK_SIZE])
            is_last = start + NUM_BLOCKS >= len(ordered)
            self._messages.append(Prefilled(part, blocks, request_id if is_last else None))


class Ended(Exception):
    """There are no more commands, and the other engine waits for one."""


class Commands:
    """Commands for serve(). None means that there are no more of them until the next step."""

    def __init__(self, *commands: Command | None) -> None:
        self._commands = deque(commands)

    def empty(self) -> bool:
        is_next_step = bool(self._commands) and self._commands[0] is None
        if is_next_step:
            self._commands.popleft()
        return is_next_step or not self._commands

    def get(self) -> Command:
        while self._commands:
            if command := self._commands.popleft():
                return command
        raise Ended


class Results:
    """The messages that serve() has sent."""

    def __init__(self) -> None:
        self.messages: deque[Prefilled] = deque()

    def send_bytes(self, data: bytes) -> None:
        self.messages.append(pickle.loads(data))


class EngineAtOnce:
    """An engine that computes a prompt when it is sent, with `serve` and an engine of its own, in this process."""

    def __init__(self, serve: Callable[[Any, Any, Any], None], engine: Any) -> None:
        self._serve, self._engine, self._results = serve, engine, Results()

    def send(self, *command: Any) -> None:
        with suppress(Ended):
            self._serve(self._engine, Commands(command), self._results)

    def abort(self, request_id: str) -> None:
        self.send(request_id, [], [])

    def receive(self, wait: bool) -> Prefilled | None:
        assert self._results.messages or not wait, "the engine waits for a message, and all have been received"
        return self._results.messages.popleft() if self._results.messages else None

    def close(self) -> None:
        pass
