"""A history: an engine on a script, the events that happen to it, and the invariants after each step.

The outputs and the end of every sample are known in advance. Only an abort, or a fault of its own, may end a sample
earlier.
"""

import gc
import tempfile
import weakref
from collections import Counter
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import pytest

from ...beam_search import BeamSearchParams
from ...requests.outputs import CompletionOutput, RequestOutput
from ...requests.prompts import TokensPrompt
from ...requests.sampling_params import SamplingParams
from ...trace import Tracer, traced
from ...trace.events import Event as TraceEvent
from ..testing.sequences import holders, name_requests
from ..testing.trace import Twin
from .plans import TEXTS, Abort, Ask, Beams, Drain, Event, Fail, Plan, Reset, Setup, Step, Stream
from .script import OPERATIONS, BrokenRule, Faults, Injected, generated_alone, scripted_llm

MAX_SILENT_STEPS = 300  # of an engine with requests: the longest prompt in chunks of 1, late loads, and a margin


class Ending(NamedTuple):
    token_ids: list[int]
    reason: str


@dataclass
class Expected:
    """A request, and the end of each of its samples, unless it is aborted or made to fail."""

    arrival: int
    prompt: list[int]
    endings: list[Ending]
    is_refused: bool
    may_fail: frozenset[int]  # samples that end before they start if their carrier fails by then

    def check(self, output: RequestOutput, is_aborting: bool, struck: set[int]) -> None:
        """Check an output. `struck` holds samples that were made to fail although they are not poisoned."""
        assert output.prompt_token_ids == self.prompt and len(output.outputs) == len(self.endings)
        for index, completion in enumerate(output.outputs):
            assert completion.index == index
            self._check_sample(output.request_id, completion, is_aborting, struck)
        reasons = [completion.finish_reason for completion in output.outputs]
        assert output.finished == (None not in reasons)
        assert (output.error is not None) == ("error" in reasons)

    def _check_sample(self, request_id: str, sample: CompletionOutput, is_aborting: bool, struck: set[int]) -> None:
        index, token_ids, reason = sample.index, sample.token_ids, sample.finish_reason
        ending = self.endings[index]
        shown = f"sample {index} of request {request_id}: {token_ids} {reason}; alone: {ending}"
        assert token_ids == ending.token_ids[: len(token_ids)], shown
        if reason is None:
            assert len(token_ids) < len(ending.token_ids) or ending.reason == "error", shown
        elif reason == "abort":
            assert is_aborting, shown
        elif (token_ids, reason) != ending:
            assert reason == "error" and (index in struck or (index in self.may_fail and not token_ids)), shown


def expected_result(setup: Setup, ask: Ask, last_text: list[int], arrival: int) -> Expected:
    """Return the expected end of a request. `last_text` starts its prompt if it follows another request."""
    prompt = [*(last_text if ask.follows else TEXTS[ask.text][: ask.num_shared]), *ask.own] or [0]
    room = min(ask.max_tokens, setup.max_model_len - len(prompt))
    endings = [ending(setup, ask, prompt, room, index) for index in range(ask.n)]
    may_fail: frozenset[int] = frozenset()
    if ask.poison and ask.poison.num_tokens <= len(prompt) and ask.poison.sample % setup.max_num_seqs == 0:
        may_fail = frozenset(range(ask.poison.sample + 1, ask.poison.sample + setup.max_num_seqs))
    return Expected(arrival, prompt, endings, room < 1 or len(prompt) > setup.num_slots, may_fail)


def ending(setup: Setup, ask: Ask, prompt: list[int], room: int, index: int) -> Ending:
    token_ids, reason = generated_alone(prompt, max(room, 0), ask.seed, index), "length"
    ends = [i + 1 for i, token_id in enumerate(token_ids) if token_id in ask.stop_token_ids]
    if ends:
        token_ids, reason = token_ids[: ends[0]], "stop"
    limit = setup.num_slots + 1 - len(prompt)  # it has outgrown the pool
    if ask.poison and ask.poison.sample == index:
        limit = min(limit, max(ask.poison.num_tokens - len(prompt), 0))
    return Ending(token_ids, reason) if len(token_ids) <= limit else Ending(token_ids[:limit], "error")


