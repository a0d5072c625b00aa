"""Observer: what all engines have in common: which sequences there are, what they compute and say, and the steps."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..engine.interrupts import interrupts_held_back
from .hidden import hidden
from .hooks import Hooks

Seq = Any  # a stage's Sequence
Write = Callable[[dict[str, Any]], object]


@dataclass
class Seen:
    """What has been told of a sequence."""

    name: str
    num_tokens: int
    num_computed_tokens: int = 0
    num_once_computed: int = 0  # before it was preempted: these are computed again


def observe(llm: Any, write: Write, show_text: bool = True) -> "Observer":
    """Begin. Without `show_text` no token is decoded, and hidden.py leaves out what else tells of a text.

    Raises ValueError if `llm` is no engine, or cannot be observed now.
    """
    from .batches import BatchObserver
    from .engines import EngineObserver

    engine = getattr(llm, "llm_engine", llm)
    if not hasattr(engine, "kv_cache_manager"):
        raise ValueError(f"an LLM or an LLMEngine can be traced, not {type(llm).__name__}")
    kind = EngineObserver if hasattr(engine, "scheduler") else BatchObserver
    observer = kind(engine, write if show_text else hidden(write))
    if not show_text:
        observer.text = lambda token_id: None
    try:
        observer.begin()
    except BaseException:
        observer.hooks.undo()
        raise
    return observer


class Observer:
    def __init__(self, engine: Any, write: Write) -> None:
        self.engine, self.manager = engine, engine.kv_cache_manager
        self.hooks = Hooks()
        self.error: Exception | None = None  # what the sink raised: nothing is told any more
        self.step = 0
        self.seen: dict[Seq, Seen] = {}  # all that have arrived and not ended
        self._write: Write | None = write
        self._start = time.perf_counter()
        self._began: float | None = None  # of the open step
        self.computed: deque[Seq] = deque()  # of a step of the model: their tokens are still to be told
        tokenizer = engine.tokenizer
        anchor = list(getattr(tokenizer, "anchor", []))  # tokens of a text to go on from: a word keeps its space
        skip = len(tokenizer.decode(anchor)) if anchor else 0
        self.text: Callable[[int], str | None] = lru_cache(maxsize=None)(
            lambda token_id: tokenizer.decode([*anchor, token_id])[skip:] if tokenizer else ""
        )

    def begin(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """What is open is marked; the methods are their classes' again."""
        with interrupts_held_back():
            self.close_step("the trace was closed in this step")
            self._write = None
            self.hooks.undo()

    def emit(self, kind: str, by: str | None, **fields: Any) -> None:
        """A key that is a keyword of Python is given with an underscore behind it."""
        if self._write is None or self.error:
            return
        event = {"kind": kind, "step": self.step, **{key.rstrip("_"): value for key, value in fields.items()}}
        try:
            self._write(event | {"by": by} if by else event)
        except Exception as error:
            self.error = error

    @property
    def seconds(self) -> float:
        """Since the trace began."""
        return round(time.perf_counter() - self._start, 6)

    # Steps

    def open_step(self) -> None:
        self.close_step(None)
        self.step += 1
        self._began = self.seconds

    def close_step(self, error: str | None) -> None:
        if self._began is not None:
            self.tell()
            began, self._began = self._began, None
            self.emit("step", None, began=began, seconds=self.seconds, error=error)

    @property
    def is_open(self) -> bool:
        return self._began is not None

    # Sequences

    def name(self, seq: Seq) -> str:
        return self.seen[seq].name

    def enter(self, seq: Seq, name: str | None = None) -> Seen:
        """Know `seq` from now on. Its name is the request's, with the sample's index if it has more than one."""
        if name is None:
            several = getattr(seq.params, "n", 1) > 1
            name = f"{seq.request_id}.{seq.sample_index}" if several else seq.request_id
        self.seen[seq] = Seen(name, seq.num_tokens, seq.num_computed_tokens)
        return self.seen[seq]

    def arrive(self, seq: Seq, by: str, carried_by: Seq | None = None, name: str | None = None) -> None:
        self.enter(seq, name)
        self.emit(
            "arrive",
            by,
            seq=self.name(seq),
            request=seq.request_id,
            tokens=list(seq.token_ids),
            texts=[self.text(token_id) for token_id in seq.token_ids],
            max_num_tokens=seq.max_num_tokens,
            carried_by=self.name(carried_by) if carried_by else None,
            seconds=self.seconds,
        )

    def end(self, seq: Seq, why: str | None = None, error: str | None = None) -> None:
        """It has ended, and its blocks have been given back. Without a `why`, as it says itself."""
        if seq in self.seen:
            why, error = why or seq.finish_reason, error or seq.error
            by = "Sequence.fail" if why == "error" else "Sequence.finish"
            self.emit("end", by, seq=self.seen.pop(seq).name, why=why, error=error, seconds=self.seconds)

    # What they compute and say

    def run(self, run: Callable, batch: list[tuple[Seq, int]]) -> list[Any]:
        """A step of the model. The engine takes what comes of it, one sequence after the other: tell() finds it."""
        try:
            tokens = run(batch)
        except Exception as error:
            names = [self.name(seq) for seq, _ in batch]
            self.emit("raised", "ModelRunner.run", sequences=names, error=in_words(error))
            raise
        self.computed.extend(seq for seq, _ in batch)
        return tokens

    def tell(self, until: Seq | None = None) -> None:
        """What the engine has taken of the last step of the model; of `until`, no token yet, and of those behind it
        nothing."""
        while self.computed:
            seq = self.computed[0]
            self._tell_chunk(seq)
            if seq is until:
                return
            self.computed.popleft()
            self.tell_tokens(seq)

    def _tell_chunk(self, seq: Seq) -> None:
        seen = self.seen.get(seq)
        if seen and seq.num_computed_tokens > seen.num_computed_tokens:
            start, end = seen.num_computed_tokens, seq.num_computed_tokens
            why = "decode" if start >= len(seq.prompt_token_ids) else "prefill"
            why = "recompute" if start < seen.num_once_computed else why
            seen.num_computed_tokens = end
            self.emit("chunk", "ModelRunner.run", seq=seen.name, start=start, end=end, why=why)

    def tell_tokens(self, seq: Seq) -> None:
        seen = self.seen.get(seq)
        if seen:
            for position in range(seen.num_tokens, seq.num_tokens):
                token = seq.token_ids[position]
                fields = {"token": token, "text": self.text(token), "position": position}
                self.emit("token", "Sequence.append_token", seq=seen.name, **fields)
            seen.num_tokens = seq.num_tokens


def in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def carried(seq: Seq) -> list[Seq]:
    """The samples that wait for it to compute their prompt; from stage 5 on."""
    return getattr(seq, "to_fork", [])
