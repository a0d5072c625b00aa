"""Helpers of stage 4's notebook, compared with runs drawn by hand."""

import pytest

pytest.importorskip("matplotlib")

from notebooks.helpers import s4
from notebooks.helpers.claims.preemption import NeverPreempts
from notebooks.helpers.s4 import Span, Toll
from stages.bench import timeline
from stages.bench.timeline import Arrival
from stages.bench.workloads import Traffic
from stages.s4_continuous_batching.scheduler import Scheduler
from tests.helpers import STORYTELLER


def continuous(
    arrivals: list[Arrival], num_blocks: int = 16, policy: type[Scheduler] = Scheduler, **options
) -> timeline.Timeline:
    options |= {"model": str(STORYTELLER), "block_size": 4, "kv_cache_tokens": 4 * num_blocks}
    return timeline.continuous(s4.scheduled_by(policy, **options), arrivals)


def request(time: float, num_prompt_tokens: int, num_output_tokens: int) -> Arrival:
    return Arrival(time, [3] * num_prompt_tokens, num_output_tokens)


def test_preempted_request_waits_and_starts_over():
    """Both requests hold two of four blocks and need a third one for token 9. The second one is preempted."""
    run = continuous([request(0, 7, 5), request(0, 6, 4)], num_blocks=4, watermark=0.0)
    assert s4.mean_toll([run]) == Toll(1, 0, 7 / 27, 7, 27, for_100=50)
    assert s4.times_preempted(run) == [0, 1] and s4.preempted_at(run) == [2]
    assert s4.spans(run, 1) == [
        Span("prefill", 0, 1),
        Span("decode", 1, 2),
        Span("preempted", 2, 5),
        Span("prefill", 5, 6),
        Span("decode", 6, 7),
    ]


def test_first_token_is_timed_from_the_arrival_and_others_from_the_token_before():
    run = continuous([request(0, 2, 4), request(1.5, 3, 2)])
    assert s4.ttft(run) == [1, 1.5] and s4.itl(run) == [1, 1, 1, 1]


def test_chunk_of_one_token_is_prefill_after_waiting():
    run = continuous([request(0, 4, 2), request(0, 4, 1)], max_num_batched_tokens=3)
    assert s4.spans(run, 0) == [Span("prefill", 0, 2), Span("decode", 2, 3)]
    assert s4.spans(run, 1) == [Span("waiting", 0, 1), Span("prefill", 1, 3)]


def test_stuck_engine_is_reported():
    both = [request(0, 7, 5), request(0, 6, 4)]
    with pytest.raises(timeline.Stuck, match="2 run, 0 wait"):
        continuous(both, num_blocks=4, watermark=0.0, policy=NeverPreempts)
    assert s4.gets_stuck(lambda: continuous(both, num_blocks=4, watermark=0.0, policy=NeverPreempts))
    assert not s4.gets_stuck(lambda: continuous(both, num_blocks=8, policy=NeverPreempts))


def test_poisson_arrivals_are_in_order_with_the_given_mean_gap():
    traffic = [Traffic(4, 4, 4)] * 2000
    arrivals = s4.poisson(traffic, mean_gap=5, seed=1)
    times = [arrival.time for arrival in arrivals]
    assert times == sorted(times) and times[0] == 0 and 4.5 < times[-1] / len(times) < 5.5
    assert all(len(a.prompt) == 4 and a.num_output_tokens == 4 for a in arrivals)
    assert {arrival.time for arrival in s4.poisson(traffic, mean_gap=0)} == {0}
