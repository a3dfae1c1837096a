"""The replicas behind one address: admission, choice, retry, replacement, drain, and what is counted of all that.

- *Admission*: at most ``max_outstanding`` sequences may be outstanding (running and queued together).  Beyond it
  a request is refused at once, with an estimate of when room will be; so a queue never grows without bound and
  what was admitted is worked off.
- *Choice*: the ready replica with the least outstanding work.
- *Retry*: a request whose replica died before anything of it was passed on goes to another replica, once; a
  second death would mean that the request is the cause.
- *Replacement*: a dead replica is started anew, with growing pauses while it keeps dying; one that has had
  work and made no step for ``stall_seconds`` makes ``/health`` fail, and is killed after twice that time.
- *Metrics*: Prometheus histograms of latency and counters, in a registry of the server's own (no global state); the
  engines' gauges are read from the last heartbeat when somebody asks for them.

A :class:`Replica` lives once: ``starting`` (the engine loads), ``ready``, ``dead``; its successor is a new
object.  Everything here runs on the server's event loop; only starting and ending a process leave it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar
from weakref import WeakSet

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from thalweg.infer.types import EngineStats, ModelMetadata, Request, RequestOutput
from thalweg.serve import engine_process as wire
from thalweg.serve import errors
from thalweg.serve.replicas.launcher import ReplicaProcess
from thalweg.utils.buckets import iter_buckets
from thalweg.utils.log import get_logger

_LOG = get_logger(__name__)
T = TypeVar("T")
_RESTART_BACKOFF = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds before a replica that keeps dying is started again
_HEALTHY_AFTER = 60.0  # a replica that lived so long starts that list from its beginning
_MAX_CRASHES = 3  # deaths in a row after which a request does not wait for the next life
_MAX_SILENCE = 10.0  # seconds without a heartbeat after which a replica counts as stuck
_YIELD_EVERY = 16  # outputs of one request that are passed on in one turn of the event loop
# Prompts of one request that an engine embeds at a time; more need no more room in the queue.
MAX_EMBED_PROMPTS = 64
_MAX_EMBED_TOKENS = 4096
_READY_TIMEOUT = 30.0  # seconds that a retry waits for a replica to be ready

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 5)
_E2E_LATENCY_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# What is shown of each replica's EngineStats.
_ENGINE_METRICS = (
    (GaugeMetricFamily, "running", "Sequences that take part in steps", "running"),
    (GaugeMetricFamily, "waiting", "Sequences queued in the engine", "waiting"),
    (GaugeMetricFamily, "kv_blocks", "KV blocks there are", "kv_blocks"),
    (GaugeMetricFamily, "kv_blocks_used", "KV blocks held by sequences", "kv_blocks_used"),
    (GaugeMetricFamily, "kv_use_ratio", "Share of the KV blocks in use", "kv_use"),
    (CounterMetricFamily, "engine_steps", "Steps", "steps"),
    (CounterMetricFamily, "engine_prompt_tokens", "Prompt tokens admitted", "prompt_tokens"),
    (CounterMetricFamily, "prefix_hit_tokens", "Prompt tokens from the prefix cache", "cached_tokens"),
    (CounterMetricFamily, "preemptions", "Sequences preempted", "preemptions"),
)

# Takes what comes for a request: a RequestOutput, a list of embeddings, or the ApiError that ended it.
EventCallback = Callable[[Any], None]


@dataclass(frozen=True)
class PoolLimits:
    """``max_outstanding`` counts sequences: running and queued, of all replicas together."""

    max_outstanding: int = 192
    stall_seconds: float = 60.0
    # Time that a replica may take to be ready: to load its model.
    start_seconds: float = 1800.0
    # Time that a request may take from its admission; None: any.
    request_seconds: float | None = None


class ServerMetrics:
    """Counts what one server does; ``pool`` is what stands behind it, and ``unit`` what that counts."""

    def __init__(self, pool: Any, unit: str) -> None:
        self.registry = CollectorRegistry()
        self._pool, self._unit = pool, unit
        self.e2e_latency = self.histogram("request_seconds", "From arrival to the last token", _E2E_LATENCY_BUCKETS)
        self._responses = self.counter("http_responses", "Responses", "path", "status")
        self.cancelled = self.counter("cancelled", "Requests whose client left before the end")
        self.registry.register(self)  # pyright: ignore[reportArgumentType]

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Make a counter of this server's own."""
        return Counter(f"thalweg_{name}", text, labels, registry=self.registry)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        """Make a histogram of this server's own."""
        return Histogram(f"thalweg_{name}", text, buckets=buckets, registry=self.registry)

    def count_response(self, path: str, status: int) -> None:
        """Count an HTTP response."""
        self._responses.labels(path, status).inc()

    def collect(self) -> Iterator[Any]:
        """Yield the gauges of this moment, as a registry asks for them."""
        pool, unit = self._pool, self._unit
        yield GaugeMetricFamily("thalweg_outstanding", f"{unit} admitted, not ended", value=pool.num_outstanding)
        yield GaugeMetricFamily("thalweg_outstanding_limit", "Beyond it: 429", value=pool.limits.max_outstanding)
        yield GaugeMetricFamily("thalweg_replicas_ready", "Replicas that serve", value=len(pool.ready_replicas()))
        yield GaugeMetricFamily("thalweg_healthy", "1 while /health is 200", value=pool.health()[0])

    def by_replica(self, family: Any, name: str, text: str, value: Callable[[Any], float]) -> Any:
        """Return a family with a number for each replica."""
        metric = family(f"thalweg_{name}", text, labels=["replica"])
        for replica in self._pool.replicas:
            metric.add_metric([str(replica.index)], value(replica))
        return metric

    def render(self) -> bytes:
        """Return the text form."""
        return generate_latest(self.registry)


