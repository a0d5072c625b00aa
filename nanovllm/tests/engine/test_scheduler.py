"""The Scheduler alone, with sequences of a given length, a BlockManager and no model.

"a4 b1" is a step that computes 4 tokens of a, then 1 of b. The samples of a request are a, a' and a''.
Blocks have 4 slots and the watermark is 0 unless a test says otherwise.
"""

import pytest

from ...engine.kv_cache import BlockCopy
from ...engine.observer import Observer
from ...engine.scheduler import Scheduler
from ...engine.sequence import Sequence
from ...options.config import EngineConfig
from ...requests.tokens import SampledToken
from ..testing.sequences import make_manager, make_samples


class Drive:
    """A scheduler, and an engine's reaction to each step."""

    def __init__(self, num_blocks: int = 100, block_size: int = 4, **knobs) -> None:
        self.manager = make_manager(num_blocks, block_size)
        self.scheduler = Scheduler(EngineConfig(**{"watermark": 0.0} | knobs), self.manager, Observer())
        self.seqs: dict[str, Sequence] = {}
        self.failed: list[str] = []
        self.copies: list[BlockCopy] = []  # of the last step

    def add(self, name: str, num_prompt_tokens: int, max_tokens: int = 50) -> Sequence:
        return self.add_samples(name, num_prompt_tokens, 1, max_tokens)[0]

    def add_samples(self, name: str, num_prompt_tokens: int, n: int, max_tokens: int = 50) -> list[Sequence]:
        samples = make_samples(name, num_prompt_tokens, max_tokens, n)
        self.seqs |= {name_of(seq): seq for seq in samples}
        self.scheduler.add(samples[0])
        return samples

    def step(self) -> str:
        """Run one step and return what ran. Complete sequences get a token per sample, and end after their last one."""
        output = self.scheduler.schedule()
        batch, self.copies = output.batch, output.copies
        self.manager.check_integrity()
        self.failed += [name_of(seq) for seq in output.failed]
        for seq, num_tokens in batch:
            self.assert_alone(seq, num_tokens)
        for seq, num_tokens in batch:
            seq.num_computed_tokens += num_tokens
            if seq.num_uncomputed_tokens == 0:
                seq.append_token(SampledToken(7 + seq.sample_index, -1.0))
            if seq.finished:
                self.scheduler.remove(seq)
        self.manager.check_integrity()
        return batch_text(batch)

    def assert_alone(self, seq: Sequence, num_tokens: int) -> None:
        """Assert that it has a slot for each token to compute, in blocks that no other sequence holds."""
        positions = range(seq.num_computed_tokens, seq.num_computed_tokens + num_tokens)
        written = {seq.block_table[position // self.manager.block_size] for position in positions}
        held = [other.block_table for other in self.scheduler.running if other is not seq]
        assert not any(written & set(table) for table in held), f"{name_of(seq)} writes to a shared block"

    def steps(self, num: int) -> list[str]:
        return [self.step() for _ in range(num)]

    def admit(self, budget: int) -> str:
        """Run the first step with this many tokens, which admits everything in it. Compute nothing."""
        self.scheduler._max_num_batched_tokens = budget  # noqa: SLF001 - budgets are otherwise fixed
        output = self.scheduler.schedule()
        self.manager.check_integrity()
        self.failed += [name_of(seq) for seq in output.failed]
        return batch_text(output.batch)

    def tables(self, name: str) -> list[list[int]]:
        """Return the block tables of a request's samples."""
        return [seq.block_table for seq in self.seqs.values() if seq.request_id == name]

    @property
    def queues(self) -> str:
        """Return the names in both queues, in order, as "running | waiting"."""
        names = [[name_of(seq) for seq in queue] for queue in (self.scheduler.running, self.scheduler.waiting)]
        return " | ".join("".join(queue) for queue in names)

    @property
    def num_free(self) -> int:
        return self.manager.num_free_blocks


def name_of(seq: Sequence) -> str:
    return seq.request_id + "'" * seq.sample_index


def batch_text(batch: list[tuple[Sequence, int]]) -> str:
    return " ".join(f"{name_of(seq)}{num_tokens}" for seq, num_tokens in batch)


# Admission


def test_waiting_sequences_are_admitted_first_come_first_served():
    drive = Drive()
    for name in "cab":
        drive.add(name, 3)
    assert drive.admit(budget=100) == "c3 a3 b3"
    assert drive.queues == "cab | "


def test_budget_limits_admission_and_the_last_sequence_may_start_with_a_part():
    drive = Drive()
    for name in "abc":
        drive.add(name, 6)
    assert drive.admit(budget=8) == "a6 b2"
    assert drive.queues == "ab | c"


@pytest.mark.parametrize("budget, admitted", [(0, ""), (6, "a6"), (7, "a6 b1")])
def test_no_sequence_is_admitted_for_zero_tokens(budget, admitted):
    drive = Drive()
    drive.add("a", 6), drive.add("b", 6)
    assert drive.admit(budget) == admitted


def test_admission_takes_the_blocks_of_all_tokens_even_for_a_chunk():
    drive = Drive(num_blocks=10)
    seq = drive.add("a", 17)
    assert drive.admit(budget=2) == "a2"
    assert len(seq.block_table) == 5 and drive.num_free == 5


def test_max_num_seqs_limits_running_sequences():
    drive = Drive(max_num_seqs=2)
    for name in "abc":
        drive.add(name, 3)
    assert drive.steps(2) == ["a3 b3", "a1 b1"]
    assert drive.queues == "ab | c"


def test_later_sequences_do_not_overtake_the_first_that_does_not_fit():
    """The pool has 4 blocks: a takes 2, b needs 3, and c would fit."""
    drive = Drive(num_blocks=4)
    drive.add("a", 8), drive.add("b", 12), drive.add("c", 4)
    assert drive.admit(budget=100) == "a8"
    assert drive.queues == "a | bc" and drive.num_free == 2


def test_free_seat_is_taken_in_the_next_step():
    drive = Drive(max_num_seqs=2)
    drive.add("a", 3, max_tokens=5), drive.add("b", 3, max_tokens=2), drive.add("c", 3, max_tokens=2)
    assert drive.steps(6) == ["a3 b3", "a1 b1", "a1 c3", "a1 c1", "a1", ""]


def test_without_sequences_nothing_is_scheduled():
    output = Drive().scheduler.schedule()
    assert (output.batch, output.copies, output.failed) == ([], [], [])


# The watermark: 0.25 of 8 blocks is 2


def test_new_sequence_must_leave_the_watermark_free_beside_others():
    drive = Drive(num_blocks=8, watermark=0.25)
    drive.add("a", 12), drive.add("b", 13)
    assert drive.admit(budget=100) == "a12", "5 are free and 4 are needed, which would leave 1"
    assert drive.queues == "a | b"


@pytest.mark.parametrize("watermark", [0.0, 0.25, 0.99])
def test_watermark_does_not_apply_to_the_first_sequence(watermark):
    drive = Drive(num_blocks=8, watermark=watermark)
    drive.add("a", 32)
    assert drive.admit(budget=100) == "a32" and drive.num_free == 0


def test_watermark_does_not_apply_once_nothing_runs():
    drive = Drive(num_blocks=8, watermark=0.25)
    drive.add("a", 4, max_tokens=2), drive.add("b", 32, max_tokens=1)
    assert drive.steps(4) == ["a4", "a1", "b32", ""]


# Chunks


def test_prompt_longer_than_the_budget_is_computed_in_chunks():
    drive = Drive(max_num_batched_tokens=4)
    seq = drive.add("a", 10, max_tokens=3)
    assert drive.steps(3) == ["a4", "a4", "a2"] and seq.num_tokens == 11
    assert drive.steps(3) == ["a1", "a1", ""] and seq.num_tokens == 13


def test_there_is_no_token_before_the_last_chunk():
    drive = Drive(max_num_batched_tokens=4)
    seq = drive.add("a", 10)
    assert drive.steps(2) == ["a4", "a4"]
    assert seq.num_tokens == 10 and seq.num_uncomputed_tokens == 2


def test_chunks_are_computed_in_order_of_arrival_one_unfinished_prompt_at_a_time():
    drive = Drive(max_num_batched_tokens=8)
    for name in "abcd":
        drive.add(name, 12, max_tokens=1)
    assert drive.steps(7) == ["a8", "a4 b4", "b8", "c8", "c4 d4", "d8", ""]


def test_decodes_go_first_then_chunks_then_new_sequences():
    drive = Drive(max_num_batched_tokens=10)
    drive.add("a", 2), drive.add("b", 2)
    assert drive.step() == "a2 b2"
    drive.add("c", 13), drive.add("d", 2), drive.add("e", 9)
    assert drive.steps(4) == ["a1 b1 c8", "a1 b1 c5 d2 e1", "a1 b1 c1 d1 e6", "a1 b1 c1 d1 e2"]


def test_prompt_with_one_token_left_takes_its_turn_among_the_decodes():
    drive = Drive(max_num_batched_tokens=4)
    drive.add("a", 5), drive.add("b", 4)
    assert drive.steps(3) == ["a4", "a1 b3", "a1 b1"]


def test_long_prompt_leaves_the_others_a_token_in_every_step():
    drive = Drive(max_num_batched_tokens=6)
    drive.add("a", 2), drive.add("b", 2), drive.step()
    drive.add("c", 16)
    assert drive.steps(5) == ["a1 b1 c4"] * 4 + ["a1 b1 c1"]


# More running sequences than budget


def test_with_a_budget_of_one_token_sequences_run_one_after_the_other():
    drive = Drive(max_num_batched_tokens=1)
    for name in "abc":
        drive.add(name, 2, max_tokens=2)
    assert drive.steps(10) == ["a1", "a1", "a1", "b1", "b1", "b1", "c1", "c1", "c1", ""]


# Preemption


def test_newest_sequence_is_preempted_and_frees_all_its_blocks():
    """All 4 blocks are full, and a needs one more."""
    drive = Drive(num_blocks=4)
    drive.add("a", 4), drive.add("b", 4)
    latest = drive.add("c", 8)
    assert drive.step() == "a4 b4 c8" and drive.num_free == 0
    assert drive.step() == "a1 b1"
    assert (latest.block_table, latest.num_computed_tokens, latest.num_tokens) == ([], 0, 9)
    assert drive.queues == "ab | c" and drive.scheduler.num_preemptions == 1


def test_preempted_sequence_is_computed_again_with_all_its_output():
    """Sequence c had 4 tokens and got 2. All 6 are computed after a and b have ended, 2 of them in a second step."""
    drive = Drive(num_blocks=4, max_num_batched_tokens=4)
    drive.add("a", 1, max_tokens=7), drive.add("b", 1, max_tokens=7), drive.add("c", 2)
    assert drive.steps(4) == ["a1 b1 c2"] + ["a1 b1 c1"] * 3
    assert drive.steps(3) == ["a1 b1"] * 3, "a and b have 5 tokens and 2 blocks each, so c is out"
    assert drive.seqs["c"].num_tokens == 6 and drive.queues == " | c"
    assert drive.steps(3) == ["c4", "c2", "c1"]


def test_preempted_sequence_waits_ahead_of_those_that_never_ran():
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


def test_newest_sequence_preempts_itself_and_the_others_continue():
    drive = Drive(num_blocks=2)
    drive.add("a", 1), drive.add("b", 4)
    assert drive.step() == "a1 b4"
    assert drive.step() == "a1"
    assert drive.queues == "a | b" and drive.num_free == 1


def test_scheduled_sequence_is_not_preempted_in_the_same_step():
    """Three sequences need a block each, and none is free: the first gets one, and each that runs has its slot."""
    for num_blocks in range(3, 7):
        drive = Drive(num_blocks=num_blocks)
        for name in "abc":
            drive.add(name, 4)
        assert drive.step() == "a4 b4 c4"
        assert drive.step() == {3: "a1", 4: "a1 b1", 5: "a1 b1", 6: "a1 b1 c1"}[num_blocks]


def test_step_that_preempts_admits_no_sequence(monkeypatch):
    """Sequence b frees 2 blocks and a takes one. The other stays free, and no waiting sequence is considered."""
    drive = Drive(num_blocks=3)
    drive.add("a", 4), drive.add("b", 8), drive.add("c", 1)
    assert drive.step() == "a4 b8"
    with monkeypatch.context() as patch:
        patch.setattr(drive.scheduler, "_may_admit", lambda seq, hits: True)
        assert drive.step() == "a1"
    assert drive.queues == "a | bc" and drive.num_free == 1
    considered = []
    monkeypatch.setattr(drive.scheduler, "_may_admit", lambda seq, hits: considered.append(seq.request_id))
    assert drive.step() == "a1" and considered == ["b"], "the next step considers the first waiting sequence"


# Sequences that can never continue


def test_sequence_that_fills_the_pool_alone_and_cannot_grow_fails():
    drive = Drive(num_blocks=2)
    seq = drive.add("a", 7)
    assert drive.steps(3) == ["a7", "a1", ""]
    assert drive.failed == ["a"] and drive.queues == " | " and drive.num_free == 2
    assert seq.finish_reason == "error" and seq.error == "9 tokens need 3 blocks, the pool has 2"
    assert seq.num_tokens == 9, "it keeps its output"


def test_waiting_sequences_are_admitted_in_the_step_in_which_another_fails():
    drive = Drive(num_blocks=2)
    drive.add("a", 7), drive.add("b", 4), drive.add("c", 1)
    assert drive.steps(2) == ["a7", "a1"]
    assert drive.step() == "b4 c1" and drive.failed == ["a"] and drive.queues == "bc | "


def test_sequence_that_outgrew_the_pool_while_waiting_fails_and_the_next_is_admitted():
    drive = Drive(num_blocks=2)
    seq = drive.add("a", 8)
    drive.add("b", 8)
    seq.append_token(SampledToken(7, -1.0))
    assert drive.admit(budget=100) == "b8"
    assert drive.failed == ["a"] and seq.error == "9 tokens need 3 blocks, the pool has 2"
    assert seq.finish_reason == "error" and drive.queues == "b | "


def test_sequence_that_fills_the_pool_to_its_last_slot_does_not_fail():
    drive = Drive(num_blocks=2)
    drive.add("a", 5, max_tokens=4)
    assert drive.steps(5) == ["a5", "a1", "a1", "a1", ""], "the ninth token needs no slot"
    assert drive.failed == [] and drive.seqs["a"].finish_reason == "length"


# Removal


def test_waiting_sequence_is_removed():
    drive = Drive(max_num_seqs=1)
    drive.add("a", 3), drive.add("b", 3), drive.add("c", 3), drive.step()
    drive.scheduler.remove(drive.seqs["b"])
    assert drive.queues == "a | c"


def test_removing_a_waiting_sequence_does_not_scan_the_queue(monkeypatch):
    """It takes the same time, however long the queue is."""
    looks = []
    monkeypatch.setattr(Sequence, "__eq__", lambda a, b: looks.append(1) or a is b)
    monkeypatch.setattr(Sequence, "__hash__", object.__hash__)
    drive = Drive()
    for i in range(1000):
        drive.add(str(i), 3)
    drive.scheduler.remove(drive.seqs["500"])
    assert sum(looks) == 0 and len(drive.scheduler.waiting) == 999
    assert list(drive.scheduler.waiting) == [seq for name, seq in drive.seqs.items() if name != "500"]


def test_removing_a_running_sequence_frees_its_blocks_and_keeps_the_order():
    drive = Drive(num_blocks=10)
    for name in "abc":
        drive.add(name, 4)
    drive.steps(2)
    drive.scheduler.remove(drive.seqs["b"])
    assert drive.queues == "ac | " and drive.num_free == 6
    assert drive.step() == "a1 c1"


# Samples: the first one carries the others until all of the prompt but its last token is computed


def test_prompt_is_computed_once_except_its_last_token():
    drive = Drive()
    samples = drive.add_samples("a", 6, n=3)
    assert drive.steps(3) == ["a5", "a1 a'1 a''1", "a1 a'1 a''1"]
    assert [seq.token_ids[6:] for seq in samples] == [[7] * 2, [8] * 2, [9] * 2]


def test_samples_are_in_no_queue_before_the_fork_and_then_right_behind_the_first():
    """So `running` stays in order of arrival."""
    drive = Drive()
    drive.add("a", 3), drive.add_samples("b", 6, n=3), drive.add("c", 3)
    assert drive.queues == " | abc"
    assert drive.step() == "a3 b5 c3" and drive.queues == "abc | "
    assert drive.step() == "a1 b1 b'1 b''1 c1" and drive.queues == "abb'b''c | "
    assert drive.seqs["b"].to_fork == []


@pytest.mark.parametrize(
    "num_prompt_tokens, chunks",
    [(10, ["a4", "a4", "a1"]), (9, ["a4", "a4"]), (8, ["a4", "a3"]), (2, ["a1"]), (1, [])],
)
def test_chunks_of_a_prompt_stop_one_token_short_of_its_end(num_prompt_tokens, chunks):
    """A prompt of one token is forked in the step that admits it."""
    drive = Drive(max_num_batched_tokens=4)
    drive.add_samples("a", num_prompt_tokens, n=3)
    assert drive.steps(len(chunks) + 2) == [*chunks, "a1 a'1 a''1", "a1 a'1 a''1"]


def test_with_a_budget_of_one_token_samples_run_one_after_the_other():
    drive = Drive(num_blocks=10, max_num_batched_tokens=1)
    drive.add_samples("a", 2, n=3, max_tokens=2), drive.add("b", 1, max_tokens=1)
    assert drive.steps(9) == ["a1", "a1", "a1", "a'1", "a'1", "a''1", "a''1", "b1", ""]
    assert [seq.num_tokens for seq in drive.seqs.values()] == [4, 4, 4, 2] and drive.num_free == 10


def test_more_samples_than_budget_all_end():
    drive = Drive(num_blocks=20, max_num_batched_tokens=3)
    drive.add_samples("a", 2, n=5, max_tokens=2)
    assert drive.step() == "a1"
    assert drive.steps(5) == ["a1 a'1 a''1", "a1 a'1 a''1", "a'''1 a''''1", "a'''1 a''''1", ""]
    assert drive.num_free == 20


# Their blocks


def test_without_a_free_block_the_newest_of_two_sharers_waits_and_the_first_writes_in_place():
    """Both blocks hold the prompt. After a' has freed them, they are no longer shared."""
    drive = Drive(num_blocks=2)
    drive.add_samples("a", 6, n=2, max_tokens=2)
    assert drive.steps(2) == ["a5", "a1"] and drive.copies == []
    assert drive.queues == "a | a'" and drive.tables("a") == [[0, 1], []]
    assert drive.steps(4) == ["a1", "a'6", "a'1", ""], "a' computes the whole prompt by itself"


# Seats and admission: carried samples count too


@pytest.mark.parametrize("num_blocks, admitted", [(4, "a4"), (5, "a4 b4")])
def test_admission_beside_others_needs_a_block_for_each_carried_sample(num_blocks, admitted):
    """Sequence a takes one block, the prompt of b takes 2, and its two other samples will need one each."""
    drive = Drive(num_blocks=num_blocks)
    drive.add("a", 4), drive.add_samples("b", 5, n=3)
    assert drive.admit(budget=100) == admitted


@pytest.mark.parametrize("num_blocks, admitted", [(9, "a4"), (10, "a4 b4")])
def test_admission_leaves_the_watermark_free_as_well(num_blocks, admitted):
    """5 of 9 or 10 blocks are kept free."""
    drive = Drive(num_blocks=num_blocks, watermark=5 / num_blocks)
    drive.add("a", 4), drive.add_samples("b", 5, n=3)
    assert drive.admit(budget=100) == admitted


# Preempted, ended, failed


def test_sample_that_is_not_forked_yet_can_be_removed():
    """It is in no queue, and holds nothing."""
    drive = Drive(num_blocks=10)
    samples = drive.add_samples("a", 6, n=3)
    drive.step()
    for seq in samples[1:]:
        drive.scheduler.remove(seq)
    assert drive.queues == "a | " and drive.num_free == 8


def test_failed_step_preempts_all_sequences_and_keeps_their_order():
    drive = Drive(max_num_batched_tokens=6)
    samples, carrier = drive.add_samples("a", 3, n=2), drive.add_samples("b", 9, n=2)[0]
    assert drive.steps(2) == ["a2 b4", "a1 a'1 b4"]
    drive.scheduler.preempt_all()
    assert drive.queues == " | aa'b" and drive.num_free == 100 and len(carrier.to_fork) == 1
    assert [seq.num_computed_tokens for seq in [*samples, carrier]] == [0, 0, 0]
    assert drive.steps(4) == ["a4 a'2", "a1 a'2 b3", "a1 a'1 b4", "a1 a'1 b1"]
    assert drive.step() == "a1 a'1 b1 b'1"
