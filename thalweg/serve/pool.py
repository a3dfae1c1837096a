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

from thalweg.infer.api import ModelFacts, Request, RequestOutput
from thalweg.serve.errors import ApiError, bad_request, overloaded, unavailable
from thalweg.serve.replica import Lost, Refused, Replica
from thalweg.serve.spawn import Running
from thalweg.utils.log import get_logger

_LOG = get_logger(__name__)
_PAUSES = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds before a replica that keeps dying is started again
_PROVEN = 60.0  # a replica that lived so long starts that list from its beginning
_HOPELESS = 3  # deaths in a row after which a request does not wait for the next life
_FAIR = 16  # outputs of one request that are passed on in one turn of the event loop
EMBED_PROMPTS = 64
"""Prompts of one request that an engine embeds at a time; more need no more room in the queue."""
_EMBED_TOKENS = 4096
_WAIT_FOR_ANOTHER = 30.0  # seconds that a retry waits for a replica to be ready


@dataclass(frozen=True)
class PoolLimits:
    """``max_outstanding`` counts sequences: running and queued, of all replicas together."""

    max_outstanding: int = 192
    stall_seconds: float = 60.0


class Pool:
    """Runs ``num_replicas`` replicas made by ``start`` and spreads requests over them."""

    def __init__(self, start: Callable[[int], Running], num_replicas: int, limits: PoolLimits) -> None:
        self.limits = limits
        self.draining = False
        self.restarts = 0
        self.outstanding = 0
        # A replica's start may wait for another host: not in the threads that all the rest shares.
        self._threads = ThreadPoolExecutor(num_replicas, "thalweg-serve-start")
        self._start = start
        self.replicas = [self._new(index) for index in range(num_replicas)]
        self._facts: ModelFacts | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self._names = itertools.count()
        self._ends: deque[float] = deque(maxlen=64)  # when sequences ended lately, for Retry-After
        self._deaths = [0] * num_replicas  # of each replica, one soon after the other
        self._gave_up = asyncio.Event()
        self._changed = asyncio.Event()  # set, and renewed, whenever a replica becomes ready

    def _new(self, index: int) -> Replica:
        return Replica(index, self._start, self._threads)

    async def start(self) -> ModelFacts:
        """Start all replicas; returns the model's facts, or raises RuntimeError when one cannot start."""
        try:
            await asyncio.gather(*(replica.start() for replica in self.replicas))
        except BaseException:
            await self.close()
            raise
        self._facts = facts = self.replicas[0].facts
        assert facts is not None
        for replica in self.replicas:
            if why := _other_model(facts, replica):
                await self.close()
                raise RuntimeError(why)
        self._keepers = [asyncio.create_task(self._keep(i)) for i in range(len(self.replicas))]
        return facts

    async def close(self) -> None:
        """End all replicas; what still waits gets an error."""
        self.draining = True
        for keeper in self._keepers:
            keeper.cancel()
        if (close := getattr(self._start, "close", None)) is not None:
            close()  # a start that waits for a worker ends
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(replica.stop(final=True) for replica in self.replicas))

    def give_up(self) -> None:
        """End every stream with an error: the time for draining is over."""
        self._gave_up.set()

    def ready(self) -> list[Replica]:
        """The replicas that take requests."""
        return [replica for replica in self.replicas if replica.state == "ready"]

    def health(self) -> tuple[bool, str]:
        """Whether a request that comes now would be served, and why not."""
        if self.draining:
            return False, "the server is shutting down"
        ready = self.ready()
        if not ready:
            reasons = {replica.reason for replica in self.replicas if replica.reason}
            return False, f"no replica is running: {'; '.join(sorted(reasons)) or 'starting'}"
        if all(replica.stuck > self.limits.stall_seconds for replica in ready):
            return False, f"the engine has made no progress for {min(r.stuck for r in ready):.0f} s"
        return True, ""

    def check(self, num_sequences: int) -> None:
        """Raise 429 without room for so many sequences, 503 while draining or when replicas keep dying."""
        if self.draining:
            raise unavailable("the server is shutting down: use another one", "shutting_down")
        if num_sequences > self.limits.max_outstanding:
            raise bad_request(
                f"{num_sequences} sequences (prompts times n) in one request; this server takes "
                f"{self.limits.max_outstanding}: split the request",
                "n",
            )
        if self.outstanding + num_sequences > self.limits.max_outstanding:
            raise overloaded(self._retry_after(num_sequences))
        self._check_hope()

    @contextlib.contextmanager
    def admit(self, num_sequences: int) -> Iterator[None]:
        """Reserve room for so many sequences, or raise what :meth:`check` does."""
        self.check(num_sequences)
        self.outstanding += num_sequences
        try:
            yield
        finally:
            self.outstanding -= num_sequences

    async def generate(
        self, requests: list[Request], *, restartable: bool = False, seconds: float | None = None
    ) -> AsyncGenerator[tuple[int, RequestOutput | None]]:
        """Yield (index of the request, output) until all have ended; closing it cancels what still runs.

        ``seconds`` is the time allowed.  With ``restartable``, for callers that have passed nothing on, a
        request whose replica died midway starts again: its output None says to forget what it gave so far.
        Raises :class:`ApiError` when a request is refused, or when a replica is lost and the request cannot
        be tried again.
        """
        inbox: asyncio.Queue[tuple[_Flight, object]] = asyncio.Queue()
        flights = [_Flight(index, request, inbox) for index, request in enumerate(requests)]
        deadline = None if seconds is None else time.monotonic() + seconds
        over = asyncio.create_task(self._gave_up.wait())
        try:
            for flight in flights:
                await self._launch(flight)
            left = sum(request.params.n for request in requests)
            turn = 0
            while left:
                turn += 1
                if turn % _FAIR == 0:  # a queue that is never empty must not keep the loop from others
                    await asyncio.sleep(0)
                flight, event = await _next(inbox, over, deadline)
                if isinstance(event, RequestOutput):
                    flight.began = True
                    if event.finished:
                        left, flight.left = left - 1, flight.left - 1
                        self._ends.append(time.monotonic())
                    yield flight.index, replace(event, request_id=requests[flight.index].request_id)
                elif isinstance(event, Lost) and not flight.retried and (restartable or not flight.began):
                    flight.retried, num_sequences = True, requests[flight.index].params.n
                    left, flight.left = left + num_sequences - flight.left, num_sequences
                    yield flight.index, None
                    await self._launch(flight)
                else:
                    raise _as_error(event)
        finally:
            over.cancel()
            for flight in flights:
                flight.abort()

    async def embed(self, prompts: list[list[int]], seconds: float | None = None) -> list[list[float]]:
        """Return a row for each prompt; ``seconds`` is the time allowed.

        An engine does nothing else while it embeds, not even say that it gets on: it has them in parts.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        over = asyncio.create_task(self._gave_up.wait())
        try:
            parts = [await self._embed(part, over, deadline) for part in _parts(prompts)]
        finally:
            over.cancel()
        return [row for part in parts for row in part]

    async def _embed(
        self, prompts: list[list[int]], over: asyncio.Task, deadline: float | None
    ) -> list[list[float]]:
        inbox: asyncio.Queue[object] = asyncio.Queue()
        for last in (False, True):
            name, replica = f"e{next(self._names)}", await self._choose()
            try:
                replica.embed(name, prompts, inbox.put_nowait)
                answer = await _next(inbox, over, deadline)
            finally:
                replica.abort(name)
            if isinstance(answer, list):
                return answer
            if last or not isinstance(answer, Lost):
                raise _as_error(answer)
        raise AssertionError

    async def _launch(self, flight: _Flight) -> None:
        replica = await self._choose()
        flight.go(replica, f"r{next(self._names)}")

    async def _choose(self) -> Replica:
        """The ready replica with the least to do; waits a while for one where none is ready."""
        deadline = time.monotonic() + _WAIT_FOR_ANOTHER
        while not (ready := self.ready()):
            self._check_hope()
            if time.monotonic() > deadline:
                raise unavailable("no replica of the model is running; one is being started")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), 0.2)
        lively = [replica for replica in ready if replica.stuck <= self.limits.stall_seconds]
        return min(lively or ready, key=lambda replica: replica.outstanding)

    def _check_hope(self) -> None:
        if not self.ready() and min(self._deaths) >= _HOPELESS:
            raise unavailable(f"no replica of the model stays alive: {self.health()[1]}")

    async def _keep(self, index: int) -> None:
        """Watch one replica; replace it when it dies."""
        while True:
            replica, born = self.replicas[index], time.monotonic()
            while not replica.ended.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(replica.ended.wait(), 0.25)
                if replica.stuck > 2 * self.limits.stall_seconds and not replica.ended.is_set():
                    _LOG.error("replica %d has made no step for %.0f s: replaced", index, replica.stuck)
                    await replica.stop(grace=0.0)
            deaths = 0 if time.monotonic() - born > _PROVEN else self._deaths[index]
            self._deaths[index] = deaths + 1
            _LOG.error("replica %d is lost (%s); starting another", index, replica.reason)
            await replica.stop(grace=2.0)
            await asyncio.sleep(_PAUSES[min(deaths, len(_PAUSES) - 1)])
            self.restarts += 1
            self.replicas[index] = successor = self._new(index)
            try:
                await successor.start()
            except RuntimeError as error:  # the next turn of the loop tries again
                _LOG.error("replica %d does not start: %s", index, error)
                continue
            if self._facts is not None and (why := _other_model(self._facts, successor)):
                _LOG.error("%s", why)
                await successor.stop(grace=0.0)
                continue
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def _retry_after(self, num_sequences: int) -> int:
        """Seconds until so many sequences will have ended, at the pace of the last ones; 1 to 60."""
        if len(self._ends) < 2:
            return 1
        pace = (len(self._ends) - 1) / max(self._ends[-1] - self._ends[0], 1e-3)
        missing = self.outstanding + num_sequences - self.limits.max_outstanding
        return max(1, min(60, math.ceil(missing / pace)))


class _Flight:
    """One request on its way: the replica that has it, and the name under which it has it."""

    def __init__(self, index: int, request: Request, inbox: asyncio.Queue[tuple[_Flight, object]]) -> None:
        self.index, self.began, self.retried = index, False, False
        self.left = request.params.n  # sequences that have not ended
        self._request, self._inbox = request, inbox
        self._replica: Replica | None = None
        self._name = ""

    def go(self, replica: Replica, name: str) -> None:
        self._replica, self._name = replica, name
        replica.add(replace(self._request, request_id=name), self._take)

    def abort(self) -> None:
        if self._replica is not None:
            self._replica.abort(self._name)

    def _take(self, event: object) -> None:
        self._inbox.put_nowait((self, event))


def _parts(prompts: list[list[int]]) -> Iterator[list[list[int]]]:
    """Cut a list of prompts into what an engine embeds at a time."""
    part: list[list[int]] = []
    num_tokens = 0
    for prompt in prompts:
        if part and (len(part) == EMBED_PROMPTS or num_tokens + len(prompt) > _EMBED_TOKENS):
            yield part
            part, num_tokens = [], 0
        part.append(prompt)
        num_tokens += len(prompt)
    yield part


async def _next(inbox: asyncio.Queue, over: asyncio.Task, deadline: float | None) -> Any:
    """The next event; raises when the pool has given up waiting, or at the deadline."""
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        raise _time_is_up()
    if not inbox.empty():
        return inbox.get_nowait()
    getting = asyncio.ensure_future(inbox.get())
    try:
        await asyncio.wait((getting, over), return_when=asyncio.FIRST_COMPLETED, timeout=left)
        if getting.done():
            return getting.result()
        if not over.done():
            raise _time_is_up()
        raise unavailable("the server is shutting down and had to stop this request", "shutting_down")
    finally:
        getting.cancel()


def _other_model(facts: ModelFacts, replica: Replica) -> str:
    """Say how a replica's model differs from that of the others; its name is its folder's on its host."""
    theirs = replica.facts
    if theirs is None or replace(theirs, name=facts.name) == facts:
        return ""
    names = [
        f.name
        for f in fields(facts)
        if f.name != "name" and getattr(theirs, f.name) != getattr(facts, f.name)
    ]
    what = f"replica {replica.index} has another model than the first ({', '.join(names)})"
    return f"{what}: load the same on each host"


def _time_is_up() -> ApiError:
    return ApiError(
        504, "the request took longer than this server allows: ask for fewer tokens", code="timeout"
    )


def _as_error(event: object) -> ApiError:
    if isinstance(event, Refused):
        return bad_request(str(event))
    return unavailable(f"the replica that worked on this request was lost ({event}): try again", "lost", 1)
