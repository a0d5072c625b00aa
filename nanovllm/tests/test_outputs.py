"""Outputs: stop reasons, text with and without a stop string, logprobs, and streams."""

from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest

from .. import LLM, RepetitionDetectionParams, RequestOutputKind, SamplingParams
from ..checkpoints.stream_decoder import StreamDecoder, decoded_token
from ..checkpoints.tokenizer import HFTokenizer, load_tokenizer
from ..engine import sequence
from ..engine.output_text import OutputText
from ..requests.logits_processors import bad_words_token_ids
from .testing.engines import OPTIONS

EOS, FOX = 2, "the fox and the rabbit"


@pytest.fixture
def make(checkpoint):
    return partial(LLM, checkpoint, **({"block_size": 4} | OPTIONS))


@pytest.fixture(scope="module")
def tokenizer(checkpoint) -> HFTokenizer:
    return load_tokenizer(checkpoint)


def saying(token_ids: list[int], **options) -> SamplingParams:
    """Return parameters that sample these tokens, in order. None may repeat."""
    assert len({*token_ids}) == len(token_ids)
    bias = {token_id: 1000.0 * (len(token_ids) - place) for place, token_id in enumerate(token_ids)}
    once = {"presence_penalty": 2.0, "repetition_penalty": 1e9}  # earlier tokens become unlikely
    return SamplingParams(temperature=0.0, logit_bias=bias, **({"max_tokens": len(token_ids)} | once | options))


def say(llm: LLM, text: str, end=(), **options):
    """Return the completion that says `text` and then the tokens `end`."""
    token_ids = llm.tokenizer.encode(text, add_bos=False) + [*end]
    [output] = llm.generate([[5]], saying(token_ids, **options))
    return output.outputs[0]


def test_say_returns_the_text(make):
    completion = say(make(), " fox")
    assert completion.text == " fox" and (completion.finish_reason, completion.stop_reason) == ("length", None)


# Times


def test_request_arrives_with_its_first_sample_and_finishes_with_its_last(make, monkeypatch):
    monkeypatch.setattr(sequence, "time", SimpleNamespace(perf_counter=count().__next__))
    [output] = make().generate([[5]], SamplingParams(n=3, temperature=1.0, max_tokens=2, ignore_eos=True))
    metrics = output.metrics
    assert (metrics.arrival_time, metrics.first_token_time, metrics.finished_time) == (0, 3, 8)


# Stop reasons


def test_eos_gives_no_stop_reason(make):
    completion = say(make(), " fox", end=[EOS])
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (
        " fox",
        "stop",
        None,
    ) and completion.token_ids[-1] == EOS
    completion = say(make(), " fox", end=[EOS], stop_token_ids=[EOS])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    completion = say(make(), " fox", end=[EOS], stop_token_ids=[EOS], ignore_eos=True)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", EOS)
    completion = say(make(), " fox", end=[EOS], ignore_eos=True)
    assert (completion.finish_reason, completion.stop_reason) == ("length", None) and completion.finished()


def test_eos_outside_the_models_vocabulary_is_ignored(make, monkeypatch):
    llm = make()
    monkeypatch.setattr(llm.llm_engine.input_processor, "_eos_token_ids", {EOS, 9999})
    [output] = llm.generate([[5]], saying([EOS, 8, 9], min_tokens=2))
    assert output.outputs[0].token_ids == [8, 9, EOS]


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_neither_eos_nor_a_stop_token_comes_before_min_tokens(make, ignore_eos):
    params = saying([EOS, 77, 8, 9], stop_token_ids=[77], min_tokens=2, max_tokens=3, ignore_eos=ignore_eos)
    [output] = make().generate([[5]], params)
    [completion] = output.outputs
    assert completion.token_ids == [8, 9, EOS] and completion.finish_reason == ("length" if ignore_eos else "stop")


def test_stop_token_is_the_stop_reason(make):
    completion = say(make(), " fox", end=[77], stop_token_ids=[77])
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (" fox", "stop", 77)


@pytest.mark.parametrize(
    ("stop", "reason", "text", "kept"),
    [
        (["ox"], "ox", " f", " fox"),
        (["zz", "x"], "x", " fo", " fox"),
        (["ox", "x"], "ox", " f", " fox"),
        (["x", "ox"], "x", " fo", " fox"),
    ],
)
def test_stop_string_is_the_stop_reason_and_the_first_in_the_list_wins(make, stop, reason, text, kept):
    completion = say(make(), " fox", stop=stop)
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, "stop", reason)
    completion = say(make(), " fox", stop=stop, include_stop_str_in_output=True)
    assert (completion.text, completion.stop_reason) == (kept, reason)


