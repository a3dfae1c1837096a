"""Errors in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``.

What several places raise or catch has a class, with its HTTP status.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """What a client is told: ``message`` names the cure, ``param`` the field, ``code`` is for programs.

    ``status`` is the class's own unless one is given.
    """

    status: int = 500
    code: str | None = None
    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self, message: str, param: str | None = None, *, code: str | None = None, status: int | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.param = message, param
        self.code = code or self.code
        self.status = status or self.status

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the response."""
        error_type = _ERROR_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}}


class BadRequest(ApiError):
    """The client's mistake."""

    status = 400


class ContextLengthExceeded(BadRequest):
    """Prompt and answer do not fit into the model's length."""

    code = "context_length_exceeded"


class InvalidApiKey(ApiError):
    """No key, or none of ours."""

    status, code = 401, "invalid_api_key"
    headers = MappingProxyType({"WWW-Authenticate": "Bearer"})


class NotFound(ApiError):
    """No such path, model or deployment."""

    status = 404


class RequestTimeout(ApiError):
    """Headers or body did not arrive in time."""

    status, code = 408, "timeout"


class _RetryLater(ApiError):
    """Passes: ``retry_after`` seconds from now it may be better."""

    def __init__(self, message: str, *, retry_after: int = 5) -> None:
        super().__init__(message)
        self.headers = {"Retry-After": str(retry_after)}


class Overloaded(_RetryLater):
    """The queue is full."""

    status, code = 429, "overloaded"

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the queue is full: try again in {retry_after} s", retry_after=retry_after)


class Unavailable(_RetryLater):
    """The fault is the server's, and passes."""

    status, code = 503, "unavailable"


class Unhealthy(Unavailable):
    """What ``/health`` answers while no request would be served."""

    code = "unhealthy"


class ShuttingDown(Unavailable):
    """The server ends."""

    code = "shutting_down"


class ReplicaLost(Unavailable):
    """The replica ended before the request did; ``reason`` says how."""

    code = "lost"

    def __init__(self, reason: str) -> None:
        super().__init__(f"the replica that worked on this request was lost ({reason}): try again", retry_after=1)


class DeadlineExceeded(ApiError):
    """The request took longer than it may."""

    status, code = 504, "timeout"

    def __init__(self) -> None:
        super().__init__("the request took longer than this server allows: ask for fewer tokens")
