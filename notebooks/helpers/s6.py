"""Helpers of stage 6's notebook: prompts with common prefixes, other orders of eviction, another hash, and a tree.

Requests are served one at a time, so a time to first token is the time of one prompt.
"""

import random
import re
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from notebooks.helpers import pictures
from notebooks.helpers.pictures import ACCENT, GREY, INK, PALE, PAPER, USED
from stages import s6_prefix_caching as s6
from stages.bench.engines import without_model
from stages.s6_prefix_caching import prefix_cache
from stages.s6_prefix_caching.block_manager import BlockManager
from stages.s6_prefix_caching.block_pool import BlockPool
from stages.s6_prefix_caching.prefix_cache import BlockHash, extend_block_hashes
from stages.s6_prefix_caching.scheduler import Scheduler

BOS = 1


class Ask(NamedTuple):
    """A turn of a conversation. Its prompt is the whole conversation so far, and these tokens."""

    conversation: int
    tokens: list[int]
    num_output_tokens: int


class Served(NamedTuple):
    """The result of a request."""

    num_prompt_tokens: int
    num_cached_tokens: int
    seconds: float  # of this thread, to the first token
    answer: list[int]


def serve(engine: Any, asks: Iterable[Ask]) -> list[Served]:
    """Serve the requests one after the other. An answer becomes part of its conversation."""
    conversations: dict[int, list[int]] = {}
    served, stats = [], engine.kv_cache_manager.prefix_cache_stats
    for number, ask in enumerate(asks):
        prompt, hits = conversations.get(ask.conversation, []) + ask.tokens, stats.hits
        params = s6.SamplingParams(temperature=0.0, max_tokens=ask.num_output_tokens, ignore_eos=True)
        begun, seconds, outputs = time.thread_time(), 0.0, list[s6.RequestOutput]()
        engine.add_request(str(number), prompt, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            seconds = seconds or (time.thread_time() - begun if outputs else 0.0)
        answer = outputs[0].outputs[0].token_ids
        served.append(Served(len(prompt), stats.hits - hits, seconds, answer))
        conversations[ask.conversation] = prompt + answer
    return served


def forget(engine: Any) -> None:
    """Empty the cache of an idle engine by giving it a new block manager and scheduler."""
    assert not engine.has_unfinished_requests(), "a request holds blocks"
    blocks, config = engine.kv_cache, engine.config
    engine.kv_cache_manager = BlockManager(
        blocks.num_blocks, blocks.block_size, config.enable_prefix_caching, engine.observer
    )
    engine.scheduler = Scheduler(config, engine.kv_cache_manager, engine.observer)


def hit_rate(served: Sequence[Served]) -> float:
    """Return the share of the prompts' tokens that were cached."""
    return sum(one.num_cached_tokens for one in served) / sum(one.num_prompt_tokens for one in served)


def shared_blocks(prompts: Sequence[Sequence[int]], block_size: int) -> float:
    """Return the share of blocks that these prompts save if they run together and share their common prefixes.

    >>> round(shared_blocks([[1] * 8 + [2] * 4, [1] * 8 + [3] * 4], block_size=4), 2)
    0.33
    """
    alone = sum(-(-len(prompt) // block_size) for prompt in prompts)
    full = {tuple(prompt[:end]) for prompt in prompts for end in range(block_size, len(prompt) + 1, block_size)}
    return 1 - (len(full) + sum(len(prompt) % block_size > 0 for prompt in prompts)) / alone


# ---- traffic


class Reader:
    """A source of tokens: the prose of the lessons, from beginning to end and then again."""

    def __init__(self, root: Path, tokenizer: Any) -> None:
        paths = [root / "README.md", *sorted((root / "stages").glob("s[1-4]_*/README.md"))]
        pages = [plain(path.read_text(encoding="utf-8")) for path in paths]
        self._tokens = [token for page in pages for token in tokenizer.encode(page)[1:]]
        self._at = 0

    def read(self, count: int) -> list[int]:
        """Return the next `count` tokens."""
        tokens = [self._tokens[(self._at + i) % len(self._tokens)] for i in range(count)]
        self._at += count
        return tokens


def plain(page: str) -> str:
    r"""Return the prose of a page. Code, tables and measured numbers are left out, because they change.

    >>> plain("# One\n\nIt is <!-- n: a.b -->3<!-- / --> here.\n\n    code\n\n| a | b |\n")
    'One It is here.'
    """
    page = re.sub(r"<!-- figures:.*?<!-- /figures -->|<!-- n:.*?<!-- / -->|<[^>]*>", "", page, flags=re.DOTALL)
    lines = (line for line in page.splitlines() if not line.startswith(("|", "    ", "```")))
    return re.sub(r"\s+", " ", " ".join(line.lstrip("# ") for line in lines)).strip()


def kinds(reader: Reader, count: int, seed: int = 0) -> dict[str, list[Ask]]:
    """Return five kinds of traffic with `count` prompts each, in a plausible order."""
    rng, read = random.Random(seed), reader.read
    system = [BOS, *read(799)]
    documents, tasks = [read(250) for _ in range(6)], [[BOS, *read(rng.randint(220, 280))] for _ in range(5)]
    instructions = [BOS, *read(99)]
    retrieved = [rng.sample(documents, 2) for _ in range(count)]  # the best first, so the order differs
    turns = [
        Ask(i, [BOS, *read(119)] if turn == 0 else read(rng.randint(40, 80)), 16)
        for turn in range(5)
        for i in range(max(1, count // 3))
    ]
    return {
        "system prompt": alone(system + read(rng.randint(40, 100)) for _ in range(count)),
        "multi-turn": turns,
        "retrieval": alone(instructions + first + second + read(50) for first, second in retrieved),
        "few-shot": alone(rng.choice(tasks) + read(rng.randint(100, 200)) for _ in range(count)),
        "unique": alone([BOS, *read(rng.randint(300, 600))] for _ in range(count)),
    }


def alone(prompts: Iterable[list[int]]) -> list[Ask]:
    """Return a conversation of one turn for each prompt."""
    return [Ask(number, prompt, 2) for number, prompt in enumerate(prompts)]


def many_conversations(reader: Reader, count: int = 24, num_turns: int = 6, seed: int = 0) -> list[Ask]:
    """Return the turns of concurrent conversations with one system prompt, in random order."""
    rng, system = random.Random(seed), [BOS, *reader.read(159)]
    turns = [number for number in range(count) for _ in range(num_turns)]
    rng.shuffle(turns)
    asks = []
    for i, number in enumerate(turns):
        start = [] if number in turns[:i] else system
        asks.append(Ask(number, start + reader.read(rng.randint(30, 70)), 12))
    return asks


def documents_in_turn(reader: Reader, num_documents: int = 6, length: int = 480, rounds: int = 5) -> list[Ask]:
    """Return questions about long documents, which take turns. Each round has new questions."""
    documents = [[BOS, *reader.read(length - 1)] for _ in range(num_documents)]
    return alone(document + reader.read(20) for _ in range(rounds) for document in documents)


# ---- other orders of eviction, and another hash


class HeadFirst(BlockPool):
    """A pool that evicts the least recently used prefix, as stage 6 does, but its first block first."""

    def free_blocks(self, blocks: list[int]) -> None:
        super().free_blocks(blocks)
        for block in blocks:
            if block in self.free and block in self.hashes:
                self.free.move_to_end(block)


class FirstInFirstOut(BlockPool):
    """A pool that evicts the block computed first, even if it was used since."""

    def free_blocks(self, blocks: list[int]) -> None:
        super().free_blocks(blocks)
        for block in self.cached.values():  # in the order in which they were computed
            if block in self.free:
                self.free.move_to_end(block)


ORDERS = {"LRU, tail first": BlockPool, "LRU, head first": HeadFirst, "FIFO": FirstInFirstOut}


def evicting(order: type[BlockPool], **options: Any) -> Any:
    """Return stage 6's engine without a model, with an order of eviction."""
    engine = without_model("s6", **options)
    manager = engine.kv_cache_manager
    manager.pool = order(manager.num_blocks, engine.observer)
    return engine


CHAINED = prefix_cache.hash_block_tokens


def of_own_tokens(parent: BlockHash, token_ids: list[int]) -> BlockHash:
    """Hash a block without its prefix."""
    return CHAINED(b"", token_ids)


HASHES = {"chained: stage 6": CHAINED, "of the block's own tokens": of_own_tokens}


@contextmanager
def hashed_by(hash_block_tokens: Callable[[BlockHash, list[int]], BlockHash]) -> Iterator[None]:
    """Replace stage 6's hash inside the context."""
    original, prefix_cache.hash_block_tokens = prefix_cache.hash_block_tokens, hash_block_tokens
    try:
        yield
    finally:
        prefix_cache.hash_block_tokens = original


def three_stories(tokenizer: Any, size: int) -> list[list[int]]:
    """Return two stories of two blocks each, and a third with the first block of one and the second of the other."""
    fox = "The fox had stolen a goose from the farmer, and he ran with it into the dark wood"
    girl = "The princess had lost her golden ring in the sea, and she wept and called the fish"
    ran = "and he ran as fast as he could, for the dogs were behind him all"
    wept = "who came and asked her why she wept, and she told him of the ring that she had lost"
    first, second = (tokenizer.encode(text)[:size] for text in (fox, girl))
    ends = [tokenizer.encode(text)[1 : 1 + size] for text in (ran, wept)]
    then = tokenizer.encode("and then")[1:]
    stories = [first + ends[0] + then, second + ends[1] + then, first + ends[1] + then]
    assert all(len(story) == 2 * size + len(then) for story in stories), "a story is too short"
    return stories


# ---- pictures


class Node(NamedTuple):
    """A block in the tree of prefixes."""

    block: int
    token_ids: tuple[int, ...]
    parent: int | None  # the block before it
    depth: int  # the number of blocks before it
    row: int  # in the picture; the first child shares it


def tree(texts: Iterable[list[int]], block_size: int, index: Mapping[BlockHash, int]) -> list[Node]:
    """Return the blocks of these texts that the index has, from the root on, with a row for each branch.

    >>> texts = [[1, 2, 3, 4], [1, 2, 5, 6], [7, 8]]
    >>> hashes = [extend_block_hashes(made := [], text, 2) or made for text in texts]
    >>> index = {h: i for i, h in enumerate(dict.fromkeys(h for some in hashes for h in some))}
    >>> [(node.block, node.parent, node.depth, node.row) for node in tree(texts, 2, index)]
    [(0, None, 0, 0), (1, 0, 1, 0), (2, 0, 1, 1), (3, None, 0, 2)]
    """
    children: dict[int | None, dict[int, tuple[int, ...]]] = {None: {}}  # of each block, with their tokens
    for text in texts:
        hashes: list[BlockHash] = []
        extend_block_hashes(hashes, text, block_size)
        parent = None
        for i, block in enumerate(index[block_hash] for block_hash in hashes if block_hash in index):
            children[parent].setdefault(block, tuple(text[i * block_size : (i + 1) * block_size]))
            children.setdefault(block, {})
            parent = block
    nodes: list[Node] = []

    def add(parent: int | None, depth: int, row: int) -> int:
        """Add the children of a block, and return the next row."""
        for block, token_ids in children[parent].items():
            nodes.append(Node(block, token_ids, parent, depth, row))
            row = add(block, depth + 1, row)
        return row if children[parent] else row + 1

    add(None, 0, 0)
    return nodes


def draw_tree(ax: Axes, nodes: Sequence[Node], idle: Sequence[int], hits: Collection[int], text_of: Callable) -> None:
    """Draw a box with its text for each block.

    `hits` are the blocks that a request just found. `idle` are the blocks without a holder in the order of eviction,
    which a small number shows.
    """
    place = {node.block: node for node in nodes}
    turn = {block: number for number, block in enumerate(idle, start=1)}
    for node in nodes:
        left, bottom, block = node.depth, -node.row, node.block
        fill = ACCENT if block in hits else PALE if block in turn else USED
        pictures.polygons(ax, [pictures.box(left, 0.93, bottom, 0.72)], fill, edge=INK, width=0.6)
        if node.parent is not None:
            parent = place[node.parent]
            x = [parent.depth + 0.93, parent.depth + 0.965, parent.depth + 0.965, left]
            y = [0.36 - parent.row] * 2 + [bottom + 0.36] * 2
            ax.plot(x, y, color=GREY, linewidth=0.8)
        words = "\n".join(textwrap.wrap(text_of(list(node.token_ids)), 16)[:2])
        color = PAPER if fill == USED else INK
        ax.text(left + 0.03, bottom + 0.36, words, va="center", fontsize=7.5, color=color)
        if block in turn:
            ax.text(left + 0.91, bottom + 0.08, f"{turn[block]}", ha="right", fontsize=6.5, color=INK)
    deepest, last = max(node.depth for node in nodes), max(node.row for node in nodes)
    ax.set(xlim=(-0.02, deepest + 1), ylim=(-last - 0.1, 0.85), xticks=[], yticks=[])
    pictures.bare(ax)
