"""`thalweg serve` over several hosts: replicas that join, leave, die and come back, behind one address."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.launch_support import RUN_COMMAND, clean_environ, is_alive, wait_exited
from tests.e2e.test_serve import SERVE, TOY, Running, environ
from tests.repo.source import ROOT
from tests.toy_engine import expected_text

sys.path.insert(0, str(ROOT / "bench"))
namespaces = importlib.import_module("_namespaces")
LOADER = ["--loader", "tests.toy_engine:load_engine"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def program(home: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A program that is killed at the end, if it still lives."""
    process = subprocess.Popen(words, env=environ(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


def ready(server: Running) -> int:
    with urllib.request.urlopen(server.url + "/health", timeout=10) as answer:
        return json.load(answer)["replicas"]


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in tasks for child in path.read_text().split()]


def test_replicas_join_leave_and_come_back(tmp_path: Path) -> None:
    key, wrong = tmp_path / "key", tmp_path / "wrong"
    key.write_text("0123456789abcdef\n")
    wrong.write_text("fedcba9876543210\n")
    at = f"127.0.0.1:{free_port()}"
    front = [*SERVE, "toy:delay=0.005", *TOY, "--replicas", "1", "--workers", "1", "--workers-at", at]
    join = [*SERVE, "toy:delay=0.005", *LOADER, "--join", at, "--join-key-file"]
    with program(tmp_path, *front, "--join-key-file", str(key)) as process:
        # Strangers are not let in: one that says nothing, one that speaks HTTP, one with another key.
        wait_for(lambda: "waiting for 1" in (process.stderr.readline() if process.stderr else ""))
        host, _, port = at.rpartition(":")
        silent = socket.create_connection((host, int(port)))
        stranger = socket.create_connection((host, int(port)))
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 60 + b"\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert not stranger.recv(100)
        done = subprocess.run([*join, str(wrong)], env=environ(tmp_path), capture_output=True, text=True)
        assert done.returncode == 1 and "another key" in done.stderr and "Traceback" not in done.stderr
        with program(tmp_path, *join, str(key)) as worker:
            assert process.stdout is not None
            server = Running(process, json.loads(process.stdout.readline())["url"])
            assert ready(server) == 2
            (theirs,) = children(worker.pid)
            with ThreadPoolExecutor(6) as clients:
                ask = lambda i: server.post("/v1/completions", prompt=f"h{i}", max_tokens=60)
                answers = [clients.submit(ask, i) for i in range(6)]
                time.sleep(0.15)
                os.kill(theirs, signal.SIGKILL)  # amid its answers, which are begun anew elsewhere
                texts = [answer.result(30)["choices"][0]["text"] for answer in answers]
            assert texts == [expected_text(f"h{i}", 60) for i in range(6)]
            wait_for(lambda: ready(server) == 2)
            (again,) = children(worker.pid)
            assert again != theirs
            worker.kill()  # the whole host: the server goes on with what it has
            wait_for(lambda: ready(server) == 1)
            wait_exited([again], time.monotonic())
            assert server.post("/v1/completions", prompt="alone", max_tokens=5)
        with program(tmp_path, *join, str(key)) as worker:
            wait_for(lambda: ready(server) == 2)
            (theirs,) = children(worker.pid)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            assert worker.wait(20) == 0, "a worker ends with its server"
            assert not is_alive(theirs)
        silent.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--workers", "2"], "go together"),
        (["--join", "nowhere", "--join-key-file", "KEY"], "HOST:PORT"),
        (["--join", "127.0.0.1:1"], "share a secret"),
        (["--join", "127.0.0.1:1", "--workers", "1"], "no --workers"),
    ],
)
def test_wrong_use(tmp_path: Path, options: list[str], said: str) -> None:
    (tmp_path / "KEY").write_text("0123456789abcdef")
    done = subprocess.run(
        [*SERVE, "toy", *TOY, *options], env=environ(tmp_path), capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(namespaces.missing_reason() is not None, reason=str(namespaces.missing_reason()))
def test_two_hosts_by_the_launcher(tmp_path: Path) -> None:
    """One command starts a server and replicas on two hosts that only a cable joins; SIGTERM ends it all."""
    with namespaces.NamespaceHosts(num_hosts=2) as hosts:
        hostfile, reach = tmp_path / "hosts", tmp_path / "reach.py"
        hostfile.write_text("".join(f"{addr} slots=1\n" for addr in hosts.addresses))
        enter = {addr: hosts.command_prefix(index) for index, addr in enumerate(hosts.addresses)}
        reach.write_text(
            f"import os, sys\nenter = {enter!r}\nhost, command = sys.argv[1], ' '.join(sys.argv[2:])\n"
            "os.execvp(enter[host][0], [*enter[host], 'sh', '-c', command])\n"
        )
        command = [
            *RUN_COMMAND,
            "--hostfile",
            str(hostfile),
            "--ssh",
            f"{sys.executable} {reach}",
            "-m",
            "thalweg",
        ]
        command += ["serve", "toy:delay=0.005", *LOADER, "--port", "8123", "--json", "--host"]
        command += [hosts.addresses[0], "--api-key", "between-hosts"]
        process = subprocess.Popen(
            command, env=clean_environ(PYTHONPATH=str(ROOT)), cwd=tmp_path, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None and process.stderr is not None
            line = process.stdout.readline()
            assert line, process.stderr.read()
            url = json.loads(line)["url"]
            told = json.loads(subprocess.check_output([*hosts.command_prefix(1), sys.executable, "-c", ASK, url]))
            assert told["replicas"] == 2
            assert told["texts"] == [expected_text(f"n{i}", 40) for i in range(8)]
            assert min(told["most"]) >= 2, "both hosts work"
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()


ASK = """
import json, re, sys, time, urllib.request
from concurrent.futures import ThreadPoolExecutor
url, most = sys.argv[1], [0.0, 0.0]
def get(path, body=None):
    head = {"Authorization": "Bearer between-hosts", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url + path, data, head), timeout=30).read().decode()
def one(i):
    return json.loads(get("/v1/completions", {"prompt": f"n{i}", "max_tokens": 40}))["choices"][0]["text"]
with ThreadPoolExecutor(8) as clients:
    answers = [clients.submit(one, i) for i in range(8)]
    while not all(answer.done() for answer in answers):
        for replica, value in re.findall(r'thalweg_running{replica="(.)"} (.*)', get("/metrics")):
            most[int(replica)] = max(most[int(replica)], float(value))
        time.sleep(0.02)
    texts = [answer.result() for answer in answers]
print(json.dumps({"replicas": json.loads(get("/health"))["replicas"], "texts": texts, "most": most}))
"""
