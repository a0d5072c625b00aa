"""Which sequences run in a step, how many tokens of each, and which one makes room. Block size 4."""

import pytest

from ..engine import LLMEngine
from ..observer import Observer
from ..scheduler import Scheduler, SchedulerOutput
from .scripted import (
    add,
    batch_of,
    queues,
    reason,
    run,
    scripted_engine,
    start,
    step,
    steps_of,
    tokens_alone,
    tokens_of,
)


class Recorder(Observer):
    """An observer that keeps events of some kinds: a sequence as its request_id, and a step as its batch."""

    def __init__(self, *kinds: str) -> None:
        self.kinds, self.events = kinds, list[tuple[object, ...]]()

    def tell(self, kind: str, *details: object) -> None:
        if kind in self.kinds:
            self.events.append((kind, *map(self._in_words, details)))

    def _in_words(self, detail: object) -> object:
        return batch_of(detail) if isinstance(detail, SchedulerOutput) else getattr(detail, "request_id", detail)


def recorder_of(engine: LLMEngine, *kinds: str) -> Recorder:
    """Give an engine a new scheduler, and return the recorder of its events."""
    recorder = Recorder(*kinds)
    engine.scheduler = Scheduler(engine.config, engine.kv_cache_manager, recorder)
    return recorder


# One step of running sequences


def test_each_decoding_sequence_gets_one_token(checkpoint):
    """Each of three sequences has computed 5 of its 6 tokens."""
    engine = scripted_engine(checkpoint, num_blocks=8)
    for name in "abc":
        start(engine, name, num_tokens=6, num_computed=5)
    assert batch_of(engine.scheduler.schedule()) == [("a", 1), ("b", 1), ("c", 1)]
    assert queues(engine) == "a b c run, none wait"


def test_a_decode_takes_a_block_only_when_its_blocks_are_full(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=8)
    full, begun = start(engine, "a", num_tokens=5, num_computed=4), start(engine, "b", num_tokens=7, num_computed=6)
    engine.scheduler.schedule()
    assert len(full.block_table) == 2, "a's fifth token needs a second block of 4"
    assert len(begun.block_table) == 2, "b's seventh token has a slot in its second block"
    engine.kv_cache_manager.check_integrity()


def test_decodes_come_before_older_prompts(checkpoint):
    """A step has 6 tokens. The prompt of a came first, but b decodes."""
    engine = scripted_engine(checkpoint, num_blocks=8, max_num_batched_tokens=6)
    start(engine, "a", num_tokens=20, num_computed=0)
    start(engine, "b", num_tokens=3, num_computed=2)
    assert batch_of(engine.scheduler.schedule()) == [("a", 5), ("b", 1)]


def test_the_oldest_prompt_gets_all_it_can_use_and_the_next_one_the_rest(checkpoint):
    """A step has 10 tokens. Three prompts have 7 left each."""
    engine = scripted_engine(checkpoint, num_blocks=16, max_num_batched_tokens=10)
    for name in "abc":
        start(engine, name, num_tokens=8, num_computed=1)
    assert batch_of(engine.scheduler.schedule()) == [("a", 7), ("b", 3)]


def test_a_budget_smaller_than_the_decodes_serves_the_oldest(checkpoint):
    """A step has 2 tokens. Three sequences decode."""
    engine = scripted_engine(checkpoint, num_blocks=8, max_num_batched_tokens=2)
    for name in "abc":
        start(engine, name, num_tokens=6, num_computed=5)
    assert batch_of(engine.scheduler.schedule()) == [("a", 1), ("b", 1)]


def test_observer_hears_of_each_step_when_it_is_complete(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=8)
    recorder = recorder_of(engine, "schedule")
    start(engine, "a", num_tokens=6, num_computed=5)
    start(engine, "b", num_tokens=8, num_computed=1)
    engine.scheduler.schedule()
    assert recorder.events == [("schedule", [("a", 1), ("b", 7)])], 'schedule() ends with tell("schedule", output)'


# Admission


def test_waiting_requests_are_admitted_in_order_of_arrival(checkpoint):
    """Three requests arrive, and a step has room for all of their tokens."""
    engine = scripted_engine(checkpoint, num_blocks=8)
    for name, num_tokens in (("a", 5), ("b", 1), ("c", 9)):
        add(engine, name, num_tokens)
    step(engine)
    assert steps_of(engine), f"three requests have arrived, and the first step runs none: {queues(engine)}"
    assert steps_of(engine) == [[("a", 5), ("b", 1), ("c", 9)]]


def test_a_long_prompt_is_computed_in_chunks_and_samples_after_the_last(checkpoint):
    """A step has 6 tokens, and the prompt has 14."""
    engine = scripted_engine(checkpoint, num_blocks=8, max_num_batched_tokens=6)
    add(engine, "a", 14)
    tokens = [step(engine) for _ in range(3)]
    assert steps_of(engine) == [[("a", 6)], [("a", 6)], [("a", 2)]]
    assert [list(outputs) for outputs in tokens] == [[], [], ["a"]], "only the third step samples a token"


