"""AsyncLLM: many callers, one engine that only one thread uses, and no leaks when a caller leaves."""

import asyncio
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest

from .. import LLM, AsyncEngineArgs, AsyncLLM, EngineDeadError, RequestOutputKind, SamplingParams, llm_engine, stats
from ..async_llm import EngineThread, Stream
from ..llm_engine import LLMEngine
from .testing.engines import OPTIONS, model_runner

PROMPT = [3, 17, 4, 29, 8, 15, 40, 22, 9, 31]


def greedy(max_tokens: int = 8, **params) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **params)


@pytest.fixture
def make(checkpoint, monkeypatch):
    """Return a function that builds an engine with blocks of 4 tokens. All engines are shut down at the end."""
    made = []

    def build(args: AsyncEngineArgs) -> LLMEngine:
        INNER.append(build_engine(args))
        return INNER[-1]

    def start(**options) -> AsyncLLM:
        args = AsyncEngineArgs(str(checkpoint), **({"block_size": 4} | OPTIONS | options))
        made.append(AsyncLLM.from_engine_args(args))
        return made[-1]

    build_engine = LLMEngine.from_engine_args
    with monkeypatch.context() as patch:
        patch.setattr(LLMEngine, "from_engine_args", build)
        yield start
    for engine in made:
        engine.shutdown()
    INNER.clear()


INNER: list[LLMEngine] = []  # the engines inside of those that `make` has built


def inner() -> LLMEngine:
    """Return the engine inside of the only AsyncLLM."""
    [engine] = INNER
    return engine


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nanovllm engine"]


async def all_of(engine: AsyncLLM, prompt, params: SamplingParams, request_id: str) -> list:
    return [output async for output in engine.generate(prompt, params, request_id)]


async def all_ended(engine: AsyncLLM, seconds: float = 60) -> None:
    """Wait until no request is left, for a limited time."""
    deadline = time.monotonic() + seconds
    while engine.get_num_unfinished_requests():
        assert time.monotonic() < deadline, engine.stats()
        await asyncio.sleep(0.001)


def check_nothing_is_left(engine: AsyncLLM) -> None:
    """Check an idle engine."""
    assert engine.stats().blocks_running == 0  # it waits for a step
    inner().kv_cache_manager.check_integrity()
    assert not inner().requests and not inner().scheduler.running and not inner().scheduler.waiting
    gc.collect()
    assert not any(type(each) is Stream for each in gc.get_objects()), "a stream is still referenced"


def hold_steps(engine):
    """Hold each step until the first event is set. The second event reports that a step is waiting."""
    may_step, is_held, step = threading.Event(), threading.Event(), inner().step

    def held():
        is_held.set()
        assert may_step.wait(timeout=60)
        return step()

    inner().step = held
    return may_step, is_held


def slow_steps(engine):
    """Let the running loop go on between two steps, so that a test can act there, even on a busy machine."""
    step, loop = inner().step, asyncio.get_running_loop()

    def slowed():
        has_run = threading.Event()
        loop.call_soon_threadsafe(loop.call_later, 0.005, has_run.set)
        assert has_run.wait(timeout=60)
        return step()

    inner().step = slowed


async def turn(count: int = 10) -> None:
    """Let the loop run whatever is ready."""
    for _ in range(count):
        await asyncio.sleep(0)


async def is_set(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0.001)


# Outputs


def test_callers_get_the_same_outputs_as_alone(make, checkpoint):
    async def run(engine: AsyncLLM) -> list:
        prompts = [PROMPT[:i] for i in range(1, 9)]
        return await asyncio.gather(*(all_of(engine, each, greedy(i + 1), str(i)) for i, each in enumerate(prompts)))

    engine = make()
    streams = asyncio.run(run(engine))
    llm = LLM(checkpoint, block_size=4, **OPTIONS)
    for i, outputs in enumerate(streams):
        [alone] = llm.generate([PROMPT[: i + 1]], greedy(i + 1))
        assert outputs[-1].finished and outputs[-1].outputs[0].token_ids == alone.outputs[0].token_ids
        assert [output.finished for output in outputs[:-1]] == [False] * (len(outputs) - 1)
    check_nothing_is_left(engine)


