"""What this stage buys: a sequence holds slots for its tokens and less than a block more, and any free block serves."""

from importlib import import_module

import pytest

from ..block_manager import BlockManager
from ..llm import LLM
from ..sampling import SamplingParams
from ..sequence import Sequence
from . import gain
from .helpers import make_sequence

BLOCK_SIZE = 4
PROMPTS = [[1] * n for n in (1, 4, 7, 12, 3)]
LENGTHS = [30, 1, 13, 9, 20]


def held_in_each_step(llm: LLM) -> list[list[tuple[int, int]]]:
    """Of each step that the engine will run: the tokens of each sequence, and the slots that it then holds."""
    run, steps = llm.model_runner.run, []

    def watched(batch: list[tuple[Sequence, int]]) -> list:
        report = llm.kv_cache_manager.report()
        seqs = [seq for seq, _ in batch]
        steps.append([(seq.num_tokens, len(seq.block_table) * BLOCK_SIZE) for seq in seqs])
        assert report.held == sum(slots for _, slots in steps[-1]), "nobody else holds any"
        return run(batch)

    llm.model_runner.run = watched
    return steps


@pytest.mark.parametrize("num_slots", [48, 1000])
def test_a_sequence_holds_its_tokens_and_less_than_a_block_more(checkpoint, num_slots):
    """At every step, in one batch or in waves, for members that may yet get one token or thirty."""
    llm = LLM(checkpoint, block_size=BLOCK_SIZE, kv_cache_tokens=num_slots)
    steps = held_in_each_step(llm)
    llm.generate(PROMPTS, [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in LENGTHS])
    members = [member for step in steps for member in step]
    assert len(members) == sum(LENGTHS), "a sequence is in as many steps as it gets tokens"
    for num_tokens, slots in members:
        assert num_tokens <= slots <= num_tokens + BLOCK_SIZE - 1


def test_what_is_held_does_not_depend_on_what_may_come(checkpoint):
    """Stage 1 reserved 3 slots or 63 here."""
    held = []
    for max_tokens in (2, 62):
        llm = LLM(checkpoint, block_size=BLOCK_SIZE, kv_cache_tokens=64)
        steps = held_in_each_step(llm)
        stream = llm.stream([[1]], SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
        next(stream), next(stream)
        stream.close()
        held.append(steps)
    assert held == [[[(1, 4)], [(2, 4)]]] * 2


def test_any_free_block_serves():
    """Blocks 1, 3, 5 and 7 of 8 are held: stage 1 could not place a sequence of 5 tokens, this one serves 16."""
    manager = BlockManager(8, BLOCK_SIZE)
    seqs = [make_sequence(str(i), 4, max_tokens=1) for i in range(8)]
    for seq in seqs:
        manager.allocate(seq)
    for seq in seqs[::2]:
        manager.free(seq)
    late = make_sequence("late", 16, max_tokens=1)
    assert manager.can_allocate(late)
    manager.allocate(late)
    assert manager.num_free_blocks == 0 and manager.report().held == 32


def test_the_gain_in_figures(tmp_path):
    """They are told at the end of the exercise, beside those of the stage before."""
    assert gain.now(import_module("..", __package__), tmp_path) == {
        "slots held, all steps added up": 1140,
        "of these, slots without a token": 108,
        "the most that are held at once": 60,
    }
