"""An open-loop load: requests that arrive when they arrive, whether the server keeps up or not.

Lengths are log-normal, arrivals Poisson, half of the prompts begin with one of a few prefixes.  The
same seed gives every server the same requests at the same moments.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NUM_PREFIXES, PREFIX_CHARS = 4, 300
CHARS_PER_TOKEN = 3.2  # of the bench's tokenizer on its text


@dataclass(frozen=True)
class Arrival:
    """One request: when it comes (seconds from the start), and what it asks."""

    arrival_time: float
    prompt: str
    max_tokens: int


@dataclass
class RequestRecord:
    """What came of a request; times are seconds from its arrival."""

    tokens: int = 0
    ttft: float | None = None
    last: float = 0.0
    status: int = 0
    inter_token_times: list[float] = field(default_factory=list)

    def meets_slo(self, max_ttft: float, max_itl: float, num_expected_tokens: int) -> bool:
        """Whether it was whole and in time: the first token, and the mean between tokens."""
        if self.status != 200 or self.ttft is None or self.tokens < num_expected_tokens:
            return False
        between = (self.last - self.ttft) / max(1, self.tokens - 1)
        return self.ttft <= max_ttft and between <= max_itl


def poisson_arrivals(num_requests: int, rate: float, seed: int) -> list[Arrival]:
    """Return the arrivals; ``rate`` is in requests a second."""
    rng = random.Random(seed)
    text = "".join(p.read_text() for p in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py")))
    take_text = lambda n: text[(at := rng.randrange(len(text) - n)) : at + n]
    prefixes = [take_text(PREFIX_CHARS) for _ in range(NUM_PREFIXES)]
    arrivals, now = [], 0.0
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        length = min(600, max(16, int(rng.lognormvariate(math.log(96), 0.6))))
        wanted = min(160, max(8, int(rng.lognormvariate(math.log(40), 0.5))))
        shared = rng.choice(prefixes) if rng.random() < 0.5 else ""
        own = max(20, int(length * CHARS_PER_TOKEN) - len(shared))
        arrivals.append(Arrival(now, shared + take_text(own), wanted))
    return arrivals


async def run_load(port: int, model: str, arrivals: list[Arrival], timeout: float) -> tuple[list[RequestRecord], float]:
    """Send the load; returns a record for each request and the seconds until the last one ended."""
    start = time.perf_counter()

    async def send_one(arrival: Arrival) -> RequestRecord:
        await asyncio.sleep(max(0.0, start + arrival.arrival_time - time.perf_counter()))
        record = RequestRecord()
        try:
            await asyncio.wait_for(send_request(port, model, arrival, record), timeout)
        except (TimeoutError, OSError, ValueError, asyncio.IncompleteReadError):
            record.status = record.status if record.status not in (0, 200) else -1
        return record

    records = await asyncio.gather(*(send_one(arrival) for arrival in arrivals))
    return records, time.perf_counter() - start


async def send_request(port: int, model: str, arrival: Arrival, record: RequestRecord) -> None:
    """One streamed completion; a token is a chunk that carries text, or what ``usage`` says."""
    body: dict[str, Any] = {"model": model, "prompt": arrival.prompt, "max_tokens": arrival.max_tokens}
    body |= {"stream": True, "temperature": 0.0, "stream_options": {"include_usage": True}}
    data, came = json.dumps(body).encode(), time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Length: {len(data)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + data)
        record.status = int((await reader.readline()).split(b" ", 2)[1])
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            event, now = json.loads(line[6:]), time.perf_counter() - came
            if "error" in event:
                record.status = 500
            if (usage := event.get("usage")) and usage.get("completion_tokens"):
                record.tokens = max(record.tokens, usage["completion_tokens"])
            if any(choice.get("text") for choice in event.get("choices", ())):
                if record.ttft is None:
                    record.ttft = now
                else:
                    record.inter_token_times.append(now - record.last)
                record.last = now
                record.tokens = max(record.tokens, 1 + len(record.inter_token_times))
    finally:
        writer.close()


def summary(
    records: list[RequestRecord], arrivals: list[Arrival], seconds: float, max_ttft: float, max_itl: float
) -> dict[str, float]:
    """Return goodput (requests a second within the latencies), token rate and percentiles."""
    good = sum(r.meets_slo(max_ttft, max_itl, a.max_tokens) for r, a in zip(records, arrivals, strict=True))
    firsts = [r.ttft if r.ttft is not None else math.inf for r in records]
    gaps = [gap for r in records for gap in r.inter_token_times]
    return {
        "goodput": good / seconds,
        "good": good,
        "requests": len(records),
        "refused": sum(r.status == 429 for r in records),
        "failed": sum(r.status not in (200, 429) for r in records),
        "tokens_per_s": sum(r.tokens for r in records) / seconds,
        "ttft_p50": percentile(firsts, 50),
        "ttft_p99": percentile(firsts, 99),
        "itl_p50": percentile(gaps, 50),
        "itl_p99": percentile(gaps, 99),
        "seconds": seconds,
    }


def percentile(values: list[float], q: int) -> float:
    """Return the q-th percentile, the value that so many lie at or below; infinite where there is none."""
    if not values:
        return math.inf
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(len(ordered) * q / 100) - 1)]


def median_of_runs(runs: list[dict[str, float]], key: str) -> float:
    """Return the median over rounds."""
    return statistics.median(run[key] for run in runs)