@pytest.mark.parametrize("n", [1, 3])
def test_every_output_kind_is_served(make, n):
    async def run(engine: AsyncLLM, kind: RequestOutputKind) -> list:
        params = SamplingParams(n=n, max_tokens=6, seed=5, ignore_eos=True, output_kind=kind)
        return await all_of(engine, PROMPT, params, kind.name)

    engine = make()
    cumulative, deltas, final = (asyncio.run(run(engine, kind)) for kind in RequestOutputKind)
    expected = [completion.token_ids for completion in cumulative[-1].outputs]
    assert len(final) == 1 and [completion.token_ids for completion in final[0].outputs] == expected
    joined: list[list[int]] = [[] for _ in range(n)]
    texts = [""] * n
    for output in deltas:
        for completion in output.outputs:
            joined[completion.index] += completion.token_ids
            texts[completion.index] += completion.text
    assert joined == expected and texts == [completion.text for completion in final[0].outputs] and len(deltas) == 6
    lengths = [len(output.outputs[0].token_ids) for output in cumulative]
    assert lengths == sorted(lengths) and lengths[-1] == 6


def test_slow_caller_gets_the_latest_output_and_loses_no_delta(make):
    async def run(engine: AsyncLLM, kind: RequestOutputKind) -> list:
        outputs = []
        async for output in engine.generate(PROMPT, greedy(10, output_kind=kind), "0"):
            outputs.append(output)
            if len(outputs) == 1:
                await all_ended(engine)
                await engine.reset_prefix_cache()  # between two steps, so all outputs have been delivered
        return outputs

    engine = make()
    cumulative = asyncio.run(run(engine, RequestOutputKind.CUMULATIVE))
    assert len(cumulative) <= 3 and len(cumulative[-1].outputs[0].token_ids) == 10
    deltas = asyncio.run(run(engine, RequestOutputKind.DELTA))
    joined = [token_id for output in deltas for token_id in output.outputs[0].token_ids]
    assert joined == cumulative[-1].outputs[0].token_ids


# Leaving


@pytest.mark.parametrize("how", ["break", "aclose", "cancel", "abort"])
def test_leaving_caller_is_aborted_within_a_step(make, how):
    async def run(engine: AsyncLLM) -> None:
        slow_steps(engine)
        outputs = engine.generate(PROMPT, greedy(40), "a")
        first = await anext(outputs)
        assert not first.finished
        may_step, is_held = hold_steps(engine)
        await is_set(is_held)
        if how == "break":
            del outputs
            gc.collect()
        elif how == "aclose":
            await outputs.aclose()
        elif how == "cancel":
            task = asyncio.create_task(anext(outputs))
            await turn()
            if task.done():  # it got the output of the step before
                task = asyncio.create_task(anext(outputs))
                await turn()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            task = asyncio.create_task(engine.abort("a"))
        await turn()
        num_steps = model_runner(inner()).num_steps
        may_step.set()
        await all_ended(engine)
        assert model_runner(inner()).num_steps <= num_steps + 1
        if how == "abort":
            last = [output async for output in outputs][-1]
            assert last.finished and last.outputs[0].finish_reason == "abort"

    engine = make()
    asyncio.run(run(engine))
    check_nothing_is_left(engine)


def test_caller_cancelled_before_its_request_is_added_adds_none(make):
    async def run(engine: AsyncLLM) -> None:
        may_step, is_held = hold_steps(engine)
        first = asyncio.create_task(all_of(engine, PROMPT, greedy(2), "first"))
        await is_set(is_held)
        second = asyncio.create_task(all_of(engine, PROMPT, greedy(2), "second"))
        await turn()
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        may_step.set()
        assert (await first)[-1].finished

    engine = make()
    asyncio.run(run(engine))
    check_nothing_is_left(engine)
    assert engine.stats().generation_tokens == 2


