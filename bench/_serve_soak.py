"""The long tiers of R23 (bad requests), R24 (soak, cancellations) and R25 (residue), on the toy engine.

The server is `thalweg serve`, its front and its replica processes of their own; the load runs in this one.
So memory is that of the server alone: the anonymous memory of both processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _peers import ROOT
from _report import Row, compare

sys.path.insert(0, str(ROOT))

from tests.serve_client import Connection
from tests.serve_fuzz import bad_body, bad_bytes
from tests.toy_engine import expected_text

_PROGRESS_SECONDS = 30.0  # seconds between lines on standard error
_NUM_CONNECTIONS = 48  # connections, more than the server admits sequences with n > 1


def run_long_tiers(num_bad: int, num_soak: int, num_ends: int, seed: int) -> list[dict[str, Any]]:
    """Run what is asked for; returns a run with rows for each, AssertionError where a promise is broken."""
    runs = []
    if num_bad:
        found = _fuzz(num_bad, seed)
        note = f"Answers by status: {found} (0: the connection was closed)."
        note += " On the tests' toy engine, one from first to last."
        rows = [_row("R23 fuzz", "bad requests", num_bad, 1_000_000)]
        rows.append(compare("R23 fuzz, answers", "goal", "answers above 499", 0, 0))
        runs.append({"run": "R23 fuzz", "rows": rows, "note": note})
    if num_soak:
        found = _soak(num_soak, seed)
        drift, memory = found.pop("drift"), found.pop("memory")
        note = f"Ends by status: {found} (-2: the client left, -1: refused by the listen queue). "
        note += f"Anonymous memory of front and replica after each twentieth, MiB: {memory}. "
        note += "Each survivor's text was what the request gives alone."
        rows = [_row("R24 soak", "requests, 30% left midway", num_soak, 500_000)]
        rows.append(compare("R24 soak, after each twentieth", "goal", "KV blocks held", 0, 0))
        rows.append(compare("R24 soak, memory", "goal", "% drift, second quarter to last", 100 * drift, 1.0,
                            ratio=1.0 / max(100 * drift, 0.01)))  # fmt: skip
        runs.append({"run": "R24 soak", "rows": rows, "note": note})
    if num_ends:
        found = _check_leftovers(num_ends, seed)
        rows = [_row("R25 residue", "ends", num_ends, 1000)]
        rows.append(compare("R25 residue, left", "goal", "processes, files, ports", 0, 0))
        runs.append({"run": "R25 residue", "rows": rows, "note": f"By signal: {found}."})
    return runs


def _row(name: str, what: str, count: int, goal: int) -> Row:
    return compare(f"{name}, full count", "goal", what, count, goal, lower_is_better=False)


class _ServerProcess:
    """`thalweg serve` with the toy engine."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process, self.port = process, port
        self.pids = [process.pid, *_children(process.pid)]

    def metrics(self) -> dict[str, float]:
        """The numbers of /metrics by name and labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def wait_idle(self) -> None:
        """Wait until nothing is admitted and no KV block is held, and that stays so."""
        deadline, since = time.monotonic() + 30, None
        while since is None or time.monotonic() - since < 0.5:  # a heartbeat and more
            found = self.metrics()
            in_use = {key: found[key] for key in found if f"{key} ".startswith(_RESOURCE_GAUGES)}
            assert len(in_use) == len(_RESOURCE_GAUGES), in_use
            since = (since or time.monotonic()) if not any(in_use.values()) else None
            assert time.monotonic() < deadline, f"left behind: {in_use}"
            time.sleep(0.05)
        assert found["thalweg_replica_restarts_total"] == 0, "an engine died"
        assert [self.process.pid, *_children(self.process.pid)] == self.pids

    def anonymous_bytes(self) -> int:
        """Anonymous bytes of the front and its replicas."""
        total = 0
        for pid in self.pids:
            status = Path(f"/proc/{pid}/status").read_text()
            total += 1024 * int(status.partition("RssAnon:")[2].split(maxsplit=1)[0])
        return total


_RESOURCE_GAUGES = ("thalweg_outstanding ", "thalweg_kv_blocks_used{", "thalweg_running{", "thalweg_waiting{")


@contextlib.contextmanager
def _run_toy_server(model: str, *options: str) -> Iterator[_ServerProcess]:
    command = [sys.executable, "-m", "thalweg", "serve", model, "--port", "0", "--json", *options]
    process = subprocess.Popen(
        [*command, "--loader", "tests.toy_engine:load_engine"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield _ServerProcess(process, int(json.loads(process.stdout.readline())["url"].rpartition(":")[2]))
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def _fuzz(count: int, seed: int) -> dict[str, Any]:
    """R23: no 5xx, no engine dies, the server answers a good request at the end."""
    rng, statuses = random.Random(seed), Counter()
    with _run_toy_server("toy") as server:
        asyncio.run(_fuzz_load(server.port, count, rng, statuses))
        server.wait_idle()
        body = {"prompt": "still here", "max_tokens": 20, "seed": 3}
        outcome = asyncio.run(Connection(server.port, keep_alive=False).send(body))
        assert outcome.texts == [expected_text("still here", 20, 3)]
    assert not [status for status in statuses if status >= 500], statuses
    return {str(status): number for status, number in sorted(statuses.items())}


async def _fuzz_load(port: int, count: int, rng: random.Random, statuses: Counter[int]) -> None:
    turns, progress = iter(range(count)), _Progress("bad requests", count)

    async def worker() -> None:
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        for turn in turns:
            progress.step()
            if turn % 50 == 0:  # something that is not HTTP, on a connection of its own
                statuses[await _send_raw(port, bad_bytes(rng, turn // 50))] += 1
                continue
            path, body = bad_body(rng)
            try:
                connection = connection or await asyncio.open_connection("127.0.0.1", port, limit=2**20)
                status, kept = await asyncio.wait_for(_post(*connection, path, body), 60)
            except (ConnectionError, asyncio.IncompleteReadError):
                status, kept = 0, False  # closed, as after a body that was too large
            statuses[status] += 1
            if not kept and connection is not None:
                connection[1].close()
                connection = None
        if connection is not None:
            connection[1].close()

    await asyncio.gather(*(worker() for _ in range(_NUM_CONNECTIONS)))


async def _post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: bytes) -> tuple[int, bool]:
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


async def _send_raw(port: int, data: bytes) -> int:
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
    with _run_toy_server("toy:batch=32,blocks=160", "--max-batch", "32", "--max-queue", "48") as server:
        batch = max(1, count // 20)
        progress = _Progress("soak", count)
        for _ in range(0, count, batch):
            asyncio.run(_soak_batch(server.port, batch, rng, statuses, progress))
            server.wait_idle()
            memory.append(server.anonymous_bytes())
    quarter = max(1, len(memory) // 4)
    early, late = (statistics.median(part) for part in (memory[quarter : 2 * quarter], memory[-quarter:]))
    return {
        **{str(k): v for k, v in sorted(statuses.items())},
        "memory": " ".join(f"{m / 2**20:.1f}" for m in memory),
        "drift": (late - early) / early,
    }


async def _soak_batch(port: int, count: int, rng: random.Random, statuses: Counter[int], progress: _Progress) -> None:
    turns = iter(range(count))

    async def worker(keep_alive: bool) -> None:
        connection = Connection(port, keep_alive)
        for i in turns:
            progress.step()
            body = {
                "prompt": f"soak {i} " + "x" * rng.randrange(60),
                "max_tokens": rng.randrange(1, 40),
                "seed": i,
            }
            body |= {"n": rng.choice((1, 1, 1, 2)), "stream": rng.random() < 0.6}
            disconnect_after = rng.uniform(0, 0.05) if rng.random() < 0.3 else None
            try:
                result = await connection.send(body, disconnect_after)
            except (ConnectionError, asyncio.IncompleteReadError):
                result = None
            statuses[-1 if result is None else -2 if result.disconnected else result.status] += 1
            if result is not None and result.status == 200:
                expected_texts = [expected_text(body["prompt"], body["max_tokens"], i, k) for k in range(body["n"])]
                assert result.texts == expected_texts, "a survivor was harmed"
        await connection.close()

    await asyncio.gather(*(worker(keep_alive=i % 2 == 0) for i in range(_NUM_CONNECTIONS)))
    assert not [status for status in statuses if status >= 500], statuses


def _check_leftovers(count: int, seed: int) -> dict[str, Any]:
    """R25: after each end no process, port or file of the server is left; a few servers at a time."""
    progress = _Progress("ends", count)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):  # a shell may have them ignored, and servers with it
        signal.signal(number, signal.SIG_DFL)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) + 1) as several:
        ends = Counter(
            several.map(lambda i: _end_one_server(random.Random(seed * 1_000_003 + i), progress), range(count))
        )
    return dict(ends)


def _end_one_server(rng: random.Random, progress: _Progress) -> str:
    progress.step()
    signal_number = rng.choice((signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGQUIT, signal.SIGHUP))
    command = [sys.executable, "-m", "thalweg", "serve", "toy:delay=0.01", "--port", "0", "--json"]
    command += ["--loader", "tests.toy_engine:load_engine", "--drain-seconds", "0.1"]
    with tempfile.TemporaryDirectory(prefix="thalweg-residue-") as name:
        homes = dict.fromkeys(("HOME", "TMPDIR", "XDG_RUNTIME_DIR"), name)
        process = subprocess.Popen(
            command, env={**os.environ, **homes, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        port, busy = None, None
        if rng.random() < 0.8:
            port = int(json.loads(process.stdout.readline())["url"].rpartition(":")[2])
            if rng.random() < 0.7:  # amid an answer
                busy = socket.create_connection(("127.0.0.1", port))
                busy.sendall(_LONG_REQUEST)
                time.sleep(rng.random() * 0.1)
        else:
            time.sleep(rng.random() * 2)  # while it starts
        children = _children(process.pid)
        process.send_signal(signal_number)
        process.wait(30)
        process.stdout.close()
        if busy is not None:
            busy.close()
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in children):
            assert time.monotonic() < deadline, f"{signal.Signals(signal_number).name} left {children}"
            time.sleep(0.02)
        left = [str(path) for path in Path(name).rglob("*") if path.is_file()]
        assert not left, left
        if port is not None:
            _wait_port_free(port)
    return signal.Signals(signal_number).name


def _wait_port_free(port: int) -> None:
    """Wait until a port can be had: another server of this run may have been given it meanwhile."""
    deadline = time.monotonic() + 20
    while True:
        try:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # its connections may linger
                probe.bind(("127.0.0.1", port))
            return
        except OSError:
            assert time.monotonic() < deadline, f"port {port} is still taken"
            time.sleep(0.1)


_LONG_BODY = b'{"prompt": "x", "max_tokens": 1500, "stream": true}'
_LONG_REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_LONG_BODY), _LONG_BODY)
)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in tasks for child in path.read_text().split()]


class _Progress:
    """A line on standard error now and then."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._count, self._last_report = what, total, 0, time.monotonic()
        self._lock = threading.Lock()

    def step(self) -> None:
        with self._lock:
            self._count += 1
            if time.monotonic() - self._last_report > _PROGRESS_SECONDS:
                self._last_report = time.monotonic()
                print(f"{self._what}: {self._count} of {self._total}", file=sys.stderr, flush=True)
