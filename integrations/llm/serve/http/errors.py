"""What clients are told when a request can't be answered, in the form that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
RETRY_AFTER_S = 2  # what a client is told to wait where trying again helps


class ApiError(Exception):
    """A request is refused, or fails.

    Attributes:
        status: of HTTP. param: the field that is to blame. code: for programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def as_dict(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.as_dict(), self.status, headers=headers)


def invalid(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """A field of the request is wrong."""
    return ApiError(400, message, param=param, code=code)


async def show(request: Request, exc: Exception) -> Response:
    """Starlette's exception handler for `ApiError`."""
    assert isinstance(exc, ApiError)
    return exc.response()
