"""Structured outputs: JSON of a schema, regular expressions, choices and grammars, with all other parameters."""

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from .. import LLM, RequestOutputKind, SamplingParams, StructuredOutputsParams
from ..checkpoints.tokenizer import load_tokenizer
from ..requests.structured_outputs import GrammarProcessor, Grammars
from .testing.engines import OPTIONS
from .testing.tokenizers import FORMS, SENTENCEPIECE, write_form, write_sentencepiece

llguidance = pytest.importorskip("llguidance")

STORYTELLER = Path(__file__).resolve().parents[2] / "models" / "storyteller"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "friends": {"type": "array", "items": {"enum": ["fox", "owl"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "friends"],
}
COMPACT: dict[str, Any] = {"disable_any_whitespace": True, "disable_additional_properties": True}
REGEX = r"The (old |little )?(fox|owl) (sat|ran)( in the [a-z]{3,6})?\."
LIST = 'root ::= "(" item ("," item)? ")"\nitem ::= [a-z] [a-z]? | root'
CHOICE = ["fox", "a rabbit", "fox and rabbit", 'the "fox"', "back\\slash", "new\nline", "émoji 🎉"]


def fits(text: str) -> bool:
    """Return True if the text is JSON of SCHEMA without whitespace between its parts."""
    value = json.loads(text)
    assert text == json.dumps(value, separators=(",", ":"))
    return (
        list(value) == ["name", "age", "friends"]
        and re.fullmatch("[A-Z][a-z]{1,6}", value["name"]) is not None
        and type(value["age"]) is int
        and 0 <= value["age"] <= 99
        and 1 <= len(value["friends"]) <= 2
        and {*value["friends"]} <= {"fox", "owl"}
    )


def is_list(text: str) -> bool:
    """Return True if the text follows LIST: items may be inner lists, to any depth."""
    while (shorter := re.sub(r"\(([a-z]{1,2}|L)(,([a-z]{1,2}|L))?\)", "L", text)) != text:
        text = shorter
    return text == "L"


FORM_OF: dict[str, tuple[dict[str, Any], Any]] = {
    "json": ({"json": SCHEMA} | COMPACT, fits),
    "json as a text": ({"json": json.dumps(SCHEMA)} | COMPACT, fits),
    "regex": ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text)),
    "choice": ({"choice": CHOICE}, lambda text: text in CHOICE),
    "grammar": ({"grammar": LIST}, is_list),
    "lark": ({"grammar": 'start: "a"~2..3 "."'}, lambda text: text in ("aa.", "aaa.")),
}
each_form = pytest.mark.parametrize("form", FORM_OF)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(STORYTELLER), dtype="float32", device="cpu", max_model_len=256, kv_cache_tokens=4096, **OPTIONS)


def params_of(form: str, **params: Any) -> SamplingParams:
    options: dict[str, Any] = {"max_tokens": 120, "structured_outputs": StructuredOutputsParams(**FORM_OF[form][0])}
    return SamplingParams(**(options | params))


def texts(llm: LLM, *params: SamplingParams) -> list[tuple[str, str]]:
    outputs = llm.generate(["The fox said to the owl: "] * len(params), list(params))
    assert not [output.error for output in outputs if output.error]
    return [(sample.text, sample.finish_reason) for output in outputs for sample in output.outputs]


@pytest.fixture(scope="module")
def whole(llm) -> str:
    """Return an output of "json"."""
    [(text, _)] = texts(llm, params_of("json", seed=4))
    return text


# All formats


@each_form
def test_outputs_follow_the_format_greedy_and_sampled(form, llm):
    hot = [params_of(form, temperature=1.5, seed=seed, n=3) for seed in range(2)]
    results = texts(llm, params_of(form, temperature=0.0), *hot)
    assert len({text for text, _ in results}) > 1
    for text, reason in results:
        assert reason == "stop" and FORM_OF[form][1](text), text


def test_each_sample_has_its_own_position_in_the_grammar(llm):
    results = texts(llm, params_of("regex", temperature=2.0, seed=1, n=8))
    assert len({text for text, _ in results}) > 2 and all(re.fullmatch(REGEX, text) for text, _ in results)


