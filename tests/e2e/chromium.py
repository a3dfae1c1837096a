"""Headless Chromium over its debugging pipe: two descriptors and JSON, no further package."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """One page; ``events`` collects what the browser told without being asked."""

    def __init__(self, read: int, write: int) -> None:
        self._reader, self._writer = os.fdopen(read, "rb"), os.fdopen(write, "wb", buffering=0)
        self._buffer, self._num_calls, self._session = b"", 0, None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Send a command and return its result."""
        self._num_calls += 1
        message = {"id": self._num_calls, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._writer.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._num_calls:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._reader.fileno(), 65536)
            assert data, "the browser ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def evaluate(self, script: str) -> Any:
        """Evaluate JavaScript and return its value."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_until(self, script: str, seconds: float = 20.0) -> Any:
        """Evaluate until the value is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            assert time.monotonic() < deadline, (
                f"{script} did not come about: {self.evaluate('document.body.innerText')}"
            )
            time.sleep(0.02)
        return value

    def close(self) -> None:
        """Close the pipe; the browser ends."""
        self._writer.close()
        self._reader.close()


@contextlib.contextmanager
def open_browser(folder: Path) -> Iterator[Page]:
    """A browser with a new profile in ``folder``."""
    assert CHROMIUM is not None
    their_read, our_write = os.pipe()
    our_read, their_write = os.pipe()
    # The browser wants descriptors 3 and 4; a shell puts them there.
    command = f'exec "$0" "$@" 3<&{their_read} 4>&{their_write}'
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += [f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe", "about:blank"]
    process = subprocess.Popen(
        ["bash", "-c", command, CHROMIUM, *options],
        pass_fds=(their_read, their_write),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},
    )
    os.close(their_read)
    os.close(their_write)
    page = None
    try:
        page = Page(our_read, our_write)
        yield page
    finally:
        if page is not None:
            with contextlib.suppress(AssertionError, OSError):
                page.call("Browser.close")
            page.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
