"""R24: many requests, a third of them cancelled at any moment.  The quick tier; ``bench/serve.py --soak N``.

Afterwards the engine holds exactly 0 KV blocks, the server admits exactly 0 sequences, and every survivor
got what it would have got alone.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.marks import nightly
from tests.serve_client import RequestResult, send_request
from tests.serve_support import run_toy_server
from tests.toy_engine import expected_text
from thalweg.serve.replicas.pool import PoolLimits

CANCELLED = 0.3


async def soak(port: int, num_requests: int, seed: int, at_once: int = 48) -> list[RequestResult]:
    """Send requests of many kinds, ``at_once`` at a time; cancel some before, some amid the answer."""
    rng, gate = random.Random(seed), asyncio.Semaphore(at_once)

    async def one(i: int) -> RequestResult:
        body = {"prompt": f"soak {i} " + "x" * rng.randrange(60), "max_tokens": rng.randrange(1, 60)}
        body |= {"seed": i, "n": rng.choice((1, 1, 1, 2)), "stream": rng.random() < 0.6}
        leave = rng.uniform(0, 0.2) if rng.random() < CANCELLED else None
        async with gate:
            return await send_request(port, body, leave)

    return await asyncio.gather(*(one(i) for i in range(num_requests)))


@pytest.mark.parametrize("num_requests", [200, nightly(600)])
def test_kv_returns_to_zero_and_survivors_are_unharmed(num_requests: int) -> None:
    with run_toy_server("toy:delay=0.001,batch=24,blocks=100", pool_limits=PoolLimits(max_outstanding=60)) as server:
        outcomes = asyncio.run(soak(server.port, num_requests, seed=11))
        server.wait_idle()
        (engine,) = server.engines
        assert engine.used == 0 and not engine.has_work()
        metrics = server.request_raw("GET", "/metrics", None)[2]
        assert "thalweg_outstanding 0.0" in metrics
        done = [outcome for outcome in outcomes if outcome.status == 200]
        left = sum(outcome.disconnected for outcome in outcomes)
        assert len(done) > num_requests // 4 and left > num_requests // 10
        assert {outcome.status for outcome in outcomes} <= {200, 429, 0}
        for outcome in done:
            body = outcome.body
            want = [expected_text(body["prompt"], body["max_tokens"], body["seed"], k) for k in range(body["n"])]
            assert outcome.texts == want


def test_the_comparison_can_fail() -> None:
    """Negative control: another seed gives another text."""
    with run_toy_server() as server:
        body = {"prompt": "soak", "max_tokens": 40, "seed": 1, "n": 1, "stream": True}
        outcome = asyncio.run(send_request(server.port, body, None))
        assert outcome.texts == [expected_text("soak", 40, 1, 0)] != [expected_text("soak", 40, 2, 0)]
