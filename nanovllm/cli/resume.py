"""What a file of results holds already, of a run that was interrupted."""

import json
from pathlib import Path
from typing import NamedTuple

from .ids import Ids
from .requests_file import RequestsFile, prompt_key


class Done(NamedTuple):
    ids: Ids
    num_bytes: int  # of whole lines; what comes after them is a line that was cut


def read_done(output: str, requests: RequestsFile) -> Done:
    """Raises ValueError if what is there is no result of one of the requests, or a second one."""
    done, num_bytes = Ids(), 0
    if not Path(output).exists():
        return Done(done, 0)
    with open(output, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                done.add(id_of(line, requests))
            except ValueError as error:
                raise ValueError(f"{output}, line {number}: {error}") from None
            num_bytes += len(line)
    if done.repeated:
        raise ValueError(f"{output} has {len(done)} results, some of them of the same request: use --overwrite")
    return Done(done, num_bytes)


def id_of(line: bytes, requests: RequestsFile) -> str:
    """The id of a result. Raises ValueError if it is none of these requests'."""
    try:
        value = json.loads(line)
        id = value.get("custom_id", value.get("id"))
    except (ValueError, RecursionError, AttributeError):
        id = None
    if not isinstance(id, str):
        raise ValueError("it is no result: remove the line, or use --overwrite")
    if id not in requests.ids:
        raise ValueError(f"there is no request {id!r}: it is another file's result")
    if "prompt" in value and prompt_key(id, value["prompt"]) not in requests.prompts:
        raise ValueError(f"request {id!r} has another prompt: it is another file's result")
    return id
