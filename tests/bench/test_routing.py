"""python -m stages.bench routing: virtual time, engines that stay whole, and what a router gains."""

import json
import math

import pytest

from nanovllm.bench.workload import Task
from nanovllm.cluster.routing import LeastQueue, PrefixRouter, RoundRobin
from nanovllm.options.config import EngineConfig
from nanovllm.tests.testing.engines import assert_empty, assert_whole
from stages.bench import routing
from stages.bench.options import Routing
from stages.bench.routing import Arrival, SimulatedEngine, StepCost, simulate, simulated_config, trace

SECOND = StepCost(fixed=1.0, per_token=0.0, per_read=0.0)
SMALL = Routing(num_requests=20, num_prefixes=4, prefix_len=24, input_len=6, output_len=4, spread=0.5)


class Checked(SimulatedEngine):
    """A simulated engine that is checked after every step."""

    def step(self):
        result = super().step()
        assert_whole(self.engine)
        return result


@pytest.fixture
def build(checkpoint):
    """Return a function that makes engines with these options."""

    def make(count: int, cost: StepCost = SECOND, num_blocks: int = 24, **options) -> list[Checked]:
        config = EngineConfig(str(checkpoint), block_size=4, kv_cache_tokens=4 * num_blocks, **options)
        return [Checked(simulated_config(config), cost) for _ in range(count)]

    return make


def request(seconds: float, prompt: list[int], num_tokens: int) -> Arrival:
    return Arrival(seconds, Task(prompt, num_tokens), 0, [bytes(prompt)])


def test_steps_of_one_engine_follow_each_other_and_engines_run_at_once(build):
    requests = [request(0.0, [5] * 8, 3), request(0.5, [6] * 8, 1), request(10.0, [7] * 8, 1)]
    alone = simulate(requests, build(1), LeastQueue(), int)
    assert alone.first_tokens == [1.0, 1.5, 1.0], "the second one waits for the end of a step"
    both = simulate(requests, build(2), LeastQueue(), int)
    assert both.first_tokens == [1.0, 1.0, 1.0]
    assert alone.seconds == both.seconds == 11.0


def test_cost_counts_tokens_and_what_they_read(build):
    cost = StepCost(fixed=0.0, per_token=1.0, per_read=0.25)
    outcome = simulate([request(0.0, [5] * 4, 2)], build(1, cost), LeastQueue(), int)
    assert outcome.first_tokens == [4 + 0.25 * (1 + 2 + 3 + 4)]
    assert outcome.seconds == outcome.first_tokens[0] + 1 + 0.25 * 5


@pytest.mark.parametrize("router", [RoundRobin, LeastQueue, PrefixRouter])
@pytest.mark.parametrize("num_blocks", [12, 40])
def test_random_trace_is_served_by_whole_engines(build, router, num_blocks):
    requests = trace(SMALL, 3, 2.0, seed=num_blocks, vocab_size=320, block_size=4)
    engines, ended = build(3, num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=16), []
    outcome = simulate(requests, engines, router(), lambda: ended.append(1))
    assert len(ended) == len(outcome.first_tokens) == len(requests) == 60
    assert outcome.num_prompt_tokens == sum(len(each.task.prompt) for each in requests)
    assert 0 <= outcome.num_cached_tokens < outcome.num_prompt_tokens
    assert min(outcome.first_tokens) >= 1.0 and outcome.seconds >= requests[-1].seconds
    for each in engines:
        assert_empty(each.engine)


def test_prefixes_that_stay_on_an_engine_are_hit_more_often(build):
    requests = trace(SMALL, 4, 0.2, seed=0, vocab_size=320, block_size=4)
    hits = {}
    for router in (RoundRobin, LeastQueue, PrefixRouter):
        outcome = simulate(requests, build(4), router(), int)
        hits[router] = outcome.num_cached_tokens, -outcome.copies
    assert hits[PrefixRouter] > max(hits[RoundRobin], hits[LeastQueue])


def test_trace_depends_on_its_seed_alone():
    first, same, other = (trace(SMALL, 2, 1.0, seed=seed, vocab_size=320, block_size=4) for seed in (1, 1, 2))
    assert first == same != other
    assert len({each.prefix for each in first}) <= 8 and first[-1].seconds > 0
    at_once = trace(SMALL, 1, math.inf, seed=1, vocab_size=320, block_size=4)
    assert {each.seconds for each in at_once} == {0.0}


FLAGS = ("--prefix-len", "24", "--input-len", "6", "--output-len", "4", "--num-requests", "8", "--num-prefixes", "3")


def test_report_has_each_router_and_number_of_engines(run, tmp_path):
    file = tmp_path / "report.json"
    status, out, _ = run("routing", *FLAGS, "--engines", "1,3", "--block-size", "4", "--json", str(file))
    report = json.loads(file.read_text())
    assert status == 0 and "prefix-aware" in out
    pairs = [(each["engines"], each["router"]) for each in report["points"]]
    assert pairs == [(number, router) for number in (1, 3) for router in routing.ROUTERS]
    assert all(0 <= each["hit_rate"] < 1 and each["ttft_ms"]["p50"] > 0 for each in report["points"])
    assert report["cost"]["fixed"] > 0 and {*report["measured"]} == {*routing.ROUTERS}


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--engines", "1,x"), "--engines must be whole numbers"),
        (("--prefix-len", "100"), "max_model_len is 64"),
        (("--kv-cache-tokens", "32"), "32"),
    ],
)
def test_impossible_options_are_an_error(run, flags, error):
    status, _, err = run("routing", *FLAGS, *flags)
    assert status == 2 and error in err and "Traceback" not in err
