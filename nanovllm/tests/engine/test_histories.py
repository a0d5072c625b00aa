"""Random histories: random requests on engines of random size, checked after each of thousands of steps."""

import random
from collections import Counter
from typing import Any

import pytest

from ...engine.kv_cache import BlockCopy
from ...engine.sequence import Sequence
from ...requests.outputs import RequestOutput
from ...requests.sampling_params import SamplingParams
from ...requests.tokens import SampledToken
from ..testing.engines import (
    Batch,
    answer_alone,
    answers,
    assert_empty,
    assert_whole,
    executor_of,
    params,
    reasons,
    scripted_engine,
    step,
)

NUM_POSITIONS = 64  # of the model


class DeviceLost(RuntimeError):
    pass


class History:
    """Random requests that arrive, end and are aborted on an engine of random size, with known answers."""

    def __init__(self, checkpoint, seed: int, is_async: bool) -> None:
        self.rng = rng = random.Random(seed)
        num_blocks, block_size = rng.randint(2, 24), rng.choice([1, 2, 3, 4, 4, 8])
        self.num_slots, self.budget = num_blocks * block_size, rng.choice([1, 3, 7, 30, 30])
        seats, watermark = rng.choice([1, 2, 4, 32, 32]), rng.choice([0.0, 0.0, 0.0, 0.1, 0.5, 0.9])
        knobs: dict[str, Any] = {"max_num_batched_tokens": self.budget, "max_num_seqs": seats, "watermark": watermark}
        is_caching = rng.random() < 0.9
        knobs |= {"enable_prefix_caching": is_caching, "async_scheduling": is_async}
        self.is_async, self.engine = is_async, scripted_engine(checkpoint, num_blocks, block_size, **knobs)
        self.beginnings = [[rng.randrange(320) for _ in range(30)] for _ in range(2)]
        self.tried: list[Batch] = []  # in this step
        self.poisoned: dict[str, int] = {}  # request_id: the number of tokens from which it raises
        self._run, self._share_failing = executor_of(self.engine).run, rng.choice([0.0, 0.0, 0.1])
        executor_of(self.engine).run = self.run  # type: ignore[method-assign]
        self._copy, self._append = self.engine.kv_cache.copy_blocks, self.engine.kv_cache_manager.append_slot
        self.engine.kv_cache.copy_blocks = self.copy  # type: ignore[method-assign]
        self.engine.kv_cache_manager.append_slot = self.append  # type: ignore[method-assign]
        self.num_lost, self._share_lost = 0, rng.choice([0.0, 0.0, 0.1])
        self.sent: dict[str, tuple[list[int], SamplingParams]] = {}
        self.ended: dict[str, RequestOutput] = {}
        self.num_requests = 0

    def run(self, batch: Batch) -> list[SampledToken | None]:
        """Run the model. Poisoned requests raise in every batch, and any batch of several may."""
        self.tried.append(batch)
        if any(
            seq.num_tokens_with_placeholders >= self.poisoned.get(seq.request_id, NUM_POSITIONS + 1) for seq, _ in batch
        ):
            raise RuntimeError("poisoned")
        if len(batch) > 1 and self.rng.random() < self._share_failing:
            raise RuntimeError("too much at once")
        return self._run(batch)

    def copy(self, copies: list[BlockCopy]) -> None:
        """Copy the blocks, or fail before a copy although the samples have their blocks."""
        self.lose(bool(copies))
        self._copy(copies)

    def append(self, seq: Sequence) -> BlockCopy | None:
        """Append a slot, or fail before the copies that are due."""
        self.lose(self.rng.random() < 0.8)
        return self._append(seq)

    def lose(self, may_be: bool) -> None:
        if may_be and self.rng.random() < self._share_lost:
            self.num_lost += 1
            raise DeviceLost

    def arrive(self) -> None:
        rng, name = self.rng, str(self.num_requests)
        self.num_requests += 1
        prompt = [rng.randrange(320) for _ in range(rng.choice([1, 2, 3, rng.randint(1, 12)]))]
        prompt = rng.choice(self.beginnings)[: rng.choice([0, rng.randint(1, 30)])] + prompt
        max_tokens = rng.choice([1, 2, rng.randint(1, 50), rng.randint(10, 40)])
        n = rng.choice([1, 1, 2, 3, 5])
        stops = rng.sample(range(320), rng.choice([0, 0, 20]))
        temperature = rng.choice([0.0, 1.0, 1.0])
        sampling = params(max_tokens, n=n, temperature=temperature, seed=rng.randrange(9), stop_token_ids=stops)
        if len(prompt) > self.num_slots:
            with pytest.raises(ValueError, match=f"pool of {self.engine.kv_cache_manager.num_blocks} blocks"):
                self.engine.add_request(name, prompt, sampling)
            return
        self.engine.add_request(name, prompt, sampling)
        self.sent[name] = prompt, sampling
        if rng.random() < 0.1:
            self.poisoned[name] = len(prompt) + rng.choice([0, rng.randint(1, 9)])

    def abort(self) -> None:
        name = str(self.rng.randint(0, self.num_requests))  # it may have ended, or never arrive
        had = name in self.engine.requests
        output = self.engine.abort_request(name)
        assert (output is not None) == had
        if output:
            self.end(output)

    def step(self) -> None:
        scheduler = self.engine.scheduler
        running, num_preemptions = list(scheduler.running), scheduler.num_preemptions
        first = next(iter(running), None)
        had_work = self.engine.has_unfinished_requests()
        may_run = {*running, *(sample for seq in running for sample in seq.to_fork)}
        self.tried.clear()
        try:
            outputs = step(self.engine)
        except DeviceLost:
            assert_whole(self.engine)
            assert not scheduler.running, "a step failed"
            return
        if self.is_async:
            assert all(sum(num_tokens for _, num_tokens in batch) <= self.budget for batch in self.tried)
        elif self.tried:
            batch = self.tried[0]
            assert sum(num_tokens for _, num_tokens in batch) <= self.budget
            assert first is None or first in dict(batch) or first.error, "the oldest request is never held up"
            assert len(set(batch)) == len(batch)
            assert self.tried[1:] in ([], [[one] for one in batch] if len(batch) > 1 else []), "one by one, and once"
        else:
            failed = any(output.error for output in outputs.values())
            assert failed or not had_work, "a step that did nothing"
        if scheduler.num_preemptions > num_preemptions:
            assert set(scheduler.running) <= may_run, "admitted in a step that preempted"
        for output in outputs.values():
            if output.finished:
                self.end(output)

    def end(self, output: RequestOutput) -> None:
        assert output.request_id not in self.ended, "returned twice"
        prompt, sampling = self.sent[output.request_id]
        self.ended[output.request_id] = output
        assert output.prompt_token_ids == prompt and len(output.outputs) == sampling.n
        seed, room = (
            sampling.seed if sampling.temperature else None,
            min(sampling.max_tokens, NUM_POSITIONS - len(prompt)),
        )
        for i, (tokens, reason) in enumerate(zip(answers(output), reasons(output), strict=True)):
            assert tokens == answer_alone(prompt, len(tokens), seed, i)
            assert not set(tokens[:-1]) & set(sampling.stop_token_ids)
            if reason == "stop":
                assert tokens[-1] in sampling.stop_token_ids
            elif reason == "length":
                assert len(tokens) == room
            elif reason == "error":
                begins = self.poisoned.get(output.request_id)
                assert len(prompt) + len(tokens) in (begins, self.num_slots + 1) and len(tokens) < room, (
                    "the same as alone"
                )
            else:
                assert reason == "abort" and len(tokens) < room


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 5))])
def test_random_histories_leave_everything_in_its_place(checkpoint, seed, is_async):
    num_steps = num_preemptions = num_copies = num_lost = num_hits = 0
    ends: Counter[str | None] = Counter()
    for i in range(8):
        history = History(checkpoint, seed * 100 + i, is_async)
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
        assert history.ended.keys() == history.sent.keys(), "a request was lost"
        num_steps += history.engine.executor.num_steps
        num_preemptions += history.engine.scheduler.num_preemptions
        num_copies += history.engine.kv_cache.num_blocks_copied
        num_lost += history.num_lost
        num_hits += history.engine.kv_cache_manager.prefix_cache_stats.hits
        for output in history.ended.values():
            ends.update([output.error, *reasons(output)])
    counts = {
        "steps": num_steps,
        "preemptions": num_preemptions,
        "copies": num_copies,
        "lost": num_lost,
        "hits": num_hits,
    }
    assert num_steps > 500 and num_preemptions > 5 and num_copies > 10 and num_lost > 10, f"too little: {counts}"
    assert num_hits > 500, f"too little: {counts}"
    assert min(ends["length"], ends["stop"], ends["abort"]) > 0, f"too little: {ends}"
    assert ends["RuntimeError: poisoned"] > 0, f"too little: {ends}"
    assert sum(ends[error] for error in ends if error and "blocks" in error) > 0, f"too little: {ends}"
