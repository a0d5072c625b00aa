"""Request: what a value of a file of requests asks for, in this engine's form or as a line of OpenAI's batches."""

import hashlib
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from ..engine.prompts import Prompt
from ..engine.sampling_params import SamplingParams
from ..server.openai.chats import Chat
from ..server.openai.fields import PARAMS, check_names
from ..server.openai.json_values import read_field

FIELDS = {"prompt": str | abc.Sequence[int], "id": str, **PARAMS}


@dataclass(frozen=True)
class Request:
    id: str
    index: int  # its place in the file, from 0
    prompt: Prompt | Chat
    params: SamplingParams
    url: str | None = None  # of OpenAI's API: its result has that API's form


class Defaults(NamedTuple):
    """What the command line says for requests that do not."""

    params: dict[str, Any]  # of SamplingParams, by field
    seed: int = 0  # what the seeds of requests without one come from
    recommended: Mapping[str, Any] = MappingProxyType({})  # by the checkpoint, for OpenAI's lines: as their server does


def read_own(index: int, value: dict[str, Any], defaults: Defaults) -> Request:
    """A request in this engine's form. Raises ValueError, naming the field and the value."""
    check_names(value, FIELDS, "a request may have")
    given = {name: read_field(name, each, FIELDS[name]) for name, each in value.items()}
    if "prompt" not in given:
        raise ValueError("it has no prompt")
    id, prompt = given.pop("id", str(index)), given.pop("prompt")
    return Request(id, index, prompt, make_params(index, given, defaults))


def make_params(index: int, given: dict[str, Any], defaults: Defaults) -> SamplingParams:
    """Raises ValueError for a value that cannot be."""
    if given.get("seed") in (None, -1):
        given = given | {"seed": seed_of(defaults.seed, index)}
    return SamplingParams(**(defaults.params | given))


def seed_of(seed: int, index: int) -> int:
    """The seed of a request without one: the same whether others before it are served in this run or were before.

    >>> seed_of(0, 5) == seed_of(0, 5) != seed_of(0, 6)
    True
    """
    return int.from_bytes(hashlib.blake2b(f"{seed},{index}".encode(), digest_size=8).digest()) >> 2  # 62 bits