def test_request_id_can_be_reused_at_once_but_not_in_parallel(make):
    async def run(engine: AsyncLLM) -> None:
        slow_steps(engine)
        one = engine.generate(PROMPT, greedy(50), "name")
        await anext(one)
        with pytest.raises(ValueError, match="request_id must be unique, got 'name'"):
            await all_of(engine, PROMPT, greedy(2), "name")
        assert [output async for output in one][-1].outputs[0].finish_reason == "length", "the first request continues"
        other = engine.generate(PROMPT, greedy(50), "name")
        await anext(other)
        await other.aclose()
        assert len((await all_of(engine, PROMPT, greedy(2), "name"))[-1].outputs[0].token_ids) == 2

    engine = make()
    asyncio.run(run(engine))
    check_nothing_is_left(engine)


def test_several_requests_are_aborted_at_once_and_unknown_ids_ignored(make):
    async def run(engine: AsyncLLM) -> list:
        slow_steps(engine)
        tasks = [asyncio.create_task(all_of(engine, PROMPT, greedy(50), name)) for name in "abc"]
        while engine.get_num_unfinished_requests() < 3:
            await asyncio.sleep(0.001)
        await engine.abort(iter(["a", "nobody", "b"]))
        await engine.abort("nobody")
        return [stream[-1].outputs[0].finish_reason for stream in await asyncio.gather(*tasks)]

    engine = make()
    assert asyncio.run(run(engine)) == ["abort", "abort", "length"]
    check_nothing_is_left(engine)


def test_loop_that_ends_with_open_streams_leaks_nothing(make):
    async def run(engine: AsyncLLM) -> None:
        for name in "ab":
            await anext(engine.generate(PROMPT, greedy(50), name))

    engine = make()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(run(engine))
    loop.close()  # unlike asyncio.run(), it does not close generators
    deadline = time.monotonic() + 60
    while engine.get_num_unfinished_requests() and time.monotonic() < deadline:
        time.sleep(0.001)
    check_nothing_is_left(engine)


# Errors


def test_only_its_own_caller_gets_the_error_for_an_invalid_request(make):
    invalid = [
        ("", greedy(), "the prompt is empty"),
        ([5] * 100, greedy(), "max_model_len is 64, got 100"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, greedy(), "field 'multi_modal_data' is unsupported"),
        (None, greedy(), "the prompt must be text, token ids or a dictionary, got NoneType"),
        ("a", None, "sampling_params must be SamplingParams, got NoneType"),
    ]

    async def run(engine: AsyncLLM) -> None:
        good = asyncio.create_task(all_of(engine, PROMPT, greedy(20), "good"))
        for prompt, params, message in invalid:
            with pytest.raises(ValueError, match=message):
                await all_of(engine, prompt, params, "bad")
        assert len((await good)[-1].outputs[0].token_ids) == 20
        await engine.check_health()

    engine = make()
    asyncio.run(run(engine))
    check_nothing_is_left(engine)


def test_unsupported_arguments_are_refused(make):
    names = ("lora_request", "trace_headers", "priority", "data_parallel_rank")
    names += ("session_id", "kv_hints", "reasoning_ended")

    async def run(engine):
        for name in names:
            with pytest.raises(ValueError, match=f"{name} is unsupported"):
                async for _ in engine.generate(PROMPT, greedy(), "0", **{name: 5}):
                    pass

    asyncio.run(run(make()))


def test_engine_error_reaches_all_current_and_later_callers(make):
    async def run(engine):
        slow_steps(engine)
        tasks = [asyncio.create_task(all_of(engine, PROMPT, greedy(50), str(i))) for i in range(3)]
        while engine.get_num_unfinished_requests() < 3:
            await asyncio.sleep(0.001)

        def broken() -> None:
            raise MemoryError("no room")

        inner().step = broken
        errors: list = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(error) for error in errors] == ["the engine has ended: MemoryError: no room"] * 3
        assert len({*map(id, errors)}) == 3 and all(isinstance(error, EngineDeadError) for error in errors)
        assert all(isinstance(error.__cause__, MemoryError) for error in errors)
        assert engine.errored and engine.is_stopped and not engine.is_running
        calls: list = [engine.check_health(), all_of(engine, PROMPT, greedy(), "late"), engine.reset_prefix_cache()]
        for call in calls:
            with pytest.raises(EngineDeadError, match="MemoryError: no room"):
                await call
        await engine.abort("0")
        assert isinstance(engine.dead_error, EngineDeadError)

    asyncio.run(run(make()))