def test_the_last_admitted_prompt_begins_with_what_is_left_of_the_budget(checkpoint):
    """A step has 10 tokens, and each of three prompts has 7."""
    engine = scripted_engine(checkpoint, num_blocks=16, max_num_batched_tokens=10)
    for name in "abc":
        add(engine, name, 7)
    for _ in range(3):
        step(engine)
    assert steps_of(engine)[:2] == [[("a", 7), ("b", 3)], [("a", 1), ("b", 4), ("c", 5)]]
    assert steps_of(engine)[2] == [("a", 1), ("b", 1), ("c", 2)]


def test_a_step_without_budget_left_admits_no_request(checkpoint):
    """A step has 5 tokens, and the prompt of a needs all of them."""
    engine = scripted_engine(checkpoint, num_blocks=8, max_num_batched_tokens=5)
    add(engine, "a", 5)
    add(engine, "b", 1)
    step(engine)
    assert queues(engine) == "a run, b wait"


def test_admission_takes_blocks_for_all_tokens_even_if_only_a_chunk_is_computed(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=8, max_num_batched_tokens=2)
    add(engine, "a", 9)
    step(engine)
    num_taken = 8 - engine.kv_cache_manager.num_free_blocks
    assert num_taken == 3, f"9 tokens need 3 blocks, {num_taken} are taken"


def test_no_more_than_max_num_seqs_run(checkpoint):
    """There are two seats, and three requests arrive."""
    engine = scripted_engine(checkpoint, num_blocks=16, max_num_seqs=2)
    for name in "abc":
        add(engine, name, 3, max_tokens=2)
    step(engine)
    assert queues(engine) == "a b run, c wait"
    step(engine)
    step(engine)
    assert steps_of(engine)[2] == [("c", 3)]


def test_a_small_request_does_not_overtake_one_that_does_not_fit(checkpoint):
    """Of 6 blocks a has 3. b needs 4, and c, which came later, needs one."""
    engine = scripted_engine(checkpoint, num_blocks=6)
    for name, num_tokens in (("a", 10), ("b", 14), ("c", 1)):
        add(engine, name, num_tokens)
    step(engine)
    assert queues(engine) == "a run, b c wait"


def test_a_request_is_admitted_for_the_tokens_it_has_not_for_those_it_may_get(checkpoint):
    """Each of four requests has 3 tokens, may get 60 more, and there are 4 blocks."""
    engine = scripted_engine(checkpoint, num_blocks=4)
    for name in "abcd":
        add(engine, name, 3, max_tokens=60)
    step(engine)
    assert queues(engine) == "a b c d run, none wait"


@pytest.mark.parametrize("num_tokens, is_admitted", [(16, True), (17, False)])
def test_a_request_admitted_beside_others_leaves_the_watermark_free(checkpoint, num_tokens, is_admitted):
    """Of 10 blocks a has 4, and 2 must stay free: 4 are left for b."""
    engine = scripted_engine(checkpoint, num_blocks=10, watermark=0.2)
    add(engine, "a", 16)
    add(engine, "b", num_tokens)
    step(engine)
    assert queues(engine) == ("a b run, none wait" if is_admitted else "a run, b wait")


def test_a_request_that_runs_alone_may_use_the_watermark(checkpoint):
    """The prompt needs all 4 blocks, and no other request runs."""
    engine = scripted_engine(checkpoint, num_blocks=4, watermark=0.9)
    add(engine, "a", 16)
    step(engine)
    assert queues(engine) == "a run, none wait"


def test_a_prompt_larger_than_the_pool_ends_with_an_error_and_the_next_one_runs(checkpoint):
    """The pool has 4 blocks of 4, and the prompt of a has 17 tokens."""
    engine = scripted_engine(checkpoint, num_blocks=4)
    add(engine, "a", 17)
    add(engine, "b", 3)
    outputs = step(engine)
    assert "a" in outputs, f"a needs 5 blocks of 4, and the first step does not end it: {queues(engine)}"
    assert reason(outputs["a"]) == "error" and "5 blocks" in outputs["a"].error and "4" in outputs["a"].error
    assert steps_of(engine) == [[("b", 3)]]


def test_observer_hears_what_the_first_in_line_waits_for(checkpoint):
    """Of 10 blocks 6 are free. b needs 5, and 2 must stay free."""
    engine = scripted_engine(checkpoint, num_blocks=10, watermark=0.2)
    recorder = recorder_of(engine, "wait")
    for name, num_tokens in (("a", 16), ("b", 17), ("c", 1)):
        add(engine, name, num_tokens)
    step(engine)
    assert recorder.events == [("wait", "b", "blocks", 7, 6)], "b's 5 blocks and the watermark's 2 are needed"


def test_observer_hears_that_the_first_in_line_waits_for_a_seat(checkpoint):
    engine = scripted_engine(checkpoint, num_blocks=10, max_num_seqs=2)
    recorder = recorder_of(engine, "wait")
    for name in "abcd":
        add(engine, name, 3)
    step(engine)
    assert recorder.events == [("wait", "c", "seat", 1, 0)], "one seat is needed, and none is free"


