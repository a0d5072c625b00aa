"""Outlines, with its models for OpenAI's and for vLLM's server."""

import json
from typing import Literal

import openai
import outlines
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


vllm = outlines.from_vllm(openai.OpenAI(), "assistant")


def try_text():
    assert vllm("Tell me about a fox.") == "A fox lives in the wood."
    assert "".join(vllm.stream("Tell me about a fox.")) == "A fox lives in the wood."


def try_choice():
    assert vllm("Is a fox a bird?", Literal["yes", "no"]) == "no"


def try_regex():
    assert vllm("When was it?", outlines.types.Regex(r"[0-9]{4}")) == "1999"


def try_grammar():
    grammar = outlines.types.CFG('start: "(" NUMBER ")"\nNUMBER: /[0-9]+/')
    assert vllm("In brackets, please.", grammar) == "(12)"


def try_JSON_schema():
    assert Person.model_validate_json(vllm("Jason is 25 years old.", Person)) == Person(name="Jason", age=25)


def try_JSON_schema_of_OpenAI():
    model = outlines.from_openai(openai.OpenAI(), "assistant")
    assert json.loads(model("Jason is 25 years old.", Person)) == {"name": "Jason", "age": 25}
