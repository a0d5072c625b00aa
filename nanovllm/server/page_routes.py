"""The page at /, its files, and /events. It is the one that plays recorded runs: served, it asks for events."""

from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .event_stream import About, EventStream

MOST_VIEWERS = 64  # each costs the front what it is sent
FOLDER = Path(__file__).with_name("page")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
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
    files = [route_of(path) for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES]

    async def events(request: Request) -> EventStream:
        state = request.app.state.server
        if len(state.feed.viewers) >= MOST_VIEWERS:
            raise HTTPException(503, f"{MOST_VIEWERS} pages watch this server already, which is the most")
        return EventStream(state.feed, About(state.model.name, state.options.show_text, can_prompt))

    return [*files, Route("/events", events, methods=["GET"])]


def route_of(path: Path) -> Route:
    body, media_type = path.read_bytes(), TYPES[path.suffix]

    async def answer(request: Request) -> Response:
        return Response(body, media_type=media_type, headers=HEADERS)

    return Route("/" if path.name == "index.html" else f"/{path.name}", answer, methods=["GET"])
