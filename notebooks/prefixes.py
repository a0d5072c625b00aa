"""Prompts that begin alike, made of this repository's own lessons; stage 6's engine without a model, or with another
prefix cache.

Requests are served one at a time, so that a time to first token is the time of a prompt and of nothing else.
"""

import random
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from stages import s6_prefix_caching as s6
from stages.s6_prefix_caching.block_manager import BlockManager, cdiv
from stages.s6_prefix_caching.prefix_cache import CachedBlock, CachedBlocks, Hash, PrefixCache
from stages.s6_prefix_caching.sampling import SampledToken

BOS = 1


class Ask(NamedTuple):
    """A request: what is new in a talk. Its prompt is all that was said in the talk before, and these tokens."""

    talk: int
    tokens: list[int]
    num_output_tokens: int


class Served(NamedTuple):
    num_prompt_tokens: int
    num_cached_tokens: int
    seconds: float  # this thread's, to the first token
    answer: list[int]


def serve(engine: s6.LLMEngine, asks: Iterable[Ask]) -> list[Served]:
    """One after the other; an answer is part of what its talk goes on with."""
    talks: dict[int, list[int]] = {}
    served = []
    for number, ask in enumerate(asks):
        prompt = talks.get(ask.talk, []) + ask.tokens
        params = s6.SamplingParams(temperature=0.0, max_tokens=ask.num_output_tokens, ignore_eos=True)
        begun, seconds, outputs = time.thread_time(), 0.0, list[s6.RequestOutput]()
        engine.add_request(str(number), prompt, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            seconds = seconds or (time.thread_time() - begun if outputs else 0.0)
        (last,) = outputs
        answer = last.outputs[0].token_ids
        served.append(Served(len(prompt), last.num_cached_tokens, seconds, answer))
        talks[ask.talk] = prompt + answer
    return served


def hit_rate(served: Sequence[Served]) -> float:
    """Share of the prompts' tokens that were found computed."""
    return sum(one.num_cached_tokens for one in served) / sum(one.num_prompt_tokens for one in served)


def typical_wait(served: Sequence[Served]) -> float:
    """The median time to first token, in milliseconds."""
    return 1000 * statistics.median(one.seconds for one in served)


def shared_blocks(prompts: Sequence[Sequence[int]], block_size: int) -> float:
    """Share of the blocks that these prompts save if they are there at one time and share what they begin with.

    >>> round(shared_blocks([[1] * 8 + [2] * 4, [1] * 8 + [3] * 4], block_size=4), 2)
    0.33
    """
    alone = sum(cdiv(len(prompt), block_size) for prompt in prompts)
    full = {tuple(prompt[:end]) for prompt in prompts for end in range(block_size, len(prompt) + 1, block_size)}
    return 1 - (len(full) + sum(len(prompt) % block_size > 0 for prompt in prompts)) / alone


# ---- what is asked


class Reader:
    """Reads the prose of the lessons from beginning to end, and then again."""

    def __init__(self, root: Path, tokenizer: Any) -> None:
        paths = [root / "README.md", *sorted((root / "stages").glob("s[1-4]_*/README.md"))]
        pages = [plain(path.read_text(encoding="utf-8")) for path in paths]
        self._tokens = [token for page in pages for token in tokenizer.encode(page)[1:]]
        self._at = 0

    def read(self, count: int) -> list[int]:
        """The next `count` tokens."""
        tokens = [self._tokens[(self._at + i) % len(self._tokens)] for i in range(count)]
        self._at += count
        return tokens


def plain(page: str) -> str:
    r"""A page without what is measured, code or a table: those change, and nobody asks about them.

    >>> plain("# One\n\nIt is <!-- n: a.b -->3<!-- / --> here.\n\n    code\n\n| a | b |\n")
    'One It is here.'
    """
    page = re.sub(r"<!-- figures:.*?<!-- /figures -->|<!-- n:.*?<!-- / -->|<[^>]*>", "", page, flags=re.DOTALL)
    lines = (line for line in page.splitlines() if not line.startswith(("|", "    ", "```")))
    return re.sub(r"\s+", " ", " ".join(line.lstrip("# ") for line in lines)).strip()


def kinds(reader: Reader, seed: int = 0) -> dict[str, list[Ask]]:
    """Five kinds of traffic, in an order in which they could come."""
    rng, read = random.Random(seed), reader.read
    system = [BOS, *read(799)]
    documents, tasks = [read(250) for _ in range(6)], [[BOS, *read(rng.randint(220, 280))] for _ in range(5)]
    told = [BOS, *read(99)]
    found = [rng.sample(documents, 2) for _ in range(20)]  # the best first: an order of their own for each question
    talks = [
        Ask(i, [BOS, *read(119)] if turn == 0 else read(rng.randint(40, 80)), 16) for turn in range(5) for i in range(6)
    ]
    return {
        "system prompt": alone(system + read(rng.randint(40, 100)) for _ in range(20)),
        "multi-turn": talks,
        "retrieval": alone(told + first + second + read(50) for first, second in found),
        "few-shot": alone(rng.choice(tasks) + read(rng.randint(100, 200)) for _ in range(20)),
        "unique": alone([BOS, *read(rng.randint(300, 600))] for _ in range(20)),
    }


def alone(prompts: Iterable[list[int]]) -> list[Ask]:
    """A talk of its own for each."""
    return [Ask(number, prompt, 2) for number, prompt in enumerate(prompts)]


def many_talks(reader: Reader, num_talks: int = 24, num_turns: int = 6, seed: int = 0) -> list[Ask]:
    """Talks that all go on at the same time, with one system prompt; whose turn it is, is drawn."""
    rng, system = random.Random(seed), [BOS, *reader.read(159)]
    turns = [talk for talk in range(num_talks) for _ in range(num_turns)]
    rng.shuffle(turns)
    begun: set[int] = set()
    asks = []
    for talk in turns:
        asks.append(Ask(talk, ([] if talk in begun else system) + reader.read(rng.randint(30, 70)), 12))
        begun.add(talk)
    return asks


def documents_in_turn(reader: Reader, num_documents: int = 6, length: int = 480, rounds: int = 5) -> list[Ask]:
    """The same long documents, one after the other and then again, each time with another question."""
    documents = [[BOS, *reader.read(length - 1)] for _ in range(num_documents)]
    return alone(document + reader.read(20) for _ in range(rounds) for document in documents)


# ---- without a model


class Placeholder:
    """A model runner that computes nothing and always samples the same token. What can be counted needs no more."""

    def __init__(self) -> None:
        self.num_steps = self.num_tokens = 0

    def run(self, batch: Sequence[Any]) -> list[list[SampledToken]]:
        self.num_steps, self.num_tokens = self.num_steps + 1, self.num_tokens + sum(count for _, count in batch)
        is_complete = [seq.num_computed_tokens + count == seq.num_tokens for seq, count in batch]
        return [
            [SampledToken(3, 0.0)] * len(seq.samplers()) if complete else []
            for (seq, _), complete in zip(batch, is_complete, strict=True)
        ]


class WithoutModel(s6.LLMEngine):
    """Stage 6's engine with placeholders for tokens: it schedules, finds blocks, takes them and gives them back."""

    def __init__(self, order: type[CachedBlocks] = CachedBlocks, **options: Any) -> None:
        """The `order` is that of eviction; `options` are EngineConfig's, kv_cache_tokens among them."""
        self._order = order
        super().__init__(s6.EngineConfig(**options))

    def build_tokenizer(self) -> None:
        return None

    def build_model(self) -> Any:
        return None

    def build_kv_cache(self) -> Any:
        assert self.config.kv_cache_tokens is not None
        num_blocks = self.config.kv_cache_tokens // self.config.block_size
        return SimpleNamespace(num_blocks=num_blocks, copy_blocks=lambda copies: None)

    def build_block_manager(self) -> BlockManager:
        size = self.config.block_size
        cache = PrefixCache(size)
        cache.blocks = self._order(cache._index)
        return BlockManager(self.kv_cache.num_blocks, size, cache if self.config.enable_prefix_caching else None)

    def build_model_runner(self, model: Any) -> Any:
        return Placeholder()


class WithCache(s6.LLMEngine):
    """Stage 6's engine, model and all, with another prefix cache."""

    def __init__(self, cache: PrefixCache | None, **options: Any) -> None:
        """Without a `cache` nothing is ever found."""
        self._cache = cache
        super().__init__(s6.EngineConfig(**options))

    def build_block_manager(self) -> BlockManager:
        return BlockManager(self.kv_cache.num_blocks, self.config.block_size, self._cache)


# ---- other orders of eviction


class HeadFirst(CachedBlocks):
    """Of the texts the one unused longest, as in stage 6; but its beginning before its end."""

    def __init__(self, index: dict[Hash, CachedBlock]) -> None:
        super().__init__(index)
        self._ranks: dict[int, tuple[int, int]] = {}  # when the text became idle, and how deep in it the block is
        self._time = 0
        self._last: CachedBlock | None = None

    def set_idle(self, block: int) -> None:
        """Blocks of one text come one after the other, each the parent of the one before."""
        cached = self._cached[block]
        if self._last is None or self._last.parent is not cached:
            self._time += 1
        self._last = cached
        self._ranks[block] = self._time, depth(cached)
        super().set_idle(block)

    def evict(self) -> int:
        block = min(self._idle, key=self._ranks.__getitem__)
        self.forget(block)
        return block


class FirstInFirstOut(CachedBlocks):
    """The block that was computed first, whether or not it was of use since."""

    def __init__(self, index: dict[Hash, CachedBlock]) -> None:
        super().__init__(index)
        self._time, self._born = 0, dict[int, int]()

    def add(self, cached: CachedBlock) -> None:
        self._time += 1
        self._born[cached.block] = self._time
        super().add(cached)

    def evict(self) -> int:
        block = min(self._idle, key=self._born.__getitem__)
        self.forget(block)
        return block


ORDERS: dict[str, type[CachedBlocks]] = {
    "LRU, tail first": CachedBlocks,
    "LRU, head first": HeadFirst,
    "FIFO": FirstInFirstOut,
}


def depth(cached: CachedBlock) -> int:
    """How many blocks of its text come before it.

    >>> depth(CachedBlock(b"b", CachedBlock(b"a", None, [1], 0), [2], 1))
    1
    """
    return 0 if cached.parent is None else 1 + depth(cached.parent)
