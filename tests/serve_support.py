"""A server in a thread of the test, with the toy engine, and small clients for it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from tests.toy_engine import ToyTokenizer
from thalweg.infer.types import EngineCore
from thalweg.serve.engine_process import EngineLoop
from thalweg.serve.openai.requests import ChatTokenizer
from thalweg.serve.replicas.launcher import EngineSpec, ProcessLauncher
from thalweg.serve.server import ServeOptions, serve, serve_router


class ThreadLauncher:
    """Starts replicas as threads of this process, each with an engine that ``load_engine`` makes."""

    def __init__(self, load_engine: Callable[[], EngineCore]) -> None:
        self._load_engine = load_engine

    def __call__(self, index: int) -> Any:
        """Start replica ``index``."""
        return _ReplicaThread(self._load_engine, index)


class _ReplicaThread:
    def __init__(self, load_engine: Callable[[], EngineCore], index: int) -> None:
        self.sock, child_sock = socket.socketpair()
        self.name = f"thread {index}"
        self._exit_code: int | None = None
        self._engine_loop = EngineLoop(child_sock, load_engine)
        self._thread = threading.Thread(target=self._run, name=f"thalweg-engine-{index}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._exit_code = self._engine_loop.run()

    def exit_code(self) -> int | None:
        return self._exit_code

    def terminate(self, grace: float) -> None:
        self._thread.join(grace)  # a thread cannot be killed; as a daemon it does not hold the exit


class ServerThread:
    """A running server: ``port``, the engines made so far (in threads only), and how to stop it."""

    def __init__(self) -> None:
        self.engines: list[Any] = []
        self.port = 0
        self.error: BaseException | None = None
        self.started = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.stop_event: asyncio.Event | None = None
        self.thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self, wait: bool = True) -> None:
        """Begin to drain; with ``wait``, until the server has ended."""
        assert self.loop is not None and self.stop_event is not None and self.thread is not None
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.stop_event.set)
        if wait:
            self.thread.join(30)
            assert not self.thread.is_alive()

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """One request on a connection of its own; JSON both ways."""
        status, _, data = self.request_raw(method, path, None if body is None else json.dumps(body).encode(), **headers)
        return status, data

    def request_raw(self, method: str, path: str, body: bytes | None, **headers: str) -> tuple[int, Any, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            content_headers = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(
                method, path, body, content_headers | {k.replace("_", "-"): v for k, v in headers.items()}
            )
            response = connection.getresponse()
            data = response.read()
            kind = response.headers.get("content-type", "")
            return (
                response.status,
                response.headers,
                json.loads(data) if data and "json" in kind else data.decode(),
            )
        finally:
            connection.close()

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        return self.request("POST", path, body)

    def create_completion(self, prompt: Any, **body: Any) -> Any:
        status, answer = self.post("/v1/completions", prompt=prompt, **body)
        assert status == 200, answer
        return answer

    def stream(self, path: str, **body: Any) -> list[Any]:
        """All events of a stream, parsed; the last one is ``[DONE]``."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            data = json.dumps({**body, "stream": True}).encode()
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            text = response.read().decode()
            assert text.endswith("\n\n")
            events = [line.removeprefix("data: ") for line in text.split("\n\n")[:-1]]
            return [event if event == "[DONE]" else json.loads(event) for event in events]
        finally:
            connection.close()

    def wait_idle(self, seconds: float = 10.0) -> None:
        """Until no engine holds a KV block or has work."""
        deadline = time.monotonic() + seconds
        while any(e.stats().kv_blocks_used or e.has_work() for e in self.engines):
            assert time.monotonic() < deadline, [(e.used, len(e.running), len(e.waiting)) for e in self.engines]
            time.sleep(0.01)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for it, or fail."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.005)


@contextlib.contextmanager
def run_toy_server(
    model: str = "toy",
    *,
    processes: bool = False,
    make_tokenizer: Callable[[], ChatTokenizer] | None = None,
    **options: Any,
) -> Iterator[ServerThread]:
    """A server with toy engines in threads, or in processes."""
    task = EngineSpec(model, loader="tests.toy_engine:load_engine")
    start_replica = ProcessLauncher(task) if processes else None
    with run_server(
        task.load, make_tokenizer or (lambda: ChatTokenizer(ToyTokenizer())), start_replica, **options
    ) as server:
        yield server


@contextlib.contextmanager
def run_server(
    load_engine: Callable[[], Any],
    make_tokenizer: Callable[[], ChatTokenizer],
    start_replica: Any = None,
    **options: Any,
) -> Iterator[ServerThread]:
    """A server whose replicas are threads with an engine that ``load_engine`` makes, or come from ``start_replica``."""
    server = ServerThread()

    def load_and_record() -> Any:
        server.engines.append(load_engine())
        return server.engines[-1]

    def main(on_ready: Callable[[str], None], stop_event: asyncio.Event) -> Awaitable[None]:
        launcher = start_replica or ThreadLauncher(load_and_record)
        return serve(ServeOptions("toy", port=0, **options), launcher, make_tokenizer, on_ready, stop_event)

    with _running(server, main):
        yield server


@contextlib.contextmanager
def run_router(urls: Sequence[str], key: str | None = None, **options: Any) -> Iterator[ServerThread]:
    """A server that forwards to those at ``urls``."""
    server = ServerThread()

    def main(on_ready: Callable[[str], None], stop_event: asyncio.Event) -> Awaitable[None]:
        return serve_router(ServeOptions("toy", port=0, **options), urls, key, on_ready, stop_event)

    with _running(server, main):
        yield server


@contextlib.contextmanager
def _running(
    server: ServerThread, main: Callable[[Callable[[str], None], asyncio.Event], Awaitable[None]]
) -> Iterator[None]:
    def on_ready(url: str) -> None:
        server.port = int(url.rpartition(":")[2])
        server.started.set()

    async def serve_until_stopped() -> None:
        server.loop, server.stop_event = asyncio.get_running_loop(), asyncio.Event()
        await main(on_ready, server.stop_event)

    def run() -> None:
        try:
            asyncio.run(serve_until_stopped())
        except BaseException as error:
            server.error = error
        finally:
            server.started.set()

    server.thread = threading.Thread(target=run, daemon=True)
    server.thread.start()
    server.started.wait(60)
    if server.error is not None:
        raise server.error
    try:
        yield
    finally:
        server.stop()
    if server.error is not None:
        raise server.error
