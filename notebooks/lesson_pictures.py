"""The lessons' pictures: `python -m notebooks.lesson_pictures` writes stages/pictures/*.svg.

Their data is counted, so every machine draws the same pictures, or it was measured, and is in results.json. A test
compares the pictures with the files.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stages.bench import results
from stages.bench.kernel import MIXED
from stages.bench.models import STORYTELLER
from stages.bench.predict.s1 import crowded_moments, most_free, num_free
from stages.more_beams import LLM, BeamSearchParams
from stages.more_beams.beam_search import BeamSearch
from stages.more_beams.sequence import Sequence as BeamSequence
from stages.more_two_ranks.llama import LlamaForCausalLM
from stages.more_two_ranks.llama import ModelConfig as RanksConfig
from stages.more_two_ranks.ranks import part_of
from stages.s1_contiguous_cache.kv_cache import PoolReport
from stages.s3_paged_attention.attention import AttentionMetadata, PagedAttention
from stages.s3_paged_attention.config import EngineConfig
from stages.s3_paged_attention.kv_cache import KVCache
from stages.s3_paged_attention.llama import ModelConfig
from stages.tools.prose.two_ranks import show_bytes, storyteller

FOLDER = Path(__file__).resolve().parents[1] / "stages" / "pictures"
WIDTH, LEFT = 720, 12  # of a picture, and its margin
STYLE = """<style>
text{font:13px system-ui,sans-serif;fill:#57606a}.strong{font-weight:600;fill:#24292f}
.used{fill:#4a7fb5}.held{fill:#cfdbe8}.free{fill:none;stroke:#c4622d;stroke-width:1.5}.needed{fill:#c4622d}
.edge{fill:none;stroke:#8c959f}
.limit{stroke:#c4622d;stroke-dasharray:3 3}.arrow{fill:none;stroke:#c4622d;stroke-width:1.5}.hot{fill:#c4622d}
@media (prefers-color-scheme:dark){text{fill:#9da7b3}.strong{fill:#e6edf3}.used{fill:#6ea3d8}.held{fill:#2d3f52}
.free,.arrow,.limit{stroke:#f0985f}.needed,.hot{fill:#f0985f}}
</style>"""


def pictures() -> dict[str, str]:
    """Return the SVG of each picture by its file name."""
    drafts = results.value("drafts")
    return {
        "s1_refused.svg": refused(),
        "s2_block_table.svg": block_table(),
        "more_beams.svg": beams_in_blocks(),
        "more_kernel.svg": what_attention_reads(),
        "more_speculation.svg": when_guesses_pay(drafts["batches"]["storyteller"], drafts["texts"]),
        "more_two_engines.svg": who_waits(results.value("two_engines.engines")),
        "more_two_ranks.svg": two_ranks(),
    }


def svg(height: int, title: str, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">'
    return "\n".join([head, f"<title>{title}</title>", STYLE, *parts, "</svg>"]) + "\n"


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:.4g}" y="{y:g}" width="{width:.4g}" height="{height:g}" class="{kind}"/>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.4g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{words}</text>'


# ---- stage 1: enough slots are free, but not in one piece


def refused() -> str:
    """Draw the pool at the moment with the most free slots, and the slots that the waiting request needs, to scale."""
    moment = most_free(crowded_moments(STORYTELLER))
    pool, needed = moment.report, moment.waiting.max_num_tokens
    scale = (WIDTH - 2 * LEFT) / pool.num_slots  # pixels per slot
    parts = [text(LEFT, 18, f"the pool, {pool.num_slots:,} slots from left to right", "strong")]
    for start, size, used in pool.pieces:
        parts.append(rect(LEFT + start * scale, 50, used * scale, 36, "used"))
        parts.append(rect(LEFT + (start + used) * scale, 50, (size - used) * scale, 36, "held"))
    for start, size in free_pieces(pool):
        x, width = LEFT + start * scale, size * scale
        parts.append(rect(x, 50, width, 36, "free"))
        if width > 25:
            parts.append(text(x + width / 2, 44, f"{size:,}", anchor="middle"))
    start, size = max(free_pieces(pool), key=lambda piece: piece[1])
    x = LEFT + start * scale
    parts += [f'<path d="M{edge:.1f} 88V122" class="limit"/>' for edge in (x, x + size * scale)]
    parts.append(rect(x, 104, needed * scale, 18, "needed"))
    words = f"the request that waits: {needed:,} slots in one piece"
    is_right = x > WIDTH / 2
    parts.append(
        text(x - 8 if is_right else x + needed * scale + 8, 118, words, "strong", "end" if is_right else "start")
    )
    for x, kind, words in [(0, "used", "keys and values"), (150, "held", "reserved, empty"), (300, "free", "free")]:
        parts += [rect(LEFT + x, 143, 12, 12, kind), text(LEFT + x + 18, 154, words)]
    caption = f"{num_free(moment):,} slots are free, and the largest free piece has {pool.largest_free:,}."
    parts.append(text(LEFT, 180, caption))
    return svg(192, f"A request that needs {needed:,} slots waits: {caption}", parts)


def free_pieces(pool: PoolReport) -> Iterator[tuple[int, int]]:
    """Yield the start and the size of each free piece."""
    end = 0
    for start, size, _ in (*pool.pieces, (pool.num_slots, 0, 0)):
        if start > end:
            yield end, start - end
        end = start + size


# ---- stage 2: blocks are anywhere in the pool, and a block table keeps them in order

BLOCK_SIZE, NUM_BLOCKS = 16, 8
TABLES = {"A": ([5, 1, 3], 37), "B": ([0, 4], 21)}  # the blocks in order, and the number of tokens in them
CELL, HIGH = 80, 26  # the size of a block in the picture


def block_table() -> str:
    """Draw the tokens of A, its table with arrows, and the pool with the blocks of A and B."""
    table, num_tokens = TABLES["A"]
    parts = [text(LEFT, 18, "tokens of A, in order", "strong"), text(LEFT, 102, "its block table", "strong")]
    words = f"blocks of {BLOCK_SIZE} slots (orange: A, blue: B, pale: held and empty, blank: free)"
    parts += [text(LEFT, 284, "the pool", "strong"), text(LEFT + 64, 284, words)]
    for place, block in enumerate(table):
        x, filled = 190 + place * 150, min(num_tokens - place * BLOCK_SIZE, BLOCK_SIZE)
        first = place * BLOCK_SIZE
        parts += [rect(x, 4, 110 * filled / BLOCK_SIZE, 20, "hot"), rect(x, 4, 110, 20, "edge")]
        parts += [text(x + 55, 42, f"{first} to {first + filled - 1}", anchor="middle")]
        parts += [rect(x + 33, 84, 44, 26, "edge"), text(x + 55, 102, str(block), "strong", "middle")]
        to = LEFT + block * 87 + CELL / 2
        parts += [f'<path d="M{x + 55} 50V80M{x + 51} 74l4 6l4 -6" class="arrow"/>']
        parts += [f'<path d="M{x + 55} 112C{x + 55} 165 {to:g} 150 {to:g} 208m-4 -6l4 6l4 -6" class="arrow"/>']
    for block in range(NUM_BLOCKS):
        parts += pool_block(block)
    title = "The block table of A has blocks 5, 1 and 3 in order. They are anywhere in the pool."
    return svg(296, title, parts)


def pool_block(block: int) -> list[str]:
    x = LEFT + block * 87
    parts = []
    for name, (table, num_tokens) in TABLES.items():
        if block in table:
            filled = min(num_tokens - table.index(block) * BLOCK_SIZE, BLOCK_SIZE) / BLOCK_SIZE
            kind = "hot" if name == "A" else "used"
            parts += [rect(x, 212, CELL, HIGH, "held"), rect(x, 212, round(CELL * filled, 1), HIGH, kind)]
    return [*parts, rect(x, 212, CELL, HIGH, "edge"), text(x + CELL / 2, 256, str(block), anchor="middle")]


# ---- the kernel: what attention reads with tiles and in place

ROW, THICK = 9, 7  # from one sequence to the next, and the height of its bar


def what_attention_reads() -> str:
    """Draw what attention reads in a decode step with one long context, with tiles and in place, and what moves."""
    contexts, tiles = MIXED.contexts, tiles_of(MIXED.contexts)
    longest = max(last for _, _, last in tiles)
    scale, right = 330 / longest, LEFT + 366  # pixels a slot, and where the kernel's rows begin
    num_copied, num_seen = sum(rows * (last - first) for rows, first, last in tiles), sum(contexts)
    parts = [
        text(LEFT, 18, f"tiles copy {num_copied:,} slots", "strong"),
        text(right, 18, f"the kernel reads {num_seen:,} slots", "strong"),
    ]
    for seq, context in enumerate(contexts):
        y = 28 + seq * ROW
        end = max(last for rows, _, last in tiles if seq < rows)
        parts += [rect(LEFT, y, context * scale, THICK, "used"), rect(right, y, context * scale, THICK, "used")]
        parts.append(rect(LEFT + context * scale, y, (end - context) * scale, THICK, "held"))
    for rows, first, last in tiles:
        parts.append(rect(LEFT + first * scale, 26, (last - first) * scale, rows * ROW + 2, "edge"))
    low = 28 + len(contexts) * ROW + 26
    for x, kind, words in [(0, "used", "tokens of a sequence"), (190, "held", "padding"), (290, "edge", "a tile")]:
        parts += [rect(LEFT + x, low - 11, 12, 12, kind), text(LEFT + x + 18, low, words)]
    parts.append(text(LEFT, low + 36, "slots that move in a layer, at least, to scale", "strong"))
    width = (WIDTH - 2 * LEFT - 90) / 3 / num_copied  # pixels a slot
    for i, words in enumerate(("read from the pool", "written to the copy", "read again")):
        start = LEFT + 90 + i * num_copied * width
        parts += [rect(start, low + 48, num_copied * width - 2, 22, "hot"), text(start, low + 86, words)]
    parts += [text(LEFT, low + 64, "tiles"), text(LEFT, low + 118, "kernel")]
    parts.append(rect(LEFT + 90, low + 102, num_seen * width, 22, "used"))
    parts.append(text(LEFT + 98 + num_seen * width, low + 118, "read from the pool"))
    batch = f"One sequence of {contexts[0]:,} tokens and {len(contexts) - 1} of {contexts[1]}"
    return svg(low + 134, f"{batch}: tiles copy {num_copied:,} slots, the kernel reads {num_seen:,}", parts)


def tiles_of(contexts: list[int]) -> list[tuple[int, int, int]]:
    """Return the tiles of a decode step: how many sequences each has, from the first on, and which of their slots."""
    num_seqs, none = len(contexts), torch.zeros(0, dtype=torch.int64)
    model = ModelConfig.from_folder(STORYTELLER)
    kv_cache = KVCache(model, 1, EngineConfig.block_size, torch.float32, torch.device("cpu"))
    tables = torch.zeros(num_seqs, -(-max(contexts) // EngineConfig.block_size), dtype=torch.int64)
    step = AttentionMetadata(list(range(num_seqs + 1)), contexts, tables, none, none)
    plan: Any = PagedAttention(kv_cache, EngineConfig.tile_size).plan(step)
    [batch] = plan.args[-1]
    return [(len(tile.rows), int(tile.keys[0]), int(tile.keys[-1]) + 1) for tile in batch.tiles]


# ---- speculation: what a step with guesses costs, and what it brings

TEXTS = {"again": "the story again", "greedy": "a new story, greedy", "sampled": "temperature 0.8"}
BOTTOM, TALLEST = 250, 200  # of the bars


def when_guesses_pay(batches: Mapping[str, Any], texts: Mapping[str, Any]) -> str:
    """Draw the cost of a step in which everybody guesses by batch, and lines at the tokens that texts bring a step."""
    scale = TALLEST / max(*(row["cost_spread"][1] for row in batches.values()), texts["again"]["tokens_a_step"])
    parts = [
        text(LEFT, 18, "bars: a step in which each sequence has 4 wrong guesses, in steps without guesses", "strong")
    ]
    parts.append(
        text(LEFT, 36, "lines: the tokens that a step brings each sequence. Guesses pay where a line is above a bar")
    )
    for place, batch in enumerate(sorted(batches, key=int)):
        row = batches[batch]
        x, height = LEFT + 20 + place * 110, row["cost"] * scale
        low, high = (BOTTOM - cost * scale for cost in row["cost_spread"])
        parts += [
            rect(x, BOTTOM - height, 60, height, "used"),
            f'<path d="M{x + 30} {low:.1f}V{high:.1f}" class="edge"/>',
        ]
        parts.append(text(x + 66, BOTTOM - height + 12, f"{row['cost']:.1f}", "strong"))
        parts.append(text(x + 30, BOTTOM + 18, f"batch of {batch}", anchor="middle"))
    for name, words in TEXTS.items():
        y = BOTTOM - texts[name]["tokens_a_step"] * scale
        parts.append(f'<path d="M{LEFT} {y:.1f}H500" class="limit"/>')
        parts.append(text(508, y + 4, f"{words}: {texts[name]['tokens_a_step']:.2f}"))
    parts.append(f'<path d="M{LEFT} {BOTTOM}H500" class="edge"/>')
    return svg(BOTTOM + 32, "Guesses cost more in a larger batch, and only some texts pay for them", parts)


# ---- beams: rows of blocks, which children share with their parents

WIDTH_OF_SEARCH, BEGINNING, FIRST, NUM_STEPS = 3, "Once upon a time there was", 3, 4  # the steps that are drawn
SLOT, APART, PANEL = 24, 52, 178  # the size of a block, and the distance of two rows and two steps


class Beam(NamedTuple):
    """A beam when its last token has a slot."""

    token_ids: tuple[int, ...]
    table: tuple[int, ...]
    is_copied: bool  # its last block, for this step


class WatchedSearch(BeamSearch):
    """A search that notes its beams at each step."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.steps: list[list[Beam]] = []

    def append_slots(self, beams: list[BeamSequence]) -> None:
        before = [list(beam.block_table) for beam in beams]
        super().append_slots(beams)
        tables = [tuple(beam.block_table) for beam in beams]
        copied = [len(a) == len(b) and a[-1] != b[-1] for a, b in zip(before, tables, strict=True)]
        tokens = [tuple(beam.token_ids) for beam in beams]
        self.steps.append([Beam(*parts) for parts in zip(tokens, tables, copied, strict=True)])


def watch_beams(width: int, prompt: str, max_tokens: int) -> tuple[list[list[Beam]], LLM]:
    """Return the beams of each step of a search by the storyteller, in blocks of 4, and its engine."""
    llm = LLM(STORYTELLER, dtype="float32", block_size=4, kv_cache_tokens=256)
    search = WatchedSearch(llm.llm_engine, BeamSearchParams(width, max_tokens, ignore_eos=True))
    search.run("0", prompt)
    return search.steps, llm


def beams_in_blocks() -> str:
    """Draw a few steps: a row for each beam, with its blocks and its last token, and an arrow to each child."""
    steps, llm = watch_beams(WIDTH_OF_SEARCH, BEGINNING, FIRST + NUM_STEPS)
    steps = steps[FIRST : FIRST + NUM_STEPS]
    parts = [
        text(
            LEFT,
            18,
            f"{WIDTH_OF_SEARCH} beams in {NUM_STEPS} steps: blocks of 4 tokens, and how many beams hold each",
            "strong",
        )
    ]
    for number, beams in enumerate(steps):
        left = LEFT + number * PANEL
        parts.append(text(left, 46, f"step {FIRST + number}"))
        parts += [part for row, beam in enumerate(beams) for part in row_of(left, row, beam, beams, llm)]
        if number + 1 < NUM_STEPS:
            parts += arrows(left, beams, steps[number + 1])
    y = 62 + WIDTH_OF_SEARCH * APART
    for x, kind, words in [
        (0, "held", "held by several beams"),
        (180, "edge", "by one"),
        (270, "free", "a copy, for this step"),
    ]:
        parts += [rect(LEFT + x, y, 12, 12, kind), text(LEFT + x + 18, y + 11, words)]
    return svg(y + 24, "Beams in rows of blocks: children share the blocks of their parent", parts)


def row_of(left: float, row: int, beam: Beam, beams: list[Beam], llm: LLM) -> Iterator[str]:
    """Yield the parts of a beam's row: its blocks, each with its number and its count, and its last token."""
    y = 58 + row * APART
    for column, block in enumerate(beam.table):
        count, x = sum(block in each.table for each in beams), left + column * SLOT
        is_copy = beam.is_copied and column == len(beam.table) - 1
        yield rect(x, y, SLOT - 3, 20, "held" if count > 1 else "free" if is_copy else "edge")
        yield text(x + (SLOT - 3) / 2, y + 15, str(block), "strong", "middle")
        yield text(x + (SLOT - 3) / 2, y + 35, f"×{count}", anchor="middle")
    yield text(left + len(beam.table) * SLOT + 2, y + 15, escape(word_of(beam, llm)))


def word_of(beam: Beam, llm: LLM) -> str:
    """Return the text of a beam's last token."""
    assert llm.tokenizer, "the storyteller has one"
    return llm.tokenizer.decode(list(beam.token_ids[-1:])).strip() or "⏎"


def arrows(left: float, beams: list[Beam], children: list[Beam]) -> Iterator[str]:
    """Yield an arrow from each beam to each of its children in the next step, and a cross behind one that has none."""
    rows = {beam.token_ids: row for row, beam in enumerate(beams)}
    parents = [rows[child.token_ids[:-1]] for child in children]
    start, end = left + PANEL - 28, left + PANEL - 5
    for row, parent in enumerate(parents):
        y = 68 + row * APART
        yield f'<path d="M{start} {68 + parent * APART}L{end - 4} {y}" class="arrow"/>'
        yield f'<path d="M{end} {y}l-7 -4v8z" class="hot"/>'
    for row in {*range(len(beams))} - {*parents}:
        yield text(start + 2, 72 + row * APART, "×", "strong", "middle")


# ---- two engines: the wait of those who decode, against that of a prompt

CHUNKS, LONGEST = ("512", "128", "64", "32"), 420  # tokens in a step of one engine; width of the longest wait


def who_waits(engines: Mapping[str, Any]) -> str:
    """Draw ITL at p95 against TTFT: a line through one engine with steps of several sizes, and a point for two."""
    longest = max(wait_range(row, "ttft_ms")[1] for row in engines.values())
    highest = max(wait_range(row, "itl_p95_ms")[1] for row in engines.values())

    def place(ttft: float, itl: float) -> tuple[float, float]:
        return LEFT + 8 + ttft / longest * LONGEST, BOTTOM - itl / highest * TALLEST

    places = {key: place(row["ttft_ms"], row["itl_p95_ms"]) for key, row in engines.items()}
    line = "L".join(f"{x:.1f} {y:.1f}" for x, y in (places[key] for key in CHUNKS))
    parts = [
        text(LEFT, 18, "up: the wait of four that decode for their next token, 95th percentile", "strong"),
        text(LEFT, 36, "right: the wait of a prompt of 700 tokens for its first one. Best is at the bottom left"),
        f'<path d="M{LEFT + 8} 50V{BOTTOM}H{LEFT + 20 + LONGEST}" class="edge"/>',
        f'<path d="M{line}" class="limit" fill="none"/>',
    ]
    for key, row in engines.items():
        (left, low), (right, high) = (
            place(*ends) for ends in zip(wait_range(row, "ttft_ms"), wait_range(row, "itl_p95_ms"), strict=True)
        )
        x, y = places[key]
        is_two = key not in CHUNKS
        name, kind = ("two engines", "strong") if is_two else (f"{key} tokens in a step", "")
        words = f"{name}: {row['itl_p95_ms']:.0f} and {row['ttft_ms']:,.0f} ms"
        parts += [
            f'<path d="M{left:.1f} {y:.1f}H{right:.1f}M{x:.1f} {low:.1f}V{high:.1f}" class="edge"/>',
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" class="{"hot" if is_two else "used"}"/>',
            text(x + 7, y + 17 if is_two else y - 7, key, kind),
            text(LEFT + 300, 70 + 20 * [*CHUNKS, "two"].index(key), words, kind),
        ]
    return svg(BOTTOM + 12, "Who waits for a prompt: one engine with steps of several sizes, and two engines", parts)


def wait_range(row: Mapping[str, Any], name: str) -> list[float]:
    """Return the smallest and the largest value over the rounds."""
    both: list[float] = row.get(f"{name}_spread", [row[name]] * 2)
    return both


# ---- two ranks: which weights of a layer, and which heads of a block, each of them has

RANKS = ("used", "free")  # filled, and only an outline, so that they differ in grey, too
SMALL, LARGE = 0.16, 1.2  # pixels per number of a weight, and of a block
Span = tuple[int, int]  # the first number and how many


def two_ranks() -> str:
    """Draw the storyteller's weights, and a block, each to its scale. The branch's code says which rank has what."""
    config = RanksConfig.from_folder(STORYTELLER)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = {name: weight for name, weight in model.model.layers[0].named_parameters() if "_proj" in name}
    words = "the weights of one layer: outputs from left to right, inputs from top to bottom"
    parts, x = [text(LEFT, 18, words, "strong")], float(LEFT)
    for name, weight in weights.items():
        adds_up = "o_proj" in name.split(".") or "down_proj" in name.split(".")
        parts += [text(x, 44, name.split(".")[-2]), *weight_of_ranks(name, weight.shape, config, x, 52)]
        x += weight.shape[0] * SMALL + (110 if adds_up else 30)
        if adds_up:
            parts.append(text(x - 102, 68, "all-reduce"))
    width, height = (size * SMALL for size in model.lm_head.weight.shape)
    parts += [text(LEFT, 190, "embedding and head: one weight"), box(LEFT, 198, width, height, "held")]
    parts.append(text(LEFT, 272, "a block of 16 tokens in one layer, tokens from top to bottom", "strong"))
    size = config.head_dim * LARGE
    for x, what in ((LEFT, "keys"), (LEFT + 230, "values")):
        parts.append(text(x, 292, what))
        for head, kind in enumerate(RANKS):
            parts.append(box(x + head * size, 300, size, 16 * LARGE, kind))
            parts.append(text(x + (head + 0.5) * size, 335, f"head {head}", "", "middle"))
    for x, kind, words in ((0, "used", "rank 0"), (90, "free", "rank 1"), (180, "held", "both")):
        parts += [box(LEFT + x, 356, 12, 12, kind), text(LEFT + x + 18, 367, words)]
    one, two = (show_bytes(storyteller().held(num_ranks)) for num_ranks in (1, 2))
    caption = f"Each rank has {two} of {one} of weights, and half of every block."
    parts.append(text(LEFT, 394, caption))
    return svg(406, f"Two ranks share the storyteller. {caption}", parts)


def weight_of_ranks(name: str, shape: Sequence[int], config: RanksConfig, x: float, y: float) -> list[str]:
    """Return the rows and columns of a layer's weight that each rank has. Rows lie from left to right."""
    parts = []
    for rank, kind in enumerate(RANKS):
        for (row, num_rows), (column, num_columns) in pieces(name, shape, config, rank):
            parts.append(box(x + row * SMALL, y + column * SMALL, num_rows * SMALL, num_columns * SMALL, kind))
    return parts


def pieces(name: str, shape: Sequence[int], config: RanksConfig, rank: int) -> list[tuple[Span, Span]]:
    """Return the rows and the columns of each piece of a weight [num_rows, num_columns] that one of two ranks has."""
    num_rows, num_columns = shape
    numbers = torch.arange(num_rows * num_columns).view(num_rows, num_columns)
    part = part_of(name, numbers, config, rank, 2)
    rows, columns = (part // num_columns).unique().tolist(), (part % num_columns).unique().tolist()
    assert len(rows) * len(columns) == part.numel(), f"{name}: the part is not some rows and some columns"
    return [(row, column) for row in spans(rows) for column in spans(columns)]


def spans(numbers: list[int]) -> list[Span]:
    """Return the runs of consecutive numbers.

    >>> spans([0, 1, 2, 6, 7])
    [(0, 3), (6, 2)]
    """
    starts = [i for i, number in enumerate(numbers) if i == 0 or number != numbers[i - 1] + 1]
    return [(numbers[a], b - a) for a, b in zip(starts, [*starts[1:], len(numbers)], strict=True)]


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return rect(round(x, 1), round(y, 1), round(width, 1), round(height, 1), kind)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, picture in pictures().items():
        (FOLDER / name).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
