"""What ``/metrics`` shows: Prometheus histograms of latency, counters, and the engines' gauges.

Each server has a registry of its own (no global state), so several live side by side in one process.  The
engines' gauges are read when somebody asks for them, from the last heartbeat.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from thalweg.infer.types import RequestOutput

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 5)
_E2E_LATENCY_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class PoolGauges(Protocol):
    """What is read from the pool whenever somebody asks for ``/metrics``."""

    num_outstanding: int
    limits: Any
    replicas: Any

    def ready_replicas(self) -> Sequence[Any]:
        """The replicas that take requests."""
        ...

    def health(self) -> tuple[bool, str]:
        """Whether ``/health`` is 200."""
        ...


class ServerMetrics:
    """Counts what one server does, whatever stands behind it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._registry_kwargs: dict[str, Any] = {"registry": self.registry}
        self._e2e_latency = Histogram("thalweg_request_seconds", "From arrival to the last token",
                                      buckets=_E2E_LATENCY_BUCKETS, **self._registry_kwargs)  # fmt: skip
        self._responses = Counter("thalweg_http_responses", "Responses", ["path", "status"], **self._registry_kwargs)
        self._cancelled = Counter(
            "thalweg_cancelled", "Requests whose client left before the end", **self._registry_kwargs
        )

    def count_response(self, path: str, status: int) -> None:
        """Count an HTTP response."""
        self._responses.labels(path, status).inc()

    def count_cancelled(self) -> None:
        """Count a client that left."""
        self._cancelled.inc()

    def render(self) -> bytes:
        """Return the text form."""
        return generate_latest(self.registry)


class EngineGauges(PoolGauges, Protocol):
    """The same of a pool of engines."""

    num_restarts: int


class Metrics(ServerMetrics):
    """Those of a server with engines."""

    def __init__(self, pool: EngineGauges) -> None:
        super().__init__()
        registry_kwargs = self._registry_kwargs
        self._ttft = Histogram("thalweg_time_to_first_token_seconds", "From arrival to the first token",
                                buckets=_TTFT_BUCKETS, **registry_kwargs)  # fmt: skip
        self._itl = Histogram("thalweg_inter_token_latency_seconds", "From one token to the next",
                                  buckets=_ITL_BUCKETS, **registry_kwargs)  # fmt: skip
        self._finished = Counter("thalweg_finished", "Sequences by finish reason", ["reason"], **registry_kwargs)
        self._prompt_tokens = Counter(
            "thalweg_prompt_tokens", "Prompt tokens of requests that were started", **registry_kwargs
        )
        self._generated_tokens = Counter("thalweg_generated_tokens", "Tokens generated", **registry_kwargs)
        self.registry.register(_EngineCollector(pool))

    def start_timer(self) -> RequestTimer:
        """Begin to time a request that has just arrived."""
        return RequestTimer(self)


