"""Speculation: the same outputs with drafts as without, in fewer steps, and nothing left of a wrong draft."""

import random
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ...beam_search import BeamSearch, BeamSearchParams
from ...engine.executor import Scheduled
from ...engine.sequence import Sequence
from ...llm import LLM
from ...llm_engine import LLMEngine
from ...metrics import Vector
from ...options.config import EngineConfig
from ...options.engine_args import EngineArgs
from ...requests.outputs import RequestOutput
from ...requests.sampling_params import SamplingParams
from ...requests.speculation import NgramDrafter, SpeculativeConfig
from ...trace import states, traced
from ..testing.checkpoints import CONFIG, random_tensors, train_tokenizer, write_checkpoint
from ..testing.engines import assert_empty, assert_whole, params, reason, run_to_the_end, step

NGRAM: dict[str, Any] = {
    "method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2,
}  # fmt: skip
OPTIONS: dict[str, Any] = {"block_size": 4, "watermark": 0.0, "offload_policy": "load", "attention_backend": "torch"}
LOOP = [5, 6, 7, 8] * 4


@pytest.fixture(scope="module")
def loopy(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return checkpoints of random models that look mostly at the last token, so they repeat themselves."""
    folders = []
    for seed, scale in enumerate((0.05, 0.15, 0.4, 1.0)):
        config = CONFIG | {"max_position_embeddings": 256}
        tensors = {
            name: tensor * scale if "o_proj" in name or "down_proj" in name else tensor
            for name, tensor in random_tensors(config, seed).items()
        }
        folder = tmp_path_factory.mktemp("loopy")
        folders.append(write_checkpoint(folder, config, tensors, train_tokenizer()))
    return folders


def make_engine(checkpoint: Path, speculation: dict[str, Any] | None = NGRAM, **options: Any) -> LLMEngine:
    settings = OPTIONS | {"kv_cache_tokens": 256} | options
    return LLMEngine(EngineConfig(str(checkpoint), speculative_config=speculation, **settings))


class KnowingDrafter(NgramDrafter):
    """A drafter that knows the output, and is wrong about one token in eight."""

    def __init__(self, seq: Sequence, output: list[int]) -> None:
        super().__init__(SpeculativeConfig.of(NGRAM))
        self._token_ids, self._rng = seq.prompt_token_ids + output, random.Random(seq.seed)

    def propose(self, token_ids: list[int], max_tokens: int) -> list[int]:
        draft = self._token_ids[len(token_ids) :][: min(max_tokens, 8)]
        return [token ^ (self._rng.random() < 1 / 8) for token in draft]


# Drafts


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3, 5, 9, 1, 2, 3], [4, 1, 2]),  # the first of two occurrences
        ([2, 3, 7, 1, 2, 3, 4, 8, 1, 2, 3], [4, 8, 1]),  # a longer ending comes before an earlier occurrence
        ([4, 2, 3, 7, 1, 2, 3], [7, 1, 2]),
        ([5, 5, 5], [5]),  # occurrences may overlap the ending
        ([3, 9, 8, 3], []),  # one token is too few
        ([1, 2], []),
        ([7], []),
        ([0x110000 - 1, 0xD800, 5, 0x110000 - 1, 0xD800], [5, 0x110000 - 1, 0xD800]),
    ],
)
def test_draft_is_what_followed_the_longest_ending(token_ids, expected):
    config = SpeculativeConfig("ngram", 3, prompt_lookup_max=3, prompt_lookup_min=2)
    assert NgramDrafter(config).propose(token_ids, max_tokens=8) == expected
    assert NgramDrafter(config).propose(token_ids, max_tokens=1) == expected[:1]


def test_drafter_that_sees_the_text_grow_drafts_the_beginning_of_what_a_plain_search_finds():
    rng, drafter = random.Random(0), NgramDrafter(SpeculativeConfig.of(NGRAM))
    token_ids = [3]
    for _ in range(300):
        token_ids += [rng.randrange(3, 8) for _ in range(rng.randint(1, 3))]
        expected: list[int] = []
        for size in (4, 3, 2):
            starts = [at for at in range(len(token_ids) - size) if token_ids[at : at + size] == token_ids[-size:]]
            if starts:
                expected = token_ids[starts[0] + size :][:8]
                break
        draft = drafter.propose(token_ids, max_tokens=8)
        assert draft == expected[: len(draft)]


def test_drafts_get_shorter_while_guesses_are_wrong_and_longer_while_they_are_right():
    drafter, token_ids, lengths = NgramDrafter(SpeculativeConfig.of(NGRAM)), [1, 2, *range(10, 30)], list[int]()
    for new in range(100, 120):  # the first guess is always 10
        token_ids += [1, 2]
        lengths.append(len(drafter.propose(token_ids, max_tokens=8)))
        token_ids.append(new)
    assert lengths[0] == 8 and lengths[-1] == 0 and lengths == sorted(lengths, reverse=True)
    token_ids += [1, 2]
    for token_id in range(10, 24):  # guesses are right now, although none is drafted
        drafter.propose(token_ids, max_tokens=8)
        token_ids.append(token_id)
    assert len(drafter.propose(token_ids, max_tokens=8)) >= 4


def test_tokens_behind_a_wrong_guess_say_nothing_about_the_guesses_behind_it():
    """So a drafter that is asked after each token drafts as much as one that is asked now and then."""
    often, rarely = (NgramDrafter(SpeculativeConfig.of(NGRAM)) for _ in range(2))
    token_ids = [1, 2, *range(10, 30), 1, 2]
    assert len(often.propose(token_ids, max_tokens=8)) == len(rarely.propose(token_ids, max_tokens=8)) == 8
    for new in [*range(100, 108), 1, 2]:  # the guess was 10 to 17
        token_ids.append(new)
        draft = often.propose(token_ids, max_tokens=8)
    assert rarely.propose(token_ids, max_tokens=8) == draft == [10, 11, 12, 13, 14]


# The same outputs

Outputs = dict[str, list[tuple[list[int], str, str | None]]]


class History:
    """Requests of all kinds for one engine, and the moments at which they arrive and are aborted.

    Some engines save blocks in a folder, so the second one to play finds those of the first. Some end with a beam
    search.
    """

    def __init__(self, seed: int, checkpoints: list[Path], folder: Path) -> None:
        rng = self.rng = random.Random(seed)
        block_size, num_seqs = rng.choice([1, 2, 4, 8, 16]), rng.choice([1, 3, 8])
        self.checkpoint, self.seed = checkpoints[seed % len(checkpoints)], seed
        self.options: dict[str, Any] = {
            "block_size": block_size,
            "kv_cache_tokens": rng.choice([96, 128, 192, 400]) // block_size * block_size,
            "max_num_seqs": num_seqs,
            "max_num_batched_tokens": rng.choice([8, 32, 512]),
            "enable_prefix_caching": rng.random() < 0.7,
            "offload_policy": rng.choice(["load", "load", "recompute"]),
            "kv_offloading_tokens": rng.choice([0, 64, 512, 512]),
            "tile_size": rng.choice([None, 32]),
            "async_scheduling": rng.random() < 0.3,
            "max_model_len": 180,
            "seed": seed,
        }
        start = [rng.randrange(3, 300) for _ in range(rng.randrange(4, 20))]
        self.arrivals: list[tuple[int, str, list[int], SamplingParams]] = []
        for i in range(rng.randrange(2, 8)):
            prompt = (4 * start)[: rng.randrange(1, 60)] + [rng.randrange(3, 300) for _ in range(rng.randrange(5))]
            request = prompt, self._params(num_seqs)
            self.arrivals.append((rng.choice([0, 0, rng.randrange(30)]), str(i), *request))
        self.arrivals.sort(key=lambda arrival: arrival[0])  # seeds are drawn on arrival
        self.aborts = {str(i): rng.randint(1, 60) for i in range(8) if rng.random() < 0.1}  # after so many tokens
        if self.options["enable_prefix_caching"] and rng.random() < 0.4:
            disk = {"kv_disk_dir": str(folder / str(seed)), "kv_disk_save": "all", "offload_policy": "load"}
            self.options |= disk
        self.beams = start[:9] if num_seqs > 2 and rng.random() < 0.3 else None

    def _params(self, max_tokens: int) -> SamplingParams:
        rng = self.rng
        special = [{}, {}, {}, {}, {"logprobs": 1}, {"repetition_penalty": 1.2}, {"min_tokens": 3}]
        return SamplingParams(
            n=rng.choice([1, 1, 1, min(2, max_tokens)]),
            temperature=rng.choice([0, 0, 0.1, 0.3, 1.0]),
            top_k=rng.choice([0, 0, 1, 2, 20]),
            top_p=rng.choice([1.0, 0.5, 0.9]),
            max_tokens=rng.randrange(3, 80),
            seed=rng.choice([None, rng.randrange(99)]),
            ignore_eos=rng.random() < 0.7,
            stop_token_ids=[rng.randrange(3, 300) for _ in range(rng.randrange(3))],
            stop=rng.choice([None, None, ["fox"], ["e", "th"]]),
            **rng.choice(special),
        )

    def play(
        self, speculation: dict[str, Any] | None, backend: str = "torch", known: Outputs | None = None
    ) -> tuple[Outputs, LLMEngine]:
        """Return the outputs of all requests that ended, and the engine. Drafts come from `known` outputs if given."""
        options = OPTIONS | self.options | {"attention_backend": backend}
        engine = make_engine(self.checkpoint, speculation, **options)
        arrivals, ended, num_steps = list(self.arrivals), Outputs(), 0
        while arrivals or engine.has_unfinished_requests():
            while arrivals and arrivals[0][0] <= num_steps:
                name = engine.add_request(*arrivals.pop(0)[1:])
                for seq, (token_ids, *_) in zip(engine.requests[name], (known or {}).get(name, []), strict=False):
                    seq.drafter = seq.drafter and KnowingDrafter(seq, token_ids)
            for output in step(engine).values():
                if output.finished:
                    ended[output.request_id] = contents(output)
            for name, num_tokens in self.aborts.items():
                samples = engine.requests.get(name, [])
                if any(seq.num_output_tokens >= num_tokens for seq in samples):
                    engine.abort_request(name)
                    assert_whole(engine)
            num_steps += 1
        if self.beams:
            output = BeamSearch(engine, BeamSearchParams(3, max_tokens=6)).run("beams", self.beams)
            assert output.error is None and len(output.sequences) == 3
            ended["beams"] = [(beam.tokens, beam.text or "", None) for beam in output.sequences]
        assert_empty(engine)
        if engine.disk_tier:
            engine.disk_tier.flush()
        return ended, engine


def contents(output: RequestOutput) -> list[tuple[list[int], str, str | None]]:
    return [(list(one.token_ids), one.text, one.finish_reason) for one in output.outputs]


def check_histories(histories: list[History], backend: str = "torch") -> Counter[str]:
    """Play each history with and without drafts, compare the outputs, and return counts."""
    counts = Counter[str]()
    for history in histories:
        plain, _ = history.play(None, backend)
        drafted, engine = history.play(NGRAM, backend, plain if history.seed % 3 else None)
        both = plain.keys() & drafted.keys() - history.aborts.keys()
        assert {name: drafted[name] for name in both} == {name: plain[name] for name in both}, history.seed
        assert plain.keys() - history.aborts.keys() == both
        stats = engine.stats()
        counts.update(
            drafted=stats.draft_tokens,
            accepted=stats.accepted_tokens,
            preempted=stats.preemptions,
            loaded=stats.blocks_loaded,
            from_disk=stats.disk_blocks_loaded,
            beams="beams" in both,
            aborted=len(history.aborts),
            stopped=sum(end == "stop" for output in drafted.values() for *_, end in output),
            tokens=stats.generation_tokens,
        )
    return counts


PARTS = [
    pytest.param((1, 4, 5), id="quick"),
    pytest.param((0, 2, 3, *range(6, 15)), marks=pytest.mark.full),
    pytest.param(range(15, 101), marks=pytest.mark.nightly),
    *(pytest.param(range(a, a + 100), marks=pytest.mark.nightly) for a in range(101, 1001, 100)),
]


@pytest.mark.parametrize("seeds", PARTS)
def test_random_histories_give_the_same_outputs_as_without_drafts(loopy, seeds, tmp_path):
    counts = check_histories([History(seed, loopy, tmp_path) for seed in seeds])
    print(dict(counts))
    assert 0.05 * counts["tokens"] < counts["accepted"] < 0.95 * counts["drafted"], counts
    kinds = "preempted", "loaded", "from_disk", "beams", "aborted", "stopped"
    assert min(counts[kind] for kind in kinds) > 0, counts


def play_both(checkpoint: Path, prompts: list[list[int]], request: SamplingParams, **options: Any) -> LLMEngine:
    """Serve the prompts with and without drafts, and compare the outputs. Return the engine with drafts."""
    ended = []
    for speculation in (None, NGRAM):
        engine = make_engine(checkpoint, speculation, **options)
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, request)
        ended.append({name: contents(output) for name, output in run_to_the_end(engine).items()})
    assert ended[0] == ended[1]
    return engine


def test_conversations_that_alternate_get_the_same_answers(loopy):
    """Each turn hits and drafts from the conversation so far. The pool holds one of them, the host both."""
    settings = {"kv_cache_tokens": 64, "kv_offloading_tokens": 200, "max_model_len": 64}
    engines = [make_engine(loopy[1], speculation, **settings) for speculation in (None, NGRAM)]
    talks = [LOOP[:9], [9, 8, 7] * 3]
    for turn in range(6):
        talk, outputs = talks[turn % 2], []
        for engine in engines:
            engine.add_request(str(turn), talk, params(14))
            outputs.append(contents(run_to_the_end(engine)[str(turn)]))
        assert outputs[0] == outputs[1]
        talk += [*outputs[0][0][0], 5 + turn]
    stats = engines[1].stats()
    assert stats.accepted_tokens > 5 and stats.prefix_hits > 20 and stats.blocks_loaded > 5, stats


def test_tool_arguments_are_the_same_beside_drafts(loopy):
    """Requests with a grammar run in the same steps as others that draft."""
    schema = {"type": "object", "properties": {"name": {"enum": ["fox", "owl"]}}, "required": ["name"]}
    grammars = [
        {"json": schema, "disable_any_whitespace": True},
        {"regex": "(fox|wood|the )+", "tool_call_start_str": "and"},
    ]
    ended = []
    for speculation in (None, NGRAM):
        engine = make_engine(loopy[0], speculation, kv_cache_tokens=200, max_num_batched_tokens=40)
        for number in range(6):
            special = {"structured_outputs": grammars[number // 2 % 2]} if number % 2 else {}
            engine.add_request(str(number), LOOP, params(40, ignore_eos=False, **special))
        ended.append({name: contents(output) for name, output in run_to_the_end(engine).items()})
    assert ended[0] == ended[1] and engine.stats().accepted_tokens > 5, engine.stats()
    texts = [ended[0][name][0][1] for name in "153"]
    assert all(re.match('{"name":"(fox|owl)"', text) for text in texts[:2]) and re.match("fox|wood|the |and", texts[2])


def test_right_drafts_save_steps(loopy):
    engine = play_both(loopy[0], [LOOP], params(60))
    stats = engine.stats()
    assert stats.generation_tokens == 60 and stats.accepted_tokens > 20
    assert engine.executor.num_steps == 60 - stats.accepted_tokens


@pytest.mark.parametrize("end", [{"stop_token_ids": True}, {"stop": True}, {"max_tokens": 23}])
def test_output_ends_in_the_middle_of_a_right_draft(loopy, end):
    """What lies beyond is discarded, and the prefix cache has no block of it."""
    [alone] = run_to_the_end(with_request(make_engine(loopy[0], None), LOOP, params(60))).values()
    token_ids = alone.outputs[0].token_ids
    first = {token: i for i, token in reversed([*enumerate(token_ids)])}
    late = max(first, key=first.__getitem__)
    values = {"stop_token_ids": [late], "stop": [alone.outputs[0].text[20:23]], "max_tokens": 23}
    for known in (True, False):
        engine = with_request(make_engine(loopy[0]), LOOP, params(**{"max_tokens": 60} | {n: values[n] for n in end}))
        [seq] = engine.requests["0"]
        seq.drafter = KnowingDrafter(seq, token_ids) if known else seq.drafter
        [output] = run_to_the_end(engine).values()
        assert reason(output) == ("length" if "max_tokens" in end else "stop")
        assert output.outputs[0].token_ids == token_ids[: len(output.outputs[0].token_ids)]
        num_computed = len(LOOP) + len(output.outputs[0].token_ids) - 1
        assert engine.stats().blocks_idle == num_computed // 4


def with_request(engine: LLMEngine, prompt: list[int], request: SamplingParams) -> LLMEngine:
    engine.add_request("0", prompt, request)
    return engine


SPECIAL: list[dict[str, Any]] = [
    {"repetition_penalty": 1.1},
    {"logprobs": 0},
    {"prompt_logprobs": 1},
    {"logit_bias": {9: 1.0}},
    {"structured_outputs": {"regex": "[a-z ]*"}},
]


@pytest.mark.parametrize("special", SPECIAL, ids=lambda special: next(iter(special)))
def test_requests_that_need_a_history_for_each_row_run_without_drafts(loopy, special):
    engine = make_engine(loopy[0])
    engine.add_request("plain", LOOP, params(30))
    engine.add_request("special", LOOP, params(30, **special))
    assert [engine.requests[name][0].drafter is None for name in ("plain", "special")] == [False, True]
    run_to_the_end(engine)
    assert engine.stats().accepted_tokens > 0


# Memory


def test_drafts_take_only_what_others_leave(loopy):
    """The pool has 8 blocks. Sequences that grow, and one that waits, come before drafts; nobody is preempted."""
    for max_num_batched_tokens in (6, 512):
        settings = {"kv_cache_tokens": 32, "max_num_batched_tokens": max_num_batched_tokens, "kv_offloading_tokens": 0}
        drafted = play_both(loopy[0], [LOOP[:9], LOOP[:9]], params(7), **settings)
        assert drafted.stats().preemptions == 0


def test_step_has_at_most_max_num_batched_tokens(loopy):
    engine = with_request(make_engine(loopy[0], max_num_batched_tokens=5), LOOP, params(40))
    run_to_the_end(engine)
    stats = engine.stats()
    max_tokens = 5 * engine.executor.num_steps
    assert stats.accepted_tokens > 5 and engine.executor.num_tokens <= max_tokens


def test_failed_draft_leaves_the_request_alone(loopy, monkeypatch):
    """If a step with drafts raises, its sequences run again without drafts."""
    plain = with_request(make_engine(loopy[0], None), LOOP, params(40))
    expected = {name: contents(output) for name, output in run_to_the_end(plain).items()}
    engine = with_request(make_engine(loopy[0]), LOOP, params(40))
    real = engine.executor.launch

    def launch(batch: list[Scheduled], *numbers: int) -> Any:
        if len(batch) > 1:
            raise RuntimeError("no memory for so many rows")
        return real(batch, *numbers)

    monkeypatch.setattr(engine.executor, "launch", launch)
    assert {name: contents(output) for name, output in run_to_the_end(engine).items()} == expected
    assert engine.stats().accepted_tokens == 0


def test_step_that_raises_after_drafts_leaves_no_slot_of_them(loopy, monkeypatch):
    """Its tokens cannot be appended: drafts are forgotten with their blocks, and the tokens are computed again."""
    plain = with_request(make_engine(loopy[0], None), LOOP, params(40))
    expected = {name: contents(output) for name, output in run_to_the_end(plain).items()}
    engine, drafted = with_request(make_engine(loopy[0]), LOOP, params(40)), list[Sequence]()
    engine.observers.append(SimpleNamespace(on_draft=drafted.append))

    def fails(seq: Sequence, tokens: list[Any]) -> int:
        raise RuntimeError("no text")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no text"):
        patch.setattr(Sequence, "append_tokens", fails)
        engine.step()
    assert drafted
    assert_whole(engine)
    assert {name: contents(output) for name, output in run_to_the_end(engine).items()} == expected


def test_draft_of_a_step_behind_one_that_fails_leaves_no_slot(loopy, monkeypatch):
    """With async_scheduling, the step of b's prompt and draft is launched before the step of a, which then fails."""
    engine = make_engine(loopy[0], async_scheduling=True)
    engine.add_request("a", [9, 8, 7], params(6, prompt_logprobs=0))  # may not draft, but may run ahead
    for _ in range(2):
        step(engine)
    real = engine.executor.launch

    def fails() -> list[Any]:
        raise RuntimeError("device lost")

    def launch(batch: list[Scheduled], *numbers: int) -> Any:
        pending = real(batch, *numbers)
        monkeypatch.setattr(pending, "tokens", fails)
        return pending

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "launch", launch)
        step(engine)
    drafted: list[Sequence] = []
    engine.observers.append(SimpleNamespace(on_draft=drafted.append))
    engine.add_request("b", LOOP[:8], params(20))
    step(engine)
    assert [seq.request_id for seq in drafted] == ["b"] and engine.stats().drafts == 0, "it is not verified"
    run_to_the_end(engine)


