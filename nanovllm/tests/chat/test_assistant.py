"""Outputs of all four families, whole and in pieces: any split gives the same message, and nothing raises."""

import json
import re
import time

import pytest

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.chat.assistant import AssistantParser, MessageDelta, read_message
from nanovllm.chat.forced_calls import ForcedCall
from nanovllm.chat.formats import MessageFormat, formats_for
from nanovllm.tests.testing.watch import num_lines

HERMES = formats_for(None, "hermes", None).for_prompt("", tool_names=["add", "find"])
LLAMA = formats_for(None, "llama3_json", None, ["<|python_tag|>", "<|x|>"]).for_prompt("", tool_names=["add", "find"])
MISTRAL = formats_for(None, "mistral", None, ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"]).for_prompt("", tool_names=["add"])
QWEN3 = formats_for(None, "hermes", "qwen3").for_prompt("", tool_names=["add"])
R1 = formats_for(None, None, "deepseek_r1").for_prompt("")
NAMED = MessageFormat(forced=ForcedCall({}, "add"))
REQUIRED = MessageFormat(forced=ForcedCall({}))

HARD = '{"a": "\\"}{][\\\\", "b": {"c": [1, {"d": null}]}, "é": "\\u00e9 ü 字 </tool_call> <tool_call>"}'
ADD = '{"name": "add", "arguments": {"a": 1}}'


def streamed(pieces: list[str], format: MessageFormat, is_cut: bool = False) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the thought, the content, and the name and arguments of each call."""
    parser = AssistantParser(format)
    parts = [*(parser.feed(piece) for piece in pieces), parser.feed("", is_last=True, is_cut=is_cut)]
    calls: list[list[str]] = []
    for part in parts:
        for call in part.tool_calls:
            if call.name is not None:
                assert call.index == len(calls) and call.id is not None
                calls.append([call.name, ""])
            assert call.index == len(calls) - 1, "calls come one after another, and the name comes first"
            calls[-1][1] += call.arguments
    return "".join(p.reasoning for p in parts), "".join(p.content for p in parts), [(n, a) for n, a in calls]


def whole(text: str, format: MessageFormat, is_cut: bool = False) -> tuple[str, str, list[tuple[str, str]]]:
    message = read_message(text, format, is_cut)
    return message.reasoning, message.content, [(call.name or "", call.arguments) for call in message.tool_calls]


CASES = {
    # Hermes
    "plain text": (HERMES, "Hi < there\n", ("", "Hi < there\n", [])),
    "hermes": (HERMES, f"<tool_call>\n{ADD}\n</tool_call>", ("", "", [("add", '{"a": 1}')])),
    "text around a call": (
        HERMES,
        f"Let me see.\n<tool_call>{ADD}</tool_call>\nDone. ",
        ("", "Let me see.\nDone.", [("add", '{"a": 1}')]),
    ),
    "several calls": (
        HERMES,
        f'<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{{"name": "find", "arguments": {HARD}}}\n</tool_call>',
        ("", "", [("add", '{"a": 1}'), ("find", HARD)]),
    ),
    "a list of calls": (HERMES, f"<tool_call>[{ADD}, {ADD}]</tool_call>", ("", "", [("add", '{"a": 1}')] * 2)),
    "a list that the tag ends": (
        HERMES,
        f'<tool_call>[{ADD}</tool_call>, {ADD}]',
        ("", f", {ADD}]", [("add", '{"a": 1}')]),
    ),
    "a bracket after the tag": (HERMES, f"<tool_call>[{ADD}</tool_call>] ok", ("", "] ok", [("add", '{"a": 1}')])),
    "arguments before the name": (
        HERMES,
        '<tool_call>{"arguments": {"a": "x"}, "name": "add"}</tool_call>',
        ("", "", [("add", '{"a": "x"}')]),
    ),
    "other keys": (
        HERMES,
        '<tool_call>{"x": {"name": "no"}, "y": [1], "z": 2, "name": "add", "arguments": {}}</tool_call>',
        ("", "", [("add", "{}")]),
    ),
    "spaces in a list": (REQUIRED, f"[ {ADD} , {ADD} ]", ("", "", [("add", '{"a": 1}')] * 2)),
    "no arguments": (HERMES, '<tool_call>{"name": "now"}</tool_call>', ("", "", [("now", "{}")])),
    "no closing tag": (HERMES, f"<tool_call>{ADD}", ("", "", [("add", '{"a": 1}')])),
    "escapes in the name": (
        HERMES,
        '<tool_call>{"name": "\\u0061dd", "arguments": {}}</tool_call>',
        ("", "", [("add", "{}")]),
    ),
    # Llama
    "llama": (LLAMA, '{"name": "add", "parameters": {"a": 1}}', ("", "", [("add", '{"a": 1}')])),
    "llama with a type": (
        LLAMA,
        '\n{"type": "function", "name": "add", "parameters": {"a": 1}}',
        ("", "", [("add", '{"a": 1}')]),
    ),
    "llama with the tag": (LLAMA, '<|python_tag|>{"name": "x", "parameters": {}}', ("", "", [("x", "{}")])),
    "llama, several": (
        LLAMA,
        f'<|python_tag|>{ADD}; {{"name": "find", "parameters": {HARD}}}\n{ADD};',
        ("", "", [("add", '{"a": 1}'), ("find", HARD), ("add", '{"a": 1}')]),
    ),
    "llama, text with JSON": (LLAMA, f"As JSON: {ADD}", ("", f"As JSON: {ADD}", [])),
    "llama, JSON as an answer": (LLAMA, '{"x": {"name": "add"}}\n', ("", '{"x": {"name": "add"}}\n', [])),
    "llama, an unknown name": (LLAMA, ' {"name": "Bo", "age": 3}', ("", ' {"name": "Bo", "age": 3}', [])),
    "llama, a tool of its own": (LLAMA, '<|python_tag|>brave.call(q="x")', ("", 'brave.call(q="x")', [])),
    "a special token": (LLAMA, "One<|x|> two<|x", ("", "One two<|x", [])),
    # Mistral
    "mistral, a list": (
        MISTRAL,
        f'[TOOL_CALLS] [{ADD}, {{"name": "x", "arguments": {HARD}, "id": "abcdefghi"}}]',
        ("", "", [("add", '{"a": 1}'), ("x", HARD)]),
    ),
    "mistral, names": (
        MISTRAL,
        f'Now[TOOL_CALLS]add[ARGS]{{"a": 1}}[TOOL_CALLS]x-y.z[CALL_ID]abcdefghi[ARGS] {HARD}',
        ("", "Now", [("add", '{"a": 1}'), ("x-y.z", HARD)]),
    ),
    "mistral, a name alone": (MISTRAL, '[TOOL_CALLS]add{"a": 1}', ("", "", [("add", '{"a": 1}')])),
    "mistral, one object": (MISTRAL, f"[TOOL_CALLS]{ADD}", ("", "", [("add", '{"a": 1}')])),
    "mistral, text after": (MISTRAL, f"[TOOL_CALLS][{ADD}] ok", ("", "ok", [("add", '{"a": 1}')])),
    "mistral, an object behind the list": (MISTRAL, f"[TOOL_CALLS][{ADD}] {ADD}", ("", ADD, [("add", '{"a": 1}')])),
    "mistral, no call": (MISTRAL, "[TOOL_CALLS] add it", ("", " add it", [])),
    "mistral, an empty list": (MISTRAL, "[TOOL_CALLS] []", ("", " []", [])),
    # Thoughts
    "a thought": (QWEN3, "<think>\nHm. \n</think>\n\nYes.\n", ("Hm.", "Yes.\n", [])),
    "an empty thought": (QWEN3, "<think>\n\n</think>\n\nYes.", ("", "Yes.", [])),
    "no thought": (QWEN3, "\nYes. </think> <think>", ("", "\nYes. </think> <think>", [])),
    "an endless thought": (QWEN3, "<think>Hm </thin", ("Hm </thin", "", [])),
    "a call in a thought": (QWEN3, "<think>Try <tool_call>{}</tool_call>", ("Try <tool_call>{}</tool_call>", "", [])),
    "a call after a thought": (
        QWEN3,
        f"<think>a</think>\n\n<tool_call>\n{ADD}\n</tool_call>",
        ("a", "", [("add", '{"a": 1}')]),
    ),
    "no opening tag": (R1, "\nHm.\n</think>\nYes </think>", ("Hm.", "Yes </think>", [])),
    "both tags": (R1, "<think>Hm.</think>Yes", ("Hm.", "Yes", [])),
    "no closing tag of the thought": (R1, "Hm", ("Hm", "", [])),
    # Forced calls
    "a named call": (NAMED, f" {HARD}\n", ("", "", [("add", HARD)])),
    "required calls": (REQUIRED, f"[{ADD},\n {ADD}]", ("", "", [("add", '{"a": 1}')] * 2)),
}  # fmt: skip
BROKEN = {
    "no JSON": (HERMES, "<tool_call>\nadd(1)\n</tool_call> ok"),
    "no object": (HERMES, "<tool_call>3</tool_call>"),
    "no name": (HERMES, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    "an empty name": (HERMES, '<tool_call>{"name": "", "arguments": {"a": 1}}</tool_call>'),
    "a number as the name": (HERMES, '<tool_call>{"name": 3, "arguments": {"a": 1}}</tool_call>'),
    "a list of arguments": (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    "arguments in a string": (HERMES, '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>'),
    "no arguments yet": (HERMES, '<tool_call>{"name": "add", "argum'),
    "a tag alone": (HERMES, "Hi <tool_call>"),
    "not the list of a forced call": (REQUIRED, "Hello"),
    "an endless header": (HERMES, "<tool_call>{" + '"a": 1, ' * 500),
}


@pytest.mark.parametrize("case", CASES)
def test_output_becomes_a_message(case):
    format, text, expected = CASES[case]
    assert whole(text, format) == expected
    assert streamed([text], format) == expected


@pytest.mark.parametrize("case", CASES)
def test_any_split_gives_the_same_message(case):
    format, text, expected = CASES[case]
    assert streamed([*text], format) == expected
    for i in range(len(text)):
        assert streamed([text[:i], text[i:]], format) == expected


@pytest.mark.parametrize("case", BROKEN)
def test_broken_call_is_content(case):
    format, text = BROKEN[case]
    assert whole(text, format) == ("", text, [])
    assert streamed([text], format) == streamed([*text], format) == ("", text, [])


ALPHABET = st.sampled_from(
    [*'{}[]":,\\ \n;a1<', "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", ADD]
    + ["<|python_tag|>", "<|x|>", '{"name": "add", ', '"arguments": ', '"parameters": ', '{"a": "', "add", "[CALL_ID]"]
)
FORMATS = [HERMES, LLAMA, MISTRAL, QWEN3, R1, NAMED, REQUIRED]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(FORMATS), st.lists(ALPHABET, max_size=30), st.data())
def test_random_text_splits_the_same_everywhere(format, words, data):
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert streamed(pieces, format) == streamed([text], format) == streamed([*text], format)
    for _, arguments in whole(text, format)[2]:
        assert isinstance(json.loads(arguments), dict)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4), st.booleans(), st.sampled_from([None, 2]), st.data())
def test_any_arguments_come_back_as_they_were_written(arguments, is_ascii, indent, data):
    text = json.dumps(arguments, ensure_ascii=is_ascii, indent=indent)
    for format, output in [
        (HERMES, f'<tool_call>\n{{"name": "add", "arguments": {text}}}\n</tool_call>'),
        (LLAMA, f'{{"name": "add", "parameters": {text}}}'),
        (MISTRAL, f'[TOOL_CALLS] [{{"name": "add", "arguments": {text}}}]'),
        (MISTRAL, f"[TOOL_CALLS]add[ARGS]{text}"),
        (NAMED, text),
    ]:
        cut = data.draw(st.integers(0, len(output)))
        assert whole(output, format) == streamed([output[:cut], output[cut:]], format) == ("", "", [("add", text)])


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][2][2]])
def test_cut_output_keeps_its_text(case):
    format, text, _ = CASES[case]
    for end in range(len(text)):
        _, content, calls = whole(text[:end], format)
        for _, arguments in calls:
            assert isinstance(json.loads(arguments), dict)
        if not calls:
            visible = re.sub(r"\[(TOOL_CALLS|ARGS|CALL_ID)\]|<\|python_tag\|>", "", text[:end])
            is_thought = "<think>" in visible and "</think>" not in visible
            assert content.strip() == ("" if is_thought else visible.rpartition("</think>")[2].strip())


CALL = '{"name": "add", "arguments": {"a": "b'
CUT = {
    "named, before the arguments": (NAMED, " ", ("", "", [])),
    "named, a brace": (NAMED, "{", ("", "", [("add", "{")])),
    "named, a string": (NAMED, '{"a": "b', ("", "", [("add", '{"a": "b')])),
    "required, a list": (REQUIRED, "[", ("", "", [])),
    "required, half a name": (REQUIRED, '[{"name": "ad', ("", "", [])),
    "required, a name": (REQUIRED, '[{"name": "add"', ("", "", [("add", "")])),
    "required, half a key": (REQUIRED, '[{"name": "add", "argum', ("", "", [("add", "")])),
    "required, arguments": (REQUIRED, f"[{CALL}", ("", "", [("add", '{"a": "b')])),
    "required, whole arguments": (REQUIRED, f"[{CALL}\"}}", ("", "", [("add", '{"a": "b"}')])),
    "required, after a call": (REQUIRED, f"[{ADD}, ", ("", "", [("add", '{"a": 1}')])),
    "required, a second call": (REQUIRED, f"[{ADD}, {CALL}", ("", "", [("add", '{"a": 1}'), ("add", '{"a": "b')])),
    "required, no list": (REQUIRED, "Hello", ("", "Hello", [])),
    "hermes": (HERMES, f"Hi <tool_call>{CALL}", ("", "Hi", [("add", '{"a": "b')])),
    "hermes, before the arguments": (HERMES, '<tool_call>{"name": "add", "argum', None),
    "hermes, in the name": (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"', None),
    "llama": (LLAMA, CALL.replace("arguments", "parameters"), ("", "", [("add", '{"a": "b')])),
    "mistral": (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a', ("", "", [("add", '{"a')])),
    "text": (QWEN3, "<think>Hm</think>No.\n", ("Hm", "No.\n", [])),
}  # fmt: skip


@pytest.mark.parametrize("case", CUT)
def test_call_of_a_cut_output_has_the_arguments_that_were_written(case):
    format, text, expected = CUT[case]
    expected = ("", text, []) if expected is None else expected
    assert whole(text, format, is_cut=True) == expected
    assert streamed([text], format, is_cut=True) == streamed([*text], format, is_cut=True) == expected


def test_arguments_stream_as_they_are_written():
    parser = AssistantParser(HERMES)
    parts = [parser.feed(char).tool_calls for char in f"<tool_call>{ADD}</tool_call>"]
    deltas = [call for calls in parts for call in calls]
    assert [call.arguments for call in deltas] == ["{", '"', "a", '"', ":", " ", "1", "}"]
    assert [call.name for call in deltas] == ["add", *[None] * 7]
    assert re.fullmatch("chatcmpl-tool-[0-9a-f]{32}", deltas[0].id)


def test_cut_call_of_a_stream_keeps_what_was_sent():
    assert streamed(['<tool_call>{"name": "add", "arguments": {"a": "b'], HERMES) == ("", "", [("add", '{"a": "b')])


def test_whole_call_with_invalid_arguments_is_content():
    text = '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>'
    assert whole(text, HERMES) == ("", text, [])


def test_text_streams_while_it_cannot_begin_a_tag():
    parser = AssistantParser(QWEN3)
    assert parser.feed("<thi") == MessageDelta()
    assert parser.feed("nk>One").reasoning == "One"
    assert parser.feed(" <").reasoning == ""
    assert parser.feed("b").reasoning == " <b"
    assert parser.feed("</think>Two") == MessageDelta(content="Two")
    assert parser.feed(" <tool_cal").content == ""
    assert parser.feed("x").content == " <tool_calx"


def test_answer_in_json_streams_from_its_first_key():
    parser = AssistantParser(LLAMA)
    assert parser.feed('{"colors": ["red"').content == '{"colors": ["red"'


def test_without_parallel_calls_only_the_first_one_is_kept():
    format = formats_for(None, "hermes", None).for_prompt("", tool_names=["add"], parallel_tool_calls=False)
    text = f"<tool_call>{ADD}</tool_call>" * 3
    assert whole(text, format) == streamed([*text], format) == ("", "", [("add", '{"a": 1}')])


def test_calls_of_mistral_have_short_ids():
    ids = [call.id for call in read_message(f"[TOOL_CALLS][{ADD}, {ADD}]", MISTRAL).tool_calls]
    assert len(set(ids)) == 2
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", id) for id in ids)


def test_thought_comes_before_a_forced_call():
    formats = formats_for(None, None, "qwen3")
    format = formats.for_prompt("<think>\n", forced=ForcedCall({}, "add"))
    assert whole('Hm {"b"}\n</think>\n\n{"a": 1}', format) == ('Hm {"b"}', "", [("add", '{"a": 1}')])


HOSTILE = [  # a beginning, what follows many times, and how often in a long output
    ("<tool_call>", "{", 100_000),
    ('<tool_call>{"name": "add", "arguments": ', '{"a":', 30_000),
    ("", "<tool_call>", 10_000),
    ("", "<tool_call>{", 10_000),
    ("<think>", "</think", 20_000),
    ("", "\n", 100_000),
    ("", '<|python_tag|>{"name": "add", "arguments": {}};', 3_000),
    ("[TOOL_CALLS]", "[", 100_000),
    ("[TOOL_CALLS]", "a", 100_000),
    ("", "<", 100_000),
]


@pytest.mark.parametrize("format", [HERMES, LLAMA, MISTRAL, QWEN3, REQUIRED], ids=range(5))
@pytest.mark.parametrize(("start", "part", "count"), HOSTILE)
def test_hostile_output_takes_as_many_lines_as_it_is_long(start, part, count, format):
    """Twice the text takes about twice the lines of Python. A quadratic parser would run four times as many."""
    num_parts = max(150 // len(part), 20)

    def lines(count: int) -> list[int]:
        text = start + part * count + "x"
        return [num_lines(lambda: read_message(text, format)), num_lines(lambda: streamed([*text], format))]

    for once, twice in zip(lines(num_parts), lines(2 * num_parts), strict=True):
        assert twice < 2.5 * once + 200


@pytest.mark.nightly
@pytest.mark.parametrize(("start", "part", "count"), HOSTILE)
def test_hostile_output_takes_linear_time(start, part, count):
    text = start + part * count + "x"
    for format in (HERMES, LLAMA, MISTRAL, QWEN3, REQUIRED):
        began = time.perf_counter()
        read_message(text, format)
        streamed([*text[:2_000]], format)
        assert time.perf_counter() - began < 3  # a quadratic parser takes minutes