class Metrics(ServerMetrics):
    """Those of a server with engines."""

    def __init__(self, pool: ReplicaPool) -> None:
        super().__init__(pool, "Sequences")
        self._ttft = self.histogram("time_to_first_token_seconds", "From arrival to the first token", TTFT_BUCKETS)
        self._itl = self.histogram("inter_token_latency_seconds", "From one token to the next", _ITL_BUCKETS)
        self._finished = self.counter("finished", "Sequences by finish reason", "reason")
        self._prompt_tokens = self.counter("prompt_tokens", "Prompt tokens of requests that were started")
        self._generated_tokens = self.counter("generated_tokens", "Tokens generated")

    def collect(self) -> Iterator[Any]:
        """Yield the engines' gauges and counters too, by replica."""
        yield from super().collect()
        restarts = self._pool.num_restarts
        yield CounterMetricFamily("thalweg_replica_restarts", "Replicas replaced", value=restarts)
        for family, name, text, field in _ENGINE_METRICS:
            yield self.by_replica(family, name, text, lambda replica, field=field: getattr(replica.stats, field))
        yield self.by_replica(
            GaugeMetricFamily, "no_progress_seconds", "Work, but no step", lambda replica: replica.stalled_seconds
        )

    def start_timer(self) -> Callable[[int, RequestOutput], None]:
        """Begin to time a request that has just arrived; call the result with each output and its prompt's index."""
        start, last_token_times = time.perf_counter(), dict[tuple[int, int], float]()

        def record(prompt_index: int, output: RequestOutput) -> None:
            now, key, num_tokens = time.perf_counter(), (prompt_index, output.index), len(output.token_ids)
            if num_tokens:
                self._generated_tokens.inc(num_tokens)
                if key in last_token_times:
                    for _ in range(num_tokens):  # tokens of one speculative step came together
                        self._itl.observe((now - last_token_times[key]) / num_tokens)
                else:
                    self._ttft.observe(now - start)
                    if output.index == 0:
                        self._prompt_tokens.inc(output.num_prompt_tokens)
                last_token_times[key] = now
            if output.finish_reason is not None:
                self._finished.labels(output.finish_reason).inc()
                self.e2e_latency.observe(now - start)

        return record


