"""Any history: random requests on engines of random size, thousands of steps; after each all is in its place."""

import random
from collections import Counter

import pytest

from ..outputs import RequestOutput
from ..sampling import SamplingParams
from .scripted import answer, assert_empty, params, reason, said_alone, scripted_engine, step

NUM_POSITIONS = 64  # of the model


class History:
    """Random requests that come, go and are aborted, on an engine of random size; each knows what it will say."""

    def __init__(self, checkpoint, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        num_blocks, block_size = rng.randint(2, 24), rng.choice([1, 2, 3, 4, 4, 8])
        self.num_slots, self.budget = num_blocks * block_size, rng.choice([1, 3, 7, 30, 30])
        seats, watermark = rng.choice([1, 2, 4, 32, 32]), rng.choice([0.0, 0.0, 0.0, 0.1, 0.5, 0.9])
        knobs = {"max_num_batched_tokens": self.budget, "max_num_seqs": seats, "watermark": watermark}
        self.engine = scripted_engine(checkpoint, num_blocks, block_size, **knobs)
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.ended: dict[str, RequestOutput] = {}
        self.num_requests = 0

    def arrive(self) -> None:
        rng, name = self.rng, str(self.num_requests)
        self.num_requests += 1
        prompt = [rng.randrange(320) for _ in range(rng.choice([1, 2, 3, rng.randint(1, 12), rng.randint(1, 40)]))]
        max_tokens = rng.choice([1, 2, rng.randint(1, 50), rng.randint(10, 40)])
        sampling = params(max_tokens, temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(9))
        if len(prompt) > self.num_slots:
            with pytest.raises(ValueError, match=f"the pool has {self.engine.kv_cache_manager.num_blocks}$"):
                self.engine.add_request(name, prompt, sampling)
            return
        self.engine.add_request(name, prompt, sampling)
        self.asked[name] = prompt, sampling

    def abort(self) -> None:
        name = str(self.rng.randint(0, self.num_requests))  # may have ended, or never come
        had = self.engine.has_request(name)
        output = self.engine.abort_request(name)
        assert (output is not None) == had
        if output:
            self.end(output)

    def step(self) -> None:
        scheduler = self.engine.scheduler
        running, num_preemptions = list(scheduler.running), scheduler.num_preemptions
        first = next(iter(running), None)
        num_steps, had_work = self.engine.model_runner.num_steps, self.engine.has_unfinished_requests()
        outputs = step(self.engine)
        if self.engine.model_runner.num_steps > num_steps:
            batch = self.engine.model_runner.steps[-1]
            assert sum(num_tokens for _, num_tokens in batch) <= self.budget
            assert first is None or first.request_id in dict(batch), "who came first is never held up"
        else:
            assert any(output.error for output in outputs.values()) or not had_work, "a step that did nothing"
        failed = any(output.error for output in outputs.values())
        if scheduler.num_preemptions > num_preemptions and not failed:
            assert set(scheduler.running) <= set(running), "admitted in a step that had to preempt"
        for output in outputs.values():
            if output.finished:
                self.end(output)

    def end(self, output: RequestOutput) -> None:
        assert output.request_id not in self.ended, "told twice"
        prompt, sampling = self.asked[output.request_id]
        self.ended[output.request_id] = output
        assert output.prompt_token_ids == prompt
        said = answer(output)
        assert said == said_alone(prompt, len(said), sampling.seed if sampling.temperature else None)
        room = min(sampling.max_tokens, NUM_POSITIONS - len(prompt))
        if reason(output) == "length":
            assert len(said) == room
        elif reason(output) == "error":
            assert len(prompt) + len(said) == self.num_slots + 1 and len(said) < room
        else:
            assert reason(output) == "abort" and len(said) < room


@pytest.mark.parametrize("seed", range(8))
def test_any_history_leaves_everything_in_its_place(checkpoint, seed):
    num_steps = num_preemptions = 0
    reasons: Counter[str] = Counter()
    for i in range(15):
        history = History(checkpoint, seed * 100 + i)
        for _ in range(80):
            draw = history.rng.random()
            if draw < 0.25:
                history.arrive()
            elif draw < 0.29:
                history.abort()
            else:
                history.step()
        while history.engine.has_unfinished_requests():
            history.step()
        assert_empty(history.engine)
        assert history.ended.keys() == history.asked.keys(), "a request was lost"
        num_steps += history.engine.model_runner.num_steps
        num_preemptions += history.engine.scheduler.num_preemptions
        reasons.update(reason(output) for output in history.ended.values())
    assert num_steps > 1000 and num_preemptions > 20, "this tests too little"
    assert reasons["length"] > 50 and reasons["abort"] > 5 and reasons["error"] > 5, "this tests too little"
