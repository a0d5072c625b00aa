"""Answers of what stands before the application."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.types import Send


async def send_json(send: Send, status: int, value: Any, headers: Mapping[str, str] | None = None) -> None:
    body = json.dumps(value).encode()
    told = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    encoded = [(name.lower().encode("latin-1"), each.encode("latin-1")) for name, each in told.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