def test_json_object_allows_any_object(llm):
    form = StructuredOutputsParams(json_object=True, whitespace_pattern=" ?")
    closing = {
        llm.get_tokenizer().backend.token_to_id(text): 6.0 for text in ('"', "<0x7D>")
    }  # otherwise few outputs end
    options = {"max_tokens": 120, "temperature": 1.0, "logit_bias": closing, "structured_outputs": form}
    params = [SamplingParams(seed=seed, **options) for seed in range(5)]
    whole = [text for text, reason in texts(llm, *params) if reason == "stop"]
    assert len(whole) > 1 and all(isinstance(json.loads(text), dict) for text in whole)


def test_whitespace_options_are_followed(llm):
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    each = [{"whitespace_pattern": "_"}, {"disable_any_whitespace": True}]
    params = [SamplingParams(seed=3, structured_outputs=StructuredOutputsParams(json=schema, **one)) for one in each]
    results = [text for text, _ in texts(llm, *params)]
    assert results[0].replace("_", "") == results[1] == '{"a":1}'


def test_format_that_may_be_empty_may_end_at_once(llm):
    results = texts(llm, SamplingParams(structured_outputs=StructuredOutputsParams(choice=[""])))
    assert results == [("", "stop")]


# Other parameters


def test_deltas_join_to_the_text(llm):
    params = params_of("json", seed=4, output_kind=RequestOutputKind.DELTA)
    parts = [output.outputs[0].text for output in llm.stream(["The fox said: "], params)]
    assert len(parts) > 5 and fits("".join(parts))


def test_stop_string_ends_the_output_before_the_format_is_complete(llm, whole):
    assert texts(llm, params_of("json", seed=4, stop='"age"')) == [(whole.split('"age"')[0], "stop")]


def test_max_tokens_cuts_the_output(llm, whole):
    [(cut, reason)] = texts(llm, params_of("json", seed=4, max_tokens=9))
    assert reason == "length" and 0 < len(cut) < len(whole) and whole.startswith(cut)


def test_min_tokens_delays_the_end_while_other_tokens_are_allowed(llm):
    form = StructuredOutputsParams(regex="(ab?){1,40}")
    eager = {"temperature": 0.0, "logit_bias": {2: 100.0}, "max_tokens": 60}  # it ends as soon as it may
    params = [SamplingParams(structured_outputs=form, min_tokens=least, **eager) for least in (0, 9)]
    short, long = (output.outputs[0] for output in llm.generate(["a", "a"], params))
    assert len(short.token_ids) == 2 and len(long.token_ids) == 10
    assert short.finish_reason == long.finish_reason == "stop"
    form = StructuredOutputsParams(choice=["fox"])
    assert texts(llm, SamplingParams(min_tokens=9, structured_outputs=form)) == [("fox", "stop")]


@pytest.mark.parametrize("regex", ["(ab){0,3}", "fox"])
def test_complete_output_continues_with_eos_alone_if_eos_is_ignored(regex, llm):
    form = StructuredOutputsParams(regex=regex)
    params = SamplingParams(seed=1, max_tokens=20, ignore_eos=True, structured_outputs=form)
    [output] = llm.generate(["a"], params)
    sample = output.outputs[0]
    assert output.error is None and re.fullmatch(regex, sample.text) and sample.finish_reason == "length"
    assert sample.token_ids[-1] == 2 and len(sample.token_ids) == 20


def test_logprobs_are_from_the_model_without_the_grammar(llm):
    [output] = llm.generate(["The fox"], params_of("choice", temperature=0.0, logprobs=1))
    assert output.outputs[0].logprobs[0][output.outputs[0].token_ids[0]].rank > 1


@pytest.mark.full
def test_text_is_the_same_with_preemption_and_in_any_batch(llm):
    params = [params_of("json", temperature=1.2, seed=seed) for seed in range(6)]
    scarce = LLM(str(STORYTELLER), dtype="float32", device="cpu", max_model_len=96, kv_cache_tokens=192, **OPTIONS)
    together = texts(scarce, *params)
    assert scarce.llm_engine.scheduler.num_preemptions > 0
    assert together == [each for one in params for each in texts(llm, one)]


