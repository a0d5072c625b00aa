"""stages/bench/timeline.py, which records requests that arrive while others run: compared with runs drawn by hand."""

import pytest

from nanovllm.bench.workload import mixed_tasks
from stages import s4_continuous_batching as s4
from stages.bench import timeline
from stages.bench.engines import without_model
from stages.bench.timeline import Again, Arrival, Timeline, Work
from tests.helpers import STORYTELLER

MODEL = str(STORYTELLER)


def request(time: float, num_prompt_tokens: int, num_output_tokens: int) -> Arrival:
    return Arrival(time, [3] * num_prompt_tokens, num_output_tokens)


def continuous(arrivals: list[Arrival], num_blocks: int = 16, **options) -> Timeline:
    engine = without_model("s4", model=MODEL, block_size=4, kv_cache_tokens=4 * num_blocks, **options)
    run = timeline.continuous(engine, arrivals)
    engine.kv_cache_manager.check_integrity()
    assert engine.kv_cache_manager.num_free_blocks == num_blocks
    return run


def static(arrivals: list[Arrival], num_blocks: int = 16, seats: int = 2) -> Timeline:
    options = {"block_size": 4, "kv_cache_tokens": 4 * num_blocks, "max_num_seqs": seats}
    return timeline.static(without_model("s3", model=MODEL, **options), arrivals)


def works(run: Timeline) -> list[dict[int, tuple[int, int]]]:
    """Return the start and the number of tokens of each sequence's work in each step."""
    return [{i: (work.start, work.num_tokens) for i, work in step.work.items()} for step in run.steps]


def test_request_joins_a_running_batch():
    run = continuous([request(0, 2, 4), request(1.5, 3, 2)])
    assert works(run) == [{0: (0, 2)}, {0: (2, 1)}, {0: (3, 1), 1: (0, 3)}, {0: (4, 1), 1: (3, 1)}]
    assert [(step.start, step.end) for step in run.steps] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert run.token_times() == [[1, 2, 3, 4], [3, 4]]


def test_request_waits_for_the_end_of_a_static_batch():
    run = static([request(0, 2, 4), request(1.5, 3, 2)])
    assert works(run) == [{0: (0, 2)}, {0: (2, 1)}, {0: (3, 1)}, {0: (4, 1)}, {1: (0, 3)}, {1: (3, 1)}]
    assert run.token_times() == [[1, 2, 3, 4], [5, 6]]


def test_static_batch_respects_seats_and_promises():
    three = [request(0, 4, 4)] * 3
    assert [len(step) for step in works(static(three, seats=2))] == [2] * 4 + [1] * 4
    assert [len(step) for step in works(static(three, seats=3, num_blocks=4))] == [2] * 4 + [1] * 4
    assert [len(step) for step in works(static(three, seats=3))] == [3] * 4


@pytest.mark.parametrize("serve", [continuous, static])
def test_clock_jumps_over_idle_times(serve):
    run = serve([request(0, 2, 1), request(10.5, 2, 1)])
    assert [(step.start, step.end) for step in run.steps] == [(0, 1), (10.5, 11.5)]
    assert run.token_times() == [[1], [11.5]]


def test_recomputed_tokens_are_counted_each_time():
    """Both requests hold two of the four blocks and need a third one for token 9. The second one is preempted."""
    run = continuous([request(0, 7, 5), request(0, 6, 4)], num_blocks=4, watermark=0.0)
    assert works(run) == [
        {0: (0, 7), 1: (0, 6)},
        {0: (7, 1), 1: (6, 1)},
        {0: (8, 1)},
        {0: (9, 1)},
        {0: (10, 1)},
        {1: (0, 8)},
        {1: (8, 1)},
    ]
    assert run.num_preemptions == 1
    assert run.recomputed == Again(of_prompts=6, generated=1)
    assert run.tokens_computed == 7 + 4 + 6 + 3 + 7


@pytest.mark.full
def test_schedule_is_the_same_without_a_model():
    prompts = [task.prompt[:40] for task in mixed_tasks(4096, 6)]
    arrivals = [Arrival(3 * i, prompt, 30) for i, prompt in enumerate(prompts)]
    options = {"model": MODEL, "kv_cache_tokens": 256, "max_num_batched_tokens": 32}
    with_model = timeline.continuous(s4.LLM(**options, dtype="float32").llm_engine, arrivals)
    without = timeline.continuous(without_model("s4", **options), arrivals)
    assert works(with_model) == works(without) and without.num_preemptions == with_model.num_preemptions > 0
    assert [step.work[0] for step in without.steps[:1]] == [Work(0, 32, sampled=False)]
