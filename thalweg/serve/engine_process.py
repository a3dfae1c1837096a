"""The engine's side of the socket: one thread owns the engine, two stand beside it; and what passes between.

The engine thread takes what has arrived, runs one step, sends what came out, and sleeps when there is
nothing to do.  The reader thread moves messages from the socket into a queue and notices when the server is
gone.  The heartbeat thread reports, several times a second, for how long the engine has been in a step:
it is the one that still speaks when a step hangs, so the server can tell "slow" from "stuck".

A request that needs preparing (a large grammar takes seconds) goes through a thread for that first, while the
engine works for the others.

Messages are JSON objects, one a line.  Server to replica: ``add`` (a request), ``abort``,
``embed``.  Replica to server: ``ready`` (with the model's metadata), ``out`` (the outputs of one step), ``refused`` (a
request that can never run), ``embedded``, ``beat`` (progress and gauges), ``fatal`` (why the engine died).  Fields that
hold their default are left out; numbers may be infinite, as Python's JSON writes them.
"""

import asyncio
import contextlib
import json
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from pydantic import TypeAdapter

from thalweg.infer.types import EngineCore, EngineStats, ModelMetadata, Request, RequestOutput

HEARTBEAT_SECONDS = 0.2  # seconds between heartbeats
Message = dict[str, Any]

MAX_LINE_BYTES = 256 * 2**20  # bytes of a message; embeddings of a full batch stay far below it


