"""The long tiers of R23 (bad requests), R24 (soak, cancellations) and R25 (residue), on the toy engine."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from _peers import ROOT
from _report import Row, compare

sys.path.insert(0, str(ROOT))

from tests.serve_client import one_request
from tests.serve_fuzz import bad_body, bad_bytes
from tests.serve_support import Served, served
from tests.toy_engine import expected
from thalweg.serve.pool import PoolLimits

_REPORT = 30.0  # seconds between lines on standard error


def run_long(num_bad: int, num_soak: int, num_ends: int, seed: int) -> list[dict[str, Any]]:
    """Run what is asked for; returns a run with rows for each, AssertionError where a promise is broken."""
    runs = []
    if num_bad:
        found = _fuzz(num_bad, seed)
        note = f"Answers by status: {found} (0: the connection was closed). One engine from first to last."
        rows = [_row("R23 fuzz", "bad requests", num_bad, 1_000_000)]
        rows.append(compare("R23 fuzz, answers", "goal", "answers above 499", 0, 0))
        runs.append({"run": "R23 fuzz", "rows": rows, "note": note})
    if num_soak:
        found = _soak(num_soak, seed)
        drift, resident = found.pop("drift"), found.pop("resident_mib")
        note = f"Ends by status: {found} (-2: the client left, -1: refused by the listen queue). "
        note += f"{resident:.0f} MiB at the end. Each survivor's text was what the request gives alone."
        rows = [_row("R24 soak", "requests, 30% left midway", num_soak, 500_000)]
        rows.append(compare("R24 soak, after each twentieth", "goal", "KV blocks held", 0, 0))
        rows.append(compare("R24 soak, memory", "goal", "% drift after a quarter", 100 * drift, 1.0,
                            ratio=1.0 / max(100 * drift, 0.01)))  # fmt: skip
        runs.append({"run": "R24 soak", "rows": rows, "note": note})
    if num_ends:
        found = _residue(num_ends, seed)
        rows = [_row("R25 residue", "ends", num_ends, 1000)]
        rows.append(compare("R25 residue, left", "goal", "processes, files, ports", 0, 0))
        runs.append({"run": "R25 residue", "rows": rows, "note": f"By signal: {found}."})
    return runs


def _row(name: str, what: str, count: int, goal: int) -> Row:
    return compare(f"{name}, full count", "goal", what, count, goal, lower_is_better=False)


def _fuzz(count: int, seed: int) -> dict[str, Any]:
    """R23: no 5xx, no engine dies, the server answers a good request at the end."""
    rng, statuses = random.Random(seed), Counter()
    with served("toy") as server:
        asyncio.run(_fuzz_load(server, count, rng, statuses))
        server.wait_idle()
        assert len(server.engines) == 1, "an engine died"
        assert server.complete("still here", max_tokens=2)
    assert not [status for status in statuses if status >= 500], statuses
    return {str(status): number for status, number in sorted(statuses.items())}


async def _fuzz_load(server: Served, count: int, rng: random.Random, statuses: Counter[int]) -> None:
    turns, progress = iter(range(count)), _Progress("bad requests", count)

    async def worker() -> None:
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        for turn in turns:
            progress.step()
            if turn % 50 == 0:  # something that is not HTTP, on a connection of its own
                statuses[await _raw(server.port, bad_bytes(rng, turn // 50))] += 1
                continue
            path, body = bad_body(rng)
            try:
                connection = connection or await asyncio.open_connection(
                    "127.0.0.1", server.port, limit=2**20
                )
                status, kept = await asyncio.wait_for(_post(*connection, path, body), 60)
            except (ConnectionError, asyncio.IncompleteReadError):
                status, kept = 0, False  # closed, as after a body that was too large
            statuses[status] += 1
            if not kept and connection is not None:
                connection[1].close()
                connection = None
        if connection is not None:
            connection[1].close()

    await asyncio.gather(*(worker() for _ in range(16)))


async def _post(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: bytes
) -> tuple[int, bool]:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    if "transfer-encoding: chunked" in head:
        while (size := int(await reader.readline(), 16)) > 0:
            await reader.readexactly(size + 2)
        await reader.readexactly(2)
    else:
        await reader.readexactly(int(head.partition("content-length: ")[2].split("\r", 1)[0]))
    return int(head.split(" ", 2)[1]), "connection: close" not in head


async def _raw(port: int, data: bytes) -> int:
    """Send bytes and hang up; returns the status, 0 for none."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        writer.write_eof()
        first = await asyncio.wait_for(reader.read(64), 60)
        writer.close()
        return int(first.split(b" ", 2)[1]) if first else 0
    except (OSError, ValueError):
        return 0


