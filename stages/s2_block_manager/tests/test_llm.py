"""LLM: prompts in, outputs out, whatever the pool. The oracle is the same model without a cache."""

import pytest
import torch

from ..llm import LLM
from ..observer import Observer
from ..outputs import RequestOutput
from ..sampling import SamplingParams
from .helpers import greedy_without_cache, next_logits, write_checkpoint

PROMPTS = [[1, 5, 9], [1], [1, 300, 301, 302, 303], list(range(3, 15)), [1, 44]]


def greedy(max_tokens: int, **options) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_tokens(outputs: list[RequestOutput], expected: list[list[int]], where: str) -> None:
    """Raise AssertionError with the first token that is not the one without a cache."""
    for output, token_ids, ids in zip(outputs, tokens(outputs), expected, strict=True):
        for i, (token, right) in enumerate(zip(token_ids, ids, strict=True)):
            assert token == right, f"{where}, token {i} after {output.prompt_token_ids} is not the one without a cache"


def assert_all_free(llm: LLM) -> None:
    llm.kv_cache_manager.check_integrity()
    assert llm.kv_cache_manager.report().held == 0


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    """Return the 24 most likely tokens after each of PROMPTS."""
    return [greedy_without_cache(model, prompt, 24) for prompt in PROMPTS]


# The same tokens


@pytest.mark.parametrize("block_size, num_slots", [(1, 100), (4, 64), (16, 64), (4, 1000)])
def test_tokens_are_the_same_as_without_a_cache(checkpoint, expected, block_size, num_slots):
    llm = LLM(checkpoint, block_size=block_size, kv_cache_tokens=num_slots)
    llm.kv_cache.blocks.fill_(float("nan"))  # what was in the pool before is never read
    assert_tokens(llm.generate(PROMPTS, greedy(24)), expected, "in a new pool")
    assert_tokens(llm.generate(PROMPTS[::-1], greedy(24)), expected[::-1], "in blocks that others have used")
    assert_all_free(llm)