def test_request_ends_with_an_error_if_grammar_and_params_leave_no_token(llm):
    params = params_of("regex", allowed_token_ids=[2])
    [bad, good] = llm.generate(["a", "b"], [params, SamplingParams(max_tokens=2)])
    assert "structured_outputs" in bad.error and good.error is None


# Invalid parameters


@pytest.mark.parametrize(
    "options, error",
    [
        ({}, "set one of json, regex, choice, grammar, json_object, got none"),
        (
            {"regex": "a", "choice": ["a"]},
            "set one of json, regex, choice, grammar, json_object, got regex and choice",
        ),
        ({"structural_tag": "{}"}, "structural_tag is unsupported"),
        ({"json_object": False}, "json_object must be True, got False"),
        ({"choice": []}, "choice must be a non-empty list of strings, got []"),
        ({"choice": "ab"}, "choice must be a list of strings, got 'ab'"),
        ({"choice": ["a", 1]}, "choice must be a list of strings, got ['a', 1]"),
        ({"regex": 5}, "regex must be a string, got 5"),
        ({"regex": "a\0"}, "regex must be a string without NUL characters, got 'a\\x00'"),
        ({"grammar": " "}, "grammar must be a non-empty string, got ' '"),
        ({"json": ""}, "json must be a JSON schema, as a dictionary or a string, got ''"),
        ({"json": "{"}, "json must be a JSON schema: Expecting property name"),
        ({"json": "[1]"}, "json must be a JSON schema, got '[1]'"),
        ({"json": {"type": {1, 2}}}, "json must be a JSON schema: Object of type set is not JSON serializable"),
        ({"json": '{"a":' * 65 + "1" + "}" * 65}, "json must be nested at most 64 levels deep"),
        ({"json": "[" * 99_999 + "]" * 99_999}, "json must be nested at most 64 levels deep"),
        ({"json": {}, "disable_any_whitespace": 1}, "disable_any_whitespace must be True or False, got 1"),
        ({"json": {}, "reasoning_end_str": ""}, "reasoning_end_str must be a non-empty string, got ''"),
        ({"json": {}, "reasoning_start_str": "<a>"}, "reasoning_start_str is '<a>', but reasoning_end_str is missing"),
        (
            {"regex": "a", "whitespace_pattern": " "},
            "whitespace_pattern needs json or json_object, got regex",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_parameter_is_named(options, error):
    with pytest.raises(ValueError, match=re.escape(error)):
        StructuredOutputsParams(**options)


def test_schema_may_be_nested_64_levels_deep():
    assert StructuredOutputsParams(json='{"a":' * 64 + "1" + "}" * 64).format == "json"


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {"a": {"const": 1}}}, '{"a":1}', '{"b":1}'),
        ({"properties": {"a": {"const": 1}}, "additionalProperties": True}, '{"a":1,"b":2}', '{"a":2}'),
        ({"properties": {"a": {"const": 1}}, "additionalProperties": {"const": 3}}, '{"b":3}', '{"b":2}'),
        ({"patternProperties": {"^a": {"const": 1}}}, '{"ab":1}', '{"b":1}'),
        ({"properties": {"a": {"properties": {"b": {"const": 1}}}}}, '{"a":{"b":1}}', '{"a":{"c":1}}'),
        ({}, '{"c":1}', "1"),
    ],
)
def test_closed_objects_have_only_the_properties_that_the_schema_allows(schema, good, bad):
    tokenizer, logits = load_tokenizer(STORYTELLER), torch.zeros(4096)
    params = StructuredOutputsParams(json=schema | {"type": "object"}, **COMPACT)
    one, two = Grammars(tokenizer, 4096, {2}).processors(params, 2)
    one.apply(logits, tokenizer.encode(good, add_special_tokens=False)[1:])
    assert logits[2] == 0
    with pytest.raises(ValueError, match="grammar"):
        two.apply(logits, tokenizer.encode(bad, add_special_tokens=False)[1:])


def test_later_change_is_checked_with_the_request(llm):
    params = params_of("choice")
    params.structured_outputs.choice = []
    with pytest.raises(ValueError, match="choice must be a non-empty list of strings"):
        llm.llm_engine.add_request("0", [1], params)


