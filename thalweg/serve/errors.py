"""Errors in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}`` with an HTTP status."""

from __future__ import annotations

from typing import Any

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """What a client is told: ``message`` names the cure, ``param`` the field, ``code`` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the response."""
        error_type = _ERROR_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def overloaded(retry_after: int) -> ApiError:
    """Return the 429 of a full queue; ``retry_after`` is in seconds."""
    return ApiError(
        429,
        f"the queue is full: try again in {retry_after} s",
        code="overloaded",
        headers={"Retry-After": str(retry_after)},
    )


def unavailable(message: str, code: str = "unavailable", retry_after: int = 5) -> ApiError:
    """Return a 503: the fault is the server's, and passes."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after)})
