"""Requests that arrive while others are served: what notebooks/live.py notes of a run, against runs drawn by hand."""

import doctest
import json

import pytest

pytest.importorskip("matplotlib")

from tqdm import tqdm

from notebooks import live, pictures_s4
from notebooks.live import Arrival, Work
from notebooks.pictures_s4 import Span
from stages import figures, serving
from stages import s3_paged_attention as s3
from stages import s4_continuous_batching as s4
from stages.s4_continuous_batching.scheduler import Scheduler
from stages.workload import mixed_workload
from tests.helpers import ROOT

MODEL = str(ROOT / "models" / "storyteller")


def request(time: float, num_prompt_tokens: int, num_output_tokens: int) -> Arrival:
    return Arrival(time, [3] * num_prompt_tokens, num_output_tokens)


def continuous(
    arrivals: list[Arrival], num_blocks: int = 16, policy: type[Scheduler] = Scheduler, **options
) -> live.Run:
    engine = live.WithoutModel(policy, model=MODEL, block_size=4, kv_cache_tokens=4 * num_blocks, **options)
    run = live.continuous(engine, arrivals)
    engine.kv_cache_manager.check_integrity()
    assert engine.kv_cache_manager.num_free_blocks == num_blocks
    return run


def static(arrivals: list[Arrival], num_blocks: int = 16, seats: int = 2) -> live.Run:
    llm = s3.LLM(MODEL, block_size=4, kv_cache_tokens=4 * num_blocks, max_num_seqs=seats)
    return live.static(live.without_model(llm), arrivals)


def works(run: live.Run) -> list[dict[int, tuple[int, int]]]:
    """What each step computed: where it began, and how many tokens."""
    return [{i: (work.start, work.num_tokens) for i, work in step.work.items()} for step in run.steps]


def test_a_request_joins_those_who_run():
    run = continuous([request(0, 2, 4), request(1.5, 3, 2)])
    assert works(run) == [{0: (0, 2)}, {0: (2, 1)}, {0: (3, 1), 1: (0, 3)}, {0: (4, 1), 1: (3, 1)}]
    assert [(step.start, step.end) for step in run.steps] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert run.token_times() == [[1, 2, 3, 4], [3, 4]]
    assert run.first_token_waits() == [1, 1.5] and run.gaps() == [1, 1, 1, 1]


def test_a_static_batch_makes_it_wait_for_the_last_member():
    run = static([request(0, 2, 4), request(1.5, 3, 2)])
    assert works(run) == [{0: (0, 2)}, {0: (2, 1)}, {0: (3, 1)}, {0: (4, 1)}, {1: (0, 3)}, {1: (3, 1)}]
    assert run.first_token_waits() == [1, 3.5]


def test_a_static_batch_takes_no_more_than_seats_and_promises():
    three = [request(0, 4, 4)] * 3
    assert [len(step) for step in works(static(three, seats=2))] == [2] * 4 + [1] * 4
    assert [len(step) for step in works(static(three, seats=3, num_blocks=4))] == [2] * 4 + [1] * 4
    assert [len(step) for step in works(static(three, seats=3))] == [3] * 4


@pytest.mark.parametrize("serve", [continuous, static])
def test_the_clock_jumps_when_nobody_is_there(serve):
    run = serve([request(0, 2, 1), request(10.5, 2, 1)])
    assert [(step.start, step.end) for step in run.steps] == [(0, 1), (10.5, 11.5)]
    assert run.first_token_waits() == [1, 1]


def test_what_is_computed_twice_is_counted_once_for_each_time():
    """4 blocks of 4. Both hold two and need a third for token 9: the second gives its two back, and comes again."""
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
    assert run.num_preemptions == 1 and run.losses == [0, 1]
    assert run.recomputed == live.Again(of_prompts=6, generated=1)
    assert run.tokens_computed == 7 + 4 + 6 + 3 + 7
    assert live.mean_toll([run]) == live.Toll(1, 0, 7 / 27, 7, 27, for_100=50)
    assert pictures_s4.preempted_at(run) == [2]
    assert pictures_s4.spans(run, 1) == [
        Span("prefill", 0, 1),
        Span("decode", 1, 2),
        Span("preempted", 2, 5),
        Span("prefill", 5, 6),
        Span("decode", 6, 7),
    ]


