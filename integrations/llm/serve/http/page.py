"""The page: static files of this package, with rules that keep it from asking any other host."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parents[1] / "page"
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_FILES = {
    "/" if file.name == "index.html" else f"/{file.name}": file for file in _FOLDER.iterdir() if file.suffix in _KINDS
}
PAGE_PATHS = tuple(_FILES)
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """A route for each file."""

    async def page(request: Request) -> Response:
        file = _FILES[request.url.path]
        return Response(file.read_bytes(), headers=_HEADERS, media_type=_KINDS[file.suffix])

    return [Route(path, page) for path in PAGE_PATHS]
