"""Several hosts: plain servers as replicas, known by their addresses, behind one that forwards to them.

    host 1:  thalweg serve ./my-model --host 0.0.0.0 --api-key-file keys
    host 2:  the same
    router:  thalweg serve ./my-model --replica http://host1:8000 --replica http://host2:8000 --replica-key KEY

A replica is any server with OpenAI's API and ``/health``; nothing else passes between it and the router.  The
router has no engine and no tokenizer: it passes bodies on as they came, with its own key as bearer token, and answers
as they come.

- *Health*: each replica is asked for ``/health`` and ``/v1/models`` every second.  One that answers anything but 200,
  or refuses the connection as one does that finishes what it has, gets no new requests.  One that is silent three times
  is lost, and so are the requests it has: a host that is gone without a word closes no connection.
- *The same model*: the name, ``max_model_len`` and adapters of each must be those of the first.
- *Choice*: the ready replica with the fewest requests outstanding.
- *Retry*: a request whose replica was lost before anything of the answer was passed on goes to another one, once; one
  that a replica did not begin (it could not be reached, is full, or ends) goes to the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import time
import urllib.parse
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httptools
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from thalweg.serve.client import is_local
from thalweg.serve.errors import ApiError, ReplicaLost, ShuttingDown, Unavailable
from thalweg.serve.replicas.pool import TTFT_BUCKETS, BasePool, PoolLimits, ServerMetrics, before_deadline
from thalweg.utils.log import get_logger

_LOG = get_logger(__name__)
_PROBE_INTERVAL = 1.0  # seconds from one question for a replica's health to the next
_PROBE_TIMEOUT = 2.0  # for its answer
_MAX_SILENT_PROBES = 3  # without an answer, after which what the replica works on is lost
_START_TIMEOUT = 600.0  # seconds that the first replica may take to be ready
_READY_TIMEOUT = 10.0  # seconds that a request waits for a replica to be ready
_CONNECT_TIMEOUT = 5.0
_MAX_BODY_BYTES = 2**28  # of a whole answer
_PASSED_HEADERS = ("content-type", "cache-control", "x-accel-buffering", "retry-after")


@dataclass
class ForwardedResponse:
    """A replica's answer: ``body`` is all of it, or the first piece of a stream."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_stream: bool

    @property
    def error_code(self) -> str | None:
        """The ``code`` of an error in OpenAI's form."""
        try:
            return json.loads(self.body)["error"]["code"]
        except (ValueError, KeyError, TypeError):
            return None