class EngineLoop:
    """Runs an engine behind a socket until the other side is gone, says stop, or the engine breaks.

    ``load_engine`` makes the engine, in the thread that calls :meth:`run`.  ``on_disconnect`` is called from the
    reader thread when the server is gone.
    """

    def __init__(
        self,
        sock: socket.socket,
        load_engine: Callable[[], EngineCore],
        on_disconnect: Callable[[], None] = lambda: None,
    ) -> None:
        self._sock, self._load_engine, self._on_disconnect = sock, load_engine, on_disconnect
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._send_lock = threading.Lock()
        self._done = threading.Event()
        self._stats = EngineStats()
        self._engine: EngineCore | None = None
        self._entered: float | None = None  # when the engine was last called, None since it came back
        self._preparing_ids: set[str] = set()
        self._aborted_ids: set[str] = set()  # whose abort is still in the inbox
        self._prepare_executor = ThreadPoolExecutor(2, "thalweg-serve-prepare")

    def run(self) -> int:
        """Work until the end; returns the exit code, 1 when the engine could not be made or broke."""
        for target in (self._read_loop, self._heartbeat_loop):
            threading.Thread(target=target, daemon=True, name=f"thalweg-serve{target.__name__}").start()
        try:
            engine = self._engine = self._load_engine()
            self._record_return(engine)
            self._send({"type": "ready", "model": asdict(engine.metadata)})
            self._run_engine(engine)
        except Exception as error:
            # One that says what is wrong with the model needs no traceback; a defect of ours does.
            known = isinstance(error, (ValueError, OSError, ImportError, RuntimeError, MemoryError))
            is_user_error = known and self._engine is None and bool(str(error))
            text = str(error) if is_user_error else f"{type(error).__name__}: {error}".removesuffix(": ")
            traceback_text = "" if is_user_error and not os.environ.get("THALWEG_TRACEBACK") else traceback.format_exc()
            self._send({"type": "fatal", "error": text, "traceback": traceback_text})
            return 1
        finally:
            self._done.set()
            self._prepare_executor.shutdown(wait=False, cancel_futures=True)
            if self._engine is not None:
                self._engine.close()
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes the reader and tells the server
            self._sock.close()
        return 0

    def _run_engine(self, engine: EngineCore) -> None:
        while self._drain_inbox(engine):
            self._entered = time.monotonic()
            outputs = engine.step()
            self._record_return(engine)
            if outputs:
                self._send({"type": "out", "outputs": OUTPUTS.dump_python(outputs, exclude_defaults=True)})
            if not engine.has_work():
                self._send(self._heartbeat_message())  # gauges are right at once when the last request ended

    def _drain_inbox(self, engine: EngineCore) -> bool:
        """Hand over what has arrived; sleep while the engine has nothing to do.  Whether the server is still there."""
        while not engine.has_work() or not self._inbox.empty():
            message = self._inbox.get()
            if message["type"] == "stop":
                return False
            if message["type"] == "lost":
                raise RuntimeError(message["error"])
            self._entered = time.monotonic()
            self._handle_message(engine, message)
            self._record_return(engine)
            if message["type"] == "abort" and not engine.has_work():
                self._send(self._heartbeat_message())
        return True

    def _handle_message(self, engine: EngineCore, message: Message) -> None:
        kind, request_id = message["type"], message.get("id", "")
        if kind == "abort":
            self._preparing_ids.discard(request_id)
            self._aborted_ids.discard(request_id)
            engine.abort(request_id)
            return
        try:
            if kind == "add":
                request_id = message["request"]["request_id"]
                self._add_request(engine, load_request(message["request"]))
            elif kind == "prepared":
                if request_id in self._preparing_ids:
                    self._preparing_ids.remove(request_id)
                    if error := message.get("error"):
                        raise error
                    engine.add(message["request"])
            elif kind == "embed" and request_id not in self._aborted_ids:  # else it would be work for nobody
                rows: Any = engine.embed(message["prompts"])
                self._send({"type": "embedded", "id": request_id, "rows": rows.tolist()})
        except (ValueError, TypeError, OverflowError, IndexError) as error:
            self._send({"type": "refused", "id": request_id, "error": str(error)})

    def _add_request(self, engine: EngineCore, request: Request) -> None:
        get_preparation: Any = getattr(engine, "get_prepare_fn", None)
        preparation: Callable[[], object] | None = None if get_preparation is None else get_preparation(request)
        if preparation is None:
            engine.add(request)
            return
        self._preparing_ids.add(request.request_id)
        self._prepare_executor.submit(self._prepare, preparation, request)

    def _prepare(self, preparation: Callable[[], object], request: Request) -> None:
        message: Message = {"type": "prepared", "id": request.request_id, "request": request}
        try:
            if request.request_id in self._preparing_ids:  # else the client has left
                preparation()
        except BaseException as error:  # a panic of compiled code is no Exception
            is_exception = isinstance(error, Exception)
            message["error"] = error if is_exception else ValueError(f"the request broke its preparation: {error}")
        self._inbox.put(message)

    def _record_return(self, engine: EngineCore) -> None:
        self._stats, self._entered = engine.stats(), None

    def _heartbeat_message(self) -> Message:
        entered = self._entered
        stalled_seconds = 0.0 if entered is None else time.monotonic() - entered
        return {"type": "beat", "stuck": stalled_seconds, "stats": asdict(self._stats)}

    def _send(self, message: Message) -> None:
        data = encode_message(message)
        with self._send_lock, contextlib.suppress(OSError):  # the reader learns that the server is gone
            self._sock.sendall(data)

    def _read_loop(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._sock.makefile("rb") as file:
            while line := file.readline(MAX_LINE_BYTES):
                message = json.loads(line)
                if message["type"] == "abort":
                    self._aborted_ids.add(message["id"])
                self._inbox.put(message)
        self._inbox.put({"type": "stop"})
        if not self._done.is_set():
            self._on_disconnect()

    def _heartbeat_loop(self) -> None:
        while not self._done.wait(HEARTBEAT_SECONDS):
            self._send(self._heartbeat_message())
            if failure := getattr(self._engine, "failure", ""):  # while it has nothing to do, nobody else would see
                self._inbox.put({"type": "lost", "error": failure})
                return


def encode_message(message: Message) -> bytes:
    """Return a message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


async def read_message(reader: asyncio.StreamReader) -> Message | None:
    """Return the next message, or None when the other side is gone; ValueError for what is none."""
    try:
        line = await reader.readline()
    except ConnectionError:
        return None
    return json.loads(line) if line.endswith(b"\n") else None


METADATA, OUTPUTS = TypeAdapter(ModelMetadata), TypeAdapter(list[RequestOutput])
_REQUEST = TypeAdapter(Request)


def dump_request(request: Request) -> Message:
    """Return a request as JSON values."""
    prompt = list(request.prompt)  # as it is: checking each of many tokens would take milliseconds
    return {**_REQUEST.dump_python(replace(request, prompt=()), exclude_defaults=True), "prompt": prompt}


def load_request(fields: Message) -> Request:
    """Undo :func:`dump_request`."""
    return replace(_REQUEST.validate_python({**fields, "prompt": ()}), prompt=fields["prompt"])