def test_beam_search_after_drafts_finds_the_same_beams(loopy):
    """Beams share the pool and the cache with what drafts have left there."""
    found = []
    for speculation in (None, NGRAM):
        llm = LLM(str(loopy[0]), kv_cache_tokens=256, speculative_config=speculation, **OPTIONS)
        [before] = llm.generate([LOOP], params(40))
        [output] = llm.beam_search([LOOP + before.outputs[0].token_ids[:9]], BeamSearchParams(3, max_tokens=6))
        [after] = llm.generate([LOOP], params(50))
        found.append(([beam.tokens for beam in output.sequences], contents(before), contents(after)))
        llm.llm_engine.kv_cache_manager.check_integrity()
    assert found[0] == found[1]


# What others see


def test_counts_are_metrics_with_vllms_names(loopy):
    engine = with_request(make_engine(loopy[0]), LOOP, params(60))
    run_to_the_end(engine)
    metrics = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in engine.get_metrics()}
    stats, by_position = engine.stats(), metrics["accepted_tokens_per_pos"]
    assert isinstance(by_position, Vector) and len(by_position.values) == 8
    assert sum(by_position.values) == stats.accepted_tokens and by_position.values[0] <= stats.drafts
    assert by_position.values == sorted(by_position.values, reverse=True)
    counted = [metrics[name].value for name in ("drafts", "draft_tokens", "accepted_tokens")]
    assert counted == [stats.drafts, stats.draft_tokens, stats.accepted_tokens] and min(counted) > 0
    assert "drafted tokens accepted" in str(stats)
    names = {metric.name for metric in make_engine(loopy[0], None).get_metrics()}
    assert not any("spec_decode" in name for name in names)