def test_error_in_a_call_reaches_its_caller_and_an_exit_ends_the_engine(make):
    def raises(error: BaseException):
        def call(inner) -> None:
            raise error

        return call

    make()
    thread = EngineThread(inner)
    with pytest.raises(KeyError, match="mine"):
        thread.call(raises(KeyError("mine"))).result(timeout=60)
    assert not thread.has_ended
    with pytest.raises(SystemExit):
        thread.call(raises(SystemExit())).result(timeout=60)
    thread.stop(timeout=60)
    assert thread.has_ended


def test_invalid_checkpoint_is_an_error_of_the_caller(tmp_path):
    with pytest.raises(ValueError):
        AsyncLLM.from_engine_args(AsyncEngineArgs(str(tmp_path)))
    assert "nanovllm engine" not in {thread.name for thread in threading.enumerate() if thread.is_alive()}
    for options, message in (
        ({"stat_loggers": [1]}, "stat_loggers"),
        ({"start_engine_loop": False}, "start_engine_loop"),
    ):
        with pytest.raises(ValueError, match=message):
            AsyncLLM.from_engine_args(AsyncEngineArgs(str(tmp_path)), **options)


# The end


def test_shutdown_ends_all_callers_and_the_thread(make):
    async def run(engine: AsyncLLM) -> None:
        tasks = [asyncio.create_task(all_of(engine, PROMPT, greedy(50), str(i))) for i in range(3)]
        while engine.get_num_unfinished_requests() < 3:
            await asyncio.sleep(0.001)
        await engine.check_health()
        assert engine.is_running and not engine.errored
        thread.join = lambda timeout=None: (may_step.set(), join(timeout))  # the end has been asked for by then
        engine.shutdown()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineDeadError) and str(error) == "the engine has ended: it was shut down"
        with pytest.raises(EngineDeadError, match="it was shut down"):
            await all_of(engine, PROMPT, greedy(), "late")

    engine = make()
    [thread] = engine_threads()
    join = thread.join
    may_step, _ = hold_steps(engine)
    asyncio.run(run(engine))
    engine.shutdown()
    assert engine.errored and not thread.is_alive() and engine.stats().blocks_running == 0


def test_abort_after_the_engine_has_ended_does_nothing(make, monkeypatch):
    """The engine ends between the caller's check and the call."""
    engine = make()
    shut_down, call = engine.shutdown, EngineThread.call

    def late(thread, function):
        shut_down()
        return call(thread, function)

    monkeypatch.setattr(EngineThread, "call", late)
    asyncio.run(engine.abort("nobody"))
    assert engine.errored


def test_statistics_describe_a_moment_between_two_steps(make, monkeypatch):
    """During a step, an ended sequence is counted as ended, but is still among the running ones."""
    engine, threads, collect = make(), [], stats.collect

    def noted(*parts):
        threads.append(threading.current_thread())
        return collect(*parts)

    monkeypatch.setattr(stats, "collect", noted)
    monkeypatch.setattr(llm_engine, "collect", noted)
    assert engine.stats().generation_tokens == 0 and engine.get_metrics()
    assert threads == engine_threads() * 2
    engine.shutdown()
    assert engine.stats().generation_tokens == 0, "it can be called after the end"


def test_engine_without_references_ends(checkpoint):
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(str(checkpoint), **OPTIONS))
    [thread], ref = engine_threads(), weakref.ref(engine)
    del engine
    gc.collect()
    thread.join(timeout=60)
    assert ref() is None and not thread.is_alive()