class BasePool:
    """What stands behind a server: ``replicas``, each with a ``state``, and ``limits`` for all of them together."""

    replicas: list[Any]

    def __init__(self, limits: PoolLimits) -> None:
        self.limits = limits
        self.draining = False
        self.num_outstanding = 0
        self._replica_ready = asyncio.Event()  # set, and renewed, whenever a replica becomes ready
        self._watchers: list[asyncio.Task[None]] = []  # one for each replica

    def ready_replicas(self) -> list[Any]:
        """The replicas that take requests."""
        return [replica for replica in self.replicas if replica.state == "ready"]

    @contextlib.contextmanager
    def admit(self, num_sequences: int = 1) -> Iterator[None]:
        """Reserve room for so many sequences, or for a request.

        Raises:
            ShuttingDown: while draining.
            BadRequest: more sequences than there will ever be room for.
            Overloaded: no room now.
            Unavailable: replicas keep dying.
        """
        if self.draining:
            raise errors.ShuttingDown("the server is shutting down: use another one")
        if num_sequences > self.limits.max_outstanding:
            raise errors.BadRequest(
                f"{num_sequences} sequences (prompts times n) in one request; this server takes "
                f"{self.limits.max_outstanding}: split the request",
                "n",
            )
        if self.num_outstanding + num_sequences > self.limits.max_outstanding:
            raise errors.Overloaded(self._retry_after(num_sequences))
        self._check_crash_loop()
        self.num_outstanding += num_sequences
        try:
            yield
        finally:
            self.num_outstanding -= num_sequences

    async def close(self) -> None:
        """End; what still waits gets an error."""
        self.draining = True
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

    def health(self) -> tuple[bool, str]:
        """Whether a request that comes now would be served, and why not."""
        if self.draining:
            return False, "the server is shutting down"
        if not self.ready_replicas():
            return False, f"no replica is running: {self._describe_replicas()}"
        return True, ""

    def _describe_replicas(self) -> str:
        """Why each of them takes no requests."""
        return "; ".join(f"replica {r.index}: {r.reason or 'starting'}" for r in self.replicas)

    def abort_all(self) -> None:
        """End every request with an error: the time for draining is over."""
        raise NotImplementedError

    def _retry_after(self, num_sequences: int) -> int:
        """Seconds until there may be room."""
        return 1

    def _check_crash_loop(self) -> None:
        """Raise Unavailable where no replica stays alive."""

    def _deadline(self) -> float | None:
        seconds = self.limits.request_seconds
        return None if seconds is None else asyncio.get_running_loop().time() + seconds

    def _announce_ready(self) -> None:
        ready_event, self._replica_ready = self._replica_ready, asyncio.Event()
        ready_event.set()

    async def _wait_for_replica(self) -> None:
        """Wait until one becomes ready, or for a moment."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._replica_ready.wait(), 0.2)


class ReplicaPool(BasePool):
    """Runs ``num_replicas`` replicas made by ``start_replica`` and spreads requests over them."""

    def __init__(self, start_replica: Callable[[int], ReplicaProcess], num_replicas: int, limits: PoolLimits) -> None:
        super().__init__(limits)
        self.num_restarts = 0
        self._start_replica = start_replica
        self.replicas = [Replica(i, start_replica, limits.start_seconds) for i in range(num_replicas)]
        self.metrics = Metrics(self)
        self._model_info: ModelMetadata  # of the replicas, once they have started
        self._request_numbers = itertools.count()
        self._finish_times: deque[float] = deque(maxlen=64)  # when sequences ended lately, for Retry-After
        self._num_crashes = [0] * num_replicas  # of each replica, one soon after the other
        self._inboxes: WeakSet[asyncio.Queue[Any]] = WeakSet()  # of the requests under way, which alone hold them

    async def start(self) -> ModelMetadata:
        """Start all replicas; returns the model's facts, or raises RuntimeError when one cannot start."""
        try:
            models = await asyncio.gather(*(replica.start() for replica in self.replicas))
        except BaseException:
            await self.close()
            raise
        self._model_info = models[0]
        for index, model_info in enumerate(models):
            if mismatch := _model_mismatch(models[0], model_info, index):
                await self.close()
                raise RuntimeError(mismatch)
        self._watchers = [asyncio.create_task(self._supervise(i)) for i in range(len(self.replicas))]
        return models[0]

    async def close(self) -> None:
        """End all replicas; what still waits gets an error."""
        await super().close()
        await asyncio.gather(*(replica.stop() for replica in self.replicas))

    def abort_all(self) -> None:
        """End every stream with an error: the time for draining is over."""
        for inbox in self._inboxes:
            inbox.put_nowait((None, errors.ShuttingDown("the server is shutting down and had to stop this request")))

    def health(self) -> tuple[bool, str]:
        """Whether a request that comes now would be served, and why not."""
        ready = self.ready_replicas()
        if ready and not self.draining and all(r.stalled_seconds > self.limits.stall_seconds for r in ready):
            return False, f"the engine has made no progress for {min(r.stalled_seconds for r in ready):.0f} s"
        return super().health()

    def _describe_replicas(self) -> str:
        reasons = {replica.reason for replica in self.replicas if replica.reason}
        return "; ".join(sorted(reasons)) or "starting"

    async def submit(
        self, num_sequences: int, tokenize: Callable[[], Awaitable[list[Request]]], stream: bool
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Admit a request, tokenize it, and yield what the engines give until all of its sequences have ended.

        Each item is a prompt's index and what one step added to one of its sequences.  ``num_sequences`` (prompts times
        n) is known at once, so that a full queue refuses the request before ``tokenize`` does any work.  With
        ``stream`` outputs are passed on as they come; without, those of a prompt are kept until all of its sequences
        have ended, so that a replica may be lost at any time before.

        Closing the generator cancels what still runs.  Raises :class:`ApiError`, by class: what :meth:`admit` and
        ``tokenize`` raise; BadRequest for what the engine refuses; ReplicaLost when the replica is lost and the
        request cannot be tried again; DeadlineExceeded; ShuttingDown; itself where the engine fails.
        """
        record_output = self.metrics.start_timer()
        with self.admit(num_sequences):
            deadline, inbox = self._deadline(), self._open_inbox()
            attempts = [_Attempt(i, r, inbox) for i, r in enumerate(await tokenize())]
            try:
                for attempt in attempts:
                    await self._dispatch(attempt)
                num_events = 0
                while any(attempt.num_unfinished for attempt in attempts):
                    num_events += 1
                    if num_events % _YIELD_EVERY == 0:  # a queue that is never empty must not keep the loop from others
                        await asyncio.sleep(0)
                    attempt, event = await _next_event(inbox, deadline)
                    if isinstance(event, errors.ReplicaLost) and attempt.can_retry:
                        attempt.reset()
                        await self._dispatch(attempt)
                        continue
                    if isinstance(event, errors.ApiError):
                        raise event
                    record_output(attempt.index, event)
                    if event.finish_reason == "error":
                        raise _engine_error(event)
                    if event.finished:
                        self._finish_times.append(time.monotonic())
                    for output in attempt.receive(event, hold=not stream):
                        yield attempt.index, output
            finally:
                for attempt in attempts:
                    attempt.abort()

    async def embed(self, prompts: list[list[int]]) -> list[list[float]]:
        """Return a row for each prompt.  The caller has room for them (:meth:`admit`).

        An engine does nothing else while it embeds, not even say that it gets on: it has them in parts.
        """
        deadline, inbox = self._deadline(), self._open_inbox()
        parts = iter_buckets(prompts, len, _MAX_EMBED_TOKENS, MAX_EMBED_PROMPTS)
        batches = [await self._embed_batch(part, inbox, deadline) for part in parts]
        return [row for part in batches for row in part]

    async def _embed_batch(
        self, prompts: list[list[int]], inbox: asyncio.Queue[Any], deadline: float | None
    ) -> list[list[float]]:
        for is_last_try in (False, True):
            request_id, replica = f"e{next(self._request_numbers)}", await self._pick_replica()
            try:
                replica.embed(request_id, prompts, lambda event: inbox.put_nowait((None, event)))
                _, answer = await _next_event(inbox, deadline)
            finally:
                replica.abort(request_id)
            if isinstance(answer, list):
                return answer
            if is_last_try or not isinstance(answer, errors.ReplicaLost):
                raise answer
        raise AssertionError

    def _open_inbox(self) -> asyncio.Queue[Any]:
        """Return the queue in which a request's events arrive, and :meth:`abort_all`'s."""
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._inboxes.add(inbox)
        return inbox

    async def _dispatch(self, attempt: _Attempt) -> None:
        replica = await self._pick_replica()
        attempt.send_to(replica, f"r{next(self._request_numbers)}")

    async def _pick_replica(self) -> Replica:
        """The ready replica with the least to do; waits a while for one where none is ready."""
        deadline = time.monotonic() + _READY_TIMEOUT
        while not (ready := self.ready_replicas()):
            self._check_crash_loop()
            if time.monotonic() > deadline:
                raise errors.Unavailable("no replica of the model is running; one is being started")
            await self._wait_for_replica()
        responsive = [replica for replica in ready if replica.stalled_seconds <= self.limits.stall_seconds]
        return min(responsive or ready, key=lambda replica: replica.num_outstanding)

    def _check_crash_loop(self) -> None:
        if not self.ready_replicas() and min(self._num_crashes) >= _MAX_CRASHES:
            raise errors.Unavailable(f"no replica of the model stays alive: {self.health()[1]}")

    async def _supervise(self, index: int) -> None:
        """Watch one replica; replace it when it dies, whatever goes wrong in doing so."""
        while True:
            try:
                await self._replace_when_dead(index)
            except Exception:
                _LOG.exception("replacing replica %d failed; trying again", index)
                await asyncio.sleep(_RESTART_BACKOFF[-1])

    async def _replace_when_dead(self, index: int) -> None:
        replica, started_at = self.replicas[index], time.monotonic()
        while not replica.died.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(replica.died.wait(), 0.25)
            if replica.stalled_seconds > 2 * self.limits.stall_seconds and not replica.died.is_set():
                _LOG.error("replica %d has made no step for %.0f s: replaced", index, replica.stalled_seconds)
                await replica.stop(grace=0.0)
        num_crashes = 0 if time.monotonic() - started_at > _HEALTHY_AFTER else self._num_crashes[index]
        self._num_crashes[index] = num_crashes + 1
        _LOG.error("replica %d is lost (%s); starting another", index, replica.reason)
        await replica.stop(grace=2.0)
        await asyncio.sleep(_RESTART_BACKOFF[min(num_crashes, len(_RESTART_BACKOFF) - 1)])
        self.num_restarts += 1
        self.replicas[index] = successor = Replica(index, self._start_replica, self.limits.start_seconds)
        try:
            model_info = await successor.start()
        except RuntimeError as error:  # the successor is dead now: it is replaced in its turn
            _LOG.error("replica %d does not start: %s", index, error)
            return
        if mismatch := _model_mismatch(self._model_info, model_info, index):
            _LOG.error("%s", mismatch)
            await successor.stop(grace=0.0)
            return
        self._announce_ready()

    def _retry_after(self, num_sequences: int) -> int:
        """Seconds until so many sequences will have ended, at the pace of the last ones; 1 to 60."""
        if len(self._finish_times) < 2:
            return 1
        pace = (len(self._finish_times) - 1) / max(self._finish_times[-1] - self._finish_times[0], 1e-3)
        missing = self.num_outstanding + num_sequences - self.limits.max_outstanding
        return max(1, min(60, math.ceil(missing / pace)))


class _Attempt:
    """One prompt on its way: the replica that has it, under which name, and what has come that was not passed on."""

    def __init__(self, index: int, request: Request, inbox: asyncio.Queue[Any]) -> None:
        self.index = index
        self.num_unfinished = request.params.n  # sequences that have not ended
        self._request, self._inbox = request, inbox
        self._held: list[RequestOutput] = []
        self._passed_on = self._retried = False
        self._replica: Replica | None = None
        self._request_id = ""

    @property
    def can_retry(self) -> bool:
        """Whether it may begin anew: the client has seen nothing of it, and it has not been tried twice."""
        return not (self._passed_on or self._retried)

    def reset(self) -> None:
        """Forget what came."""
        self._retried, self.num_unfinished = True, self._request.params.n
        self._held.clear()

    def send_to(self, replica: Replica, request_id: str) -> None:
        self._replica, self._request_id = replica, request_id
        replica.add(replace(self._request, request_id=request_id), lambda event: self._inbox.put_nowait((self, event)))

    def receive(self, output: RequestOutput, hold: bool) -> list[RequestOutput]:
        """Take an output; returns what is to be passed on now: with ``hold``, all of them with the last one."""
        self.num_unfinished -= output.finished
        self._held.append(output)
        if hold and self.num_unfinished:
            return []
        outputs, self._held, self._passed_on = self._held, [], True
        return outputs

    def abort(self) -> None:
        if self._replica is not None:
            self._replica.abort(self._request_id)


class Replica:
    """One replica as the server sees it: messages out, outputs in; ``died`` is set when it is dead."""

    def __init__(self, index: int, start_replica: Callable[[int], ReplicaProcess], start_seconds: float) -> None:
        self.index = index
        self.state = "starting"
        self.stats = EngineStats()
        self.reason = ""
        self.died = asyncio.Event()
        self._start_replica, self._start_seconds = start_replica, start_seconds
        self._handle: ReplicaProcess | None = None
        self._callbacks: dict[str, tuple[EventCallback, int]] = {}  # by request, with its sequences that run
        self._stalled_seconds = 0.0
        self._last_message_time = time.monotonic()
        self._writer: asyncio.StreamWriter | None = None
        self._read_task: asyncio.Task[None] | None = None

    async def start(self) -> ModelMetadata:
        """Start it, wait until it is ready and return its model's facts; raises RuntimeError with the cause when it is
        not to be."""
        try:
            handle = self._handle = await asyncio.to_thread(self._start_replica, self.index)
            handle.sock.setblocking(False)
            reader, self._writer = await asyncio.open_connection(sock=handle.sock, limit=wire.MAX_LINE_BYTES)
        except Exception as error:
            detail = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self._mark_dead(f"cannot start a process: {detail}")
            raise RuntimeError(self.reason) from error
        ready: asyncio.Future[ModelMetadata] = asyncio.get_running_loop().create_future()
        self._read_task = asyncio.create_task(self._read_loop(reader, ready))
        try:
            async with asyncio.timeout(self._start_seconds):
                return await ready
        except TimeoutError:
            await self.stop(grace=0.0, reason=f"the engine was not ready in {self._start_seconds:g} s")
            raise RuntimeError(self.reason) from None

    @property
    def num_outstanding(self) -> int:
        """Sequences that were handed over and have not ended."""
        return sum(num_sequences for _, num_sequences in self._callbacks.values())

    @property
    def stalled_seconds(self) -> float:
        """Seconds for which it has had work and made no progress."""
        silence = time.monotonic() - self._last_message_time
        if self.state != "ready" or silence < _MAX_SILENCE:
            return self._stalled_seconds
        return max(self._stalled_seconds, silence)

    def add(self, request: Request, callback: EventCallback) -> None:
        """Hand over a request; what comes for it goes to ``callback``."""
        self._register(request.request_id, callback, request.params.n)
        self._send({"type": "add", "request": wire.dump_request(request)})

    def embed(self, request_id: str, prompts: list[list[int]], callback: EventCallback) -> None:
        """Ask for embeddings; one list of rows goes to ``callback``."""
        self._register(request_id, callback, len(prompts))
        self._send({"type": "embed", "id": request_id, "prompts": prompts})

    def abort(self, request_id: str) -> None:
        """Drop a request, if it still runs; nothing more goes to its callback."""
        if self._unregister(request_id) is not None and self.state == "ready":
            self._send({"type": "abort", "id": request_id})

    async def stop(self, grace: float = 2.0, reason: str = "stopped") -> None:
        """End it, for ``reason`` unless it is dead already."""
        self._mark_dead(reason)
        if self._handle is not None:
            await asyncio.to_thread(self._handle.terminate, grace)
        if self._read_task is not None:
            await asyncio.gather(self._read_task, return_exceptions=True)

    def _register(self, request_id: str, callback: EventCallback, num_sequences: int) -> None:
        assert request_id not in self._callbacks
        if self.state != "ready":
            raise errors.ReplicaLost(self.reason)
        self._callbacks[request_id] = callback, num_sequences

    def _unregister(self, request_id: str) -> EventCallback | None:
        return self._callbacks.pop(request_id, (None, 0))[0]

    def _send(self, message: wire.Message) -> None:
        assert self._writer is not None
        self._writer.write(wire.encode_message(message))

    async def _read_loop(self, reader: asyncio.StreamReader, ready: asyncio.Future[ModelMetadata]) -> None:
        try:
            while (message := await wire.read_message(reader)) is not None:
                self._last_message_time = time.monotonic()
                kind = message["type"]
                if kind == "ready" and self.state == "starting":
                    ready.set_result(wire.METADATA.validate_python(message["model"]))
                    self.state = "ready"
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

    def _handle_message(self, kind: str, message: wire.Message) -> None:
        if kind == "out":
            for output in wire.OUTPUTS.validate_python(message["outputs"]):
                if entry := self._callbacks.pop(output.request_id, None):
                    callback, num_running = entry
                    callback(output)
                    if num_running > output.finished:  # with the last one the request is forgotten
                        self._callbacks[output.request_id] = callback, num_running - output.finished
        elif kind == "beat":
            self._stalled_seconds, self.stats = message["stuck"], EngineStats(**message["stats"])
        elif (callback := self._unregister(message["id"])) is not None:
            callback(errors.BadRequest(message["error"]) if kind == "refused" else message["rows"])

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
        callbacks, self._callbacks = self._callbacks, {}
        for callback, _ in callbacks.values():
            callback(errors.ReplicaLost(reason))
        if self._writer is not None:
            with contextlib.suppress(OSError, RuntimeError):
                self._writer.close()
        self.died.set()


async def _next_event(inbox: asyncio.Queue[Any], deadline: float | None) -> tuple[Any, Any]:
    """Return (attempt, event), the next one; raises what :meth:`ReplicaPool.abort_all` sends, or at the deadline."""
    if deadline is not None and asyncio.get_running_loop().time() >= deadline:
        raise errors.DeadlineExceeded
    # Around this wait alone: the generator that waits here may be driven by another task each time.
    attempt, event = await before_deadline(deadline, inbox.get())
    if isinstance(event, errors.ShuttingDown):
        raise event
    return attempt, event


async def before_deadline(deadline: float | None, awaitable: Awaitable[T]) -> T:
    """Await it until the deadline; raises DeadlineExceeded."""
    try:
        async with asyncio.timeout_at(deadline):
            return await awaitable
    except TimeoutError:
        raise errors.DeadlineExceeded from None


def _model_mismatch(expected: ModelMetadata, model_info: ModelMetadata, index: int) -> str:
    """Say how a replica's model differs from that of the others: its files may have changed since they started."""
    names = [f.name for f in fields(expected) if getattr(model_info, f.name) != getattr(expected, f.name)]
    message = f"replica {index} has another model than the first ({', '.join(names)}): load the same in each"
    return message if names else ""


def _engine_error(output: RequestOutput) -> errors.ApiError:
    if output.invalid_request:
        return errors.BadRequest(f"{output.error}: ask for a simpler one")
    return errors.ApiError(f"the engine failed on this request: {output.error}", code="engine_error")
