"""Names of parsers, formats detected from chat templates, prompts that open or close the thought, and forced calls."""

import json
from pathlib import Path

import llguidance
import pytest

from nanovllm.chat.assistant import read_message
from nanovllm.chat.forced_calls import forced_call
from nanovllm.chat.formats import REASONING_FORMATS, TOOL_FORMATS, formats_for

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"
QWEN3 = formats_for(None, "hermes", "qwen3")


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ((TEMPLATES / "llama3.jinja").read_text(), "llama3_json", None),
        ((TEMPLATES / "qwen25.jinja").read_text(), "hermes", None),
        ((TEMPLATES / "qwen3.jinja").read_text(), "hermes", "qwen3"),
        ((TEMPLATES / "mistral.jinja").read_text(), "mistral", None),
        ("{{ '<｜Assistant｜><think>\\n' }}", None, "deepseek_r1"),
        ("<tool_call>\n<function=name>", None, None),  # XML, which has no parser here
        ("{{ messages[0].content }}", None, None),
        (None, None, None),
    ],
)
def test_auto_takes_the_formats_from_the_template(template, tools, reasoning):
    formats = formats_for(template)
    assert formats.tool_format == (tools and TOOL_FORMATS[tools])
    assert formats.reasoning_format == (reasoning and REASONING_FORMATS[reasoning])


def test_unknown_parser_is_refused_with_the_known_names():
    with pytest.raises(ValueError, match="tool_call_parser must be one of auto, hermes, llama3_json, mistral, got 'x'"):
        formats_for("", "x")
    with pytest.raises(ValueError, match="reasoning_parser must be one of auto, qwen3, deepseek_r1, got 'x'"):
        formats_for("", None, "x")


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("assistant\n", "<think>a</think>b", "a", "b"),
        ("assistant\n<think>\n", "a</think>b", "a", "b"),
        ("assistant\n<think>\n", "a", "a", ""),
        ("assistant\n<think>\n\n</think>\n\n", "a", "", "a"),
    ],
)
def test_prompt_decides_where_the_thought_begins(prompt, text, reasoning, content):
    message = read_message(text, QWEN3.for_prompt(prompt, tool_names=["add"]))
    assert (message.reasoning, message.content) == (reasoning, content)


def test_plain_output_needs_no_parser():
    assert formats_for("", None, None).for_prompt("Hi", tool_names=["add"]) is None
    assert QWEN3.for_prompt("<think>\n\n</think>") is None


# Forced calls

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
TREE = {  # refers to a definition, and to itself
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/Point"}, "next": {"$ref": "#"}},
    "required": ["at"],
    "additionalProperties": False,
    "$defs": {"Point": POINT},
}
WORD = {**TREE, "$defs": {"Point": {"type": "string"}}}
FUNCTIONS = [{"name": "tree", "parameters": TREE}, {"name": "word", "parameters": WORD}, {"name": "now"}]


def follows(value: object, schema: dict[str, object]) -> bool:
    """Return whether a grammar for the schema takes the whole text of a value."""
    characters = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(characters, llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(characters.tokenize_str(json.dumps(value))) and matcher.is_accepting()


def call(name: str, arguments: object) -> dict[str, object]:
    return {"name": name, "arguments": arguments}


@pytest.mark.parametrize(
    ("calls", "is_valid"),
    [
        ([call("tree", {"at": {"x": 1}})], True),
        ([call("tree", {"at": {"x": 1}, "next": {"at": {"x": 2}}})], True),
        ([call("word", {"at": "x"}), call("now", {})], True),
        ([call("tree", {"at": "x"})], False),
        ([call("word", {"at": {"x": 1}})], False),
        ([call("tree", {"at": {"x": 1}, "next": {"at": "x"}})], False),
        ([call("now", {"x": 1})], False),
        ([call("else", {})], False),
        ([{"name": "now"}], False),
        ([], False),
    ],
)
def test_required_calls_follow_the_schemas_of_all_tools(calls, is_valid):
    assert follows(calls, forced_call(FUNCTIONS).schema) == is_valid


def test_required_call_is_one_without_parallel_calls():
    schema = forced_call(FUNCTIONS, parallel_tool_calls=False).schema
    assert follows([call("now", {})], schema)
    assert not follows([call("now", {})] * 2, schema)


def test_named_call_is_its_arguments():
    forced = forced_call(FUNCTIONS, "tree")
    assert forced.name == "tree" and forced.schema == TREE
    assert follows({"at": {"x": 1}}, forced.schema)
    assert follows({}, forced_call(FUNCTIONS, "now").schema)


def test_forced_call_of_no_tool_is_refused():
    with pytest.raises(ValueError, match=r"one of the tools \(tree, word, now\), got 'tre'"):
        forced_call(FUNCTIONS, "tre")
    with pytest.raises(ValueError, match="at least 1 tool, got 0"):
        forced_call([])