def test_repetition_is_the_stop_reason(make):
    params = {"max_tokens": 12, "repetition_detection": RepetitionDetectionParams(2, 1, 3), "logit_bias": {7: 100.0}}
    [output] = make().generate([[5]], SamplingParams(temperature=0.0, **params))
    [completion] = output.outputs
    assert (completion.finish_reason, completion.stop_reason, completion.token_ids) == (
        "repetition",
        "repetition_detected",
        [7, 7, 7],
    )
    [output] = make().generate([[5]], SamplingParams(temperature=0.0, min_tokens=5, **params))
    assert output.outputs[0].token_ids == [7] * 5


class Pieces:
    """A decoder whose tokens are strings."""

    def push(self, pieces: list[str]) -> str:
        return "".join(pieces)

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("pieces", "least", "stop", "expected"),
    [
        (["ab", "c", "ab"], 0, ["ab"], ("", "ab", 1)),
        (["ab", "c", "ab"], 1, ["ab"], ("abc", "ab", 3)),
        (["a", "b", "c"], 1, ["ab"], ("", "ab", 2)),  # complete after them
        (["ab", "ab"], 2, ["ab"], ("abab", None, 2)),
        (["xab", "q"], 1, ["ab", "xabz"], ("xabq", None, 2)),
        (["xa", "bz"], 1, ["ab", "xabz"], ("x", "ab", 2)),
        (["aa", "a"], 1, ["aa"], ("a", "aa", 2)),
    ],
)
def test_stop_string_counts_if_it_is_complete_after_min_tokens(pieces, least, stop, expected):
    text = OutputText(Pieces(), tuple(stop), min_tokens=least)
    num_pushed = next((i for i, piece in enumerate(pieces, 1) if text.push([piece])), len(pieces))
    text.close()
    assert ("".join(text.pieces), text.stop_string, num_pushed) == expected


# Text


def test_stop_token_can_be_kept_in_the_text(make):
    [last] = make().tokenizer.encode("e", add_bos=False)[-1:]
    assert say(make(), " fox", end=[last], stop_token_ids=[last]).text == " fox"
    kept = say(make(), " fox", end=[last], stop_token_ids=[last], include_stop_str_in_output=True)
    assert (kept.text, kept.stop_reason) == (" foxe", last)
    kept = say(make(), " fox", end=[last], stop_token_ids=[last], include_stop_str_in_output=True, stop=["xe"])
    assert (kept.text, kept.stop_reason) == (" foxe", "xe")


def test_without_detokenizing_there_is_no_text(make):
    completion = say(make(), " fox", detokenize=False, logprobs=1)
    assert completion.text == "" and make().tokenizer.decode(completion.token_ids) == "fox"
    assert {entry.decoded_token for place in completion.logprobs for entry in place.values()} == {None}


@pytest.mark.parametrize("spaces", [True, False])
def test_special_tokens_can_be_kept_in_the_text(make, spaces):
    options = {"ignore_eos": True, "spaces_between_special_tokens": spaces}
    assert say(make(), " fox", end=[EOS, 1, 77], **options).text == " fox" + make().tokenizer.decode([77])
    shown = say(make(), " fox", end=[EOS, 1], skip_special_tokens=False, **options)
    assert shown.text == " fox</s><s>"
    ended = say(make(), " fox", end=[EOS], skip_special_tokens=False, include_stop_str_in_output=True)
    assert (ended.text, ended.stop_reason) == (" fox</s>", None)
    assert say(make(), " fox", end=[EOS], skip_special_tokens=False).text == " fox"
    assert say(make(), " fox", end=[EOS, 1], skip_special_tokens=False, stop="</s", **options).stop_reason == "</s"


def test_output_may_fill_max_model_len(make):
    llm = make()
    [output] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == llm.max_model_len - 3


# Logprobs


def test_each_listed_token_has_its_text(make):
    completion = say(make(), " fox", logprobs=0)
    assert (
        "".join(place[i].decoded_token for place, i in zip(completion.logprobs, completion.token_ids, strict=True))
        == " fox"
    )


