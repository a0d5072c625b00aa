"""Requests with invalid bodies: broken JSON, wrong values, wrong encodings, huge ones."""

import gzip
import json
import random
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from ...testing.raw_http import post
from .bad_values import GOOD, INFINITE, wrong_body

HUGE = (
    *("messages", "one text", "one word", "tokens", "tokens, the last one wrong", "prompts", "prompts of tokens"),
    *("stops", "fields", "one name", "biases", "objects", "spaces", "a schema", "too large", "a size too large"),
)


class Bad(NamedTuple):
    """A bad request as bytes. A number among the parts is a pause in seconds."""

    kind: str
    parts: tuple[bytes | float, ...]
    is_ended: bool = False  # the client closes its sending side
    is_slow: bool = False  # only its duration is wrong
    has_text: bool = True  # of the response; a response to HEAD has none


def whole(kind: str, body: bytes, path: str = "/v1/completions", **headers: str) -> Bad:
    return Bad(kind, (post(body, path, **headers),))


def encoded(body: object) -> bytes:
    return json.dumps(body).replace(json.dumps(INFINITE), "1e999").encode()


def wrong_value(rng: random.Random) -> Bad:
    kind, path, body = wrong_body(rng)
    return whole(kind, encoded(body), path)


def broken_json(rng: random.Random) -> Bad:
    """Remove, insert or replace bytes of a good body until it is not JSON."""
    path = rng.choice(list(GOOD))
    body = bytearray(encoded(GOOD[path]))
    while is_json(bytes(body)):
        place = rng.randrange(len(body))
        change = rng.choice(("cut", "replace", "insert", "end"))
        if change == "cut":
            del body[place : place + rng.randint(1, 5)]
        elif change == "end":
            del body[place:]
        else:
            body[place : place + (change == "replace")] = bytes([rng.choice(b'{}[]",:\\x00\t\x00\xff-e')])
    return whole("broken JSON", bytes(body), path)


def is_json(body: bytes) -> bool:
    try:
        json.loads(body.decode())
    except ValueError:
        return False
    return bool(body)


def not_an_object(rng: random.Random) -> Bad:
    body = rng.choice((b"", b" ", b"null", b"5", b"[]", b'"x"', b"true", b"[{}]", b"-0", b"1e5", b'{"prompt": 1} {}'))
    return whole("JSON that is not an object", body, rng.choice(list(GOOD)))


def bad_number(rng: random.Random) -> Bad:
    number = rng.choice((b"NaN", b"Infinity", b"-Infinity", b"01", b"+1", b".5", b"0x5", b"1_000", b"9" * 5000))
    return whole("an invalid number", b'{"prompt": "a", "max_tokens": 1, "seed": ' + number + b"}")


def nested(rng: random.Random) -> Bad:
    depth = rng.choice((300, 1000, 5000, 100_000))
    start, end = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    field = rng.choice((b"prompt", b"logit_bias", b"structured_outputs", b"other"))
    ending = b"" if rng.random() < 0.3 else b"1" + end * depth
    return whole("nested deeply", b'{"prompt": "a", "' + field + b'": ' + start * depth + ending + b"}")


def half_characters(rng: random.Random) -> Bad:
    half = rng.choice((rb"\ud800", rb"\udfff", rb"\uD83D", rb"\udc00\ud800", rb"a\ud800b", rb"\ud800\u0041"))
    field = rng.choice((b'"prompt": "%b"', b'"prompt": "a", "%b": 1', b'"prompt": "a", "stop": ["%b"]'))
    return whole("half of a character", b"{" + field % half + b', "max_tokens": 1}')


def other_encoding(rng: random.Random) -> Bad:
    text = '{"prompt": "café", "max_tokens": 1}'
    name = rng.choice(("utf-16", "utf-16-le", "utf-32", "latin-1", "utf-8-sig", "gzip", "cut", "overlong", "cesu"))
    if name == "gzip":
        return whole("gzip", gzip.compress(text.encode(), mtime=0), content_encoding="gzip")
    by_hand = {"cut": b"\xe2\x82", "overlong": b"\xc0\xaf", "cesu": b"\xed\xa0\xbd\xed\xb8\x80"}
    if name in by_hand:
        return whole(f"UTF-8: {name}", b'{"prompt": "' + by_hand[name] + b'", "max_tokens": 1}')
    return whole(f"encoded as {name}", text.encode(name))


def other_type(rng: random.Random) -> Bad:
    kind = rng.choice(("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "json", "*/*"))
    path = rng.choice(list(GOOD))
    return whole("another Content-Type", encoded(GOOD[path]), path, content_type=kind)


def huge(rng: random.Random) -> Bad:
    """Build a body around the largest allowed size."""
    kind, size = rng.choice(HUGE), rng.choice((200_000, 1_000_000, 3_900_000))
    path = "/v1/chat/completions" if kind == "messages" else "/v1/completions"
    length = {"content_length": str(10 ** rng.randint(7, 19))} if kind == "a size too large" else {}
    return whole(f"huge: {kind}", huge_body(kind, size), path, **length)


@cache  # building one takes a tenth of a second, which the healthy client would measure as a gap
def huge_body(kind: str, size: int) -> bytes:
    bodies: dict[str, Callable[[], bytes]] = {
        "messages": lambda: encoded({"messages": [{"role": "user", "content": "a"}] * (size // 33)}),
        "one text": lambda: encoded({"prompt": "word " * (size // 5)}),
        "one word": lambda: encoded({"prompt": "x" * size}),
        "tokens": lambda: encoded({"prompt": [5] * (size // 3)}),
        "tokens, the last one wrong": lambda: encoded({"prompt": [5] * (size // 3) + ["x"]}),
        "prompts": lambda: encoded({"prompt": ["a"] * (size // 5)}),
        "prompts of tokens": lambda: encoded({"prompt": [[5]] * (size // 5)}),
        "stops": lambda: encoded({"prompt": "a", "stop": ["a"] * (size // 5) + [5]}),
        "fields": lambda: encoded({f"f{i}": 1 for i in range(size // 12)}),
        "one name": lambda: encoded({"x" * size: 1}),
        "biases": lambda: encoded({"prompt": "a", "logit_bias": {i: 1 for i in range(5000, 5000 + size // 12)}}),
        "objects": lambda: b'{"prompt": [' + b"{}," * (size // 3) + b"{}]}",
        "spaces": lambda: b" " * size,
        "a schema": lambda: encoded({"prompt": "a", "structured_outputs": {"json": {"enum": ["x" * size], "type": 5}}}),
        "too large": lambda: b" " * (5 << 20),
        "a size too large": lambda: b"{}",
    }
    return bodies[kind]()
