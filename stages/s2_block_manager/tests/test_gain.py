"""The gain of this stage: a sequence holds slots for its tokens and less than a block more, in any free blocks."""

from importlib import import_module

import pytest

from ..block_manager import BlockManager
from ..llm import LLM
from ..observer import Observer
from ..sampling import SamplingParams
from ..sequence import Sequence
from . import gain
from .helpers import make_sequence

BLOCK_SIZE = 4
PROMPTS = [[1] * n for n in (1, 4, 7, 12, 3)]
LENGTHS = [30, 1, 13, 9, 20]


class Meter:
    """A meter of an engine: at each step, the tokens of each sequence and the slots that it holds."""

    def __init__(self, llm: LLM) -> None:
        self.steps: list[list[tuple[int, int]]] = []
        run = llm.model_runner.run

        def measured(batch: list[tuple[Sequence, int]]) -> list:
            self.steps.append([(seq.num_tokens, len(seq.block_table) * BLOCK_SIZE) for seq, _ in batch])
            held = sum(slots for _, slots in self.steps[-1])
            assert llm.kv_cache_manager.report().held == held, "the report and the block tables disagree"
            return run(batch)

        llm.model_runner.run = measured


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("num_slots", [48, 1000])
def test_sequence_holds_its_tokens_and_less_than_a_block_more(checkpoint, num_slots):
    llm = LLM(checkpoint, block_size=BLOCK_SIZE, kv_cache_tokens=num_slots)
    meter = Meter(llm)
    llm.generate(PROMPTS, [greedy(n) for n in LENGTHS])
    held = [sequence for step in meter.steps for sequence in step]
    assert len(held) == sum(LENGTHS), "a step of each sequence for each new token"
    for num_tokens, slots in held:
        assert num_tokens <= slots < num_tokens + BLOCK_SIZE, f"the slots that a sequence of {num_tokens} tokens holds"


def test_max_tokens_does_not_change_what_is_held(checkpoint):
    """Stage 1 reserves 3 slots for the first request, and 63 for the second."""
    for max_tokens in (2, 62):
        llm = LLM(checkpoint, block_size=BLOCK_SIZE, kv_cache_tokens=64)
        meter = Meter(llm)
        stream = llm.stream([[1]], greedy(max_tokens))
        next(stream), next(stream)
        stream.close()
        assert meter.steps == [[(1, 4)], [(2, 4)]], f"tokens and slots in two steps, with max_tokens {max_tokens}"


def test_any_free_block_serves():
    """Every second of 8 blocks is held. Stage 1 could not place a sequence of 5 tokens; this stage serves one of 16."""
    manager = BlockManager(8, BLOCK_SIZE, Observer())
    seqs = [make_sequence(str(i), 3, max_tokens=1) for i in range(8)]
    for seq in seqs:
        manager.allocate(seq)
    for seq in seqs[::2]:
        manager.free(seq)
    late = make_sequence("late", 15, max_tokens=1)
    assert manager.can_promise(late), "4 blocks are free, and the sequence needs 4"
    manager.allocate(late)
    assert manager.report().held == 32, "8 blocks of 4 slots"


def test_gain_in_figures(tmp_path):
    """`make check` prints them at the end of the exercise, next to those of the previous stage."""
    assert gain.now(import_module("..", __package__), tmp_path) == {
        "slots held, all steps added up": 1140,
        "of these, slots without a token": 108,
        "the most that are held at once": 60,
    }