class RequestTimer:
    """Times one HTTP request's sequences."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._start = metrics, time.perf_counter()
        self._last_token_time: dict[tuple[int, int], float] = {}

    def record_output(self, index: int, output: RequestOutput) -> None:
        """Note one output of sequence ``output.index`` of request ``index``."""
        metrics, now, key = self._metrics, time.perf_counter(), (index, output.index)
        num_tokens = len(output.token_ids)
        if num_tokens:
            metrics._generated_tokens.inc(num_tokens)
            if key in self._last_token_time:
                for _ in range(num_tokens):  # tokens of one speculative step came together
                    metrics._itl.observe((now - self._last_token_time[key]) / num_tokens)
            else:
                metrics._ttft.observe(now - self._start)
                if output.index == 0:
                    metrics._prompt_tokens.inc(output.num_prompt_tokens)
            self._last_token_time[key] = now
        if output.finish_reason is not None:
            metrics._finished.labels(output.finish_reason).inc()
            metrics._e2e_latency.observe(now - self._start)


class _EngineCollector:
    """The engines' gauges and counters, by replica."""

    def __init__(self, pool: EngineGauges) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Any]:
        pool = self._pool
        yield from _common_gauges(pool, "Sequences")
        yield CounterMetricFamily("thalweg_replica_restarts", "Replicas replaced", value=pool.num_restarts)
        families = [
            (GaugeMetricFamily, "running", "Sequences that take part in steps", "running"),
            (GaugeMetricFamily, "waiting", "Sequences queued in the engine", "waiting"),
            (GaugeMetricFamily, "kv_blocks", "KV blocks there are", "kv_blocks"),
            (GaugeMetricFamily, "kv_blocks_used", "KV blocks held by sequences", "kv_blocks_used"),
            (GaugeMetricFamily, "kv_use_ratio", "Share of the KV blocks in use", "kv_use"),
            (CounterMetricFamily, "engine_steps", "Steps", "steps"),
            (CounterMetricFamily, "engine_prompt_tokens", "Prompt tokens admitted", "prompt_tokens"),
            (CounterMetricFamily, "prefix_hit_tokens", "Prompt tokens from the prefix cache", "cached_tokens"),
            (CounterMetricFamily, "preemptions", "Sequences preempted", "preemptions"),
        ]
        for family, name, text, field in families:
            metric = family(f"thalweg_{name}", text, labels=["replica"])
            for replica in pool.replicas:
                metric.add_metric([str(replica.index)], getattr(replica.stats, field))
            yield metric
        stalled = GaugeMetricFamily("thalweg_no_progress_seconds", "Work, but no step", labels=["replica"])
        for replica in pool.replicas:
            stalled.add_metric([str(replica.index)], replica.stalled_seconds)
        yield stalled


class RouterGauges(PoolGauges, Protocol):
    """The same of a router."""

    num_retries: int


class RouterMetrics(ServerMetrics):
    """Those of a server that forwards to others."""

    def __init__(self, router: RouterGauges) -> None:
        super().__init__()
        self._first_byte = Histogram("thalweg_time_to_first_byte_seconds", "From arrival to a replica's answer",
                                     buckets=_TTFT_BUCKETS, **self._registry_kwargs)  # fmt: skip
        self.registry.register(_RouterCollector(router))

    @contextlib.contextmanager
    def time_request(self) -> Iterator[Callable[[], None]]:
        """Time one request; what is yielded is to be called when its answer begins."""
        start, began = time.perf_counter(), []

        def answer_begins() -> None:
            began.append(time.perf_counter())
            self._first_byte.observe(began[0] - start)

        try:
            yield answer_begins
        finally:
            if began:
                self._e2e_latency.observe(time.perf_counter() - start)


class _RouterCollector:
    def __init__(self, router: RouterGauges) -> None:
        self._router = router

    def collect(self) -> Iterator[Any]:
        router = self._router
        yield from _common_gauges(router, "Requests")
        yield CounterMetricFamily("thalweg_retries", "Requests given to another replica", value=router.num_retries)
        up = GaugeMetricFamily("thalweg_replica_up", "1 while it takes requests", labels=["replica"])
        outstanding = GaugeMetricFamily("thalweg_replica_outstanding", "Requests it has", labels=["replica"])
        for replica in router.replicas:
            up.add_metric([str(replica.index)], replica.state == "ready")
            outstanding.add_metric([str(replica.index)], replica.num_outstanding)
        yield from (up, outstanding)


def _common_gauges(pool: PoolGauges, what: str) -> Iterator[Any]:
    yield GaugeMetricFamily("thalweg_outstanding", f"{what} admitted, not ended", value=pool.num_outstanding)
    yield GaugeMetricFamily("thalweg_outstanding_limit", "Beyond it: 429", value=pool.limits.max_outstanding)
    yield GaugeMetricFamily("thalweg_replicas_ready", "Replicas that serve", value=len(pool.ready_replicas()))
    yield GaugeMetricFamily("thalweg_healthy", "1 while /health is 200", value=pool.health()[0])