def test_dict_is_read_as_params():
    assert SamplingParams(structured_outputs={"regex": "a"}).structured_outputs == StructuredOutputsParams(regex="a")
    with pytest.raises(ValueError, match="structured_outputs has no field 'regx'; its fields are json, regex"):
        SamplingParams(structured_outputs={"regx": "a"})
    with pytest.raises(ValueError, match="structured_outputs must be a StructuredOutputsParams, got 'a'"):
        SamplingParams(structured_outputs="a")


@pytest.mark.parametrize(
    "options, error",
    [
        ({"json": {"type": "objekt"}}, "invalid json: Invalid type: objekt"),
        ({"json": {"type": "string", "minLength": 3, "maxLength": 2}}, "invalid json: Unsatisfiable schema"),
        (
            {"json": {"type": "array", "uniqueItems": True}},
            'invalid json: Unimplemented keys: ["uniqueItems"]',
        ),
        ({"json": {}, "whitespace_pattern": "("}, "invalid json: regex parse error"),
        ({"regex": "(a"}, 'invalid regex: at 1(8): invalid regex "(a"'),
        ({"regex": r"[^\s\S]"}, "no token of this checkpoint can come next"),
        ({"grammar": "start: foo"}, 'invalid grammar: at 1(8): unknown name: "foo"'),
        ({"grammar": 'root ::= "a" ('}, "invalid grammar: Failed to convert the grammar from GBNF"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_impossible_format_is_an_error_when_the_request_arrives(options, error, llm):
    with pytest.raises(ValueError, match=re.escape(f"structured_outputs: {error}")) as caught:
        llm.llm_engine.add_request("0", [1], SamplingParams(structured_outputs=StructuredOutputsParams(**options)))
    assert "\n" not in str(caught.value) and not llm.llm_engine.has_unfinished_requests()


def test_dead_end_during_generation_ends_only_its_request(llm):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(grammar=r'start: "fox" /[^\s\S]/'))
    [bad, good] = llm.generate(["a", "b"], [params, SamplingParams(max_tokens=4, ignore_eos=True)])
    assert "no token of this checkpoint can come next" in bad.error and bad.outputs[0].finish_reason == "error"
    assert len(good.outputs[0].token_ids) == 4


def test_missing_library_is_one_error_with_the_install_command(llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    fresh = Grammars(load_tokenizer(STORYTELLER), 4096, {2})
    with pytest.raises(ValueError, match=re.escape("need llguidance: pip install 'llguidance>=1.9'")):
        fresh.processors(StructuredOutputsParams(regex="a"), 1)[0]


def test_missing_tokenizer_or_eos_is_one_error():
    with pytest.raises(ValueError, match="need a tokenizer"):
        Grammars(None, 320, {2}).processors(StructuredOutputsParams(regex="a"), 1)[0]
    with pytest.raises(ValueError, match="the checkpoint names none"):
        Grammars(load_tokenizer(STORYTELLER), 4096, set()).processors(StructuredOutputsParams(regex="a"), 1)[0]


# Grammars and tokenizers


def test_grammar_is_compiled_once(monkeypatch):
    built, real = [], llguidance.LLMatcher

    class Counting:
        def __call__(self, *arguments, **options):
            built.append(arguments)
            return real(*arguments, **options)

        def __getattr__(self, name):
            return getattr(real, name)

    monkeypatch.setattr(llguidance, "LLMatcher", Counting())
    grammars = Grammars(load_tokenizer(STORYTELLER), 4096, {2})
    for _ in range(4):
        grammars.processors(StructuredOutputsParams(**FORM_OF["json"][0]), 1)
    assert len(built) == 1


# llguidance reads no unigram vocabulary, and spells no emoji if the tokenizer's normalizer changes it.
EVERY = [*FORMS, *(f"sentencepiece {form}" for form in SENTENCEPIECE if form not in ("normalized", "unigram"))]
QUICK = ("llama3", "mistral", "sentencepiece plain")


@pytest.fixture(params=[form if form in QUICK else pytest.param(form, marks=pytest.mark.full) for form in EVERY])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    name = request.param.removeprefix("sentencepiece ")
    (write_form if name == request.param else write_sentencepiece)(tmp_path, name)
    return load_tokenizer(tmp_path)


@pytest.mark.parametrize("form", ["json", "regex", "choice", "grammar"])
def test_random_walks_through_a_grammar_follow_its_format(form, tokenizer):
    """Each step takes any allowed token, like a model without knowledge."""
    options, holds = FORM_OF[form]
    vocab_size, eos = len(tokenizer) + 7, tokenizer.eos_token_id
    grammars, rng = Grammars(tokenizer, vocab_size, {eos}), random.Random(0)
    whole = [
        walk(tokenizer, grammars.processors(StructuredOutputsParams(**options), 1)[0], vocab_size, rng)
        for _ in range(6)
    ]
    whole = [text for text in whole if text is not None]
    assert len(whole) > 2 and all(map(holds, whole)), whole


def walk(tokenizer: Any, processor: GrammarProcessor, vocab_size: int, rng: random.Random) -> str | None:
    """Return the text after the tokenizer's anchor, or None if it does not end."""
    output: list[int] = []
    while tokenizer.eos_token_id not in output:
        if len(output) == 150:
            return None
        logits = torch.zeros(vocab_size)
        processor.apply(logits, output)
        output.append(rng.choice(logits.isfinite().nonzero().squeeze(1).tolist()))
    return tokenizer.decode([*tokenizer.anchor, *output])[len(tokenizer.decode(tokenizer.anchor)) :]


# Answers behind a thought

THINKS = {"reasoning_end_str": "the end"}
MAY_THINK, MAY_CALL = THINKS | {"reasoning_start_str": "think"}, {"tool_call_start_str": "call"}
WORDS = ("fox", "think", "call", "1", "x", "the", "end", "<unk>")  # a token each
NEXT = {
    "free": {"fox", "think", "call", "1"},
    "both": {"think", "call", "1"},
    "think": {"think", "1"},
    "call": {"call", "1"},
    "format": {"1"},
    "word": {"call"},  # within the format
}


@pytest.mark.parametrize(
    ("options", "output"),
    [
        (THINKS, "free:fox free:think free:end free:the free:end format:1 format:1"),
        (MAY_THINK, "think:think free:fox free:the free:fox free:the free:end format:1"),
        (MAY_THINK, "think:1 format:1 format:1"),
        (MAY_CALL, "call:1 format:x word:call format:1 format:1"),
        (MAY_CALL, "call:call free:fox free:1"),
        (THINKS | MAY_CALL, "free:call free:the free:end call:call free:fox"),
        (THINKS | MAY_CALL, "free:call free:the free:end call:1 format:1"),
        (MAY_THINK | MAY_CALL, "both:think free:the free:end call:1 format:1"),
        ({"reasoning_end_str": "<unk>"}, "free:fox free:<unk> format:1"),
    ],
)
def test_format_begins_where_the_thought_ends(options, output):
    """A kind before each token says what may come next: any token, the format's, or also a thought or a call.

    A second sequence of the same request begins where the first began, and may get several tokens at once.
    """
    tokenizer, token_ids, seen = load_tokenizer(STORYTELLER), list[int](), list[torch.Tensor]()
    id_of = {word: tokenizer.encode(word, add_special_tokens=False)[-1] for word in WORDS}
    first, second = Grammars(tokenizer, 4096, {2}).processors(
        StructuredOutputsParams(regex="[0-9]+( x call[0-9]+)?", **options), 2
    )
    for kind, word in [part.split(":") for part in output.split()]:
        seen.append(torch.zeros(4096))
        first.apply(seen[-1], token_ids)
        assert {word for word in NEXT["free"] if seen[-1][id_of[word]] == 0} == NEXT[kind], (token_ids, kind)
        token_ids.append(id_of[word])
    for logits, count in ((seen[0], 0), (seen[-1], len(seen) - 1)):
        again = torch.zeros(4096)
        second.apply(again, token_ids[:count])
        assert torch.equal(again, logits)


def test_call_whose_token_the_model_lacks_is_not_offered():
    tokenizer, logits = load_tokenizer(STORYTELLER), torch.zeros(700)
    params = StructuredOutputsParams(regex="[0-9]+", **MAY_CALL)
    Grammars(tokenizer, 700, {2}).processors(params, 1)[0].apply(logits, [])
    assert tokenizer.encode("call")[-1] >= 700 and logits.isfinite().any()
