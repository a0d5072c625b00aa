"""The Scheduler alone: sequences of so many tokens, a BlockManager, no model.

"a4 b1" is a step: 4 tokens of a, then 1 of b. Where a request has samples, they are a, a' and a''.
Blocks have 4 slots, nothing is kept free, unless a test says otherwise.
"""

import pytest

from ..block_manager import BlockManager
from ..config import EngineConfig
from ..sampling import SampledToken
from ..scheduler import Scheduler, SchedulerOutput
from ..sequence import Sequence
from .helpers import make_group


class Drive:
    """A scheduler, and what an engine does with what it says."""

    def __init__(self, num_blocks: int = 100, block_size: int = 4, **knobs) -> None:
        self.manager = BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(EngineConfig(**{"watermark": 0.0} | knobs), self.manager)
        self.seqs: dict[str, Sequence] = {}
        self.failed: list[str] = []
        self.copies: dict[int, int] = {}  # of the last step
        self.alike = False  # whether all samples get the same tokens

    def add(self, name: str, num_prompt_tokens: int, max_tokens: int = 50) -> Sequence:
        return self.add_group(name, num_prompt_tokens, 1, max_tokens)[0]

    def add_group(self, name: str, num_prompt_tokens: int, n: int, max_tokens: int = 50) -> list[Sequence]:
        group = make_group(name, num_prompt_tokens, max_tokens, n)
        self.seqs |= {name_of(seq): seq for seq in group}
        self.scheduler.add(group)
        return group

    def add_preempted(self, name: str, *token_ids: list[int], max_tokens: int = 50) -> list[Sequence]:
        """A group that waits once more; its samples have these tokens, the first of which is the prompt."""
        group = self.add_group(name, 1, len(token_ids), max_tokens)
        for seq, ids in zip(group, token_ids, strict=True):
            seq.token_ids = list(ids)
        return group

    def step(self) -> str:
        """Who ran. A sequence that is complete gets a token, another one in each sample; who has all its leaves."""
        batch, failed = self.scheduler.schedule()
        self.manager.check_integrity()
        self.failed += [name_of(seq) for seq in failed]
        self.copies = dict(self.scheduler.copies)
        self.scheduler.copies.clear()
        for seq, num_tokens in batch:
            self.assert_alone(seq, num_tokens)
        for seq, num_tokens in batch:
            seq.num_computed_tokens += num_tokens
            samplers = seq.samplers() if seq.num_uncomputed_tokens == 0 else []
            self.scheduler.fork_followers(seq)
            for sampler in samplers:
                sampler.append_token(SampledToken(7 if self.alike else 7 + sampler.sample_index, -1.0))
        for seq in [*self.scheduler.running]:
            if seq.finished:
                self.scheduler.remove(seq)
        self.manager.check_integrity()
        return says(batch)

    def assert_alone(self, seq: Sequence, num_tokens: int) -> None:
        """It has a slot for each token that it is to compute, in blocks that no other holds."""
        positions = range(seq.num_computed_tokens, seq.num_computed_tokens + num_tokens)
        written = {seq.block_table[position // self.manager.block_size] for position in positions}
        held = [other.block_table for other in self.scheduler.running if other is not seq]
        assert not any(written & set(table) for table in held), f"{name_of(seq)} writes to a block of another's"

    def steps(self, num: int) -> list[str]:
        return [self.step() for _ in range(num)]

    def admit(self, budget: int) -> str:
        """Admission alone, with so many tokens left in the step."""
        output = SchedulerOutput(batch=[], failed=[])
        self.scheduler._admit(output, budget)
        self.manager.check_integrity()
        self.failed += [name_of(seq) for seq in output.failed]
        return says(output.batch)

    def tables(self, name: str) -> list[list[int]]:
        """Of the samples of a request."""
        return [seq.block_table for seq in self.seqs.values() if seq.request_id == name]

    @property
    def queues(self) -> str:
        """Who runs | who waits, in order."""
        names = [[name_of(seq) for seq in queue] for queue in (self.scheduler.running, self.scheduler.waiting)]
        return " | ".join("".join(queue) for queue in names)

    @property
    def num_free(self) -> int:
        return self.manager.num_free_blocks


def name_of(seq: Sequence) -> str:
    return seq.request_id + "'" * seq.sample_index


def says(batch: list[tuple[Sequence, int]]) -> str:
    return " ".join(f"{name_of(seq)}{num_tokens}" for seq, num_tokens in batch)


# Admission


def test_those_who_wait_are_admitted_first_come_first_served():
    drive = Drive()
    for name in "cab":
        drive.add(name, 3)
    assert drive.admit(budget=100) == "c3 a3 b3"
    assert drive.queues == "cab | "


def test_the_budget_bounds_what_is_admitted_and_the_last_may_begin_with_a_part():
    drive = Drive()
    for name in "abc":
        drive.add(name, 6)
    assert drive.admit(budget=8) == "a6 b2"
    assert drive.queues == "ab | c"


@pytest.mark.parametrize("budget, admitted", [(0, ""), (6, "a6"), (7, "a6 b1")])
def test_nobody_is_admitted_for_no_tokens(budget, admitted):
    drive = Drive()
    drive.add("a", 6), drive.add("b", 6)
    assert drive.admit(budget) == admitted


def test_admission_takes_the_blocks_of_all_tokens_though_a_part_is_computed():
    drive = Drive(num_blocks=10)
    seq = drive.add("a", 17)
    assert drive.admit(budget=2) == "a2"
    assert len(seq.block_table) == 5 and drive.num_free == 5


def test_max_num_seqs_bounds_those_who_run():
    drive = Drive(max_num_seqs=2)
    for name in "abc":
        drive.add(name, 3)
    assert drive.admit(budget=100) == "a3 b3"
    assert drive.admit(budget=100) == ""
    assert drive.queues == "ab | c"


def test_nobody_overtakes_the_first_that_does_not_fit():
    """Of 4 blocks a takes 2; b wants 3; c would fit."""
    drive = Drive(num_blocks=4)
    drive.add("a", 8), drive.add("b", 12), drive.add("c", 4)
    assert drive.admit(budget=100) == "a8"
    assert drive.queues == "a | bc" and drive.num_free == 2


def test_nothing_is_promised():
    """8 slots, 8 sequences of one token: what they may come to need does not matter."""
    drive = Drive(num_blocks=8, block_size=1)
    for name in "abcdefgh":
        drive.add(name, 1, max_tokens=1000)
    assert drive.admit(budget=100) == "a1 b1 c1 d1 e1 f1 g1 h1"


def test_a_sequence_joins_those_who_run_in_the_step_after_it_came():
    drive = Drive()
    drive.add("a", 3)
    assert drive.steps(2) == ["a3", "a1"]
    drive.add("b", 5)
    assert drive.steps(2) == ["a1 b5", "a1 b1"]


def test_a_seat_is_taken_in_the_step_after_it_is_left():
    drive = Drive(max_num_seqs=2)
    drive.add("a", 3, max_tokens=5), drive.add("b", 3, max_tokens=2), drive.add("c", 3, max_tokens=2)
    assert drive.steps(6) == ["a3 b3", "a1 b1", "a1 c3", "a1 c1", "a1", ""]


def test_blocks_are_taken_in_the_step_after_they_are_given_back():
    """3 blocks: a and b run in one each, c needs two."""
    drive = Drive(num_blocks=3)
    drive.add("a", 1, max_tokens=4), drive.add("b", 1, max_tokens=2), drive.add("c", 8, max_tokens=1)
    assert drive.steps(5) == ["a1 b1", "a1 b1", "a1 c8", "a1", ""]


def test_with_nobody_there_nothing_is_scheduled():
    assert Drive().scheduler.schedule() == ([], [])


# The watermark: 0.25 of 8 blocks are 2


def test_beside_others_a_new_sequence_must_leave_the_watermark_free():
    drive = Drive(num_blocks=8, watermark=0.25)
    drive.add("a", 12), drive.add("b", 13)
    assert drive.admit(budget=100) == "a12", "5 are free, 4 are needed, 1 would be left"
    assert drive.queues == "a | b"


def test_the_watermark_is_what_may_be_left():
    drive = Drive(num_blocks=8, watermark=0.25)
    drive.add("a", 12), drive.add("b", 12)
    assert drive.admit(budget=100) == "a12 b12" and drive.num_free == 2


@pytest.mark.parametrize("watermark, num_prompt_tokens", [(0.12, 20), (0.13, 16), (0.24, 16), (0.25, 12)])
def test_the_watermark_is_of_whole_blocks_rounded_down(watermark, num_prompt_tokens):
    """8 blocks, of which a takes 3: so many tokens just fit beside it."""
    drive = Drive(num_blocks=8, watermark=watermark)
    drive.add("a", 12), drive.add("b", num_prompt_tokens), drive.admit(budget=100)
    assert drive.queues == "ab | "
    drive = Drive(num_blocks=8, watermark=watermark)
    drive.add("a", 12), drive.add("b", num_prompt_tokens + 1), drive.admit(budget=100)
    assert drive.queues == "a | b"


@pytest.mark.parametrize("watermark", [0.0, 0.25, 0.99])
def test_the_watermark_does_not_hold_back_the_first(watermark):
    drive = Drive(num_blocks=8, watermark=watermark)
    drive.add("a", 32)
    assert drive.admit(budget=100) == "a32" and drive.num_free == 0


def test_the_watermark_does_not_hold_back_those_who_run():
    """a and b grow into what c may not have."""
    drive = Drive(num_blocks=8, watermark=0.25)
    drive.add("a", 12), drive.add("b", 12), drive.add("c", 1)
    assert drive.steps(2) == ["a12 b12", "a1 b1"]
    assert drive.num_free == 0 and drive.queues == "ab | c"


def test_once_nobody_runs_the_watermark_holds_nobody_back():
    drive = Drive(num_blocks=8, watermark=0.25)
    drive.add("a", 4, max_tokens=2), drive.add("b", 32, max_tokens=1)
    assert drive.steps(4) == ["a4", "a1", "b32", ""]


# Chunks


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks():
    drive = Drive(max_num_batched_tokens=4)
    seq = drive.add("a", 10, max_tokens=3)
    assert drive.steps(3) == ["a4", "a4", "a2"] and seq.num_tokens == 11
    assert drive.steps(3) == ["a1", "a1", ""] and seq.num_tokens == 13


def test_there_is_no_token_before_the_last_chunk():
    drive = Drive(max_num_batched_tokens=4)
    seq = drive.add("a", 10)
    assert drive.steps(2) == ["a4", "a4"]
    assert seq.num_tokens == 10 and seq.num_uncomputed_tokens == 2


def test_a_chunk_that_ends_on_a_block_boundary_is_followed_by_the_next_block():
    drive = Drive(num_blocks=3, max_num_batched_tokens=4)
    seq = drive.add("a", 8)
    assert drive.steps(2) == ["a4", "a4"]
    assert len(seq.block_table) == 2, "the token that came has no slot yet"
    assert drive.step() == "a1" and len(seq.block_table) == 3


@pytest.mark.parametrize("budget, chunks", [(1, ["a1"] * 7), (2, ["a2", "a2", "a2", "a1"]), (3, ["a3", "a3", "a1"])])
def test_a_budget_may_be_smaller_than_a_block(budget, chunks):
    drive = Drive(max_num_batched_tokens=budget)
    drive.add("a", 7, max_tokens=1)
    assert drive.steps(len(chunks)) == chunks
    assert drive.queues == " | "


def test_what_is_left_of_the_budget_goes_to_the_next_prompt():
    drive = Drive(max_num_batched_tokens=5)
    for name in "abc":
        drive.add(name, 4, max_tokens=1)
    assert drive.steps(3) == ["a4 b1", "b3 c2", "c2"]


def test_chunks_are_computed_in_order_of_arrival_and_only_one_prompt_is_begun_and_not_done():
    drive = Drive(max_num_batched_tokens=8)
    for name in "abcd":
        drive.add(name, 12, max_tokens=1)
    assert drive.steps(7) == ["a8", "a4 b4", "b8", "c8", "c4 d4", "d8", ""]


def test_decodes_go_first_then_chunks_then_those_admitted():
    drive = Drive(max_num_batched_tokens=10)
    drive.add("a", 2), drive.add("b", 2)
    assert drive.step() == "a2 b2"
    drive.add("c", 13), drive.add("d", 2), drive.add("e", 9)
    assert drive.steps(4) == ["a1 b1 c8", "a1 b1 c5 d2 e1", "a1 b1 c1 d1 e6", "a1 b1 c1 d1 e2"]


def test_a_prompt_of_which_one_token_is_left_takes_its_turn_among_the_decodes():
    drive = Drive(max_num_batched_tokens=4)
    drive.add("a", 5), drive.add("b", 4)
    assert drive.steps(3) == ["a4", "a1 b3", "a1 b1"]


def test_a_long_prompt_leaves_the_others_their_token_in_every_step():
    drive = Drive(max_num_batched_tokens=6)
    drive.add("a", 2), drive.add("b", 2), drive.step()
    drive.add("c", 16)
    assert drive.steps(5) == ["a1 b1 c4"] * 4 + ["a1 b1 c1"]


def test_nobody_is_admitted_while_decodes_take_the_whole_budget():
    drive = Drive(max_num_batched_tokens=2)
    drive.add("a", 1, max_tokens=3), drive.add("b", 1, max_tokens=3), drive.add("c", 1)
    assert drive.steps(4) == ["a1 b1", "a1 b1", "a1 b1", "c1"]


# More that run than the budget has tokens


@pytest.mark.parametrize("budget", [1, 2, 3, 5])
def test_no_more_run_than_the_budget_has_tokens(budget):
    drive = Drive(max_num_batched_tokens=budget)
    for name in "abcdefgh":
        drive.add(name, 2, max_tokens=4)
    most = 0
    while drive.step():
        most = max(most, len(drive.scheduler.running))
    assert most == budget and all(seq.finished for seq in drive.seqs.values())


def test_if_more_run_than_the_budget_the_first_end_first_and_nobody_is_forgotten():
    """Admission does not let it come to that: here the budget shrinks."""
    drive = Drive(max_num_batched_tokens=8)
    for name in "abcd":
        drive.add(name, 2, max_tokens=3)
    assert drive.step() == "a2 b2 c2 d2"
    drive.scheduler._max_num_batched_tokens = 3
    assert drive.steps(4) == ["a1 b1 c1", "a1 b1 c1", "d1", "d1"]


def test_with_a_budget_of_one_token_all_are_served_one_after_the_other():
    drive = Drive(max_num_batched_tokens=1)
    for name in "abc":
        drive.add(name, 2, max_tokens=2)
    assert drive.steps(10) == ["a1", "a1", "a1", "b1", "b1", "b1", "c1", "c1", "c1", ""]


# No block left


def test_the_latest_is_preempted_and_gives_all_its_blocks_back():
    """4 blocks, all full: a needs one more."""
    drive = Drive(num_blocks=4)
    drive.add("a", 4), drive.add("b", 4)
    latest = drive.add("c", 8)
    assert drive.step() == "a4 b4 c8" and drive.num_free == 0
    assert drive.step() == "a1 b1"
    assert (latest.block_table, latest.num_computed_tokens, latest.num_tokens) == ([], 0, 9)
    assert drive.queues == "ab | c" and drive.scheduler.num_preemptions == 1


def test_it_is_computed_anew_with_all_that_it_had_generated():
    """c had 4 tokens and got 2; 6 are computed when a and b are gone, 2 of them in a second step."""
    drive = Drive(num_blocks=4, max_num_batched_tokens=4)
    drive.add("a", 1, max_tokens=7), drive.add("b", 1, max_tokens=7), drive.add("c", 2)
    assert drive.steps(4) == ["a1 b1 c2"] + ["a1 b1 c1"] * 3
    assert drive.steps(3) == ["a1 b1"] * 3, "a and b have 5 tokens and 2 blocks each: c is out"
    assert drive.seqs["c"].num_tokens == 6 and drive.queues == " | c"
    assert drive.steps(3) == ["c4", "c2", "c1"]


def test_it_waits_in_front_of_those_who_never_started():
    drive = Drive(num_blocks=2, max_num_seqs=2)
    drive.add("a", 4, max_tokens=3), drive.add("b", 4), drive.add("c", 4), drive.add("d", 4)
    assert drive.steps(2) == ["a4 b4", "a1"]
    assert drive.queues == "a | bcd"
    assert drive.steps(2) == ["a1", "b5"]


def test_several_are_preempted_in_turn_and_wait_in_order_of_arrival():
    drive = Drive(num_blocks=4)
    for name in "abcde":
        drive.add(name, 4)
    assert drive.step() == "a4 b4 c4 d4"
    assert drive.step() == "a1 b1"
    assert drive.queues == "ab | cde" and drive.scheduler.num_preemptions == 2


def test_who_is_itself_the_latest_waits_and_the_others_go_on():
    drive = Drive(num_blocks=2)
    drive.add("a", 1), drive.add("b", 4)
    assert drive.step() == "a1 b4"
    assert drive.step() == "a1"
    assert drive.queues == "a | b" and drive.num_free == 1


def test_a_prompt_that_is_not_done_can_be_preempted_too():
    """b has 2 of 3 chunks behind it when a needs a block."""
    drive = Drive(num_blocks=4, max_num_batched_tokens=4)
    drive.add("a", 3)
    latest = drive.add("b", 12)
    assert drive.steps(3) == ["a3 b1", "a1 b3", "a1"]
    assert (latest.block_table, latest.num_computed_tokens, latest.num_tokens) == ([], 0, 12)
    assert drive.queues == "a | b"


def test_nobody_is_preempted_who_has_been_scheduled_in_this_step():
    """Three that need a block each, none free: the first gets it, and each that runs has its slot."""
    for num_blocks in range(3, 7):
        drive = Drive(num_blocks=num_blocks)
        for name in "abc":
            drive.add(name, 4)
        assert drive.step() == "a4 b4 c4"
        assert drive.step() == {3: "a1", 4: "a1 b1", 5: "a1 b1", 6: "a1 b1 c1"}[num_blocks]


def test_who_still_has_room_in_its_last_block_goes_on_without_one():
    drive = Drive(num_blocks=2)
    drive.add("a", 2), drive.add("b", 2)
    assert drive.steps(3) == ["a2 b2", "a1 b1", "a1 b1"]
    assert drive.num_free == 0 and drive.scheduler.num_preemptions == 0


def test_nobody_is_admitted_in_a_step_that_had_to_preempt():
    """b gives 2 blocks back and a takes one. The other is too little for b, and c came after b."""
    drive = Drive(num_blocks=3)
    drive.add("a", 4), drive.add("b", 8), drive.add("c", 1)
    assert drive.step() == "a4 b8"
    assert drive.step() == "a1"
    assert drive.queues == "a | bc" and drive.num_free == 1


def test_the_watermark_holds_a_preempted_sequence_back_as_well():
    """Of 8 blocks 2 are kept free. b comes back when a has ended, not into the 4 that are free beside a."""
    drive = Drive(num_blocks=8, watermark=0.25)
    drive.add("a", 16, max_tokens=3), drive.add("b", 8)
    assert drive.step() == "a16 b8"
    drive.scheduler._preempt([drive.seqs["b"]])
    assert drive.num_free == 4
    assert drive.steps(3) == ["a1", "a1", "b9"]


# Who can never go on


def test_one_that_fills_the_pool_alone_and_cannot_grow_fails_with_both_numbers():
    drive = Drive(num_blocks=2)
    seq = drive.add("a", 7)
    assert drive.steps(3) == ["a7", "a1", ""]
    assert drive.failed == ["a"] and drive.queues == " | " and drive.num_free == 2
    assert seq.finish_reason == "error" and seq.error == "9 tokens need 3 blocks, the pool has 2"
    assert seq.num_tokens == 9, "what it has generated stays"


def test_those_who_wait_go_on_at_once():
    drive = Drive(num_blocks=2)
    drive.add("a", 7), drive.add("b", 5), drive.add("c", 1)
    assert drive.steps(2) == ["a7", "a1"]
    assert drive.step() == "b5" and drive.failed == ["a"]


def test_it_fails_only_when_all_others_are_out():
    """a fills both blocks; b is preempted first, and comes back when a has failed."""
    drive = Drive(num_blocks=2)
    drive.add("a", 1), drive.add("b", 1, max_tokens=6)
    assert drive.steps(4) == ["a1 b1"] * 4
    assert drive.steps(5) == ["a1"] * 4 + ["b5"]
    assert drive.failed == ["a"] and drive.seqs["a"].num_tokens == 9
    assert drive.steps(3) == ["b1", "", ""] and drive.seqs["b"].finish_reason == "length"


def test_one_that_outgrew_the_pool_while_it_waited_fails_and_the_next_is_admitted():
    drive = Drive(num_blocks=2)
    seq = drive.add("a", 8)
    drive.add("b", 8)
    seq.append_token(SampledToken(7, -1.0))
    assert drive.admit(budget=100) == "b8"
    assert drive.failed == ["a"] and seq.error == "9 tokens need 3 blocks, the pool has 2"
    assert seq.finish_reason == "error" and drive.queues == "b | "


def test_one_that_fills_the_pool_to_its_last_slot_does_not_fail():
    drive = Drive(num_blocks=2)
    drive.add("a", 5, max_tokens=4)
    assert drive.steps(5) == ["a5", "a1", "a1", "a1", ""], "the ninth token needs no slot"
    assert drive.failed == [] and drive.seqs["a"].finish_reason == "length"


# Removal


def test_one_that_waits_is_removed():
    drive = Drive(max_num_seqs=1)
    drive.add("a", 3), drive.add("b", 3), drive.add("c", 3), drive.step()
    drive.scheduler.remove(drive.seqs["b"])
    assert drive.queues == "a | c"


def test_one_whose_prompt_is_not_done_is_removed_with_all_its_blocks():
    drive = Drive(num_blocks=5, max_num_batched_tokens=4)
    drive.add("a", 10), drive.step()
    assert drive.num_free == 2
    drive.scheduler.remove(drive.seqs["a"])
    assert drive.queues == " | " and drive.num_free == 5


def test_one_that_runs_is_removed_with_all_its_blocks_and_the_order_stays():
    drive = Drive(num_blocks=10)
    for name in "abc":
        drive.add(name, 4)
    drive.steps(2)
    drive.scheduler.remove(drive.seqs["b"])
    assert drive.queues == "ac | " and drive.num_free == 6
    assert drive.step() == "a1 c1"


def test_one_that_was_preempted_is_removed():
    drive = Drive(num_blocks=2)
    drive.add("a", 4), drive.add("b", 4), drive.steps(2)
    assert drive.queues == "a | b"
    drive.scheduler.remove(drive.seqs["b"])
    assert drive.queues == "a | " and drive.num_free == 0
    assert drive.step() == "a1"


def test_one_that_is_in_no_queue_any_more_is_removed_without_harm():
    drive = Drive()
    seq = drive.add("a", 3, max_tokens=1)
    drive.add("b", 3), drive.step()
    before = drive.num_free
    drive.scheduler.remove(seq)
    assert drive.queues == "b | " and drive.num_free == before


# Groups: a, a' and a'' are the samples of a


def test_the_prompt_is_computed_once_and_then_each_sample_runs_by_itself():
    drive = Drive()
    drive.add_group("a", 6, n=3)
    assert drive.steps(3) == ["a6", "a1 a'1 a''1", "a1 a'1 a''1"]
    assert [seq.token_ids[6:] for seq in drive.seqs.values()] == [[7] * 3, [8] * 3, [9] * 3]


def test_samples_hold_the_blocks_of_the_prompt_once():
    drive = Drive(num_blocks=10)
    drive.add_group("a", 6, n=3), drive.step()
    assert drive.tables("a") == [[0, 1]] * 3 and drive.num_free == 8


def test_the_first_step_of_the_samples_copies_the_last_block_for_all_but_the_last():
    drive = Drive(num_blocks=10)
    drive.add_group("a", 6, n=3)
    copies = [drive.copies for _ in range(4) if drive.step()]
    assert copies == [{}, {2: 1, 3: 1}, {}, {}]
    assert drive.tables("a") == [[0, 2, 4], [0, 3, 5], [0, 1, 6]]


def test_behind_a_prompt_that_ends_on_a_block_boundary_nothing_is_copied():
    drive = Drive(num_blocks=10)
    drive.add_group("a", 8, n=3)
    copies = [drive.copies for _ in range(6) if drive.step()]
    assert copies == [{}] * 6 and drive.num_free == 10 - 2 - 2 * 3


def test_copies_are_kept_until_somebody_takes_them():
    drive = Drive(num_blocks=20)
    drive.add_group("a", 6, n=2), drive.step()
    drive.add_group("b", 5, n=2)
    for _ in range(2):
        drive.scheduler.schedule()
        assert drive.scheduler.copies == {2: 1}


def test_followers_have_seats_and_no_blocks_while_their_leader_computes_the_prompt():
    drive = Drive(num_blocks=10, max_num_batched_tokens=4)
    _, *followers = drive.add_group("a", 10, n=3)
    for chunk in ("a4", "a4"):
        assert drive.step() == chunk
        assert drive.queues == "aa'a'' | " and drive.num_free == 7
        assert [(seq.block_table, seq.num_computed_tokens) for seq in followers] == [([], 0)] * 2
    assert drive.steps(2) == ["a2", "a1 a'1 a''1"]


@pytest.mark.parametrize("num_prompt_tokens, chunks", [(5, ["a3", "a2"]), (8, ["a3", "a3", "a2"]), (3, ["a3"])])
def test_chunks_may_be_smaller_than_what_is_shared(num_prompt_tokens, chunks):
    drive = Drive(max_num_batched_tokens=3)
    drive.add_group("a", num_prompt_tokens, n=3)
    assert drive.steps(len(chunks) + 2) == [*chunks, "a1 a'1 a''1", "a1 a'1 a''1"]


def test_with_a_budget_of_one_token_samples_run_one_after_the_other():
    drive = Drive(num_blocks=10, max_num_batched_tokens=1)
    drive.add_group("a", 2, n=3, max_tokens=3), drive.add("b", 1, max_tokens=1)
    assert drive.steps(10) == ["a1", "a1", "a1", "a1", "a'1", "a'1", "a''1", "a''1", "b1", ""]
    assert [seq.num_tokens for seq in drive.seqs.values()] == [5, 5, 5, 2] and drive.num_free == 10


def test_all_samples_end_though_they_are_more_than_the_budget_has_tokens():
    drive = Drive(num_blocks=20, max_num_batched_tokens=3)
    drive.add_group("a", 2, n=5, max_tokens=3)
    assert drive.step() == "a2"
    assert drive.steps(5) == ["a1 a'1 a''1", "a1 a'1 a''1", "a'''1 a''''1", "a'''1 a''''1", ""]
    assert drive.num_free == 20


def test_a_group_that_ends_with_its_first_token_gives_back_what_was_shared():
    """The leader ends in the step in which the others are forked, and so do they."""
    drive = Drive(num_blocks=4)
    group = drive.add_group("a", 6, n=3, max_tokens=1)
    assert drive.steps(2) == ["a6", ""]
    assert drive.num_free == 4 and all(seq.finished for seq in group) and drive.queues == " | "


def test_a_leader_that_ends_in_the_step_in_which_followers_are_forked_leaves_them_running():
    """a has one token to go; the others, which share 5 and 2 of its tokens, have more."""
    drive = Drive(num_blocks=10)
    drive.add_preempted("a", [1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7], max_tokens=5)
    assert drive.step() == "a5"
    assert drive.queues == "a'a'' | " and drive.seqs["a"].finished
    assert drive.tables("a") == [[], [0], [0]]
    assert drive.steps(3) == ["a'1 a''1", "a''1", "a''1"]
    assert drive.num_free == 10


# Groups are admitted as one


def test_a_group_is_admitted_when_there_is_a_seat_for_each_sample():
    drive = Drive(max_num_seqs=3)
    drive.add("a", 3, max_tokens=2), drive.add_group("b", 3, n=3, max_tokens=2), drive.add("c", 3, max_tokens=1)
    assert drive.steps(5) == ["a3", "a1", "b3", "b1 b'1 b''1", "c3"]


def test_seats_of_followers_are_taken():
    drive = Drive(max_num_seqs=3)
    drive.add_group("a", 3, n=2), drive.add_group("b", 3, n=2), drive.add("c", 3)
    assert drive.admit(budget=100) == "a3" and drive.queues == "aa' | bb'c"


def test_a_new_group_needs_the_blocks_of_its_prompt():
    drive = Drive(num_blocks=2)
    drive.add_group("a", 8, n=5, max_tokens=1)
    assert drive.step() == "a8" and drive.num_free == 2


def test_a_group_that_comes_back_needs_the_blocks_of_all_its_samples():
    """a has 2 blocks of 6. b would need one for the first 4 tokens, which its samples share, and one for each."""
    drive = Drive(num_blocks=6)
    drive.add("a", 5, max_tokens=4)
    drive.add_preempted("b", [1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 7], [1, 2, 3, 4, 8])
    assert drive.admit(budget=100) == "a5" and drive.queues == "a | bb'b''b'''"
    drive.scheduler.remove(drive.seqs["a"])
    assert drive.admit(budget=100) == "b5" and drive.queues == "bb'b''b''' | "


@pytest.mark.parametrize("num_blocks, admitted", [(8, "a4"), (9, "a4 b5")])
def test_a_group_leaves_the_watermark_free_beside_others(num_blocks, admitted):
    """Of 8 or 9 blocks 4 are kept free; a takes one, and b needs 4: 3 stay or 4."""
    drive = Drive(num_blocks=num_blocks, watermark=0.5)
    drive.add("a", 4)
    drive.add_preempted("b", [1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 7])
    assert drive.admit(budget=100) == admitted


# Groups are preempted as one, and share what they shared when they come back


def test_a_group_is_preempted_as_one_and_waits_as_one():
    """a takes the last block of 6. Then b's samples, which hold one, need one each."""
    drive = Drive(num_blocks=6)
    drive.add("a", 16), drive.add_group("b", 4, n=2), drive.add("c", 8)
    assert drive.step() == "a16 b4" and drive.num_free == 1
    assert drive.step() == "a1"
    assert drive.queues == "a | bb'c" and drive.scheduler.num_preemptions == 1
    for seq in (drive.seqs["b"], drive.seqs["b'"]):
        assert (seq.block_table, seq.num_computed_tokens, seq.num_tokens) == ([], 0, 5)


def test_a_group_whose_samples_find_no_room_is_preempted_whole_if_it_is_the_latest():
    """The samples of b need a block each, and one is free: nobody runs but a, and b does not keep half of them."""
    drive = Drive(num_blocks=4)
    drive.add("a", 3), drive.add_group("b", 8, n=2)
    assert drive.step() == "a3 b8" and drive.num_free == 1
    assert drive.step() == "a1"
    assert drive.queues == "a | bb'" and drive.num_free == 3 and drive.copies == {}


def test_several_groups_are_preempted_in_turn_and_wait_in_order_of_arrival():
    drive = Drive(num_blocks=4)
    drive.add_group("a", 4, n=2), drive.add_group("b", 4, n=2), drive.add_group("c", 8, n=2)
    assert drive.step() == "a4 b4 c8"
    assert drive.step() == "a1 a'1"
    assert drive.queues == "aa' | bb'cc'" and drive.scheduler.num_preemptions == 2


def test_a_group_whose_prompt_is_not_done_can_be_preempted():
    drive = Drive(num_blocks=4, max_num_batched_tokens=4)
    drive.add("a", 3), drive.add_group("b", 12, n=3)
    assert drive.steps(3) == ["a3 b1", "a1 b3", "a1"]
    leader = drive.seqs["b"]
    assert (leader.block_table, leader.num_computed_tokens, leader.followers) == ([], 0, [])
    assert drive.queues == "a | bb'b''"


def test_a_group_that_comes_back_computes_what_its_samples_share_once():
    """6 tokens of the prompt, and 2 of each sample's own: 8 + 2 + 2 tokens, where each alone would compute 8."""
    drive = Drive(num_blocks=20)
    group = drive.add_group("a", 6, n=3)
    drive.steps(2)
    drive.scheduler._preempt(group)
    assert drive.num_free == 20
    assert drive.steps(3) == ["a8", "a1 a'2 a''2", "a1 a'1 a''1"]
    assert [seq.block_table[0] for seq in group] == [0, 0, 0]
    assert drive.num_free == 20 - 1 - 2 * 3, "8 tokens and 3 more: each has two blocks of its own"


def test_a_group_that_shares_again_is_not_admitted_in_the_step_that_preempted_it():
    """b gives 3 blocks back, and 4 are free. Its samples have the same tokens: they would come back to 3."""
    drive = Drive(num_blocks=6)
    drive.alike = True
    drive.add("a", 4)
    group = drive.add_group("b", 6, n=2)
    assert drive.steps(3) == ["a4 b6", "a1 b1 b'1", "a1 b1 b'1"]
    assert drive.step() == "a1"
    assert drive.queues == "a | bb'" and drive.manager.can_allocate(*group)
    assert drive.step() == "a1 b9"


def test_samples_of_the_same_tokens_come_back_as_one_and_go_on_as_many():
    drive = Drive(num_blocks=20)
    drive.alike = True
    group = drive.add_group("a", 3, n=3)
    drive.steps(3)
    drive.scheduler._preempt(group)
    assert drive.steps(2) == ["a6", "a1 a'1 a''1"], "one row of logits gives all three their next token"
    assert len(drive.copies) == 2 and [seq.num_tokens for seq in group] == [8, 8, 8]


def test_a_follower_goes_on_as_soon_as_its_share_is_computed():
    """a' shares 2 tokens, a'' shares 9: with 4 tokens a step a' begins after the first, and a'' after the last."""
    drive = Drive(num_blocks=20, max_num_batched_tokens=4)
    shared = list(range(1, 10))
    drive.add_preempted("a", [*shared, 50], [1, 2, 60, 61], [*shared, 70])
    assert drive.step() == "a4" and drive.tables("a")[1:] == [[0], []]
    assert drive.step() == "a4" and drive.copies == {3: 0}, "a' is to write to block 0, and the leader needs that"
    assert drive.step() == "a2 a'2" and drive.tables("a")[0][:2] == drive.tables("a")[2][:2]
    assert drive.step() == "a1 a'1 a''1"


def test_a_sample_that_is_the_beginning_of_its_leader_computes_its_own_last_token():
    """Its next token comes from its own last, not from the leader's: so 3 of its 4 tokens are shared."""
    drive = Drive(num_blocks=20)
    drive.add_preempted("a", [1, 2, 3, 4, 5, 6], [1, 2, 3, 4])
    assert drive.step() == "a6" and drive.seqs["a'"].num_computed_tokens == 3
    assert drive.step() == "a1 a'1" and drive.seqs["a'"].token_ids == [1, 2, 3, 4, 8]
    assert drive.tables("a")[0][0] != drive.tables("a")[1][0], "both write to the same place of the first block"


def test_a_sample_that_goes_on_from_its_leaders_end_shares_all_of_the_leader():
    drive = Drive(num_blocks=20)
    drive.add_preempted("a", [1, 2, 3], [1, 2, 3, 4, 5])
    assert drive.step() == "a3" and drive.seqs["a'"].num_computed_tokens == 3
    assert drive.step() == "a1 a'2"
    assert [seq.token_ids for seq in drive.seqs.values()] == [[1, 2, 3, 7, 7], [1, 2, 3, 4, 5, 8]]


# A group that can never go on


def test_a_group_that_fills_the_pool_alone_and_cannot_grow_fails_with_both_numbers():
    """6 tokens: one block shared, one for each of three; with the ninth token each needs another."""
    drive = Drive(num_blocks=4)
    group = drive.add_group("a", 6, n=3)
    assert drive.steps(4) == ["a6", "a1 a'1 a''1", "a1 a'1 a''1", ""]
    assert drive.failed == ["a", "a'", "a''"] and drive.queues == " | " and drive.num_free == 4
    assert {seq.error for seq in group} == {"3 samples, 27 tokens in all, need 7 blocks, the pool has 4"}
    assert [seq.num_tokens for seq in group] == [9, 9, 9], "what they have generated stays"


def test_a_group_that_outgrew_the_pool_while_it_waited_fails_and_the_next_is_admitted():
    drive = Drive(num_blocks=4)
    drive.add_preempted("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 50, 60, 70, 80, 90])
    drive.add("b", 16)
    assert drive.admit(budget=100) == "b16"
    assert drive.failed == ["a", "a'"] and drive.queues == "b | "
    assert drive.seqs["a'"].error == "2 samples, 18 tokens in all, need 5 blocks, the pool has 4"


def test_a_sample_whose_siblings_have_ended_is_named_as_one():
    drive = Drive(num_blocks=2)
    group = drive.add_group("a", 7, n=2)
    group[0].max_num_tokens = 8
    assert drive.steps(3) == ["a7", "a'1", ""]
    assert group[0].error is None and group[1].error == "9 tokens need 3 blocks, the pool has 2"


def test_a_group_fails_only_when_all_others_are_out():
    drive = Drive(num_blocks=4)
    drive.add_group("a", 6, n=2, max_tokens=4), drive.add("b", 3, max_tokens=2)
    assert drive.steps(5) == ["a6 b3", "a1 a'1 b1", "a1 a'1", "", ""]
    assert drive.failed == ["a", "a'"] and drive.seqs["b"].finish_reason == "length"