def test_sequences_of_a_batch_may_end_at_different_times(checkpoint, expected):
    lengths = [3, 24, 1, 10, 2]
    outputs = LLM(checkpoint, block_size=4).generate(PROMPTS, [greedy(n) for n in lengths])
    assert tokens(outputs) == [token_ids[:n] for token_ids, n in zip(expected, lengths, strict=True)]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_cumulative_logprob_is_of_the_raw_logits(checkpoint, model):
    (output,) = LLM(checkpoint).generate([[1, 5]], SamplingParams(temperature=0.5, top_k=3, seed=1, max_tokens=6))
    token_ids, total = [1, 5], 0.0
    for token in output.outputs[0].token_ids:
        total += float(next_logits(model, token_ids).log_softmax(dim=-1)[token])
        token_ids.append(token)
    assert output.outputs[0].cumulative_logprob == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(checkpoint, dtype):
    llm = LLM(checkpoint, dtype=dtype)
    assert [len(ids) for ids in tokens(llm.generate(PROMPTS, greedy(8)))] == [8] * len(PROMPTS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_tokens_on_a_gpu_are_the_same_as_on_the_cpu(checkpoint, expected):
    assert tokens(LLM(checkpoint, device="cuda", dtype="float32").generate(PROMPTS, greedy(24))) == expected


# Prompts


def test_text_gets_bos_and_ids_do_not(checkpoint, tokenizer):
    ids = tokenizer.encode("the fox", add_bos=False)
    outputs = LLM(checkpoint).generate(["the fox", ids], greedy(4))
    assert [output.prompt_token_ids for output in outputs] == [[1, *ids], ids]
    assert [output.prompt for output in outputs] == ["the fox", None]


@pytest.mark.parametrize("prompt", ["the fox", [1, 5, 9]], ids=["text", "ids"])
def test_one_prompt_is_a_list_of_one(checkpoint, prompt):
    llm = LLM(checkpoint)
    assert tokens(llm.generate(prompt, greedy(4))) == tokens(llm.generate([prompt], greedy(4)))
    assert llm.generate([]) == []


def test_each_prompt_may_have_its_own_parameters(checkpoint):
    outputs = LLM(checkpoint).generate(PROMPTS[:3], [greedy(n) for n in (1, 2, 3)])
    assert [len(ids) for ids in tokens(outputs)] == [1, 2, 3]
    with pytest.raises(ValueError, match="2 prompts but 3 sampling_params"):
        LLM(checkpoint).stream(PROMPTS[:2], [greedy(1)] * 3)


@pytest.mark.parametrize(
    "prompt, error",
    [
        ([], "the prompt is empty"),
        ("", "the prompt is empty"),
        ([7] * 64, "the prompt has 64 tokens, max_model_len is 64"),
        ([1, 320], "token ids outside of 0 .. 319"),
        ([-1, 1], "token ids outside of 0 .. 319"),
    ],
    ids=str,
)
def test_prompt_that_cannot_be_served_is_an_error_in_its_place(checkpoint, expected, prompt, error):
    llm = LLM(checkpoint)
    outputs = llm.generate([PROMPTS[0], prompt, PROMPTS[1]], greedy(24))
    assert error in outputs[1].error and outputs[1].finished
    completion = outputs[1].outputs[0]
    assert (completion.finish_reason, completion.text, completion.token_ids) == ("error", "", [])
    assert tokens(outputs[::2]) == expected[:2] and outputs[0].error is outputs[2].error is None


def test_folder_without_a_tokenizer_serves_token_ids(tmp_path, expected):
    outputs = LLM(write_checkpoint(tmp_path)).generate(["the fox", PROMPTS[0]], greedy(24, stop="the"))
    assert "no tokenizer.model" in outputs[0].error
    assert tokens(outputs)[1] == expected[0] and outputs[1].outputs[0].text == ""


# Limits


def test_longest_prompt_gets_one_token(checkpoint, model):
    prompt = [1 + i % 300 for i in range(63)]
    (output,) = LLM(checkpoint, kv_cache_tokens=64).generate([prompt], greedy(10))
    assert output.outputs[0].token_ids == greedy_without_cache(model, prompt, 1)
    assert output.outputs[0].finish_reason == "length"


def test_output_ends_at_max_model_len(checkpoint, expected):
    (output,) = LLM(checkpoint, max_model_len=16).generate([PROMPTS[0]], greedy(1000))
    assert output.outputs[0].token_ids == expected[0][:13]
    assert output.outputs[0].finish_reason == "length"


def test_pool_must_hold_the_blocks_of_one_request(checkpoint, expected):
    """A prompt of 3 tokens and 9 new ones: 3 blocks."""
    options = {"max_model_len": 32, "block_size": 4}
    llm = LLM(checkpoint, kv_cache_tokens=12, **options)
    assert tokens(llm.generate([PROMPTS[0]], greedy(9))) == [expected[0][:9]]
    (output,) = LLM(checkpoint, kv_cache_tokens=11, **options).generate([PROMPTS[0]], greedy(9))
    assert output.error == "the request may need 3 blocks, the pool has 2"


# Static batches: a batch runs until its last sequence ends


def first_steps(llm: LLM, lengths: list[int]) -> list[int]:
    """Return the step in which each prompt of 2 tokens gets its first token."""
    prompts = [[1, 5 + i] for i in range(len(lengths))]
    first: dict[int, int] = {}
    for output in llm.stream(prompts, [greedy(n) for n in lengths]):
        first.setdefault(int(output.request_id), llm.model_runner.num_steps - 1)
    assert_all_free(llm)
    return [first[i] for i in range(len(lengths))]


def test_next_batch_begins_when_the_last_sequence_has_ended(checkpoint):
    """Each may need 2 blocks of 4 slots, in a pool of 5."""
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=20)
    assert first_steps(llm, [4, 3, 3, 3, 3]) == [0, 0, 4, 4, 7]


def test_max_num_seqs_bounds_a_batch(checkpoint):
    llm = LLM(checkpoint, max_model_len=16, max_num_seqs=3)
    assert first_steps(llm, [2, 2, 2, 2]) == [0, 0, 0, 2]


def test_requests_start_in_order(checkpoint):
    """The second may need 6 of 6 blocks. The third would fit beside the first, and waits all the same."""
    llm = LLM(checkpoint, kv_cache_tokens=24, block_size=4)
    assert first_steps(llm, [3, 20, 2]) == [0, 3, 23]


def test_outputs_come_in_the_order_of_the_prompts(checkpoint):
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=48)
    prompts = [[1, 5 + i] for i in range(12)]
    outputs = llm.generate(prompts, [greedy(1 + (7 * i) % 11) for i in range(12)])
    assert [output.prompt_token_ids for output in outputs] == prompts


# Streaming


def test_stream_yields_each_request_after_each_of_its_tokens(checkpoint, expected):
    streamed: dict[str, list[RequestOutput]] = {}
    for output in LLM(checkpoint).stream(PROMPTS, greedy(24)):
        streamed.setdefault(output.request_id, []).append(output)
    for outputs, token_ids in zip(streamed.values(), expected, strict=True):
        assert tokens(outputs) == [token_ids[:n] for n in range(1, 25)]
        assert [output.finished for output in outputs] == [False] * 23 + [True]


def test_times_are_in_order_and_the_first_token_comes_once(checkpoint):
    first_times: dict[str, set[float]] = {}
    for output in LLM(checkpoint, max_num_seqs=2).stream(PROMPTS, greedy(3)):
        times = output.metrics
        assert times.arrival_time < times.first_token_time
        assert (times.finished_time is not None) == output.finished
        assert times.finished_time is None or times.first_token_time < times.finished_time
        first_times.setdefault(output.request_id, set()).add(times.first_token_time)
    assert [len(times) for times in first_times.values()] == [1] * 5