def test_a_chunk_of_one_token_is_prefill_and_waiting_comes_first():
    run = continuous([request(0, 4, 2), request(0, 4, 1)], max_num_batched_tokens=3)
    assert works(run) == [{0: (0, 3)}, {0: (3, 1), 1: (0, 2)}, {0: (4, 1), 1: (2, 2)}]
    assert pictures_s4.spans(run, 0) == [Span("prefill", 0, 2), Span("decode", 2, 3)]
    assert pictures_s4.spans(run, 1) == [Span("waits", 0, 1), Span("prefill", 1, 3)]


def test_who_cannot_go_on_is_said_and_not_waited_for():
    class NeverPreempts(Scheduler):
        def _make_room(self, seq, output):
            return self._block_manager.can_append(seq)

    both = [request(0, 7, 5), request(0, 6, 4)]
    with pytest.raises(live.Stuck, match="2 run, 0 wait"):
        continuous(both, num_blocks=4, watermark=0.0, policy=NeverPreempts)
    assert live.gets_stuck(lambda: continuous(both, num_blocks=4, watermark=0.0, policy=NeverPreempts))
    assert not live.gets_stuck(lambda: continuous(both, num_blocks=8, policy=NeverPreempts))


def test_without_a_model_the_schedule_is_the_same():
    prompts = [request.prompt_token_ids[:40] for request in mixed_workload(4096, 6)]
    arrivals = [Arrival(3 * i, prompt, 30) for i, prompt in enumerate(prompts)]
    options = {"model": MODEL, "kv_cache_tokens": 256, "max_num_batched_tokens": 32}
    with_model = live.continuous(s4.LLM(**options, dtype="float32").llm_engine, arrivals)
    without = live.continuous(live.WithoutModel(**options), arrivals)
    assert works(with_model) == works(without) and without.num_preemptions == with_model.num_preemptions > 0
    assert [step.work[0] for step in without.steps[:1]] == [Work(0, 32, sampled=False)]


def test_poisson_arrivals_are_in_order_and_as_far_apart_as_was_asked():
    asked = [live.Request(4, 4, 4)] * 2000
    arrivals = live.poisson(asked, mean_gap=5, seed=1)
    times = [arrival.time for arrival in arrivals]
    assert times == sorted(times) and times[0] == 0 and 4.5 < times[-1] / len(times) < 5.5
    assert all(len(a.prompt) == 4 and a.num_output_tokens == 4 for a in arrivals)
    assert {arrival.time for arrival in live.poisson(asked, mean_gap=0)} == {0}


def test_stages_that_serve_in_turns_each_serve_everything():
    requests = [r._replace(num_output_tokens=r.num_output_tokens // 8) for r in mixed_workload(4096, 3)]
    with tqdm(disable=True) as bar:
        scores = serving.serve_in_turns(["s3", "s4"], ROOT / "models" / "storyteller", requests, "float32", bar)
    num_tokens = sum(request.num_output_tokens for request in requests)
    for score in scores.values():
        assert score["tokens_per_second"] == pytest.approx(num_tokens / score["seconds"])
        assert 0 < score["first_token_seconds"] < score["seconds"]
        assert score["steps"] >= max(request.num_output_tokens for request in requests)


@pytest.mark.parametrize(
    "pool, part", [(serving.POOL_TOKENS, ("s4",)), (serving.ROOMY_TOKENS, ("peers", "s4"))], ids=["tight", "roomy"]
)
def test_counts_in_the_lesson_are_what_the_engine_does(pool, part):
    """Of steps and tokens: no model is needed, and no clock. (A vocabulary only gives the prompts their tokens.)"""
    engine = live.WithoutModel(model=MODEL, kv_cache_tokens=pool)
    for number, (prompt, num_output_tokens) in enumerate(mixed_workload(4096)):
        params = s4.SamplingParams(max_tokens=num_output_tokens, ignore_eos=True)
        engine.add_request(str(number), prompt, params)
    while engine.has_unfinished_requests():
        engine.step()
    told = json.loads((ROOT / figures.RESULTS).read_text("utf-8"))["serving"]
    for name in part:
        told = told[name]
    runner = engine.model_runner
    assert (runner.num_steps, runner.num_tokens) == (told["steps"], told["tokens_computed"])


@pytest.mark.parametrize("module", [live, pictures_s4], ids=lambda module: module.__name__)
def test_examples_in_docstrings(module):
    assert doctest.testmod(module).failed == 0
