"""The page at /, and its files. It is the one that plays recorded runs: served, it asks for /events."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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


def page_routes() -> list[Route]:
    """One for each file: nothing else of the folder's disk can be asked for."""
    return [route_of(path) for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES]


def route_of(path: Path) -> Route:
    body, media_type = path.read_bytes(), TYPES[path.suffix]

    async def answer(request: Request) -> Response:
        return Response(body, media_type=media_type, headers=HEADERS)

    return Route("/" if path.name == "index.html" else f"/{path.name}", answer, methods=["GET"])
