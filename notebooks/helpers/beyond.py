"""Helpers of the notebook beyond stage 7: where the blocks of a prompt were found, and what became of guesses."""

import random
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from nanovllm import LLM, SamplingParams
from nanovllm.bench.harness import take_turns, timed
from nanovllm.bench.workload import random_tokens
from nanovllm.engine.executor import with_drafts
from nanovllm.trace import traced
from nanovllm.trace.events import Event
from notebooks.helpers import pictures
from notebooks.helpers.nanovllm import DecodeStep
from notebooks.helpers.pictures import ACCENT, GREY, INK, LIGHT, PALE, PAPER, USED, Line

# ---- a restart

PLACES = {"device": USED, "host": "#8db4cc", "disk": ACCENT, "computed": PAPER, "lost": INK}
BLOCK = 16


class Answer(NamedTuple):
    """The first token of a request, and where the blocks of its prompt were found."""

    token: int
    milliseconds: float  # until the token was there
    tries: list[list[str]]  # a key of PLACES for each block; a second try follows if a block was lost on its way
    hashes: list[str]  # of the blocks that were computed or read


def ask(llm: LLM, prompt: list[int]) -> Answer:
    """Ask for one token, and watch where the blocks come from."""
    events: list[Event] = []
    with traced(llm, events.append):
        started = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=1)
        [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        seconds = time.perf_counter() - started
    hashes = [event["hash"] for event in events if event["kind"] in ("cached", "disk_loaded")]
    return Answer(output.outputs[0].token_ids[0], 1000 * seconds, tries_of(events), list(dict.fromkeys(hashes)))


def tries_of(events: Sequence[Event]) -> list[list[str]]:
    """Return the place of each block, for each time that the one request was admitted."""
    tries = [dict[int, str]()]
    for event in events:
        match event["kind"]:
            case "preempt":
                tries.append({})
            case "hit":
                tries[-1][event["block"]] = "device"
            case "taken":
                tries[-1].setdefault(event["block"], "computed")
            case "loaded":
                tries[-1][event["to"]] = "host"
            case "disk_loaded":
                tries[-1][event["to"]] = "disk"
            case "lost":
                tries[-1][event["to"]] = "lost"
    return [[*places.values()] for places in tries]


class Restarts:
    """Engines that have nothing in common but a folder, and a prompt that all of them get."""

    def __init__(self, model: Path, folder: str, prompt: list[int]) -> None:
        """Build no engine yet. Each one computes a prompt of random tokens first, so its first step is not timed."""
        self._model, self._folder, self._prompt = model, folder, prompt
        self._seeds, self._num_blocks = count(), -(-len(prompt) // BLOCK)

    def engine(self) -> LLM:
        """Return a new engine, whose pool holds two prompts and a bit."""
        room = {"kv_cache_tokens": (2 * self._num_blocks + 8) * BLOCK, "watermark": 0.0, "dtype": "float32"}
        room |= {"kv_offloading_tokens": 8 * self._num_blocks * BLOCK, "kv_disk_dir": self._folder}
        llm = LLM(str(self._model), device="cpu", offload_policy="load", **room)
        ask(llm, self.other(self._num_blocks))
        return llm

    def other(self, num_blocks: int) -> list[int]:
        """Return another prompt of so many blocks each time."""
        return random_tokens(random.Random(next(self._seeds)), 4096, num_blocks * BLOCK - 1)

    def tell(self) -> dict[str, Answer]:
        """Return the answers of four engines, one after another."""
        first, half = self.engine(), self._num_blocks // 2
        answers = {"a new prompt": ask(first, self._prompt), "the same again": ask(first, self._prompt)}
        ask(first, self.other(self._num_blocks + 8 + half))
        answers["after another prompt"] = ask(first, self._prompt)
        flush(first)
        answers["a second engine"] = self.ask_new(self._prompt)
        question = [*self._prompt[: -2 * BLOCK], *self.other(2)]
        answers["a third one, another question"] = self.ask_new(question)
        self.damage(answers["a new prompt"].hashes[half])
        answers["a fourth one, with a damaged file"] = self.ask_new(self._prompt)
        return answers

    def ask_new(self, prompt: list[int]) -> Answer:
        """Return the answer of a new engine."""
        answer = ask(llm := self.engine(), prompt)
        flush(llm)
        return answer

    def damage(self, block_hash: str) -> None:
        """Flip a bit in the middle of a block's file."""
        [path] = Path(self._folder).glob(f"*/*/{block_hash}.kv")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def flush(llm: LLM) -> None:
    """Wait until all blocks are in files, if the engine uses the disk."""
    if llm.llm_engine.disk_tier:
        llm.llm_engine.disk_tier.flush()


def restart(model: Path, prompt: list[int]) -> dict[str, Answer]:
    """Return the answers of some engines that share a new folder."""
    with TemporaryDirectory() as folder:
        return Restarts(model, folder, prompt).tell()


def draw_tries(ax: Axes, answers: Mapping[str, Answer], milliseconds: Mapping[str, float]) -> None:
    """Draw a row of blocks for each try, with the time to the first token at its end."""
    names: list[str] = []
    for name, answer in answers.items():
        for number, places in enumerate(answer.tries):
            row = -len(names)
            for place, color in PLACES.items():
                boxes = [pictures.box(i, 1, row, 0.7) for i, each in enumerate(places) if each == place]
                pictures.polygons(ax, boxes, color, GREY)
            names.append(name if number == 0 else "its second try")
        pictures.label(ax, pictures.duration(1000 * milliseconds[name]), (len(places), row + 0.35), (6, 0))
    ax.set(yticks=[0.35 - i for i in range(len(names))], yticklabels=names, ylim=(-len(names) + 0.8, 1))
    ax.set(xlim=(0, len(places) * 1.1), xlabel="block of the prompt")
    pictures.bare(ax)
    pictures.legend(ax, PLACES)


class Speeds(NamedTuple):
    """The speeds that decide whether a disk pays for a model on this machine."""

    bytes_per_token: int
    bytes_per_second: float  # read from the disk, not from the system's memory
    computed_per_second: float  # tokens of a prefill

    @property
    def read_per_second(self) -> float:
        """The tokens whose keys and values are read in a second. The disk pays while computing is slower.

        >>> Speeds(50_000, 1e9, 1000).read_per_second
        20000.0
        """
        return self.bytes_per_second / self.bytes_per_token


def measure_speeds(model: Path) -> Speeds:
    """Measure as an engine does when it starts."""
    with TemporaryDirectory() as folder:
        room = {"kv_cache_tokens": 512, "max_num_batched_tokens": 256, "kv_offloading_tokens": 0}
        llm = LLM(str(model), device="cpu", dtype="float32", kv_disk_dir=folder, offload_policy="auto", **room)
        flush(llm)  # the folder is removed next
        cost = llm.llm_engine.tiers.disk_cost_model
        assert cost is not None
        return Speeds(llm.llm_engine.kv_cache.bytes_per_token, cost.load_bytes_per_second, cost.tokens_per_second)


def draw_speeds(ax: Axes, speeds: Mapping[str, Speeds]) -> None:
    """Draw a dot for each model. Above the diagonal, reading is faster than computing."""
    numbers = [number for each in speeds.values() for number in (each.read_per_second, each.computed_per_second)]
    low, high = min(numbers) / 3, max(numbers) * 3
    ax.fill_between([low, high], [low, high], [high, high], color=PALE, linewidth=0)
    ax.plot([low, high], [low, high], color=GREY, linewidth=0.8)
    for name, each in speeds.items():
        at = each.computed_per_second, each.read_per_second
        ax.hlines(at[1], *at, color=ACCENT, linewidth=1)
        ax.plot(at[1], at[1], "|", color=ACCENT, markersize=10)
        ax.plot(*at, "o", color=USED)
        pictures.label(ax, name, at, (0, 6), USED)
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
    pictures.thousands(ax.xaxis, ax.yaxis)
    ax.set(xlabel="computed tokens/s", ylabel="read tokens/s")
    pictures.label(ax, "the disk pays", (low, (low * high) ** 0.5), (8, 0), GREY)


# ---- drafts

FATES = {"accepted": USED, "sampled": PAPER, "rejected": ACCENT}  # of a computed row


class Rows(NamedTuple):
    """The number of sequences in a step, and of guesses for each of them."""

    sequences: int
    guesses: int


class Step(NamedTuple):
    """The texts of a step's rows: right guesses, then the token that was sampled, then the wrong guesses."""

    accepted: list[str]
    sampled: str
    rejected: list[str]


def steps_of(events: Sequence[Event]) -> list[Step]:
    """Return the steps of the one request that gave tokens."""
    steps, draft, num_accepted, texts = list[Step](), list[str](), 0, list[str]()
    for event in events:
        match event["kind"]:
            case "draft_proposed":
                draft = event["texts"]
            case "draft_accepted":
                num_accepted = event["num_tokens"]
            case "token":
                texts.append(event["text"])
            case "step" if texts:
                steps.append(Step(texts[:-1], texts[-1], draft[num_accepted:]))
                draft, num_accepted, texts = [], 0, []
    return steps


def draw_strip(ax: Axes, steps: Sequence[Step], title: str, columns: int = 14, rows: int = 6) -> None:
    """Draw the first cells: one for each computed row, with its text."""
    cells = [cell for step in steps for cell in [
        *((text, "accepted") for text in step.accepted), (step.sampled, "sampled"),
        *((text, "rejected") for text in step.rejected),
    ]][: columns * rows]  # fmt: skip
    for fate, color in FATES.items():
        places = [divmod(i, columns) for i, (_, each) in enumerate(cells) if each == fate]
        pictures.polygons(ax, [pictures.box(x, 1, -y, 0.84) for y, x in places], color, LIGHT)
    for i, (text, fate) in enumerate(cells):
        y, x = divmod(i, columns)
        color = PAPER if fate == "accepted" else INK
        ax.text(x + 0.5, 0.4 - y, visible(text), color=color, ha="center", va="center", fontsize=7)
    ax.set(xlim=(0, columns), ylim=(0.9 - rows, 0.9), xticks=[], yticks=[], title=title)
    pictures.bare(ax)


def visible(text: str) -> str:
    r"""Return a text for a small box: without its space, and with a sign for the end of a line.

    >>> visible(" rabbit"), visible("\n")
    ('rabbit', '⏎')
    """
    return text.strip(" ").replace("\n", "⏎").replace("$", r"\$")


def draft_costs(
    step: DecodeStep, sequences: Sequence[int], lengths: Sequence[int], num_rounds: int
) -> dict[Rows, float]:
    """Return the milliseconds of a step for each number of sequences and of guesses for each of them.

    They take turns, and the fastest round counts, because other work on the machine can only add to it.
    """
    manager = step.engine.kv_cache_manager
    for seq in step.seqs:
        assert manager.append_draft_slots(seq, max(lengths)) == max(lengths), "the pool is too small for the drafts"

    def run(num_seqs: int, length: int) -> None:
        for seq in step.seqs[:num_seqs]:
            seq.draft_token_ids = [5] * length
        step.runner.launch(with_drafts([(seq, 1) for seq in step.seqs[:num_seqs]])).tokens()

    calls = {Rows(n, k): timed(partial(run, n, k)) for n in sequences for k in lengths}
    try:
        rounds = take_turns(calls, num_rounds)
        return {rows: 1000 * min(seconds[rows] for seconds in rounds) for rows in calls}
    finally:
        for seq in step.seqs:
            seq.draft_token_ids = []
            manager.trim(seq)


def expected_tokens(right: float, length: int) -> float:
    """Return the tokens of a step with `length` guesses, each of which is right with this probability.

    A guess counts only if all before it were right, and the model adds a token of its own (Leviathan et al. 2023,
    arXiv:2211.17192, section 3.1).

    >>> expected_tokens(0.5, 2), expected_tokens(1.0, 4)
    (1.75, 5.0)
    """
    return sum(right**i for i in range(length + 1))


def break_even(cost: float, length: int) -> float:
    """Return the share of right guesses from which a step that costs `cost` times as much is worth it, at most 1.

    >>> round(break_even(1.75, 2), 6), break_even(1.0, 4), break_even(9.0, 4)
    (0.5, 0.0, 1.0)
    """
    low, high = 0.0, 1.0
    if expected_tokens(low, length) >= cost:
        return low
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens(middle, length) >= cost else (middle, high)
    return high


def draw_costs(ax: Axes, ms: Mapping[str, Mapping[Rows, float]], lengths: Sequence[int]) -> None:
    """Draw how many times as long a step takes with guesses as without, for each number of sequences."""
    looks = iter([(ACCENT, "s--"), (USED, "o-"), (INK, "x-"), (GREY, "v-")])
    for name, times in ms.items():
        for n in sorted({rows.sequences for rows in times}):
            color, style = next(looks)
            ratios = [times[Rows(n, k)] / times[Rows(n, 0)] for k in (0, *lengths)]
            label = f"{name}, {n} sequence{'s' * (n > 1)}"
            ax.plot((0, *lengths), ratios, style, color=color, linewidth=1.4, markersize=4, label=label)
    ax.axhline(1, color=LIGHT, linewidth=0.8, zorder=0)
    ax.set(xlabel="guesses for each sequence", ylabel="time of a step, without guesses = 1", ylim=(0, None))
    ax.set(xticks=(0, *lengths))
    ax.legend(loc="upper left", frameon=False, fontsize=8)


def draw_break_even(ax: Axes, costs: Mapping[int, float], measured: Mapping[str, dict[str, Any]]) -> None:
    """Draw the gain that `costs` predict, by the number of guesses, and the gains that were measured."""
    shares = [i / 100 for i in range(101)]
    for (length, cost), color in zip(costs.items(), (LIGHT, GREY, USED), strict=True):
        gains = [expected_tokens(share, length) / cost for share in shares]
        pictures.lines(ax, [Line(shares, gains, f"{length}", color, (5, 0))], "share of right guesses", "times as fast")
    names = sorted(measured, key=lambda name: measured[name]["speedup"]["median"])
    for name, shift in zip(names, ((7, -9), (7, -9), (-7, 9)), strict=True):
        each = measured[name]
        at = each["accepted"] / max(each["drafted"], 1), each["speedup"]["median"]
        ax.plot(*at, "o", color=ACCENT)
        pictures.label(ax, name, at, shift, ACCENT)
    ax.axhline(1, color=INK, linewidth=0.8, zorder=0)
    pictures.percent(ax.xaxis)
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set(xlim=(0, 1), ylim=(0, None))