def test_observers_hear_how_many_tokens_each_step_computed(loopy):
    class Listener:
        num_tokens = 0

        def on_step(self, batch: list[tuple[Sequence, int]], updated: list[Sequence]) -> None:
            self.num_tokens += sum(num_tokens for _, num_tokens in batch)

    engine = with_request(make_engine(loopy[0]), LOOP, params(60))
    engine.observers.append(listener := Listener())
    run_to_the_end(engine)
    assert listener.num_tokens == len(LOOP) + 59 and engine.stats().accepted_tokens > 20  # the last is never computed


def test_trace_tells_of_drafts_and_replays_to_the_engines_state(loopy):
    events = list[dict[str, Any]]()
    engine = make_engine(loopy[0], kv_cache_tokens=80)
    with traced(engine, events.append):
        for number in range(3):
            engine.add_request(str(number), LOOP[number:], params(30))
        while engine.has_unfinished_requests():
            step(engine)
            *_, state = states(events)
            running = {seq.request_id: (seq.block_table, seq.token_ids) for seq in engine.scheduler.running}
            assert {
                name: (each.block_table, each.tokens) for name, each in state.sequences.items() if each.block_table
            } == running
            assert state.free == list(engine.kv_cache_manager.pool.free)
    proposed = [event for event in events if event["kind"] == "draft_proposed"]
    accepted = [event for event in events if event["kind"] == "draft_accepted"]
    stats = engine.stats()
    assert len(proposed) == len(accepted) == stats.drafts > 0 and stats.preemptions > 0
    assert sum(event["num_tokens"] for event in accepted) == stats.accepted_tokens
    assert sum(len(event["tokens"]) for event in proposed) == stats.draft_tokens
    assert "draft" in {event["why"] for event in events if event["kind"] == "given_back"}


