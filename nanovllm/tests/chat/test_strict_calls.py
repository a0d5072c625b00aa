"""Grammars that hold the calls of strict functions to their schemas, in the format of each family."""

from functools import cache
from typing import Any

import llguidance
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nanovllm.chat.formats import formats_for

TAGS = ["<eos>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FUNCTIONS = [{"name": "add", "strict": True, "parameters": SCHEMA}, {"name": "free", "parameters": SCHEMA}]
ONE = '{"name": "add", "arguments": {"a": 1}}'
FREE = '{"name": "free", "arguments": {"a": "x"}}'
WRONG = '{"name": "add", "arguments": {"a": "x"}}'
OTHER = '{"name": "other", "arguments": {}}'
HERMES = "<tool_call>\n{}\n</tool_call>".format
MISTRAL = "[TOOL_CALLS] [{}]".format


def LLAMA(call: str) -> str:
    return call.replace("arguments", "parameters")


@cache
def tokenizer(*tags: str) -> Tokenizer:
    """Return a tokenizer with a token for each byte and tag."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*tags])
    return tokenizer


def follows(text: str, name: str, tags: list[str]) -> bool:
    """Return whether a model with these tokens may write the text."""
    tokens = tokenizer(*tags)
    vocabulary = llguidance.LLTokenizer(tokens.to_str(), eos_token=tokens.token_to_id("<eos>"))
    token_ids = {tag: tokens.token_to_id(tag) for tag in tags}
    grammar = formats_for(None, name, None, token_ids=token_ids).strict_grammar(FUNCTIONS)
    matcher: Any = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(tokens.encode(text).ids) and matcher.is_accepting()


@pytest.mark.parametrize("tags", [TAGS, ["<eos>"]], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("", True),
        ("No { call", True),
        (HERMES(ONE), True),
        (f"So\n{HERMES(ONE)}\n{HERMES(FREE)} ok", True),
        (HERMES(WRONG), False),
        (HERMES(OTHER), False),
        (f"{HERMES(ONE)}{HERMES(WRONG)}", False),
    ],
)
def test_hermes(text, is_allowed, tags):
    assert follows(text, "hermes", tags) == is_allowed


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("", True),
        ('As {"x": 1}', True),
        (LLAMA(ONE), True),
        (LLAMA(f"<|python_tag|>{ONE}; {FREE}"), True),
        (LLAMA(WRONG), False),
        (LLAMA(f" {OTHER}"), False),
    ],
)
def test_llama(text, is_allowed):
    assert follows(text, "llama3_json", TAGS) == is_allowed
    if "<|python_tag|>" not in text:
        assert follows(text, "llama3_json", ["<eos>"]) == is_allowed


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [("Hi", True), (MISTRAL(f"{ONE}, {FREE}"), True), (MISTRAL(WRONG), False), (MISTRAL(OTHER), False)],
)
def test_mistral_with_a_list(text, is_allowed):
    assert follows(text, "mistral", TAGS[:-1]) == is_allowed


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("Hi", True),
        ('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]free[ARGS]{"a": "x"}', True),
        ('[TOOL_CALLS]add[ARGS]{"a": "x"}', False),
        (MISTRAL(ONE), False),
    ],
)
def test_mistral_with_names(text, is_allowed):
    assert follows(text, "mistral", TAGS) == is_allowed


def test_no_grammar_without_strict_functions_or_a_format():
    assert formats_for(None, "hermes").strict_grammar([{"name": "add"}]) is None
    assert formats_for(None, None).strict_grammar(FUNCTIONS) is None