def test_byte_has_the_text_of_the_character_that_it_completes(tokenizer):
    é = tokenizer.encode("é", add_bos=False)[-2:]
    assert [tokenizer.decode([each]) for each in é] == ["\ufffd", "\ufffd"]
    word = tokenizer.encode("fox", add_bos=False)
    assert decoded_token(é[0], word, tokenizer) == "" and decoded_token(é[1], [*word, é[0]][-4:], tokenizer) == "é"
    assert decoded_token(é[1], word, tokenizer) == "" and decoded_token(é[0], [], tokenizer) == ""
    assert decoded_token(word[0], é[:1], tokenizer) == " fox", "the space belongs to the word"


def test_text_of_a_listed_token_is_decoded_once(tokenizer, monkeypatch):
    ids = tokenizer.encode("the fox jumps")
    texts = [decoded_token(each, [], tokenizer) for each in ids]
    monkeypatch.setattr(type(tokenizer), "decode", None)
    assert [decoded_token(each, ids[:3], tokenizer) for each in ids] == texts


def test_special_token_has_a_text_only_where_special_tokens_are_shown(tokenizer):
    assert decoded_token(EOS, [], tokenizer) == ""
    assert decoded_token(EOS, [], tokenizer.showing_special_tokens()) == "</s>"
    assert decoded_token(EOS, [], tokenizer) == ""


def test_logprobs_of_all_or_of_named_tokens(make):
    [every], [some] = (
        make().generate(FOX, SamplingParams(max_tokens=3, seed=3, **choices))
        for choices in ({"logprobs": -1, "prompt_logprobs": -1}, {"logprob_token_ids": [9, 4]})
    )
    assert {len(place) for place in every.outputs[0].logprobs + every.prompt_logprobs[1:]} == {320}
    for place, whole, own in zip(
        some.outputs[0].logprobs, every.outputs[0].logprobs, some.outputs[0].token_ids, strict=True
    ):
        assert [*place] == [9, 4, own] and place.items() <= whole.items()


def test_request_can_skip_reading_the_prefix_cache_and_still_fills_it(make):
    llm, params = make(), SamplingParams(max_tokens=1, skip_reading_prefix_cache=True)
    assert [llm.generate(FOX, params)[0].num_cached_tokens for _ in range(2)] == [0, 0]
    assert llm.generate(FOX, SamplingParams(max_tokens=1))[0].num_cached_tokens > 0


# Streams


def streamed(llm: LLM, **options):
    return list(llm.stream([FOX], SamplingParams(seed=5, max_tokens=7, ignore_eos=True, **options)))


@pytest.mark.parametrize(("n", "stop"), [(1, ["qqq"]), (3, ["qqq"]), (3, [])])
def test_deltas_join_to_the_whole_output(make, n, stop):
    options = {"n": n, "logprobs": 1, "prompt_logprobs": 1, "stop": stop}
    [whole] = streamed(make(), **options, output_kind=RequestOutputKind.FINAL_ONLY)
    deltas = streamed(make(), **options, output_kind=RequestOutputKind.DELTA)
    assert whole.finished and [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[0].prompt_logprobs == whole.prompt_logprobs
    assert all(delta.prompt_logprobs == [] for delta in deltas[1:])
    for index, full in enumerate(whole.outputs):
        parts = [each for delta in deltas for each in delta.outputs if each.index == index]
        assert "".join(part.text for part in parts) == full.text
        assert [each for part in parts for each in part.token_ids] == full.token_ids
        assert [each for part in parts for each in part.logprobs] == full.logprobs
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
        assert all(len(part.token_ids) == len(part.logprobs) == 1 for part in parts)


def test_without_stop_strings_text_is_decoded_on_demand(make, monkeypatch):
    pushed, real = [], StreamDecoder.push
    monkeypatch.setattr(StreamDecoder, "push", lambda self, ids: pushed.append(len(ids)) or real(self, ids))
    texts = [streamed(make(), output_kind=kind)[-1].outputs[0].text for kind in RequestOutputKind]
    assert texts[0] == texts[2] and pushed == [1] * 14 + [7]


def test_delta_has_only_samples_with_news(make):
    """One sample stops before the others."""
    params = {"n": 3, "stop_token_ids": [*range(3, 120)], "output_kind": RequestOutputKind.DELTA}
    deltas = streamed(make(), **params)
    assert len({len(delta.outputs) for delta in deltas}) > 1
    ends = [each.index for delta in deltas for each in delta.outputs if each.finished()]
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_stream_interval_counts_tokens_after_the_first_one(make, kind):
    outputs = streamed(make(), stream_interval=3, output_kind=kind)
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == ([1, 4, 7] if kind is RequestOutputKind.CUMULATIVE else [1, 3, 3])
    assert [output.finished for output in outputs] == [False, False, True]


def test_aborted_request_has_a_last_output_of_any_kind(make):
    for kind in RequestOutputKind:
        engine = make().llm_engine
        engine.add_request("a", [5, 6], SamplingParams(output_kind=kind))
        engine.step(), engine.step()
        last = engine.abort_request("a")
        num_tokens = 0 if kind is RequestOutputKind.DELTA else 2
        assert last.finished and len(last.outputs[0].token_ids) == num_tokens
        assert last.outputs[0].finish_reason == "abort"


# Parameters that this model or tokenizer cannot serve


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_token_ids": [1, 320]}, "stop_token_ids: a token id must be from 0 to 319, got 320"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: a token id must be from 0 to 319, got -1"),
        ({"allowed_token_ids": [999]}, "allowed_token_ids: a token id must be from 0 to 319, got 999"),
        ({"logprob_token_ids": [320]}, "logprob_token_ids: a token id must be from 0 to 319, got 320"),
        ({"max_tokens": None, "min_tokens": 63}, "min_tokens must be at most 62 to fit max_model_len, got 63"),
        ({"bad_words": [" "]}, "bad_words: ' ' has no tokens"),
    ],
)
def test_parameter_outside_the_models_limits_is_refused(make, options, message):
    llm = make()
    with pytest.raises(ValueError) as caught:
        llm.llm_engine.add_request("a", [5, 6], SamplingParams(**options))
    assert str(caught.value) == message and not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("options", [{"stop": "fox"}, {"bad_words": ["fox"]}], ids=str)