def _soak(count: int, seed: int) -> dict[str, Any]:
    """R24: KV blocks and admitted sequences back at 0, survivors as alone, memory within 1% after warm-up."""
    rng, statuses, memory = random.Random(seed), Counter(), []
    with served("toy:batch=32,blocks=160", pool=PoolLimits(max_outstanding=80)) as server:
        batch = max(1, count // 20)
        progress = _Progress("soak", count)
        for _ in range(0, count, batch):
            asyncio.run(_soak_batch(server.port, batch, rng, statuses, progress))
            server.wait_idle()
            assert [engine.used for engine in server.engines] == [0], "KV blocks were lost"
            assert "thalweg_outstanding 0.0" in server.raw("GET", "/metrics", None)[2]
            memory.append(_resident())
    settled = memory[len(memory) // 4 :]
    drift = (settled[-1] - settled[0]) / settled[0]
    assert drift <= 0.01 or len(memory) < 10, f"memory grew by {drift:.1%}"
    return {
        **{str(k): v for k, v in sorted(statuses.items())},
        "resident_mib": memory[-1] / 2**20,
        "drift": drift,
    }


async def _soak_batch(
    port: int, count: int, rng: random.Random, statuses: Counter[int], progress: _Progress
) -> None:
    turns = iter(range(count))

    async def worker() -> None:
        for i in turns:
            progress.step()
            body = {
                "prompt": f"soak {i} " + "x" * rng.randrange(60),
                "max_tokens": rng.randrange(1, 40),
                "seed": i,
            }
            body |= {"n": rng.choice((1, 1, 1, 2)), "stream": rng.random() < 0.6}
            leave = rng.uniform(0, 0.05) if rng.random() < 0.3 else None
            try:
                outcome = await one_request(port, body, leave)
            except (ConnectionError, asyncio.IncompleteReadError):
                outcome = None
            statuses[-1 if outcome is None else -2 if outcome.left else outcome.status] += 1
            if outcome is not None and outcome.status == 200:
                want = [expected(body["prompt"], body["max_tokens"], i, k) for k in range(body["n"])]
                assert outcome.texts == want, "a survivor was harmed"

    await asyncio.gather(*(worker() for _ in range(40)))
    assert not [status for status in statuses if status >= 500], statuses


def _residue(count: int, seed: int) -> dict[str, Any]:
    """R25: after each end no process, port or file of the server is left."""
    rng, ends = random.Random(seed), Counter()
    progress = _Progress("ends", count)
    with tempfile.TemporaryDirectory(prefix="thalweg-residue-") as name:
        home = Path(name)
        environ = {
            **os.environ,
            "HOME": name,
            "TMPDIR": name,
            "XDG_RUNTIME_DIR": name,
            "PYTHONPATH": str(ROOT),
        }
        for _ in range(count):
            progress.step()
            number = rng.choice(
                (signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGQUIT, signal.SIGHUP)
            )
            command = [sys.executable, "-m", "thalweg", "serve", "toy:delay=0.01", "--port", "0", "--json"]
            command += ["--loader", "tests.toy_engine:load_engine", "--drain-seconds", "0.1"]
            process = subprocess.Popen(
                command,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            assert process.stdout is not None
            port = (
                json.loads(process.stdout.readline())["url"].rpartition(":")[2]
                if rng.random() < 0.8
                else None
            )
            if port is None:
                time.sleep(rng.random())  # while it starts
            children = _children(process.pid)
            process.send_signal(number)
            process.wait(30)
            process.stdout.close()
            deadline = time.monotonic() + 10
            while any(Path(f"/proc/{pid}").exists() for pid in children):
                assert time.monotonic() < deadline, f"{signal.Signals(number).name} left {children}"
                time.sleep(0.02)
            left = [str(path) for path in home.rglob("*") if path.is_file()]
            assert not left, left
            if port is not None:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", int(port)))
            ends[signal.Signals(number).name] += 1
    return dict(ends)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in tasks for child in path.read_text().split()]


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class _Progress:
    """A line on standard error now and then."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._count, self._said = what, total, 0, time.monotonic()
        self._lock = threading.Lock()

    def step(self) -> None:
        with self._lock:
            self._count += 1
            if time.monotonic() - self._said > _REPORT:
                self._said = time.monotonic()
                print(f"{self._what}: {self._count} of {self._total}", file=sys.stderr, flush=True)
