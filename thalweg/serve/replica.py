"""One replica as the front sees it: what it is doing, who waits for it, and how it ends.

States: ``starting`` (the engine loads), ``ready``, ``dead``.  A replica lives once; its successor is a new
object.  Everything here runs on the front's event loop; only starting and ending a process leave it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from thalweg.infer.api import EngineStats, ModelFacts, Request
from thalweg.serve import wire
from thalweg.serve.spawn import Running
from thalweg.utils.log import get_logger

_LOG = get_logger(__name__)
_SILENCE = 10.0  # seconds without a heartbeat after which a replica counts as stuck

Sink = Callable[[Any], None]
"""Takes what comes for a request: a RequestOutput, a Refused, a list of rows, or Lost."""


class Refused(ValueError):
    """The engine says why the request can never run."""


class Lost(Exception):
    """The replica ended before the request did."""


class Replica:
    """Messages out, outputs in; ``ended`` is set when the replica is dead."""

    def __init__(
        self, index: int, start: Callable[[int], Running], threads: ThreadPoolExecutor | None = None
    ) -> None:
        self.index = index
        self.state = "starting"
        self.facts: ModelFacts | None = None
        self.stats = EngineStats()
        self.reason = ""
        self.ended = asyncio.Event()
        self._start, self._threads = start, threads
        self._running: Running | None = None
        self._waiting: dict[str, tuple[Sink, int]] = {}
        self._weight = 0
        self._stuck = 0.0
        self._heard = time.monotonic()
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it and wait until it is ready; raises RuntimeError with the cause when it is not to be."""
        try:
            loop = asyncio.get_running_loop()
            running: Running = await loop.run_in_executor(self._threads, self._start, self.index)
            self._running = running
            running.sock.setblocking(False)
            reader, self._writer = await asyncio.open_connection(sock=running.sock)
        except OSError as error:
            self._end(f"cannot start a process: {error}")
            raise RuntimeError(self.reason) from error
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listener = asyncio.create_task(self._listen(reader, ready))
        await ready

    @property
    def outstanding(self) -> int:
        """Sequences that were handed over and have not ended."""
        return self._weight

    @property
    def stuck(self) -> float:
        """Seconds for which it has had work and made no progress."""
        silent = time.monotonic() - self._heard
        if self.state != "ready" or silent < _SILENCE:
            return self._stuck
        return max(self._stuck, silent)

    def add(self, request: Request, sink: Sink) -> None:
        """Hand over a request; its outputs go to ``sink``."""
        self._expect(request.request_id, sink, request.params.n)
        self._send({"type": "add", "request": wire.dump_request(request)})

    def embed(self, name: str, prompts: list[list[int]], sink: Sink) -> None:
        """Ask for embeddings; one list of rows goes to ``sink``."""
        self._expect(name, sink, len(prompts))
        self._send({"type": "embed", "id": name, "prompts": prompts})

    def abort(self, name: str) -> None:
        """Drop a request, if it still runs; nothing more goes to its sink."""
        if self._forget(name) is not None and self.state == "ready":
            self._send({"type": "abort", "id": name})

    async def stop(self, grace: float = 2.0, final: bool = False) -> None:
        """End it; ``final``: the server ends, there will be no successor."""
        if final and self.state == "ready":
            self._send({"type": "stop", "final": True})
        self._end("stopped")
        if self._running is not None:
            await asyncio.to_thread(self._running.terminate, grace)
        if self._listener is not None:
            await asyncio.gather(self._listener, return_exceptions=True)

    def _expect(self, name: str, sink: Sink, weight: int) -> None:
        assert name not in self._waiting
        if self.state != "ready":
            raise Lost(self.reason)
        self._waiting[name] = sink, weight
        self._weight += weight

    def _forget(self, name: str) -> Sink | None:
        sink, weight = self._waiting.pop(name, (None, 0))
        self._weight -= weight
        return sink

    def _send(self, message: wire.Message) -> None:
        assert self._writer is not None
        self._writer.write(wire.pack(message))

    async def _listen(self, reader: asyncio.StreamReader, ready: asyncio.Future[None]) -> None:
        try:
            while (message := await wire.read_message(reader)) is not None:
                self._heard = time.monotonic()
                kind = message["type"]
                if kind == "ready":
                    self.facts, self.state = wire.load_facts(message["facts"]), "ready"
                    ready.set_result(None)
                elif kind == "fatal":
                    if message["traceback"]:
                        _LOG.error("replica %d: %s", self.index, message["traceback"].rstrip())
                    self._end(message["error"])
                else:
                    self._deliver(kind, message)
            self._end(await self._cause())
        except Exception as error:
            self._end(f"{type(error).__name__}: {error}")
            raise
        finally:
            if not ready.done():
                ready.set_exception(RuntimeError(self.reason))

    def _deliver(self, kind: str, message: wire.Message) -> None:
        if kind == "out":
            for fields in message["outputs"]:
                output = wire.load_output(fields)
                entry = self._waiting.get(output.request_id)
                if entry is not None:
                    entry[0](output)
                    if output.finished:
                        self._one_less(output.request_id)
        elif kind == "beat":
            self._stuck, self.stats = message["stuck"], wire.load_stats(message["stats"])
        elif (sink := self._forget(message["id"])) is not None:
            sink(Refused(message["error"]) if kind == "refused" else message["rows"])

    def _one_less(self, name: str) -> None:
        """A sequence of the request ended; with the last one the request is forgotten."""
        sink, weight = self._waiting[name]
        self._weight -= 1
        if weight == 1:
            del self._waiting[name]
        else:
            self._waiting[name] = sink, weight - 1

    async def _cause(self) -> str:
        """Say how the replica ended, once its socket has."""
        assert self._running is not None
        for _ in range(50):
            code = self._running.exit_code()
            if code is not None:
                how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                return f"{self._running.name} {how}"
            await asyncio.sleep(0.02)
        return f"{self._running.name} closed its socket"

    def _end(self, reason: str) -> None:
        if self.state == "dead":
            return
        self.state, self.reason = "dead", reason
        waiting, self._waiting, self._weight = self._waiting, {}, 0
        for sink, _ in waiting.values():
            sink(Lost(reason))
        if self._writer is not None:
            with contextlib.suppress(OSError, RuntimeError):
                self._writer.close()
        self.ended.set()
