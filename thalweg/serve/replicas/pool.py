"""The replicas behind one address: admission, choice, retry, replacement, drain.

- *Admission*: at most ``limit`` sequences may be outstanding (running and queued together).  Beyond it a
  request is refused at once, with an estimate of when room will be; so a queue never grows without bound and
  what was admitted is worked off.
- *Choice*: the ready replica with the least outstanding work.
- *Retry*: a request whose replica died before anything came from it goes to another replica, once; a second
  death would mean that the request is the cause.
- *Replacement*: a dead replica is started anew, with growing pauses while it keeps dying; one that has had
  work and made no step for ``stall_seconds`` makes ``/health`` fail, and is killed after twice that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

from thalweg.infer.types import ModelMetadata, Request, RequestOutput
from thalweg.serve.errors import ApiError, bad_request, overloaded, unavailable
from thalweg.serve.replicas.launcher import ReplicaHandle
from thalweg.serve.replicas.replica import Replica, ReplicaDied, RequestRejected
from thalweg.utils.log import get_logger

_LOG = get_logger(__name__)
_RESTART_BACKOFF = (
    0.1,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
)  # seconds before a replica that keeps dying is started again
_HEALTHY_AFTER = 60.0  # a replica that lived so long starts that list from its beginning
_MAX_CRASHES = 3  # deaths in a row after which a request does not wait for the next life
_YIELD_EVERY = 16  # outputs of one request that are passed on in one turn of the event loop
MAX_EMBED_PROMPTS = 64
"""Prompts of one request that an engine embeds at a time; more need no more room in the queue."""
_MAX_EMBED_TOKENS = 4096
_READY_TIMEOUT = 30.0  # seconds that a retry waits for a replica to be ready


@dataclass(frozen=True)
class PoolLimits:
    """``max_outstanding`` counts sequences: running and queued, of all replicas together."""

    max_outstanding: int = 192
    stall_seconds: float = 60.0


class ReplicaPool:
    """Runs ``num_replicas`` replicas made by ``start`` and spreads requests over them."""

    def __init__(self, start_replica: Callable[[int], ReplicaHandle], num_replicas: int, limits: PoolLimits) -> None:
        self.limits = limits
        self.draining = False
        self.num_restarts = 0
        self.num_outstanding = 0
        # A replica's start may wait for another host: not in the threads that all the rest shares.
        self._start_executor = ThreadPoolExecutor(num_replicas, "thalweg-serve-start")
        self._start_replica = start_replica
        self.replicas = [self._make_replica(index) for index in range(num_replicas)]
        self._model_info: ModelMetadata | None = None
        self._supervisors: list[asyncio.Task[None]] = []
        self._request_numbers = itertools.count()
        self._finish_times: deque[float] = deque(maxlen=64)  # when sequences ended lately, for Retry-After
        self._num_crashes = [0] * num_replicas  # of each replica, one soon after the other
        self._aborted = asyncio.Event()
        self._replica_ready = asyncio.Event()  # set, and renewed, whenever a replica becomes ready

    def _make_replica(self, index: int) -> Replica:
        return Replica(index, self._start_replica, self._start_executor)

    async def start(self) -> ModelMetadata:
        """Start all replicas; returns the model's facts, or raises RuntimeError when one cannot start."""
        try:
            await asyncio.gather(*(replica.start() for replica in self.replicas))
        except BaseException:
            await self.close()
            raise
        self._model_info = model_info = self.replicas[0].model_info
        assert model_info is not None
        for replica in self.replicas:
            if mismatch := _model_mismatch(model_info, replica):
                await self.close()
                raise RuntimeError(mismatch)
        self._supervisors = [asyncio.create_task(self._supervise(i)) for i in range(len(self.replicas))]
        return model_info

    async def close(self) -> None:
        """End all replicas; what still waits gets an error."""
        self.draining = True
        for supervisor in self._supervisors:
            supervisor.cancel()
        if (close := getattr(self._start_replica, "close", None)) is not None:
            close()  # a start that waits for a worker ends
        self._start_executor.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        await asyncio.gather(*(replica.stop(final=True) for replica in self.replicas))

    def abort_all(self) -> None:
        """End every stream with an error: the time for draining is over."""
        self._aborted.set()

    def ready_replicas(self) -> list[Replica]:
        """The replicas that take requests."""
        return [replica for replica in self.replicas if replica.state == "ready"]

    def health(self) -> tuple[bool, str]:
        """Whether a request that comes now would be served, and why not."""
        if self.draining:
            return False, "the server is shutting down"
        ready = self.ready_replicas()
        if not ready:
            reasons = {replica.reason for replica in self.replicas if replica.reason}
            return False, f"no replica is running: {'; '.join(sorted(reasons)) or 'starting'}"
        if all(replica.stalled_seconds > self.limits.stall_seconds for replica in ready):
            return False, f"the engine has made no progress for {min(r.stalled_seconds for r in ready):.0f} s"
        return True, ""

    def check_capacity(self, num_sequences: int) -> None:
        """Raise 429 without room for so many sequences, 503 while draining or when replicas keep dying."""
        if self.draining:
            raise unavailable("the server is shutting down: use another one", "shutting_down")
        if num_sequences > self.limits.max_outstanding:
            raise bad_request(
                f"{num_sequences} sequences (prompts times n) in one request; this server takes "
                f"{self.limits.max_outstanding}: split the request",
                "n",
            )
        if self.num_outstanding + num_sequences > self.limits.max_outstanding:
            raise overloaded(self._retry_after(num_sequences))
        self._check_crash_loop()

    @contextlib.contextmanager
    def admit(self, num_sequences: int) -> Iterator[None]:
        """Reserve room for so many sequences, or raise what :meth:`check` does."""
        self.check_capacity(num_sequences)
        self.num_outstanding += num_sequences
        try:
            yield
        finally:
            self.num_outstanding -= num_sequences

    async def generate(
        self, requests: list[Request], *, retryable: bool = False, timeout: float | None = None
    ) -> AsyncGenerator[tuple[int, RequestOutput | None]]:
        """Yield (index of the request, output) until all have ended; closing it cancels what still runs.

        ``seconds`` is the time allowed.  With ``retryable``, for callers that have passed nothing on, a
        request whose replica died midway starts again: its output None says to forget what it gave so far.
        Raises :class:`ApiError` when a request is refused, or when a replica is lost and the request cannot
        be tried again.
        """
        inbox: asyncio.Queue[tuple[_InFlight, object]] = asyncio.Queue()
        in_flight = [_InFlight(index, request, inbox) for index, request in enumerate(requests)]
        deadline = None if timeout is None else time.monotonic() + timeout
        abort_task = asyncio.create_task(self._aborted.wait())
        try:
            for entry in in_flight:
                await self._dispatch(entry)
            num_unfinished = sum(request.params.n for request in requests)
            num_events = 0
            while num_unfinished:
                num_events += 1
                if num_events % _YIELD_EVERY == 0:  # a queue that is never empty must not keep the loop from others
                    await asyncio.sleep(0)
                entry, event = await _next_event(inbox, abort_task, deadline)
                if isinstance(event, RequestOutput):
                    entry.has_output = True
                    if event.finished:
                        num_unfinished, entry.num_unfinished = num_unfinished - 1, entry.num_unfinished - 1
                        self._finish_times.append(time.monotonic())
                    yield entry.index, replace(event, request_id=requests[entry.index].request_id)
                elif isinstance(event, ReplicaDied) and not entry.retried and (retryable or not entry.has_output):
                    entry.retried, num_sequences = True, requests[entry.index].params.n
                    num_unfinished, entry.num_unfinished = (
                        num_unfinished + num_sequences - entry.num_unfinished,
                        num_sequences,
                    )
                    yield entry.index, None
                    await self._dispatch(entry)
                else:
                    raise _to_api_error(event)
        finally:
            abort_task.cancel()
            for entry in in_flight:
                entry.abort()

    async def embed(self, prompts: list[list[int]], timeout: float | None = None) -> list[list[float]]:
        """Return a row for each prompt; ``seconds`` is the time allowed.

        An engine does nothing else while it embeds, not even say that it gets on: it has them in parts.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        abort_task = asyncio.create_task(self._aborted.wait())
        try:
            batches = [await self._embed_batch(part, abort_task, deadline) for part in _batch_prompts(prompts)]
        finally:
            abort_task.cancel()
        return [row for part in batches for row in part]

    async def _embed_batch(
        self, prompts: list[list[int]], abort_task: asyncio.Task, deadline: float | None
    ) -> list[list[float]]:
        inbox: asyncio.Queue[object] = asyncio.Queue()
        for is_last_try in (False, True):
            request_id, replica = f"e{next(self._request_numbers)}", await self._pick_replica()
            try:
                replica.embed(request_id, prompts, inbox.put_nowait)
                answer = await _next_event(inbox, abort_task, deadline)
            finally:
                replica.abort(request_id)
            if isinstance(answer, list):
                return answer
            if is_last_try or not isinstance(answer, ReplicaDied):
                raise _to_api_error(answer)
        raise AssertionError

    async def _dispatch(self, entry: _InFlight) -> None:
        replica = await self._pick_replica()
        entry.submit(replica, f"r{next(self._request_numbers)}")

    async def _pick_replica(self) -> Replica:
        """The ready replica with the least to do; waits a while for one where none is ready."""
        deadline = time.monotonic() + _READY_TIMEOUT
        while not (ready := self.ready_replicas()):
            self._check_crash_loop()
            if time.monotonic() > deadline:
                raise unavailable("no replica of the model is running; one is being started")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._replica_ready.wait(), 0.2)
        responsive = [replica for replica in ready if replica.stalled_seconds <= self.limits.stall_seconds]
        return min(responsive or ready, key=lambda replica: replica.num_outstanding)

    def _check_crash_loop(self) -> None:
        if not self.ready_replicas() and min(self._num_crashes) >= _MAX_CRASHES:
            raise unavailable(f"no replica of the model stays alive: {self.health()[1]}")

    async def _supervise(self, index: int) -> None:
        """Watch one replica; replace it when it dies."""
        while True:
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
            self.replicas[index] = successor = self._make_replica(index)
            try:
                await successor.start()
            except RuntimeError as error:  # the next turn of the loop tries again
                _LOG.error("replica %d does not start: %s", index, error)
                continue
            if self._model_info is not None and (mismatch := _model_mismatch(self._model_info, successor)):
                _LOG.error("%s", mismatch)
                await successor.stop(grace=0.0)
                continue
            ready_event, self._replica_ready = self._replica_ready, asyncio.Event()
            ready_event.set()

    def _retry_after(self, num_sequences: int) -> int:
        """Seconds until so many sequences will have ended, at the pace of the last ones; 1 to 60."""
        if len(self._finish_times) < 2:
            return 1
        pace = (len(self._finish_times) - 1) / max(self._finish_times[-1] - self._finish_times[0], 1e-3)
        missing = self.num_outstanding + num_sequences - self.limits.max_outstanding
        return max(1, min(60, math.ceil(missing / pace)))


class _InFlight:
    """One request on its way: the replica that has it, and the name under which it has it."""

    def __init__(self, index: int, request: Request, inbox: asyncio.Queue[tuple[_InFlight, object]]) -> None:
        self.index, self.has_output, self.retried = index, False, False
        self.num_unfinished = request.params.n  # sequences that have not ended
        self._request, self._inbox = request, inbox
        self._replica: Replica | None = None
        self._request_id = ""

    def submit(self, replica: Replica, request_id: str) -> None:
        self._replica, self._request_id = replica, request_id
        replica.add(replace(self._request, request_id=request_id), self._on_event)

    def abort(self) -> None:
        if self._replica is not None:
            self._replica.abort(self._request_id)

    def _on_event(self, event: object) -> None:
        self._inbox.put_nowait((self, event))


def _batch_prompts(prompts: list[list[int]]) -> Iterator[list[list[int]]]:
    """Cut a list of prompts into what an engine embeds at a time."""
    batch: list[list[int]] = []
    num_tokens = 0
    for prompt in prompts:
        if batch and (len(batch) == MAX_EMBED_PROMPTS or num_tokens + len(prompt) > _MAX_EMBED_TOKENS):
            yield batch
            batch, num_tokens = [], 0
        batch.append(prompt)
        num_tokens += len(prompt)
    yield batch


async def _next_event(inbox: asyncio.Queue, abort_task: asyncio.Task, deadline: float | None) -> Any:
    """The next event; raises when the pool has given up waiting, or at the deadline."""
    remaining = None if deadline is None else deadline - time.monotonic()
    if remaining is not None and remaining <= 0:
        raise _timeout_error()
    if not inbox.empty():
        return inbox.get_nowait()
    get_task = asyncio.ensure_future(inbox.get())
    try:
        await asyncio.wait((get_task, abort_task), return_when=asyncio.FIRST_COMPLETED, timeout=remaining)
        if get_task.done():
            return get_task.result()
        if not abort_task.done():
            raise _timeout_error()
        raise unavailable("the server is shutting down and had to stop this request", "shutting_down")
    finally:
        get_task.cancel()


def _model_mismatch(model_info: ModelMetadata, replica: Replica) -> str:
    """Say how a replica's model differs from that of the others; its name is its folder's on its host."""
    theirs = replica.model_info
    if theirs is None or replace(theirs, name=model_info.name) == model_info:
        return ""
    different_fields = [
        f.name
        for f in fields(model_info)
        if f.name != "name" and getattr(theirs, f.name) != getattr(model_info, f.name)
    ]
    message = f"replica {replica.index} has another model than the first ({', '.join(different_fields)})"
    return f"{message}: load the same on each host"


def _timeout_error() -> ApiError:
    return ApiError(504, "the request took longer than this server allows: ask for fewer tokens", code="timeout")


def _to_api_error(event: object) -> ApiError:
    if isinstance(event, RequestRejected):
        return bad_request(str(event))
    return unavailable(f"the replica that worked on this request was lost ({event}): try again", "lost", 1)
