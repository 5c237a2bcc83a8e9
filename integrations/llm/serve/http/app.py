"""The routes."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from hostring.integrations.llm.serve.http.chat import chat_reply
from hostring.integrations.llm.serve.http.cluster_view import cluster_view
from hostring.integrations.llm.serve.http.completions import completion_reply
from hostring.integrations.llm.serve.http.errors import RETRY_AFTER_S, ApiError, invalid, show
from hostring.integrations.llm.serve.http.guard import Guard
from hostring.integrations.llm.serve.http.metrics import Metrics
from hostring.integrations.llm.serve.http.page import PAGE_PATHS, page_routes
from hostring.integrations.llm.serve.http.replies import Reply
from hostring.integrations.llm.serve.http.service import Service

MAX_BODY_BYTES = 8 << 20


def make_app(service: Service) -> ASGIApp:
    """The ASGI application of a server."""
    handlers = {ApiError: show, HTTPException: _http_error, ClientDisconnect: _gone, Exception: _failed}
    routes = [*_api_routes(service), *_state_routes(service), *page_routes()]
    return Guard(Starlette(routes=routes, exception_handlers=handlers), service.options, PAGE_PATHS)


def _api_routes(service: Service) -> list[Route]:
    """What clients of OpenAI's API ask for."""

    def answering(start: Callable[[dict[str, Any], Service], Awaitable[Reply]]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Any:
            return await start(await _body(request), service)

        return endpoint

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(service)]})

    async def model(request: Request) -> Response:
        if (name := request.path_params["name"]) != service.options.model_name:
            raise ApiError(404, f"The model {name!r} does not exist", param="model", code="model_not_found")
        return JSONResponse(_model(service))

    return [
        Route("/v1/chat/completions", answering(chat_reply), methods=["POST"]),
        Route("/v1/completions", answering(completion_reply), methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
    ]


def _state_routes(service: Service) -> list[Route]:
    """How the server and its ranks are."""
    metrics = Metrics(service)

    async def metrics_page(request: Request) -> Response:
        return metrics.response()

    async def cluster(request: Request) -> Response:
        return JSONResponse(cluster_view(service))

    async def health(request: Request) -> Response:
        if why := service.scheduler.why_not:
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            return JSONResponse({"status": "unavailable", "reason": why}, 503, headers=headers)
        running, waiting = service.scheduler.in_flight
        return JSONResponse({"status": "ok", "running": running, "waiting": waiting})

    return [Route("/health", health), Route("/metrics", metrics_page), Route("/cluster", cluster)]


def _model(service: Service) -> dict[str, Any]:
    context = service.scheduler.max_seq
    name = service.options.model_name
    return {"id": name, "object": "model", "created": service.started, "owned_by": "hostring", "max_model_len": context}


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object that a request brings.

    Raises:
        ApiError: it is too large, or no JSON object.
    """
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="request_too_large")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise invalid(None, f"We could not parse the JSON body of your request: {exc}", "invalid_json") from exc
    if not isinstance(found, dict):
        raise invalid(None, "the body is no JSON object", "invalid_json")
    return found


async def _http_error(request: Request, exc: Exception) -> Response:
    """Starlette's own errors: no such route, no such method."""
    assert isinstance(exc, HTTPException)
    error = ApiError(exc.status_code, f"{exc.detail}: {request.method} {request.url.path}", code="unknown_url")
    response = error.response()
    response.headers.update(exc.headers or {})
    return response


async def _gone(request: Request, exc: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


async def _failed(request: Request, exc: Exception) -> Response:
    """A fault of this program. Its traceback is in the log."""
    return ApiError(500, "the server made a mistake; its log says more", code="internal_error").response()
