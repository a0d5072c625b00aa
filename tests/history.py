"""A history: an LLM of any stage on a script, what happens to it, and what must hold after each of its steps.

Of each request it is known beforehand what its samples say and how they end (tests/expected_outputs.py). Only an abort may end a
sample sooner: after a step that raised, all requests are aborted.
"""

import gc
import tempfile
import weakref
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.expected_outputs import Asked, asked_for
from tests.plans import Abort, Ask, Beams, Drain, Event, Fail, Knobs, Plan, Step, Stream
from tests.scripted_llm import BrokenRule, Injected, Stage, carried

MAX_SILENT_STEPS = 300  # of an engine with requests: the longest prompt in chunks of 1, late loads, and room to spare


class Progress(NamedTuple):
    """Of an engine, before or after a step."""

    num_steps: int
    num_tokens: int
    num_preemptions: int
    num_admitted: int


class History:
    def __init__(self, stage: Stage, knobs: Knobs, folder: Path) -> None:
        self.stage, self.knobs = stage, knobs
        self.observer = stage.counter()
        self.events = self.observer.counts  # of each kind
        self.llm = stage.build(folder, self.observer, knobs.load_delays, **options(stage, knobs))
        self.open: dict[str, Asked] = {}
        self.last_text: list[int] = []  # of the request that ended last
        self.aborting: str | None = None
        self.num_requests = self.num_silent_steps = 0
        self.seqs: list[weakref.ref] = []
        self._folder = folder
        if stage.has_engine:
            self._step = self.llm.llm_engine.step
            self.llm.llm_engine.step = self.watched_step

    @property
    def num_steps(self) -> int:
        return self.events["begin"]

    def apply(self, event: Event) -> None:
        handle = {
            Ask: self.ask,
            Step: self.step,
            Drain: self.drain,
            Abort: self.abort,
            Stream: self.stream,
            Beams: self.beams,
            Fail: self.fail,
        }[type(event)]
        try:
            handle(event)
        except BrokenRule as broken:
            raise AssertionError(str(broken)) from broken

    # What happens

    def ask(self, ask: Ask) -> None:
        request_id, asked = self.admit(ask)
        self.llm.llm_engine.add_request(request_id, asked.prompt, self.params(ask))
        self.seqs += [weakref.ref(seq) for seq in as_list(self.llm.llm_engine._requests[request_id])]
        self.check()

    def step(self, step: Step) -> None:
        for _ in range(step.count):
            try:
                self.llm.llm_engine.step()
            except Injected:  # what the step has changed so far is of nobody any more
                for request_id in list(self.open):
                    self.abort_one(request_id)
                assert not self.llm.llm_engine.has_unfinished_requests()

    def drain(self, _: Drain | None = None) -> None:
        while self.llm.llm_engine.has_unfinished_requests():
            self.step(Step(1))

    def abort(self, abort: Abort) -> None:
        request_ids = [*self.open, "nobody"]
        self.abort_one(request_ids[abort.which % len(request_ids)])

    def abort_one(self, request_id: str) -> None:
        self.aborting = request_id
        output = self.llm.llm_engine.abort_request(request_id)
        assert (output is not None) == (request_id in self.open)
        if output:
            assert output.finished
            self.hear(output)
        self.aborting = None
        assert self.llm.llm_engine.abort_request(request_id) is None
        self.check()

    def stream(self, stream: Stream) -> None:
        if self.open:
            return  # the engine is shared: the stream would serve them, too
        asked = [self.admit(ask) for ask in stream.asks]
        self.llm._request_ids = iter(list(self.open))
        outputs = self.llm.stream([each.prompt for _, each in asked], [self.params(ask) for ask in stream.asks])
        try:
            for num_taken, output in enumerate(outputs, start=1):
                if not self.stage.has_engine:
                    self.hear(output)
                    self.llm.kv_cache_manager.check_integrity()
                if num_taken == stream.take:
                    break
            else:
                assert not self.open, "a request was lost"
        except Injected:
            pass
        outputs.close()
        self.open.clear()
        self.check()
        assert not self.llm.kv_cache_manager._holders, "the stream is closed, and somebody holds slots"

    def beams(self, beams: Beams) -> None:
        """The same as with all the memory and no cache."""
        asked = self.asked(beams.ask)
        params = self.stage.module.BeamSearchParams(beams.width, beams.ask.max_tokens, ignore_eos=True)
        if self.open:
            return
        if beams.width > self.knobs.max_num_seqs:
            with pytest.raises(ValueError, match="max_num_seqs is"):
                self.llm.beam_search([asked.prompt], params)
            return
        self.llm._request_ids = iter(["beams"])
        try:
            [output] = self.llm.beam_search([asked.prompt], params)
        except Injected:
            self.check()
            return
        if asked.is_refused:
            asked.check_refusal(output)
        elif output.error:
            num_tokens = len(asked.prompt) + beams.ask.max_tokens
            assert self.knobs.num_blocks < beams.width * (-(-num_tokens // self.knobs.block_size) + 1), output.error
        else:
            knobs = self.knobs._replace(block_size=16, num_blocks=100, enable_prefix_caching=False)
            alone = self.stage.build(self._folder, self.stage.counter(), **options(self.stage, knobs))
            [expected] = alone.beam_search([asked.prompt], params)
            assert [(each.token_ids, each.finish_reason) for each in output.outputs] == [
                (each.token_ids, each.finish_reason) for each in expected.outputs
            ]
        assert not self.llm.kv_cache_manager._holders, "a beam holds blocks"
        self.check()

    def fail(self, fail: Fail) -> None:
        self.llm.model_runner.raises_after = fail.after

    # What must come of it

    def admit(self, ask: Ask) -> tuple[str, Asked]:
        self.num_requests += 1
        request_id = str(self.num_requests)
        self.open[request_id] = asked = self.asked(ask)
        return request_id, asked

    def asked(self, ask: Ask) -> Asked:
        return asked_for(self.stage, self.knobs, ask, self.last_text, self.num_requests)

    def params(self, ask: Ask) -> Any:
        more = {"n": ask.n} if self.stage.has_samples else {}
        return self.stage.module.SamplingParams(
            max_tokens=ask.max_tokens, seed=ask.seed, stop_token_ids=ask.stop_token_ids, ignore_eos=True, **more
        )

    def hear(self, output: Any) -> None:
        asked = self.open[output.request_id]  # KeyError: a request that has ended, or never came, says something
        asked.check(output, output.request_id == self.aborting)
        if output.finished:
            self.last_text = [*asked.prompt, *output.outputs[0].token_ids][: self.knobs.max_model_len - 8]
            del self.open[output.request_id]

    # What must hold after each step

    def watched_step(self) -> list[Any]:
        """In place of the engine's step."""
        before = self.progress()
        try:
            outputs = self._step()
        except Injected:
            self.num_silent_steps = 0
            self.check()
            raise
        for output in outputs:
            self.hear(output)
        self.check()
        self.check_schedule(before, self.progress(), bool(outputs))
        self.num_silent_steps = 0 if outputs or not self.open else self.num_silent_steps + 1
        assert self.num_silent_steps < MAX_SILENT_STEPS, "it loops"
        return outputs

    def progress(self) -> Progress:
        runner, scheduler = self.llm.model_runner, self.llm.llm_engine.scheduler
        assert scheduler.num_preemptions == self.events["preempt"]
        return Progress(runner.num_steps, runner.num_tokens, scheduler.num_preemptions, self.events["admit"])

    def check_schedule(self, before: Progress, after: Progress, has_outputs: bool) -> None:
        assert after.num_tokens - before.num_tokens <= self.knobs.max_num_batched_tokens
        if after.num_preemptions > before.num_preemptions:
            assert after.num_admitted == before.num_admitted, "admitted in a step that preempted"
        if self.stage.has_tiers and after.num_steps == before.num_steps and not has_outputs:
            assert not self.llm.llm_engine.host_tier.loads, "nobody ran, and nobody waited for what is on its way"

    def check(self) -> None:
        manager = self.llm.kv_cache_manager
        manager.check_integrity()
        if not self.stage.has_engine:
            assert {seq.request_id for seq in manager._holders} <= self.open.keys()
            return
        scheduler, requests = self.llm.llm_engine.scheduler, self.llm.llm_engine._requests
        assert requests.keys() <= self.open.keys(), "something of a request is left"
        queue = [*scheduler.running, *scheduler.waiting]
        places = [(self.open[seq.request_id].arrival, getattr(seq, "sample_index", 0)) for seq in queue]
        assert places == sorted(places), "not in order of arrival"
        here = Counter(id(seq) for first in queue for seq in [first, *carried(first)])
        assert here == Counter(id(s) for samples in requests.values() for s in as_list(samples) if not s.finished)
        assert set(manager._holders) == set(scheduler.running)
        assert not any(seq.block_table or seq.num_computed_tokens for seq in scheduler.waiting)
        assert sum(1 + len(carried(seq)) for seq in scheduler.running) <= self.knobs.max_num_seqs

    def finish(self) -> None:
        """All end, and nothing is left."""
        self.llm.model_runner.raises_after = None
        if self.stage.has_engine:
            self.drain()
            assert not self.open and not self.llm.llm_engine._requests, "a request was lost"
            self.llm.model_runner.batch = []
            if any(seq() for seq in self.seqs):
                gc.collect()
            assert not any(seq() for seq in self.seqs), "something of a request is left"
        manager = self.llm.kv_cache_manager
        assert not manager._holders
        if self.stage.has_tiers:
            manager.collect_loads(wait=True)
            tier = self.llm.llm_engine.host_tier
            assert not tier.loads and len(tier.pool.free) == tier.pool.num_blocks
        self.check()
        report = manager.report()
        assert report.held == 0 and report.num_slots == self.knobs.num_slots
        if self.stage.number > 1:
            assert len(manager.pool.free) == self.knobs.num_blocks

    def counts(self) -> Counter[str]:
        """What happened, in numbers."""
        llm = self.llm
        counts = Counter(steps=self.num_steps, histories=1, requests=self.num_requests)
        counts["raised"] = llm.model_runner.num_raised
        counts["tokens"] = llm.model_runner.num_tokens
        if self.stage.has_engine:
            counts["preempted"] = llm.llm_engine.scheduler.num_preemptions
        if self.stage.has_samples:
            counts["blocks copied"] = llm.kv_cache.num_blocks_copied
        if self.stage.has_prefix_cache:
            counts["tokens hit"] = llm.kv_cache_manager.prefix_cache_stats.hits
        if self.stage.has_tiers:
            counts["blocks stored"] = llm.llm_engine.host_tier.num_blocks_stored
            counts["blocks loaded"] = llm.llm_engine.host_tier.num_blocks_loaded
        return counts


def options(stage: Stage, knobs: Knobs) -> dict[str, Any]:
    """The fields of EngineConfig that the stage has."""
    chosen: dict[str, Any] = {"kv_cache_tokens": knobs.num_slots, "max_model_len": knobs.max_model_len}
    chosen |= {"max_num_seqs": knobs.max_num_seqs}
    chosen |= {"block_size": knobs.block_size} if stage.number > 1 else {"reservation": knobs.reservation}
    if stage.has_engine:
        chosen |= {"max_num_batched_tokens": knobs.max_num_batched_tokens, "watermark": knobs.watermark}
    if stage.has_prefix_cache:
        chosen["enable_prefix_caching"] = knobs.enable_prefix_caching
    if stage.has_tiers:
        chosen |= {"kv_offloading_tokens": knobs.num_host_blocks * knobs.block_size}
        chosen["offload_policy"] = knobs.offload_policy
    return chosen


def as_list(samples: Any) -> list[Any]:
    return samples if isinstance(samples, list) else [samples]


def play(stage: Stage, plan: Plan) -> Counter[str]:
    """Raises AssertionError, or whatever the engine raised, at the first fault."""
    with tempfile.TemporaryDirectory() as folder:
        history = History(stage, plan.knobs, Path(folder))
        for event in plan.events:
            history.apply(event)
        counts = history.counts()
        history.finish()
        return counts