class Progress(NamedTuple):
    """Counts of an engine before or after a step."""

    num_steps: int
    num_tokens: int
    num_preemptions: int
    num_admitted: int


class History:
    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup = setup
        self.faults = Faults(delays=cycle(setup.load_delays))
        self.llm, self.script = scripted_llm(folder, self.faults, **options(setup))
        self.engine = self.llm.llm_engine
        self.open: dict[str, Expected] = {}
        self.last_text: list[int] = []  # of the request that ended last
        self.aborting: str | None = None
        self.num_requests = self.num_steps = self.num_silent_steps = 0
        self.seqs: list[weakref.ref] = []
        self._folder = folder
        self._step = self.engine.step
        self.engine.step = self.watched_step  # type: ignore[method-assign]

    def apply(self, event: Event) -> None:
        """Apply an event. Raise AssertionError for a fault of the engine."""
        try:
            match event:
                case Ask():
                    self.ask(event)
                case Step(count):
                    self.step(count)
                case Drain():
                    self.drain()
                case Abort(which):
                    self.abort(which)
                case Stream():
                    self.stream(event)
                case Beams():
                    self.beams(event)
                case Reset():
                    self.reset()
                case Fail(operation, after):
                    self.faults.arm(operation, after)
        except BrokenRule as broken:
            raise AssertionError(str(broken)) from broken

    # Events

    def ask(self, ask: Ask) -> None:
        request_id, expected_of = self.admit(ask)
        if expected_of.is_refused:
            del self.open[request_id]
            with pytest.raises(ValueError, match=r"the prompt must fit the pool|the prompt must have at most"):
                self.engine.add_request(request_id, expected_of.prompt, params(ask))
        else:
            self.engine.add_request(request_id, expected_of.prompt, params(ask))
            self.seqs += [weakref.ref(seq) for seq in self.engine.requests[request_id]]
        self.check()

    def step(self, count: int) -> None:
        for _ in range(count):
            try:
                self.engine.step()
            except Injected:
                assert not self.engine.scheduler.running, "a step failed, but sequences are running"

    def drain(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step(1)

    def abort(self, which: int) -> None:
        request_ids = [*self.open, "nobody"]
        self.aborting = request_id = request_ids[which % len(request_ids)]
        output = self.engine.abort_request(request_id)
        assert (output is not None) == (request_id in self.open)
        if output:
            assert output.finished
            self.hear(output)
        self.aborting = None
        assert self.engine.abort_request(request_id) is None
        self.check()

    def stream(self, stream: Stream) -> None:
        if self.open:
            with pytest.raises(ValueError, match="unfinished requests"):
                next(self.llm.stream([[1]]))
            return
        expected_of = [self.admit(ask) for ask in stream.asks]
        name_requests(self.llm, map(str, [*self.open, *["a second stream's"] * 20]))
        outputs = self.llm.stream([each.prompt for _, each in expected_of], [params(ask) for ask in stream.asks])
        try:
            for num_taken, output in enumerate(outputs, start=1):
                if output.request_id in self.open and self.open[output.request_id].is_refused:
                    check_refusal(output)  # all other outputs come from step()
                    del self.open[output.request_id]
                if num_taken == 1 and self.engine.has_unfinished_requests():
                    with pytest.raises(ValueError, match="stream"):
                        next(self.llm.stream([[1]]))
                if num_taken == stream.take:
                    break
            else:
                assert not self.open, "a request was lost"
        except Injected:
            pass
        outputs.close()
        self.open.clear()
        self.check()
        assert not holders(self.engine.kv_cache_manager), "the stream is closed, but sequences hold blocks"

    def beams(self, beams: Beams) -> None:
        """Compare a search with one that has unlimited memory and no cache."""
        expected_of = self.expected_of(beams.ask)
        beam_params = BeamSearchParams(beams.width, beams.ask.max_tokens, ignore_eos=True)
        prompts = [TokensPrompt(prompt_token_ids=expected_of.prompt)]
        if self.open or beams.width > self.setup.max_num_seqs:
            with pytest.raises(ValueError, match=r"unfinished requests|at most max_num_seqs"):
                self.llm.beam_search(prompts, beam_params)
            return
        name_requests(self.llm, map(str, ["beams"]))
        [output] = self.llm.beam_search(prompts, beam_params)
        if output.error and "blocks are needed" in output.error:
            num_tokens = len(expected_of.prompt) + beams.ask.max_tokens
            assert self.setup.num_blocks < beams.width * (-(-num_tokens // self.setup.block_size) + 1), output.error
        elif output.error:
            assert "max_model_len" in output.error or output.error in OPERATIONS, output.error
        else:
            setup = self.setup._replace(block_size=16, num_blocks=100, enable_prefix_caching=False)
            alone, _ = scripted_llm(self._folder, Faults(), **options(setup))
            [expected] = alone.beam_search(prompts, beam_params)
            assert [(each.token_ids, each.finish_reason) for each in output.outputs] == [
                (each.token_ids, each.finish_reason) for each in expected.outputs
            ]
        assert not holders(self.engine.kv_cache_manager), "a beam holds blocks"
        self.check()

    def reset(self) -> None:
        manager = self.engine.kv_cache_manager
        is_idle = not holders(manager)
        assert self.llm.reset_prefix_cache() == is_idle
        if is_idle:
            assert not manager.pool.cached and not self.engine.host_tier.pool.cached, "a block is still cached"
        self.check()

    # Expectations

    def admit(self, ask: Ask) -> tuple[str, Expected]:
        self.num_requests += 1
        request_id = str(self.num_requests)
        self.open[request_id] = expected_of = self.expected_of(ask)
        if ask.poison:
            self.faults.poison[request_id, ask.poison.sample] = ask.poison.num_tokens
        return request_id, expected_of

    def expected_of(self, ask: Ask) -> Expected:
        return expected_result(self.setup, ask, self.last_text, self.num_requests)

    def hear(self, output: RequestOutput) -> None:
        expected_of = self.open[output.request_id]  # KeyError: an output of a request that has ended or never arrived
        struck = {index for request_id, index in self.faults.struck if request_id == output.request_id}
        expected_of.check(output, output.request_id == self.aborting, struck)
        if output.finished:
            self.last_text = [*expected_of.prompt, *output.outputs[0].token_ids][: self.setup.max_model_len - 8]
            del self.open[output.request_id]

    # Invariants after each step

    def watched_step(self) -> list[RequestOutput]:
        """Run a step with checks, instead of the engine's own method."""
        before = self.progress()
        self.num_steps += 1
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
        assert self.num_silent_steps < MAX_SILENT_STEPS, "the engine loops"
        return outputs

    def progress(self) -> Progress:
        num_preemptions = self.engine.scheduler.num_preemptions
        return Progress(self.script.num_steps, self.script.num_tokens, num_preemptions, self.faults.calls["allocate"])

    def check_schedule(self, before: Progress, after: Progress, has_outputs: bool) -> None:
        num_batches = 1 + self.setup.async_scheduling  # a step that raises is computed again beside the next one
        assert after.num_tokens - before.num_tokens <= self.setup.max_num_batched_tokens * num_batches
        if after.num_preemptions > before.num_preemptions:
            assert after.num_admitted == before.num_admitted, "admitted in a step that preempted"
        if after.num_steps == before.num_steps and not has_outputs and not self.setup.async_scheduling:
            assert not self.engine.host_tier.loads, "nothing ran, and nothing waited for a load"

    def check(self) -> None:
        manager, scheduler, requests = self.engine.kv_cache_manager, self.engine.scheduler, self.engine.requests
        manager.check_integrity()
        assert requests.keys() <= self.open.keys(), "a part of a request is left"
        queue = [*scheduler.running, *scheduler.waiting]
        places = [(self.open[seq.request_id].arrival, seq.sample_index) for seq in queue]
        assert places == sorted(places), "not in order of arrival"
        here = Counter(id(seq) for first in queue for seq in [first, *first.to_fork])
        assert here == Counter(id(seq) for samples in requests.values() for seq in samples if not seq.finished)
        assert holders(manager) == set(scheduler.running)
        assert not any(seq.block_table or seq.num_computed_tokens for seq in scheduler.waiting)
        assert sum(1 + len(seq.to_fork) for seq in scheduler.running) <= self.setup.max_num_seqs

    def finish(self) -> None:
        """Let all requests end, and check that nothing is left."""
        self.faults.armed.clear()
        self.drain()
        assert not self.open and not self.engine.requests, "a request was lost"
        self.script.batch = []
        if any(seq() for seq in self.seqs):
            gc.collect()
        assert not any(seq() for seq in self.seqs), "a part of a request is left"
        manager, tier = self.engine.kv_cache_manager, self.engine.host_tier
        assert not holders(manager)
        manager.collect_loads(wait=True)
        assert len(tier.pool.free) == tier.num_blocks
        self.reset()
        report = manager.report()
        assert report.held == 0 and report.num_slots == self.setup.num_slots
        assert len(manager.pool.free) == self.setup.num_blocks

    def counts(self) -> Counter[str]:
        """Return the counts of what happened."""
        tier = self.engine.host_tier
        counts = Counter(steps=self.num_steps, histories=1, requests=self.num_requests, **self.faults.raised)
        counts["raised"] = self.faults.raised.total()
        counts["tokens"] = self.script.num_tokens
        counts["preempted"] = self.engine.scheduler.num_preemptions
        counts["blocks copied"] = self.engine.kv_cache.num_blocks_copied
        counts["tokens hit"] = self.engine.kv_cache_manager.prefix_cache_stats.hits
        counts["blocks stored"], counts["blocks loaded"] = tier.num_blocks_stored, tier.num_blocks_loaded
        return counts


def check_refusal(output: RequestOutput) -> None:
    [completion] = output.outputs
    assert output.finished and output.error
    assert completion.finish_reason == "error" and not completion.token_ids


def params(ask: Ask) -> SamplingParams:
    return SamplingParams(
        n=ask.n, max_tokens=ask.max_tokens, seed=ask.seed, stop_token_ids=list(ask.stop_token_ids), ignore_eos=True
    )


def options(setup: Setup) -> dict[str, object]:
    """Return the options of an LLM."""
    own = {
        name: value
        for name, value in setup._asdict().items()
        if name not in ("num_blocks", "num_host_blocks", "load_delays")
    }
    pools = {"kv_cache_tokens": setup.num_slots, "kv_offloading_tokens": setup.num_host_blocks * setup.block_size}
    return own | pools


def play(plan: Plan) -> Counter[str]:
    """Play a plan. Raise AssertionError, or the engine's error, at the first fault."""
    with tempfile.TemporaryDirectory() as folder:
        history = History(plan.setup, Path(folder))
        for event in plan.events:
            history.apply(event)
        counts = history.counts()
        history.finish()
        return counts


def play_traced(plan: Plan, num_before: int = 0) -> list[TraceEvent]:
    """Play a plan under a trace whose replay must equal the engine. The first `num_before` events are not traced."""
    with tempfile.TemporaryDirectory() as folder:
        history, tracer = History(plan.setup, Path(folder)), Tracer()
        for event in plan.events[:num_before]:
            history.apply(event)
        twin = Twin(history.llm, tracer)
        with traced(history.llm, twin, tracer):
            for event in plan.events[num_before:]:
                history.apply(event)
                twin.compare()
            history.finish()
        return twin.events
