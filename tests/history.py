"""A history: an LLM of any stage on a scripted model, the events that happen to it, and checks after each step.

The output of each request is known in advance (tests/expected_outputs.py). Only an abort may end a sample sooner: after
a step that raised, all requests are aborted.
"""

import gc
import tempfile
import weakref
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nanovllm.tests.testing.sequences import holders, name_requests
from nanovllm.tests.testing.trace import Twin
from nanovllm.trace import Tracer, traced
from tests.expected_outputs import ExpectedOutput, expect
from tests.plans import Abort, Beams, Drain, EngineOptions, Event, Fail, Plan, Request, Step, Stream
from tests.scripted_llm import BrokenRule, InjectedError, Stage, waiting_samples

MAX_SILENT_STEPS = 300  # in a row without outputs: enough for the longest prompt in chunks of 1, and slow loads


class Progress(NamedTuple):
    """An engine's counters before or after a step."""

    num_steps: int
    num_tokens: int
    num_preemptions: int
    num_admitted: int


class History:
    def __init__(self, stage: Stage, options: EngineOptions, folder: Path) -> None:
        self.stage, self.options = stage, options
        self.observer = stage.counter()
        self.events = self.observer.counts  # counts by kind
        self.llm = stage.build(folder, self.observer, options.load_delays, **config_of(stage, options))
        self.open: dict[str, ExpectedOutput] = {}
        self.last_text: list[int] = []  # prompt and output of the request that ended last
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
            Request: self.add_request,
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

    # Events

    def add_request(self, request: Request) -> None:
        request_id, expected = self.open_request(request)
        self.llm.llm_engine.add_request(request_id, expected.prompt, self.params(request))
        self.seqs += [weakref.ref(seq) for seq in as_list(requests_of(self.llm)[request_id])]
        self.check()

    def step(self, step: Step) -> None:
        for _ in range(step.count):
            try:
                self.llm.llm_engine.step()
            except InjectedError:  # the step is half done: no request may go on
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
            self.receive(output)
        self.aborting = None
        assert self.llm.llm_engine.abort_request(request_id) is None
        self.check()

    def stream(self, stream: Stream) -> None:
        if self.open:
            return  # they share the engine, so the stream would serve them too
        expected = [self.open_request(request) for request in stream.requests]
        name_requests(self.llm, iter(list(self.open)))
        outputs = self.llm.stream(
            [each.prompt for _, each in expected], [self.params(each) for each in stream.requests]
        )
        try:
            for num_taken, output in enumerate(outputs, start=1):
                if not self.stage.has_engine:
                    self.receive(output)
                    self.llm.kv_cache_manager.check_integrity()
                if num_taken == stream.take:
                    break
            else:
                assert not self.open, "a request was lost"
        except InjectedError:
            pass
        outputs.close()
        self.open.clear()
        self.check()
        assert not holders(self.llm.kv_cache_manager), "a sequence holds slots after the stream was closed"

    def beams(self, beams: Beams) -> None:
        """Search beams, and expect the same as with plenty of memory and no cache."""
        expected = self.expect(beams.request)
        params = self.stage.module.BeamSearchParams(beams.width, beams.request.max_tokens, ignore_eos=True)
        if self.open:
            return
        if beams.width > self.options.max_num_seqs:
            with pytest.raises(ValueError, match="max_num_seqs is"):
                self.llm.beam_search([expected.prompt], params)
            return
        name_requests(self.llm, iter(["beams"]))
        try:
            [output] = self.llm.beam_search([expected.prompt], params)
        except InjectedError:
            self.check()
            return
        if expected.is_refused:
            expected.check_refusal(output)
        elif output.error:
            num_tokens = len(expected.prompt) + beams.request.max_tokens
            assert self.options.num_blocks < beams.width * (-(-num_tokens // self.options.block_size) + 1), output.error
        else:
            options = self.options._replace(block_size=16, num_blocks=100, enable_prefix_caching=False)
            alone = self.stage.build(self._folder, self.stage.counter(), **config_of(self.stage, options))
            [output_alone] = alone.beam_search([expected.prompt], params)
            assert [(each.token_ids, each.finish_reason) for each in output.outputs] == [
                (each.token_ids, each.finish_reason) for each in output_alone.outputs
            ]
        assert not holders(self.llm.kv_cache_manager), "a beam holds blocks"
        self.check()

    def fail(self, fail: Fail) -> None:
        self.llm.model_runner.raises_after = fail.after

    # Expected outputs

    def open_request(self, request: Request) -> tuple[str, ExpectedOutput]:
        self.num_requests += 1
        request_id = str(self.num_requests)
        self.open[request_id] = expected = self.expect(request)
        return request_id, expected

    def expect(self, request: Request) -> ExpectedOutput:
        return expect(self.stage, self.options, request, self.last_text, self.num_requests)

    def params(self, request: Request) -> Any:
        more = {"n": request.n} if self.stage.has_samples else {}
        return self.stage.module.SamplingParams(
            max_tokens=request.max_tokens,
            seed=request.seed,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=True,
            **more,
        )

    def receive(self, output: Any) -> None:
        expected = self.open[output.request_id]  # KeyError: an output of an unknown or finished request
        expected.check(output, output.request_id == self.aborting)
        if output.finished:
            self.last_text = [*expected.prompt, *output.outputs[0].token_ids][: self.options.max_model_len - 8]
            del self.open[output.request_id]

    # Checks after each step

    def watched_step(self) -> list[Any]:
        """Replace the engine's step by one with checks."""
        before = self.progress()
        try:
            outputs = self._step()
        except InjectedError:
            self.num_silent_steps = 0
            self.check()
            raise
        for output in outputs:
            self.receive(output)
        self.check()
        self.check_schedule(before, self.progress(), bool(outputs))
        self.num_silent_steps = 0 if outputs or not self.open else self.num_silent_steps + 1
        assert self.num_silent_steps < MAX_SILENT_STEPS, f"{MAX_SILENT_STEPS} steps without an output"
        return outputs

    def progress(self) -> Progress:
        runner, scheduler = self.llm.model_runner, self.llm.llm_engine.scheduler
        assert scheduler.num_preemptions == self.events["preempt"]
        return Progress(runner.num_steps, runner.num_tokens, scheduler.num_preemptions, self.events["admit"])

    def check_schedule(self, before: Progress, after: Progress, has_outputs: bool) -> None:
        assert after.num_tokens - before.num_tokens <= self.options.max_num_batched_tokens
        if after.num_preemptions > before.num_preemptions:
            assert after.num_admitted == before.num_admitted, "a step that preempted admitted a sequence"
        if self.stage.has_tiers and after.num_steps == before.num_steps and not has_outputs:
            assert not self.llm.llm_engine.host_tier.loads, "an empty step did not wait for the loads in progress"

    def check(self) -> None:
        manager = self.llm.kv_cache_manager
        manager.check_integrity()
        if not self.stage.has_engine:
            assert {seq.request_id for seq in holders(manager)} <= self.open.keys()
            return
        scheduler, requests = self.llm.llm_engine.scheduler, requests_of(self.llm)
        assert requests.keys() <= self.open.keys(), "a finished request is still referenced"
        queue = [*scheduler.running, *scheduler.waiting]
        places = [(self.open[seq.request_id].arrival, getattr(seq, "sample_index", 0)) for seq in queue]
        assert places == sorted(places), "not in order of arrival"
        queued = Counter(id(seq) for first in queue for seq in [first, *waiting_samples(first)])
        assert queued == Counter(id(s) for samples in requests.values() for s in as_list(samples) if not s.finished)
        assert holders(manager) == set(scheduler.running)
        assert not any(seq.block_table or seq.num_computed_tokens for seq in scheduler.waiting)
        assert sum(1 + len(waiting_samples(seq)) for seq in scheduler.running) <= self.options.max_num_seqs

    def finish(self) -> None:
        """Serve all requests to their end, and check that nothing is left."""
        self.llm.model_runner.raises_after = None
        if self.stage.has_engine:
            self.drain()
            assert not self.open and not requests_of(self.llm), "a request was lost"
            self.llm.model_runner.batch = []
            if any(seq() for seq in self.seqs):
                gc.collect()
            assert not any(seq() for seq in self.seqs), "a finished request is still referenced"
        manager = self.llm.kv_cache_manager
        assert not holders(manager)
        if self.stage.has_tiers:
            manager.collect_loads(wait=True)
            tier = self.llm.llm_engine.host_tier
            assert not tier.loads and len(tier.pool.free) == tier.pool.num_blocks
        self.check()
        report = manager.report()
        assert report.held == 0 and report.num_slots == self.options.num_slots
        if self.stage.number > 1:
            assert len(manager.pool.free) == self.options.num_blocks

    def counts(self) -> Counter[str]:
        """Return the counts of what happened."""
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


def config_of(stage: Stage, options: EngineOptions) -> dict[str, Any]:
    """Return the options that the stage's EngineConfig has."""
    config: dict[str, Any] = {"kv_cache_tokens": options.num_slots, "max_model_len": options.max_model_len}
    config |= {"max_num_seqs": options.max_num_seqs}
    config |= {"block_size": options.block_size} if stage.number > 1 else {"reservation": options.reservation}
    if stage.has_engine:
        config |= {"max_num_batched_tokens": options.max_num_batched_tokens, "watermark": options.watermark}
    if stage.has_prefix_cache:
        config["enable_prefix_caching"] = options.enable_prefix_caching
    if stage.has_tiers:
        config |= {"kv_offloading_tokens": options.num_host_blocks * options.block_size}
        config["offload_policy"] = options.offload_policy
    return config


def requests_of(llm: Any) -> dict[str, Any]:
    """Return the samples of each unfinished request."""
    return llm.llm_engine._requests  # noqa: SLF001 - a stage's engine has no public name for them


def as_list(samples: Any) -> list[Any]:
    return samples if isinstance(samples, list) else [samples]


def play(stage: Stage, plan: Plan) -> Counter[str]:
    """Play a plan and return its counts. Raise AssertionError, or the engine's own error, at the first fault."""
    with tempfile.TemporaryDirectory() as folder:
        history = History(stage, plan.options, Path(folder))
        for event in plan.events:
            history.apply(event)
        counts = history.counts()
        history.finish()
        return counts


def play_traced(stage: Stage, plan: Plan, num_before: int = 0) -> list[dict[str, Any]]:
    """Play a plan under a trace and return its events. The trace begins after `num_before` events of the plan.

    After each step, compare the engine's state with the one replayed from the trace's events alone.
    """
    with tempfile.TemporaryDirectory() as folder:
        history, tracer = History(stage, plan.options, Path(folder)), Tracer()
        count = history.observer.tell

        def tell(kind: str, *details: Any) -> None:
            count(kind, *details)
            tracer.tell(kind, *details)

        history.observer.tell = tell
        for event in plan.events[:num_before]:
            history.apply(event)
        twin = Twin(history.llm, tracer)
        with traced(history.llm, twin, tracer):
            for event in plan.events[num_before:]:
                history.apply(event)
                twin.compare()
                if tracer.error:
                    break  # raised at the end of the block
            else:
                history.finish()
        return twin.events