# Preemption


def test_the_newest_sequence_is_preempted_and_loses_all_its_blocks(checkpoint):
    """Three sequences of 7 tokens hold all 6 blocks, 2 each. For its ninth token a needs a third one."""
    engine = scripted_engine(checkpoint, num_blocks=6)
    for name in "abc":
        add(engine, name, 7)
    for _ in range(3):
        step(engine)
    assert queues(engine) == "a b run, c wait"
    assert steps_of(engine)[2] == [("a", 1), ("b", 1)]
    num_free = engine.kv_cache_manager.num_free_blocks
    assert num_free == 0, f"a and b hold 3 blocks each, so none of 6 is free, but {num_free} are"


def test_a_preempted_sequence_computes_its_prompt_and_its_output_again_like_one_prompt(checkpoint):
    """Two sequences of 7 tokens hold all 4 blocks. For its ninth token a needs a third one."""
    engine = scripted_engine(checkpoint, num_blocks=4)
    prompts = [add(engine, name, 7, max_tokens=4) for name in "ab"]
    outputs = run(engine)
    assert steps_of(engine) == [
        [("a", 7), ("b", 7)],
        [("a", 1), ("b", 1)],
        [("a", 1)],  # its third block is one of b's
        [("a", 1)],
        [("b", 9)],
        [("b", 1)],
    ], "b comes back with 7 tokens of prompt and 2 of output"
    assert [tokens_of(outputs[name]) for name in "ab"] == [tokens_alone(prompt, 4) for prompt in prompts]


def test_a_preempted_sequence_waits_in_front_of_new_requests(checkpoint):
    """Two of four requests run in 4 blocks. For its ninth token a needs a third one, and b makes room."""
    engine = scripted_engine(checkpoint, num_blocks=4)
    for name in "abcd":
        add(engine, name, 7, max_tokens=4)
    for _ in range(3):
        step(engine)
    assert queues(engine) == "a run, b c d wait"


def test_preempted_sequences_wait_in_order_of_arrival(checkpoint):
    """All six blocks are full after the first step, and each of six sequences needs another one."""
    engine = scripted_engine(checkpoint, num_blocks=6)
    for name in "abcdef":
        add(engine, name, 4)
    step(engine)
    step(engine)
    assert queues(engine) == "a b c run, d e f wait"
    counted = engine.scheduler.num_preemptions
    assert counted == 3, f"d, e and f were preempted, num_preemptions is {counted}"


def test_the_newest_sequence_preempts_itself_if_it_needs_a_block(checkpoint):
    """The pool has 3 blocks. a has 2, which are not full, and b needs a second one."""
    engine = scripted_engine(checkpoint, num_blocks=3)
    add(engine, "a", 5)
    add(engine, "b", 4)
    step(engine)
    step(engine)
    assert queues(engine) == "a run, b wait"


def test_a_prompt_that_is_partly_computed_can_be_preempted(checkpoint):
    """A step has 6 tokens. b has computed 2 of its 16 when a needs another block."""
    engine = scripted_engine(checkpoint, num_blocks=5, max_num_batched_tokens=6)
    add(engine, "a", 4)
    add(engine, "b", 16)
    step(engine)
    step(engine)
    assert steps_of(engine) == [[("a", 4), ("b", 2)], [("a", 1)]]
    assert queues(engine) == "a run, b wait"


def test_a_step_that_preempts_admits_no_sequence(checkpoint):
    """The blocks that b has just lost are enough for c."""
    engine = scripted_engine(checkpoint, num_blocks=5)
    for name, num_tokens in (("a", 8), ("b", 9), ("c", 1)):
        add(engine, name, num_tokens)
    step(engine)
    step(engine)
    assert queues(engine) == "a run, b c wait"


def test_a_sequence_that_fills_the_pool_alone_ends_with_an_error_and_keeps_its_output(checkpoint):
    """First b makes room for a, which outgrows the 2 blocks of the pool. Then b does, too."""
    engine = scripted_engine(checkpoint, num_blocks=2)
    prompts = [add(engine, name, 4, max_tokens=20) for name in "ab"]
    outputs = run(engine)
    counted = engine.scheduler.num_preemptions
    assert counted == 1, f"only b is preempted: one that runs alone ends instead, and num_preemptions is {counted}"
    for name, prompt in zip("ab", prompts, strict=True):
        assert (reason(outputs[name]), tokens_of(outputs[name])) == ("error", tokens_alone(prompt, 5))
        assert "3 blocks" in outputs[name].error and "2" in outputs[name].error


def test_observer_hears_which_sequence_is_preempted_and_for_which(checkpoint):
    """All four blocks are full after the first step. Then d makes room for a, and c for b."""
    engine = scripted_engine(checkpoint, num_blocks=4)
    recorder = recorder_of(engine, "preempt")
    for name in "abcd":
        add(engine, name, 4)
    step(engine)
    step(engine)
    assert recorder.events == [("preempt", "d", "a"), ("preempt", "c", "b")], 'tell("preempt", seq, makes_room_for)'