class RemoteReplica:
    """A server at ``url`` as the router sees it; ``state`` is ``starting``, ``ready`` or ``down``."""

    def __init__(self, index: int, url: str, key: str | None) -> None:
        self.index, self.url = index, url
        self.state = "starting"
        self.reason = ""
        # Whether the reason is one that somebody must mend: another model, another key.
        self.refused = False
        self.num_outstanding = 0
        self._parts, self._ssl = _parse_url(url)
        self._key = key
        self._connections: set[_Connection] = set()
        self._num_silent_probes = 0

    async def probe(self) -> dict[str, Any] | None:
        """Ask for its health and its model; returns names and length of the latter.

        None where it cannot serve: ``state`` and ``reason`` say so then.
        """
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT):
                health = await self._fetch("/health")
                models = await self._fetch("/v1/models") if health.status == 200 else None
        except (OSError, ApiError) as error:  # a timeout is an OSError
            # Whatever else it is (refused, without a name), the requests that it has may well be worked on.
            self._num_silent_probes += isinstance(error, TimeoutError)
            self.mark_down("it does not answer", f"{type(error).__name__} {error}")
            if self._num_silent_probes >= _MAX_SILENT_PROBES:
                self.abort_connections()
            return None
        self._num_silent_probes = 0
        if models is None:
            self.mark_down(f"/health is {health.status}")
        elif models.status in (401, 403):
            self.mark_down("it does not accept the key: give its own as --replica-key", refused=True)
        else:
            try:
                cards = json.loads(models.body)["data"]
                return {
                    "model": cards[0]["id"],
                    "max_model_len": cards[0].get("max_model_len"),
                    "adapters": sorted(card["id"] for card in cards[1:]),
                }
            except (ValueError, KeyError, TypeError, IndexError):
                self.mark_down("its /v1/models is not OpenAI's", refused=True)
        return None

    def mark_ready(self) -> None:
        """It takes requests from now on."""
        if self.state != "ready":
            _LOG.info("replica %d (%s) is ready", self.index, self.url)
        self.state, self.reason, self.refused = "ready", "", False

    def mark_down(self, reason: str, detail: str = "", *, refused: bool = False) -> None:
        """It gets no new requests until a probe finds it well.  ``reason`` is for clients, ``detail`` for the log."""
        if (self.state, self.reason) != ("down", reason):
            _LOG.warning("replica %d (%s) takes no requests: %s %s", self.index, self.url, reason, detail)
        self.state, self.reason, self.refused = "down", reason, refused

    def abort_connections(self) -> None:
        """Break off what is under way."""
        for connection in self._connections:
            connection.abort()

    async def _fetch(self, target: str) -> ForwardedResponse:
        async with self.connect("GET", target) as connection:
            return await connection.response()

    @contextlib.asynccontextmanager
    async def connect(self, method: str, target: str, body: bytes = b"") -> AsyncIterator[_Connection]:
        """Send a request on a connection of its own, which is closed at the end: that cancels what still runs.

        ``target``: the path, quoted.  Raises OSError where the replica cannot be reached.
        """
        parts = self._parts
        async with asyncio.timeout(_CONNECT_TIMEOUT):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=self._ssl)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Asked after as soon as nothing comes for 10 s: a host that has started anew does not know of it.
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connection = _Connection(reader, writer)
        self._connections.add(connection)
        try:
            lines = [f"{method} {parts.path}{target} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
            if self._key is not None:
                lines.append(f"Authorization: Bearer {self._key}")
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            yield connection
        finally:
            self._connections.remove(connection)
            writer.transport.abort()


class _Connection:
    """Reads one HTTP response; the parser calls the ``on_`` methods."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._parser: Any = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._chunks: deque[bytes] = deque()
        self._headers_complete = self._complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._headers_complete = True

    def on_body(self, data: bytes) -> None:
        self._chunks.append(data)

    def on_message_complete(self) -> None:
        self._complete = True

    def abort(self) -> None:
        """Break it off: whoever reads gets ReplicaLost."""
        self._writer.transport.abort()

    async def response(self) -> ForwardedResponse:
        """Read status, headers and the whole body, or the first piece of a stream; raises ReplicaLost."""
        while not self._headers_complete:
            await self._read()
        is_stream = self._headers.get("content-type", "").startswith("text/event-stream")
        body, size = [], 0
        async for chunk in self.chunks():
            body.append(chunk)
            size += len(chunk)
            if size > _MAX_BODY_BYTES:
                raise ReplicaLost("its answer is too large")
            if is_stream:
                break
        headers = {name: value for name, value in self._headers.items() if name in _PASSED_HEADERS}
        return ForwardedResponse(self._parser.get_status_code(), headers, b"".join(body), is_stream)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the pieces of the body that have not been read; raises ReplicaLost where it breaks off."""
        while True:
            while self._chunks:
                yield self._chunks.popleft()
            if self._complete:
                return
            await self._read()

    async def _read(self) -> None:
        try:
            data = await self._reader.read(2**16)
            if not data:
                raise ReplicaLost("it hung up")
            self._parser.feed_data(data)
        except OSError as error:
            raise ReplicaLost(f"it hung up, {type(error).__name__}") from None
        except httptools.HttpParserError as error:
            raise ReplicaLost(f"it does not speak HTTP: {error}") from None


class RouterMetrics(ServerMetrics):
    """Those of a server that forwards to others."""

    def __init__(self, router: ReplicaRouter) -> None:
        super().__init__(router, "Requests")
        text = "From arrival to a replica's answer"
        self.first_byte = self.histogram("time_to_first_byte_seconds", text, TTFT_BUCKETS)

    def collect(self) -> Iterator[Any]:
        """Yield the replicas' states too."""
        yield from super().collect()
        retries = self._pool.num_retries
        yield CounterMetricFamily("thalweg_retries", "Requests given to another replica", value=retries)
        up = "1 while it takes requests"
        yield self.by_replica(GaugeMetricFamily, "replica_up", up, lambda replica: replica.state == "ready")
        outstanding = "Requests it has"
        yield self.by_replica(GaugeMetricFamily, "replica_outstanding", outstanding, lambda r: r.num_outstanding)


class ReplicaRouter(BasePool):
    """Forwards requests to ``urls``, which must all serve ``model``; ``limits`` count requests.

    ``max_outstanding`` is of all replicas together; each has a limit of its own besides.
    """

    def __init__(self, urls: Sequence[str], key: str | None, model: str, limits: PoolLimits) -> None:
        if len(set(urls)) < len(urls):
            raise ValueError("--replica names a server twice: each once")
        super().__init__(limits)
        self.model, self.num_retries = model, 0
        self.replicas = [RemoteReplica(index, url, key) for index, url in enumerate(urls)]
        self.metrics = RouterMetrics(self)
        self._aborted = False
        self._expected: dict[str, Any] | None = None  # of each replica's model: what the first one said
        exposed = [r.url for r in self.replicas if r.url.startswith("http://") and not is_local(r.url)]
        if exposed:
            _LOG.warning("what passes to %s is not encrypted: use https, or a network of your own", ", ".join(exposed))

    async def start(self) -> None:
        """Wait until a replica is ready; RuntimeError where one has another model or key, or none comes."""
        deadline = time.monotonic() + _START_TIMEOUT
        while True:
            await asyncio.gather(*map(self._probe, self.replicas))
            if refusals := [f"{replica.url}: {replica.reason}" for replica in self.replicas if replica.refused]:
                raise RuntimeError("; ".join(refusals))
            if self.ready_replicas():
                break
            if time.monotonic() > deadline:
                raise RuntimeError(self.health()[1])
            await asyncio.sleep(_PROBE_INTERVAL)
        self._watchers = [asyncio.create_task(self._watch(replica)) for replica in self.replicas]

    async def close(self) -> None:
        """End; what still waits gets an error."""
        await super().close()
        self.abort_all()

    def abort_all(self) -> None:
        """End every request with an error: the time for draining is over."""
        self._aborted = True
        for replica in self.replicas:
            replica.abort_connections()

    async def submit(self, method: str, target: str, body: bytes) -> AsyncGenerator[ForwardedResponse | bytes]:
        """Yield the response of a replica, then what follows of a stream; closing the generator cancels the request.

        Raises :class:`ApiError`: ShuttingDown; Overloaded; Unavailable where no replica can be reached; ReplicaLost
        when the replica is lost and the request cannot be tried again; DeadlineExceeded.
        """
        with self.admit():
            deadline, start = self._deadline(), time.perf_counter()
            tried: set[int] = set()
            was_lost = began = False
            while True:
                replica = await self._pick_replica(tried)
                tried.add(replica.index)
                replica.num_outstanding += 1
                try:
                    async with replica.connect(method, target, body) as connection:
                        response = await before_deadline(deadline, connection.response())
                        if self._goes_elsewhere(replica, response, tried):
                            self.num_retries += 1
                            continue
                        began = True
                        self.metrics.first_byte.observe(time.perf_counter() - start)
                        yield response
                        chunks = connection.chunks()
                        while response.is_stream and (chunk := await before_deadline(deadline, anext(chunks, b""))):
                            yield chunk
                        return
                except OSError as error:  # it was not reached: not begun
                    replica.mark_down("it cannot be reached", f"{type(error).__name__} {error}")
                    self.num_retries += 1
                except ReplicaLost:
                    if self._aborted:
                        raise ShuttingDown("the server is shutting down and had to stop this request") from None
                    if began or was_lost or len(tried) == len(self.replicas):
                        raise
                    was_lost = True
                    self.num_retries += 1
                finally:
                    replica.num_outstanding -= 1
                    if began:
                        self.metrics.e2e_latency.observe(time.perf_counter() - start)

    async def _pick_replica(self, tried: set[int]) -> RemoteReplica:
        """The ready replica with the least to do of those that were not tried; waits a while where none is ready."""
        deadline = time.monotonic() + _READY_TIMEOUT
        while not (ready := self._untried(tried)):
            if len(tried) == len(self.replicas) or time.monotonic() > deadline or self.draining:
                raise Unavailable(self.health()[1] or "no replica could take this request: try again")
            await self._wait_for_replica()
        return min(ready, key=lambda replica: replica.num_outstanding)

    def _goes_elsewhere(self, replica: RemoteReplica, response: ForwardedResponse, tried: set[int]) -> bool:
        """Whether the replica did not begin the request, and another one might."""
        if response.status in (401, 403):  # the router's key, not the client's
            replica.mark_down("it does not accept the key", refused=True)
            if not self._untried(tried):
                raise Unavailable("no replica takes this request: the router's key is not theirs")
            return True
        # A request that cost a replica its engines is not tried on more of them.
        refused = response.status == 429 or (response.status == 503 and response.error_code != ReplicaLost.code)
        return refused and bool(self._untried(tried))

    def _untried(self, tried: set[int]) -> list[RemoteReplica]:
        return [replica for replica in self.ready_replicas() if replica.index not in tried]

    async def _watch(self, replica: RemoteReplica) -> None:
        while True:
            await asyncio.sleep(_PROBE_INTERVAL)
            try:
                await self._probe(replica)
            except Exception:  # whatever is wrong with one answer, the next may be right
                _LOG.exception("the probe of %s failed", replica.url)

    async def _probe(self, replica: RemoteReplica) -> None:
        model = await replica.probe()
        if model is None:
            return
        expected = self._expected or {**model, "model": self.model}
        for name, value in expected.items():
            if model[name] != value:
                what = f"its {name} is {model[name]!r}, not {value!r}: serve the same model on each"
                replica.mark_down(what, refused=True)
                return
        self._expected = expected
        replica.mark_ready()
        self._announce_ready()


def _parse_url(url: str) -> tuple[urllib.parse.SplitResult, ssl.SSLContext | None]:
    """Return a replica's address and how to encrypt; ValueError where it is no address."""
    parts = urllib.parse.urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        valid = parts.scheme in ("http", "https") and parts.hostname and not (parts.username or parts.query)
    except ValueError:  # of a port that is none
        valid = False
    if not valid:
        raise ValueError(f"--replica {url} is no address: write it as http://HOST:PORT or https://HOST:PORT")
    path = parts.path.rstrip("/").removesuffix("/v1")
    netloc = parts.netloc if parts.port else f"{parts.netloc}:{port}"
    context = ssl.create_default_context() if parts.scheme == "https" else None
    return urllib.parse.SplitResult(parts.scheme, netloc, path, "", ""), context
