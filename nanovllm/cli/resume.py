"""What a file of results holds already, of a run that was interrupted."""

import json
from pathlib import Path
from typing import NamedTuple

from .ids import Ids


class Done(NamedTuple):
    ids: Ids
    num_bytes: int  # of whole lines; what comes after them is a line that was cut


def read_done(output: str, requests: Ids) -> Done:
    """Raises ValueError if what is there is no result of one of the requests."""
    done, num_bytes = Ids(), 0
    if not Path(output).exists():
        return Done(done, 0)
    with open(output, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                break
            id = id_of(line)
            if id is None:
                raise ValueError(f"{output}, line {number}: it is no result: remove the line, or use --overwrite")
            if id not in requests:
                raise ValueError(f"{output}, line {number}: there is no request {id!r}: it is another file's result")
            done.add(id)
            num_bytes += len(line)
    return Done(done, num_bytes)


def id_of(line: bytes) -> str | None:
    """The id of a result; None if the line is none.

    >>> id_of(b'{"id": "fox", "index": 0}'), id_of(b'{"id": "batch_req_0", "custom_id": "fox"}'), id_of(b'{"id": "f')
    ('fox', 'fox', None)
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    id = value.get("custom_id", value.get("id")) if isinstance(value, dict) else None
    return id if isinstance(id, str) else None