def test_parameter_that_needs_a_tokenizer_is_refused_without_one(make, checkpoint, tmp_path, options):
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(checkpoint / file)
    llm = LLM(tmp_path, **OPTIONS)
    [output] = llm.generate([[5, 6]], SamplingParams(**options))
    [name] = options
    assert output.error.startswith(f"{name} needs a tokenizer") and "fox" in output.error
    [output] = llm.generate([[5, 6]], SamplingParams(max_tokens=2, logprobs=1, ignore_eos=True))
    assert output.error is None and output.outputs[0].text == ""


def test_later_changes_do_not_affect_a_request(make):
    engine, params = make().llm_engine, SamplingParams(max_tokens=3, ignore_eos=True, stop=[])
    engine.add_request("a", [5, 6], params)
    params.max_tokens = 9
    params.stop.append("e")
    while engine.has_unfinished_requests():
        [output] = engine.step()
    assert len(output.outputs[0].token_ids) == 3


def test_invalid_later_change_is_refused_by_the_next_request(make):
    params = SamplingParams()
    params.logprobs = "many"
    with pytest.raises(ValueError, match="logprobs must be an integer, got 'many'"):
        make().llm_engine.add_request("a", [5, 6], params)


# Tokens of bad words


class Letters(HFTokenizer):
    """A tokenizer with a token per letter. A space is a token too, except before f."""

    def __init__(self) -> None:
        pass

    def encode(self, text: str, add_bos: bool = True, add_special_tokens: bool | None = None) -> list[int]:
        assert not add_bos
        return [ord(letter) for letter in text.replace(" f", "F")]


def test_bad_word_is_spelled_as_at_the_start_and_after_a_space():
    def spelled(*words: str, size: int = 500) -> list[str]:
        return ["".join(map(chr, word)) for word in bad_words_token_ids([*words], Letters(), size)]

    assert spelled("fox") == ["fox", "Fox"] and spelled(" fox") == ["fox", "Fox"]
    assert spelled("ab") == ["ab"], "after a space it has one more token"
    assert spelled("a", "f") == ["a", "f", "F"]
    with pytest.raises(ValueError, match="bad_words: a token id must be from 0 to 99, got 120"):
        spelled("x", size=100)


def test_bad_words_do_not_appear_in_the_text(make):
    words = ["e", "the", "fox", " a"]
    params = SamplingParams(n=8, max_tokens=30, seed=1, temperature=0.9, ignore_eos=True, bad_words=words)
    [output], [free] = make().generate(FOX, params), make().generate(FOX, SamplingParams(n=8, max_tokens=30, seed=1))
    single = {ids[0] for ids in bad_words_token_ids(words, make().tokenizer, 320) if len(ids) == 1}
    assert single and not single & {token_id for each in output.outputs for token_id in each.token_ids}
    assert single & {token_id for each in free.outputs for token_id in each.token_ids}