def test_other_methods(make):
    async def run(engine: AsyncLLM) -> None:
        outputs = await all_of(engine, "the fox", greedy(2), "0")
        assert outputs[-1].prompt == "the fox"
        shown = await all_of(engine, PROMPT, greedy(2), "1")
        assert shown[-1].prompt is None
        async for output in engine.generate(PROMPT, greedy(2), "2", prompt_text="shown"):
            assert output.prompt == "shown"
        assert await engine.reset_prefix_cache() is True

    engine = make()
    asyncio.run(run(engine))
    tokenizer = engine.get_tokenizer()
    assert tokenizer is engine.tokenizer and tokenizer.decode(tokenizer.encode("the fox")[1:]) == "the fox"
    assert engine.stats().generation_tokens == 6
    assert "vllm:generation_tokens" in {metric.name for metric in engine.get_metrics()}


def test_stream_holds_one_cumulative_output():
    async def run() -> list:
        stream = Stream(is_cumulative=True)
        outputs: list = ["a", "b", ValueError("c")]
        for output in outputs:
            stream.put(output)
        outputs_read = [await stream.get()]
        with pytest.raises(ValueError):
            await stream.get()
        return outputs_read

    assert asyncio.run(run()) == ["b"]


# Many callers


@pytest.mark.parametrize("num_callers", [16, pytest.param(50, marks=pytest.mark.full)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 4))])
def test_soak(make, num_callers, seed):
    """Callers come, leave in all possible ways, and share a pool that is too small for them. Nothing is leaked."""
    chance, moments = random.Random(seed), Moments()

    async def caller(engine: AsyncLLM, i: int) -> int:
        """Return how many of its requests ran to their end."""
        num_served = 0
        for turn in range(4):
            kind = chance.choice([*RequestOutputKind])
            prompt = [chance.randrange(3, 60) for _ in range(chance.randint(1, 12))]
            length, n = chance.randint(1, 20), chance.choice([1, 1, 2, 3])
            params = SamplingParams(n=n, max_tokens=length, seed=i, ignore_eos=True, output_kind=kind)
            name, patience = f"{i}-{turn}", chance.choice([None, None, 0, 3, 20])  # outputs of all callers
            gives_up_after = chance.choice([None, None, 1, 3])
            try:
                async with asyncio.timeout(0.0 if patience == 0 else None) as limit:
                    if patience:
                        moments.call_after(patience, partial(time_out, limit))
                    if chance.random() < 0.1:
                        moments.call_after(3, partial(spawn_abort, engine, name))
                    async for number, output in numbered(engine.generate(prompt, params, name)):
                        moments.count()
                        if number == gives_up_after:
                            break
                        if output.finished and output.outputs[0].finish_reason == "length":
                            num_served += 1
                            for completion in output.outputs:
                                assert kind is RequestOutputKind.DELTA or len(completion.token_ids) == length
            except TimeoutError:
                pass
        return num_served

    spawned: list = []

    def spawn_abort(engine: AsyncLLM, name: str) -> None:
        spawned.append(asyncio.create_task(engine.abort(name)))

    async def run(engine: AsyncLLM) -> int:
        served = await asyncio.gather(*(caller(engine, i) for i in range(num_callers)))
        await asyncio.gather(*spawned)
        gc.collect()
        await asyncio.sleep(0)
        await all_ended(engine)
        return sum(served)

    engine = make(kv_cache_tokens=96, max_num_seqs=8, max_num_batched_tokens=24)
    assert asyncio.run(run(engine)) > num_callers / 2
    check_nothing_is_left(engine)
    assert sum(inner().tally.ended.values()) > num_callers
    assert engine.stats().preemptions > 0 or num_callers < 50


class Moments:
    """Calls that are due after a number of outputs."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, Callable[[], None]]] = []
        self._count = 0

    def call_after(self, count: int, call: Callable[[], None]) -> None:
        self._calls.append((self._count + count, call))

    def count(self) -> None:
        self._count += 1
        due = [call for count, call in self._calls if count <= self._count]
        self._calls = [each for each in self._calls if each[0] > self._count]
        for call in due:
            call()


def time_out(limit: asyncio.Timeout) -> None:
    with suppress(RuntimeError):  # it is over
        limit.reschedule(0.0)


async def numbered(outputs):
    number = 0
    async for output in outputs:
        number += 1
        yield number, output
