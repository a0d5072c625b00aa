"""The page at /, its files in /page/, and /events. It is the page of recorded runs: served, it asks for events."""

import re
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .event_stream import About, EventStream

MOST_VIEWERS = 64  # each costs the front what it is sent
FOLDER = Path(__file__).with_name("page")
Endpoint = Callable[[Request], Awaitable[Response]]
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",  # the empty icon
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes(can_prompt: bool) -> list[Route]:
    """One for each file: nothing else of the disk can be asked for. `can_prompt`: /v1/completions is there, too."""
    files = [route_of(path) for path in sorted(FOLDER.iterdir()) if path.suffix in (".css", ".js")]

    async def events(request: Request) -> EventStream:
        state = request.app.state.server
        if len(state.feed.viewers) >= MOST_VIEWERS:
            raise HTTPException(503, f"{MOST_VIEWERS} pages watch this server already, which is the most")
        return EventStream(state.feed, About(state.model.name, state.options.show_text, can_prompt))

    return [Route("/", answering(index(), "text/html")), *files, Route("/events", events, methods=["GET"])]


def index() -> str:
    """index.html, which names its files as they lie beside it."""
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    return re.sub(r'(src|href)="([\w.]+)"', r'\1="page/\2"', html)


def route_of(path: Path) -> Route:
    media_type = "text/css" if path.suffix == ".css" else "text/javascript"
    return Route(f"/page/{path.name}", answering(path.read_text(encoding="utf-8"), media_type))


def answering(text: str, media_type: str) -> Endpoint:
    async def answer(request: Request) -> Response:
        return Response(text, media_type=media_type, headers=HEADERS)

    return answer
