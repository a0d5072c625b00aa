"""Bodies with one invalid field: a wrong type, or a value out of range."""

import random
from typing import Any

INFINITE = "(1e999)"  # json.dumps cannot write such a number: bad_bodies.py does
BAD_CONTENTS: tuple[Any, ...] = (5, {}, [5], [{}], [{"type": "image_url"}], [{"type": "text"}])
NOT_NUMBERS: tuple[Any, ...] = ("x", "", "1", [], [1], {}, {"a": 1}, True)
NOT_INTEGERS = (*NOT_NUMBERS, 0.5, INFINITE)
NOT_BOOLEANS: tuple[Any, ...] = ("x", "true", 1, 0, [], {})
NOT_TOKENS: tuple[Any, ...] = (5, "x", {}, True, ["x"], [0.5], [True], [[5]], [INFINITE])
NOT_IN_THE_VOCABULARY = ([-1], [4096], [10**30], [5, -(10**30)])

GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 1},
    "/tokenize": {"prompt": "Once"},
    "/detokenize": {"tokens": [5, 6]},
}

SAMPLING: dict[str, tuple[Any, ...]] = {  # fields of all bodies that generate text
    "temperature": (*NOT_NUMBERS, -1, -0.001, INFINITE),
    "top_p": (*NOT_NUMBERS, -1, 0, 1.1, INFINITE),
    "top_k": (*NOT_INTEGERS, -2),
    "min_p": (*NOT_NUMBERS, -0.1, 1.1, INFINITE),
    "presence_penalty": (*NOT_NUMBERS, -2.1, 3, INFINITE),
    "frequency_penalty": (*NOT_NUMBERS, -2.1, 3, INFINITE),
    "repetition_penalty": (*NOT_NUMBERS, 0, -1),
    "min_tokens": (*NOT_INTEGERS, -1, 10**9),
    "seed": NOT_INTEGERS,
    "stop": (5, {}, True, [5], [["x"]], ["a", 5]),
    "stop_token_ids": NOT_TOKENS,
    "logit_bias": (5, "x", [], {"x": 1}, {"5": "x"}, {"-1": 1}, {"5": True}, {"99999999": 1}, {"1.5": 1}),
    "bad_words": (5, "x", [5], [""], {}),
    "allowed_token_ids": (*NOT_TOKENS, *NOT_IN_THE_VOCABULARY, []),
    "stream": NOT_BOOLEANS,
    "ignore_eos": NOT_BOOLEANS,
    "model": (5, [], {}, True, "another", "../storyteller", "x" * 5000),
    "structured_outputs": (
        *(5, "x", [], {}, {"x": 1}, {"json": 5}, {"json": {}, "regex": "a"}, {"json": {"type": "nope"}}),
        *({"json": {"$ref": "#/nowhere"}}, {"json": "{"}, {"json": {"type": [5]}}, {"json": {"enum": 5}}),
        *({"regex": "("}, {"regex": "[a-"}, {"regex": 5}, {"regex": "a{5,2}"}, {"regex": "(?<=a)b"}),
        *({"grammar": "x"}, {"grammar": 'start: "a'}, {"choice": []}, {"choice": [5]}, {"json_object": False}),
    ),
}
CHAT: dict[str, tuple[Any, ...]] = {
    "messages": (
        *(5, "x", {}, [], [5], [{}], [[]], [{"role": 5, "content": "x"}], [{"role": "user"}], [{"content": "x"}]),
        *([{"role": "user", "content": content}] for content in BAD_CONTENTS),
    ),
    "tool_choice": ("required", 5, {"type": "function", "function": {"name": "f"}}),
    "tools": (5, "x", [5], ["x"]),
    "chat_template_kwargs": (5, "x", [], {"messages": 1}, {"tools": []}),
    "top_logprobs": NOT_INTEGERS,
    "logprobs": ("x", 1, [], {}),
    "max_tokens": (*NOT_INTEGERS, -1),
    "max_completion_tokens": (*NOT_INTEGERS, -1),
    "n": (*NOT_INTEGERS, 0, -1, 10**30),
    "stream_options": (5, "x", [], {"include_usage": True}),
    "add_generation_prompt": NOT_BOOLEANS,
    "response_format": (
        *(5, "x", [], {}, {"type": "x"}, {"type": 5}, {"type": "json_schema"}),
        *({"type": "json_schema", "json_schema": schema} for schema in (5, {"name": "a", "schema": 5})),
    ),
}
BAD: dict[str, dict[str, tuple[Any, ...]]] = {
    "/v1/completions": SAMPLING
    | {
        "prompt": (5, {}, True, 0.5, [[]], [{}], ["a", 5], [["x"]], [0.5], [True], *NOT_IN_THE_VOCABULARY),
        "n": (*NOT_INTEGERS, 0, -1, 10**30),
        "max_tokens": (*NOT_INTEGERS, -1),
        "logprobs": (*NOT_INTEGERS, -2),
        "echo": NOT_BOOLEANS,
        "suffix": (5, "x"),
        "best_of": (*NOT_INTEGERS[:-3], 7),
        "stream_options": (5, "x", [], {"include_usage": True}),
    },
    "/v1/chat/completions": SAMPLING | CHAT,
    "/v1/responses": {
        "input": (5, {}, True, [5], ["x"], [{}], [{"role": "user", "content": 5}]),
        "max_output_tokens": (*NOT_INTEGERS, -1),
        "temperature": SAMPLING["temperature"],
        "previous_response_id": ("x", 5),
        "tool_choice": ("required", 5, {"type": "function", "name": "f"}),
        "tools": (5, "x", [5], [{"type": "function", "name": "f", "parameters": 5}]),
        "text": (5, "x", {"format": 5}, {"format": {"type": "x"}}),
        "instructions": (5, [], {}),
    },
    "/tokenize": {"prompt": (5, [], {}, True), "add_special_tokens": NOT_BOOLEANS, "model": (5, "another")},
    "/detokenize": {"tokens": (*NOT_TOKENS, *NOT_IN_THE_VOCABULARY), "model": (5, "another")},
}


def wrong_body(rng: random.Random) -> tuple[str, str, dict[str, Any]]:
    """Return the name of the fault, the path and the body."""
    path = rng.choice(list(GOOD))
    if rng.random() < 0.95:
        name = rng.choice(list(BAD[path]))
        return f"{name} of {path}", path, GOOD[path] | {name: rng.choice(BAD[path][name])}
    return "an empty body", path, {}