@pytest.mark.parametrize("num_taken", [0, 1, 2, 3, 5, 8, 11])
def test_closed_stream_frees_everything(checkpoint, expected, num_taken):
    """Three batches of at most 2, closed between and within steps."""
    llm = LLM(checkpoint, kv_cache_tokens=128)
    stream = llm.stream(PROMPTS, [greedy(n) for n in (1, 3, 2, 4, 2)])
    for _ in range(num_taken):
        next(stream)
    stream.close()
    assert_all_free(llm)
    assert tokens(llm.generate(PROMPTS, greedy(24))) == expected


def test_step_that_raises_frees_everything(checkpoint, expected, monkeypatch):
    llm = LLM(checkpoint, kv_cache_tokens=128)
    with monkeypatch.context() as patched, pytest.raises(TypeError):
        patched.setattr(llm.model_runner, "run", None)
        llm.generate(PROMPTS, greedy(24))
    assert_all_free(llm)
    assert tokens(llm.generate(PROMPTS, greedy(24))) == expected


def test_two_streams_share_the_pool(checkpoint, expected):
    llm = LLM(checkpoint, kv_cache_tokens=128)
    first, second = llm.stream([PROMPTS[0]], greedy(24)), llm.stream([PROMPTS[1]], greedy(24))
    for _ in range(24):
        outputs = [next(first), next(second)]
    assert tokens(outputs) == expected[:2]


# The pool's peak, and the observer


def test_peak_counts_all_but_the_last_token(checkpoint):
    """Two prompts of 2 tokens. After n steps each has n + 1 tokens in the pool: 4 in a block each, at the most."""
    llm = LLM(checkpoint, block_size=4, kv_cache_tokens=40)
    llm.generate([[1, 5], [1, 6]], [greedy(3), greedy(3)])
    llm.generate([[1] * 3], greedy(2))
    assert llm.peak.pieces == ((0, 4, 4), (4, 4, 4)) and llm.peak.promised == 8 + 8
    assert llm.peak.strip(width=20) == "####................"


class Recorder(Observer):
    """An observer that keeps the kind of each event, and the request that it is about."""

    def __init__(self) -> None:
        self.events: list[tuple] = []

    def tell(self, kind: str, *details: object) -> None:
        subject = [getattr(detail, "request_id", detail) for detail in details[:1]]
        self.events.append((kind, *subject, *(details[1:] if kind in ("wait", "free") else ())))


def test_observer_hears_of_each_event(checkpoint):
    recorder = Recorder()
    llm = LLM(checkpoint, observer=recorder, block_size=2, kv_cache_tokens=4)
    llm.generate([[1, 5], [], [1, 6]], [greedy(2), greedy(2), greedy(1)])
    expected = [("refuse", "1"), ("add", "0"), ("add", "2")]
    expected += ["begin", ("admit", "0"), ("wait", "2", "promise", 2, 0), "schedule", "step", "end"]
    expected += ["begin", ("wait", "2", "batch", None, None), ("grow", "0"), "schedule", "step", ("free", "0", [0, 1])]
    expected += [("finish", "0"), "end"]
    expected += [
        "begin",
        ("admit", "2"),
        "schedule",
        "step",
        ("free", "2", [0]),
        ("finish", "2"),
        "end",
    ]
    named = [event[0] if event[0] in ("begin", "schedule", "step", "end") else event for event in recorder.events]
    assert named == expected


def test_observer_hears_that_the_first_in_line_waits(checkpoint):
    recorder = Recorder()
    llm = LLM(checkpoint, observer=recorder, block_size=2, kv_cache_tokens=4)
    llm.generate([[1, 5], [1, 6], [1, 7]], greedy(1))
    waits = [event for event in recorder.events if event[0] == "wait"]
    assert waits == [("wait", "1", "promise", 2, 0), ("wait", "2", "promise", 2, 0)]


def test_observer_hears_that_no_seat_is_free(checkpoint):
    recorder = Recorder()
    LLM(checkpoint, observer=recorder, max_num_seqs=1).generate([[1, 5], [1, 6]], greedy(1))
    assert ("wait", "1", "seat", 1, 0) in recorder.events


def test_observer_hears_that_a_closed_stream_has_ended(checkpoint):
    recorder = Recorder()
    stream = LLM(checkpoint, observer=recorder, max_num_seqs=1).stream([[1, 5], [1, 6]], greedy(4))
    next(stream)
    stream.close()
    assert recorder.events[-3:] == [("free", "0", [0]), ("finish", "0"), ("finish", "1")]


def test_steps_and_computed_tokens_are_counted_from_the_first_request(checkpoint):
    """The newest token of a sequence is computed in the next step, so the last one of each output never is."""
    llm = LLM(checkpoint)
    llm.generate([[1, 5], [1, 6, 7]], greedy(3))
    assert (llm.model_runner.num_steps, llm.model_runner.num_tokens) == (3, 5 + 2 * 2)