# The option


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "must have the key 'method', got {}"),
        ({"method": "ngram"}, "must have the key 'num_speculative_tokens', got {'method': 'ngram'}"),
        ({"method": "eagle", "num_speculative_tokens": 2}, "method must be 'ngram', got 'eagle'"),
        (NGRAM | {"num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1, got 0"),
        (NGRAM | {"num_speculative_tokens": "8"}, "num_speculative_tokens must be an integer, got '8'"),
        (NGRAM | {"prompt_lookup_min": 0}, "prompt_lookup_min must be at least 1, got 0"),
        (NGRAM | {"prompt_lookup_min": 5}, "prompt_lookup_min must be at most prompt_lookup_max, 4, got 5"),
        (NGRAM | {"prompt_lookup_mx": 5}, "has no key 'prompt_lookup_mx': did you mean 'prompt_lookup_max'?"),
        (NGRAM | {"model": "a/b"}, "has no key 'model'; its keys are method, num_speculative_tokens, "),
    ],
)
def test_mistake_in_the_option_is_one_clear_error(entries, message):
    with pytest.raises(ValueError, match=f"^speculative_config:? {re.escape(message)}"):
        EngineArgs(speculative_config=entries)


def test_lookup_sizes_default_to_each_other_and_to_vllms():
    sizes = []
    for given in (
        {},
        {"prompt_lookup_max": 3},
        {"prompt_lookup_min": 7},
        {"prompt_lookup_min": 2, "prompt_lookup_max": 4},
    ):
        config = SpeculativeConfig("ngram", 1, **given)
        sizes.append((config.min_suffix_tokens, config.max_suffix_tokens))
    assert sizes == [(5, 5), (3, 3), (7, 7), (2, 4)]
