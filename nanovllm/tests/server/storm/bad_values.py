"""Bodies of which one field is wrong: of another type, out of range, or no field at all."""

import random
import string
from typing import Any

INFINITE = "(1e999)"  # json.dumps has no such number: bad_bodies.py writes it
NO_CONTENTS: tuple[Any, ...] = (5, {}, [5], [{}], [{"type": "image_url"}], [{"type": "text"}])
NO_NUMBERS: tuple[Any, ...] = ("x", "", "1", [], [1], {}, {"a": 1}, True)
NO_WHOLE_NUMBERS = (*NO_NUMBERS, 0.5, INFINITE)
NO_FLAGS: tuple[Any, ...] = ("x", "true", 1, 0, [], {})
NO_TOKENS: tuple[Any, ...] = (5, "x", {}, True, ["x"], [0.5], [True], [[5]], [INFINITE])
NOT_IN_THE_VOCABULARY = ([-1], [4096], [10**30], [5, -(10**30)])

GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 1},
    "/tokenize": {"prompt": "Once"},
    "/detokenize": {"tokens": [5, 6]},
}

OF_ANY: dict[str, tuple[Any, ...]] = {  # of what makes text
    "temperature": (*NO_NUMBERS, -1, -0.001, INFINITE),
    "top_p": (*NO_NUMBERS, -1, 0, 1.1, INFINITE),
    "top_k": (*NO_WHOLE_NUMBERS, -2),
    "min_p": (*NO_NUMBERS, -0.1, 1.1, INFINITE),
    "presence_penalty": (*NO_NUMBERS, -2.1, 3, INFINITE),
    "frequency_penalty": (*NO_NUMBERS, -2.1, 3, INFINITE),
    "repetition_penalty": (*NO_NUMBERS, 0, -1),
    "min_tokens": (*NO_WHOLE_NUMBERS, -1, 10**9),
    "seed": NO_WHOLE_NUMBERS,
    "stop": (5, {}, True, [5], [["x"]], ["a", 5]),
    "stop_token_ids": NO_TOKENS,
    "logit_bias": (5, "x", [], {"x": 1}, {"5": "x"}, {"-1": 1}, {"5": True}, {"99999999": 1}, {"1.5": 1}),
    "bad_words": (5, "x", [5], [""], {}),
    "allowed_token_ids": (*NO_TOKENS, *NOT_IN_THE_VOCABULARY, []),
    "stream": NO_FLAGS,
    "ignore_eos": NO_FLAGS,
    "model": (5, [], {}, True, "another", "../storyteller", "x" * 5000),
    "structured_outputs": (
        *(5, "x", [], {}, {"x": 1}, {"json": 5}, {"json": {}, "regex": "a"}, {"json": {"type": "nope"}}),
        *({"json": {"$ref": "#/nowhere"}}, {"json": "{"}, {"json": {"type": [5]}}, {"json": {"enum": 5}}),
        *({"regex": "("}, {"regex": "[a-"}, {"regex": 5}, {"regex": "a{5,2}"}, {"regex": "(?<=a)b"}),
        *({"grammar": "x"}, {"grammar": 'start: "a'}, {"choice": []}, {"choice": [5]}, {"json_object": False}),
    ),
}
OF_CHAT: dict[str, tuple[Any, ...]] = {
    "messages": (
        *(5, "x", {}, [], [5], [{}], [[]], [{"role": 5, "content": "x"}], [{"role": "user"}], [{"content": "x"}]),
        *([{"role": "user", "content": content}] for content in NO_CONTENTS),
    ),
    "tool_choice": ("required", 5, {"type": "function", "function": {"name": "f"}}),
    "tools": (5, "x", [5], ["x"]),
    "chat_template_kwargs": (5, "x", [], {"messages": 1}, {"tools": []}),
    "top_logprobs": NO_WHOLE_NUMBERS,
    "logprobs": ("x", 1, [], {}),
    "max_tokens": (*NO_WHOLE_NUMBERS, -1),
    "max_completion_tokens": (*NO_WHOLE_NUMBERS, -1),
    "n": (*NO_WHOLE_NUMBERS, 0, -1, 10**30),
    "stream_options": (5, "x", [], {"include_usage": True}),
    "add_generation_prompt": NO_FLAGS,
    "response_format": (
        *(5, "x", [], {}, {"type": "x"}, {"type": 5}, {"type": "json_schema"}),
        *({"type": "json_schema", "json_schema": schema} for schema in (5, {"name": "a", "schema": 5})),
    ),
}
BAD: dict[str, dict[str, tuple[Any, ...]]] = {
    "/v1/completions": OF_ANY
    | {
        "prompt": (5, {}, True, 0.5, [[]], [{}], ["a", 5], [["x"]], [0.5], [True], *NOT_IN_THE_VOCABULARY),
        "n": (*NO_WHOLE_NUMBERS, 0, -1, 10**30),
        "max_tokens": (*NO_WHOLE_NUMBERS, -1),
        "logprobs": (*NO_WHOLE_NUMBERS, -2),
        "echo": NO_FLAGS,
        "suffix": (5, "x"),
        "best_of": (*NO_WHOLE_NUMBERS[:-3], 7),
        "stream_options": (5, "x", [], {"include_usage": True}),
    },
    "/v1/chat/completions": OF_ANY | OF_CHAT,
    "/v1/responses": {
        "input": (5, {}, True, [5], ["x"], [{}], [{"role": "user", "content": 5}]),
        "max_output_tokens": (*NO_WHOLE_NUMBERS, -1),
        "temperature": OF_ANY["temperature"],
        "previous_response_id": ("x", 5),
        "background": (True, 5, "x"),
        "text": (5, "x", {"format": 5}, {"format": {"type": "x"}}),
        "instructions": (5, [], {}),
    },
    "/tokenize": {"prompt": (5, [], {}, True), "add_special_tokens": NO_FLAGS, "model": (5, "another")},
    "/detokenize": {"tokens": (*NO_TOKENS, *NOT_IN_THE_VOCABULARY), "model": (5, "another")},
}


def wrong_body(rng: random.Random) -> tuple[str, str, dict[str, Any]]:
    """What is wrong, the path, and the body."""
    path = rng.choice(list(GOOD))
    kind = rng.random()
    if kind < 0.85:
        name = rng.choice(list(BAD[path]))
        return f"{name} of {path}", path, GOOD[path] | {name: rng.choice(BAD[path][name])}
    if kind < 0.95:
        name = "".join(rng.choices(string.ascii_letters + "_é\0", k=rng.randint(0, 30)))
        return "an unknown field", path, GOOD[path] | {"x" + name: rng.choice((1, "a", [], {}, True))}
    return "a body without what it is about", path, {}
