"""A small client for our own programs: a JSON object to a server, and what it answers or streams."""

import contextlib
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any

from thalweg.serve.errors import ApiError
from thalweg.utils.env import is_loopback


def is_local(url: str) -> bool:
    """Whether an address leads to this host."""
    return is_loopback(urllib.parse.urlsplit(url).hostname or "")


def post_json(url: str, body: dict[str, Any], api_key: str | None = None) -> http.client.HTTPResponse:
    """Send ``body``; raises :class:`ApiError` with the server's own words, ConnectionError without any."""
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    # A proxy for the outside, which many environments have, does not lead to this host.
    opener = urllib.request.build_opener(*[urllib.request.ProxyHandler({})] * is_local(url))
    try:
        return opener.open(request)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        message, code = text[:500], None
        with contextlib.suppress(ValueError, KeyError, TypeError):
            detail = json.loads(text)["error"]
            message, code = detail["message"], detail["code"]
        raise ApiError(message, code=code, status=error.code) from None
    except urllib.error.URLError as error:
        raise ConnectionError(f"{url} does not answer ({error.reason}): is it serving?") from None


def iter_sse(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a stream; raises :class:`ApiError` or ConnectionError where it breaks off."""
    with contextlib.suppress(http.client.HTTPException, OSError):
        for line in lines:
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            if data:
                try:
                    event = json.loads(data)
                except ValueError:  # half a line
                    break
                if "error" in event:
                    raise ApiError(event["error"]["message"])
                yield event
    raise ConnectionError("the server went away in the middle of its answer")
