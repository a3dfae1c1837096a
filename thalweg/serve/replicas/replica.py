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

from thalweg.infer.types import EngineStats, ModelMetadata, Request
from thalweg.serve.replicas import ipc
from thalweg.serve.replicas.launcher import ReplicaHandle
from thalweg.utils.log import get_logger

_LOG = get_logger(__name__)
_MAX_SILENCE = 10.0  # seconds without a heartbeat after which a replica counts as stuck

OutputCallback = Callable[[Any], None]
"""Takes what comes for a request: a RequestOutput, a Refused, a list of rows, or Lost."""


class RequestRejected(ValueError):
    """The engine says why the request can never run."""


class ReplicaDied(Exception):
    """The replica ended before the request did."""


class Replica:
    """Messages out, outputs in; ``ended`` is set when the replica is dead."""

    def __init__(
        self,
        index: int,
        start_replica: Callable[[int], ReplicaHandle],
        executor: ThreadPoolExecutor | None = None,
    ) -> None:
        self.index = index
        self.state = "starting"
        self.model_info: ModelMetadata | None = None
        self.stats = EngineStats()
        self.reason = ""
        self.died = asyncio.Event()
        self._start_replica, self._executor = start_replica, executor
        self._handle: ReplicaHandle | None = None
        self._callbacks: dict[str, tuple[OutputCallback, int]] = {}
        self._num_outstanding = 0
        self._stalled_seconds = 0.0
        self._last_message_time = time.monotonic()
        self._writer: asyncio.StreamWriter | None = None
        self._read_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it and wait until it is ready; raises RuntimeError with the cause when it is not to be."""
        try:
            loop = asyncio.get_running_loop()
            handle: ReplicaHandle = await loop.run_in_executor(self._executor, self._start_replica, self.index)
            self._handle = handle
            handle.sock.setblocking(False)
            reader, self._writer = await asyncio.open_connection(sock=handle.sock)
        except OSError as error:
            self._mark_dead(f"cannot start a process: {error}")
            raise RuntimeError(self.reason) from error
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._read_task = asyncio.create_task(self._read_loop(reader, ready))
        await ready

    @property
    def num_outstanding(self) -> int:
        """Sequences that were handed over and have not ended."""
        return self._num_outstanding

    @property
    def stalled_seconds(self) -> float:
        """Seconds for which it has had work and made no progress."""
        silence = time.monotonic() - self._last_message_time
        if self.state != "ready" or silence < _MAX_SILENCE:
            return self._stalled_seconds
        return max(self._stalled_seconds, silence)

    def add(self, request: Request, callback: OutputCallback) -> None:
        """Hand over a request; its outputs go to ``sink``."""
        self._register(request.request_id, callback, request.params.n)
        self._send({"type": "add", "request": ipc.dump_request(request)})

    def embed(self, request_id: str, prompts: list[list[int]], callback: OutputCallback) -> None:
        """Ask for embeddings; one list of rows goes to ``sink``."""
        self._register(request_id, callback, len(prompts))
        self._send({"type": "embed", "id": request_id, "prompts": prompts})

    def abort(self, request_id: str) -> None:
        """Drop a request, if it still runs; nothing more goes to its sink."""
        if self._unregister(request_id) is not None and self.state == "ready":
            self._send({"type": "abort", "id": request_id})

    async def stop(self, grace: float = 2.0, final: bool = False) -> None:
        """End it; ``final``: the server ends, there will be no successor."""
        if final and self.state == "ready":
            self._send({"type": "stop", "final": True})
        self._mark_dead("stopped")
        if self._handle is not None:
            await asyncio.to_thread(self._handle.terminate, grace)
        if self._read_task is not None:
            await asyncio.gather(self._read_task, return_exceptions=True)

    def _register(self, request_id: str, callback: OutputCallback, num_sequences: int) -> None:
        assert request_id not in self._callbacks
        if self.state != "ready":
            raise ReplicaDied(self.reason)
        self._callbacks[request_id] = callback, num_sequences
        self._num_outstanding += num_sequences

    def _unregister(self, request_id: str) -> OutputCallback | None:
        callback, num_sequences = self._callbacks.pop(request_id, (None, 0))
        self._num_outstanding -= num_sequences
        return callback

    def _send(self, message: ipc.Message) -> None:
        assert self._writer is not None
        self._writer.write(ipc.encode_frame(message))

    async def _read_loop(self, reader: asyncio.StreamReader, ready: asyncio.Future[None]) -> None:
        try:
            while (message := await ipc.read_message(reader)) is not None:
                self._last_message_time = time.monotonic()
                kind = message["type"]
                if kind == "ready":
                    self.model_info, self.state = ipc.load_model_info(message["facts"]), "ready"
                    ready.set_result(None)
                elif kind == "fatal":
                    if message["traceback"]:
                        _LOG.error("replica %d: %s", self.index, message["traceback"].rstrip())
                    self._mark_dead(message["error"])
                else:
                    self._handle_message(kind, message)
            self._mark_dead(await self._describe_exit())
        except Exception as error:
            self._mark_dead(f"{type(error).__name__}: {error}")
            raise
        finally:
            if not ready.done():
                ready.set_exception(RuntimeError(self.reason))

    def _handle_message(self, kind: str, message: ipc.Message) -> None:
        if kind == "out":
            for fields in message["outputs"]:
                output = ipc.load_output(fields)
                entry = self._callbacks.get(output.request_id)
                if entry is not None:
                    entry[0](output)
                    if output.finished:
                        self._sequence_done(output.request_id)
        elif kind == "beat":
            self._stalled_seconds, self.stats = message["stuck"], ipc.load_stats(message["stats"])
        elif (callback := self._unregister(message["id"])) is not None:
            callback(RequestRejected(message["error"]) if kind == "refused" else message["rows"])

    def _sequence_done(self, request_id: str) -> None:
        """A sequence of the request ended; with the last one the request is forgotten."""
        callback, num_sequences = self._callbacks[request_id]
        self._num_outstanding -= 1
        if num_sequences == 1:
            del self._callbacks[request_id]
        else:
            self._callbacks[request_id] = callback, num_sequences - 1

    async def _describe_exit(self) -> str:
        """Say how the replica ended, once its socket has."""
        assert self._handle is not None
        for _ in range(50):
            code = self._handle.exit_code()
            if code is not None:
                how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                return f"{self._handle.name} {how}"
            await asyncio.sleep(0.02)
        return f"{self._handle.name} closed its socket"

    def _mark_dead(self, reason: str) -> None:
        if self.state == "dead":
            return
        self.state, self.reason = "dead", reason
        callbacks, self._callbacks, self._num_outstanding = self._callbacks, {}, 0
        for callback, _ in callbacks.values():
            callback(ReplicaDied(reason))
        if self._writer is not None:
            with contextlib.suppress(OSError, RuntimeError):
                self._writer.close()
        self.died.set()
