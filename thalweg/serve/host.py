"""The engine's side of the socket: one thread owns the engine, two stand beside it.

The engine thread takes what has arrived, runs one step, sends what came out, and sleeps when there is
nothing to do.  The reader thread moves messages from the socket into a queue and notices when the front is
gone.  The heartbeat thread reports, several times a second, how long ago the engine last came back from a
step: it is the one that still speaks when a step hangs, so the front can tell "slow" from "stuck".

A request that needs preparing (a large grammar takes seconds) goes through a thread for that first, while the
engine works for the others.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from thalweg.infer.api import EngineCore, EngineStats, Request
from thalweg.serve import wire

BEAT = 0.2  # seconds between heartbeats
SERVER_ENDED = 75
"""Exit code of a replica whose server ended for good: nobody will want another one."""


class Host:
    """Runs an engine behind a socket until the other side is gone, says stop, or the engine breaks.

    ``load`` makes the engine, in the thread that calls :meth:`run`.  ``lost`` is called from the reader
    thread when the front is gone.
    """

    def __init__(
        self, sock: socket.socket, load: Callable[[], EngineCore], lost: Callable[[], None] = lambda: None
    ) -> None:
        self._sock, self._load, self._lost = sock, load, lost
        self._inbox: queue.SimpleQueue[wire.Message] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._done = threading.Event()
        self._stats = EngineStats()
        self._engine: EngineCore | None = None
        self._returned: float | None = None  # when the engine last came back, None while it loads
        self._busy = False
        self._preparing: set[str] = set()
        self._preparer = ThreadPoolExecutor(2, "thalweg-serve-prepare")

    def run(self) -> int:
        """Work until the end; returns the exit code, 1 when the engine could not be made or broke."""
        for target in (self._read, self._beat):
            threading.Thread(target=target, daemon=True, name=f"thalweg-serve{target.__name__}").start()
        engine = None
        try:
            engine = self._engine = self._load()
            self._note(engine)
            self._send({"type": "ready", "facts": wire.dump_facts(engine.facts)})
            self._loop(engine)
        except _Stopped as stopped:
            return stopped.code
        except Exception as error:
            # One that says what is wrong with the model needs no traceback; a defect of ours does.
            known = isinstance(error, (ValueError, OSError, ImportError, RuntimeError, MemoryError))
            told = known and self._engine is None and bool(str(error))
            text = str(error) if told else f"{type(error).__name__}: {error}".removesuffix(": ")
            shown = "" if told and not os.environ.get("THALWEG_TRACEBACK") else traceback.format_exc()
            self._send({"type": "fatal", "error": text, "traceback": shown})
            return 1
        finally:
            self._done.set()
            self._preparer.shutdown(wait=False, cancel_futures=True)
            if engine is not None:
                engine.close()
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes the reader and tells the front
            self._sock.close()
        return 0

    def _loop(self, engine: EngineCore) -> None:
        while True:
            self._take(engine)
            outputs = engine.step()
            self._note(engine)
            if outputs:
                self._send({"type": "out", "outputs": [wire.dump_output(output) for output in outputs]})
            if not engine.has_work():
                self._send(self._report())  # gauges are right at once when the last request ended

    def _take(self, engine: EngineCore) -> None:
        """Hand over what has arrived; sleep while the engine has nothing to do."""
        while not engine.has_work() or not self._inbox.empty():
            self._busy = engine.has_work()
            message = self._inbox.get()
            if message["type"] == "stop":
                raise _Stopped(SERVER_ENDED if message.get("final") else 0)
            if message["type"] == "lost":
                raise RuntimeError(message["error"])
            if not self._busy:
                self._returned = time.monotonic()
            self._busy = True
            self._handle(engine, message)
            self._note(engine)
            if message["type"] == "abort" and not engine.has_work():
                self._send(self._report())
        self._busy = True

    def _handle(self, engine: EngineCore, message: wire.Message) -> None:
        kind, name = message["type"], message.get("id", "")
        if kind == "abort":
            self._preparing.discard(name)
            engine.abort(name)
            return
        try:
            if kind == "add":
                name = message["request"]["request_id"]
                self._add(engine, wire.load_request(message["request"]))
            elif kind == "prepared":
                if name in self._preparing:
                    self._preparing.remove(name)
                    if error := message.get("error"):
                        raise error
                    engine.add(message["request"])
            elif kind == "embed":
                rows: Any = engine.embed(message["prompts"])
                self._send({"type": "embedded", "id": name, "rows": rows.tolist()})
        except (ValueError, TypeError, OverflowError) as error:
            self._send({"type": "refused", "id": name, "error": str(error)})

    def _add(self, engine: EngineCore, request: Request) -> None:
        find: Any = getattr(engine, "preparation", None)
        work: Callable[[], object] | None = None if find is None else find(request)
        if work is None:
            engine.add(request)
            return
        self._preparing.add(request.request_id)
        self._preparer.submit(self._prepare, work, request)

    def _prepare(self, work: Callable[[], object], request: Request) -> None:
        message: wire.Message = {"type": "prepared", "id": request.request_id, "request": request}
        try:
            if request.request_id in self._preparing:  # else the client has left
                work()
        except BaseException as error:  # a panic of compiled code is no Exception
            wrong = isinstance(error, Exception)
            message["error"] = error if wrong else ValueError(f"the request broke its preparation: {error}")
        self._inbox.put(message)

    def _note(self, engine: EngineCore) -> None:
        self._stats = engine.stats()
        self._busy = engine.has_work()
        self._returned = time.monotonic()

    def _report(self) -> wire.Message:
        stuck = time.monotonic() - self._returned if self._busy and self._returned is not None else 0.0
        return {
            "type": "beat",
            "loading": self._returned is None,
            "stuck": stuck,
            "stats": wire.dump_stats(self._stats),
        }

    def _send(self, message: wire.Message) -> None:
        data = wire.pack(message)
        with self._sending, contextlib.suppress(OSError):  # the reader learns that the front is gone
            self._sock.sendall(data)

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for message in wire.read_messages(self._sock):
                self._inbox.put(message)
        self._inbox.put({"type": "stop"})
        if not self._done.is_set():
            self._lost()

    def _beat(self) -> None:
        while not self._done.wait(BEAT):
            self._send(self._report())
            if lost := getattr(self._engine, "lost", ""):  # while it has nothing to do, nobody else would see
                self._inbox.put({"type": "lost", "error": lost})
                return


class _Stopped(Exception):
    """The front said stop, or is gone."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
