"""`thalweg serve --replica`: plain servers on hosts of their own behind one address."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch_support import RUN_COMMAND, clean_environ
from tests.e2e.test_serve import SERVE, TOY, environ, left_behind, serving
from tests.repo.source import ROOT
from tests.toy_engine import expected_text

sys.path.insert(0, str(ROOT / "bench"))
namespaces = importlib.import_module("_namespaces")
LOADER = ["--loader", "tests.toy_engine:load_engine"]
KEY = "between-hosts"
needs_namespaces = pytest.mark.skipif(namespaces.missing_reason() is not None, reason=str(namespaces.missing_reason()))


class Program:
    """A program whose lines on standard error and output are kept."""

    def __init__(self, home: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            words, env=environ(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=home
        )
        self.errors: list[str] = []
        self._output: queue.Queue[str] = queue.Queue()
        for stream, take in ((self.process.stdout, self._output.put), (self.process.stderr, self.errors.append)):
            threading.Thread(target=_read, args=(stream, take), daemon=True).start()

    def children(self) -> list[int]:
        """What runs in a namespace: the program that enters it stays outside, and passes no signals on."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(child) for path in tasks for child in path.read_text().split()]

    def line(self, seconds: float = 60.0) -> Any:
        """The next line of its output, as JSON."""
        try:
            text = self._output.get(timeout=seconds)
        except queue.Empty:
            text = ""
        assert text, "".join(self.errors)
        return json.loads(text)


def _read(stream: Any, take: Callable[[str], None]) -> None:
    for line in stream:
        take(line)
    take("")  # it has ended: nobody waits for its next line


@contextlib.contextmanager
def program(home: Path, *words: str) -> Iterator[Program]:
    """A program that is killed at the end, if it still lives."""
    running = Program(home, *words)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            for pid in (*running.children(), running.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        running.process.wait()


def start_replica(hosts: Any, host: int, home: Path, model: str = "toy:delay=0.01", key: str = KEY) -> Any:
    """A server of its own on a host."""
    address = ["--host", hosts.addresses[host], "--port", "8000", "--api-key", key, "--name", "toy", "--json"]
    return program(home, *hosts.command_prefix(host), *SERVE, model, *LOADER, *address)


def router_command(hosts: Any) -> list[str]:
    """The server on host 0 that forwards to the other hosts."""
    replicas = [word for address in hosts.addresses[1:] for word in ("--replica", f"http://{address}:8000")]
    return [*hosts.command_prefix(0), *SERVE, "toy", "--port", "8123", "--json", *replicas, "--replica-key", KEY]


def ask(hosts: Any, home: Path, prompt: str, num_requests: int, max_tokens: int, at_once: int = 8) -> Any:
    """A client on host 0: says when its requests are under way, then what came of them."""
    arguments = [prompt, str(num_requests), str(max_tokens), str(at_once)]
    return program(home, *hosts.command_prefix(0), sys.executable, "-c", ASK, *arguments)


@pytest.mark.nightly
@needs_namespaces
def test_replicas_on_hosts_die_fall_silent_and_come_back(tmp_path: Path) -> None:
    """Of a quick and a slow host the quick one gets most; one dies, one is cut off: no answer is lost."""
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(namespaces.NamespaceHosts(num_hosts=3))
        for host, delay in ((1, 0.005), (2, 0.05)):
            stack.enter_context(start_replica(hosts, host, tmp_path, f"toy:delay={delay}")).line()
        router = stack.enter_context(program(tmp_path, *router_command(hosts)))
        assert router.line()["model"] == "toy"

        with ask(hosts, tmp_path, "shared", 24, 20, at_once=4) as client:
            assert client.line() == {"replicas": 2}
            told = client.line()
            assert told["texts"] == [expected_text(f"shared {i}", 20) for i in range(24)]
            quick, slow = told["answered"]
            assert 0 < slow < quick / 2, "the slow host has its share, and no more"

        with ask(hosts, tmp_path, "cable", 8, 200) as client:  # seconds of work on either
            client.line()
            hosts.disconnect(2)  # no connection breaks: it is silent
            told = client.line()
            assert told["texts"] == [expected_text(f"cable {i}", 200) for i in range(8)]
            assert told["seconds"] < 30

        hosts.reconnect(2)
        with ask(hosts, tmp_path, "death", 8, 200) as client:
            assert client.line() == {"replicas": 2}
            os.kill(hosts.init_pid(1), signal.SIGKILL)  # the whole host, amid its answers
            told = client.line()
            assert told["texts"] == [expected_text(f"death {i}", 200) for i in range(8)]

        (pid,) = router.children()
        os.kill(pid, signal.SIGTERM)
        assert router.process.wait(20) == 0
        assert not [line for line in router.errors if "Traceback" in line]


@needs_namespaces
def test_another_key_or_another_model_on_a_host_is_refused(tmp_path: Path) -> None:
    with namespaces.NamespaceHosts(num_hosts=3) as hosts, start_replica(hosts, 1, tmp_path) as one:
        one.line()
        for model, key, said in (
            ("toy:delay=0.01", "another-secret", "does not accept the key"),
            (
                "toy:delay=0.01,length=512",
                KEY,
                r"max_model_len is (512, not 2048|2048, not 512)",
            ),  # of whom was ready first
        ):
            with start_replica(hosts, 2, tmp_path, model, key) as other:
                other.line()
                done = subprocess.run(
                    router_command(hosts), env=environ(tmp_path), capture_output=True, text=True, timeout=60
                )
                assert done.returncode == 1 and re.search(said, done.stderr) and done.stdout == "", done.stderr
                assert hosts.addresses[2] in done.stderr and "Traceback" not in done.stderr


def test_a_router_forwards_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """On one host: two servers, with the key from the environment; a request is finished after SIGTERM."""
    options = ("--name", "toy", "--api-key", KEY)
    with serving(tmp_path, "toy:delay=0.01", *options) as one, serving(tmp_path, "toy:delay=0.01", *options) as two:
        command = [*SERVE, "toy", "--port", "0", "--json", "--replica", one.url, "--replica", f"{two.url}/v1/"]
        process = subprocess.Popen(
            command, env={**environ(tmp_path), "THALWEG_REPLICA_KEY": KEY}, stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            client = [sys.executable, "-m", "thalweg", "chat", "--url", url, "--max-tokens", "60", "--temperature", "0"]
            chat = subprocess.Popen(
                client, env=environ(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert chat.stdin is not None and chat.stdout is not None
            chat.stdin.write("How deep?\n")
            chat.stdin.close()
            said = chat.stdout.read(3)  # amid the answer
            process.send_signal(signal.SIGTERM)
            said += chat.stdout.read()
            assert chat.wait(30) == 0 and said.strip() == expected_text("User: How deep?\nAssistant:", 60).strip()
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.communicate()
    assert not left_behind(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--replica", "nowhere"], "http://HOST:PORT"),
        (["--replica", "http://127.0.0.1:1", "--replica", "http://127.0.0.1:1"], "twice"),
        (["--replica", "http://127.0.0.1:1", "--replicas", "2"], "give --replicas to the servers"),
        (["--replica", "http://127.0.0.1:1", "--dtype", "bf16"], "give --dtype to the servers"),
    ],
)
def test_wrong_use(tmp_path: Path, options: list[str], said: str) -> None:
    done = subprocess.run(
        [*SERVE, "toy", *TOY, *options], env=environ(tmp_path), capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.nightly
@pytest.mark.slow
@needs_namespaces
def test_two_hosts_by_the_launcher(tmp_path: Path) -> None:
    """One command starts a server on each of two hosts that only a cable joins; SIGTERM ends it all."""
    with namespaces.NamespaceHosts(num_hosts=3) as hosts:
        hostfile, reach = tmp_path / "hosts", tmp_path / "reach.py"
        hostfile.write_text("".join(f"{addr} slots=1\n" for addr in hosts.addresses[1:]))
        enter = {addr: hosts.command_prefix(index) for index, addr in enumerate(hosts.addresses)}
        reach.write_text(
            f"import os, sys\nenter = {enter!r}\nhost, command = sys.argv[1], ' '.join(sys.argv[2:])\n"
            "os.execvp(enter[host][0], [*enter[host], 'sh', '-c', command])\n"
        )
        command = [*RUN_COMMAND, "--hostfile", str(hostfile), "--ssh", f"{sys.executable} {reach}"]
        command += ["-m", "thalweg", "serve", "toy:delay=0.005", *LOADER, "--name", "toy", "--port", "8000"]
        command += ["--host", "0.0.0.0", "--api-key", KEY]
        launcher = subprocess.Popen(
            command, env=clean_environ(PYTHONPATH=str(ROOT)), cwd=tmp_path, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            with program(tmp_path, *router_command(hosts)) as router:  # waits for the first of them
                router.line()
                deadline = time.monotonic() + 60
                while True:
                    with ask(hosts, tmp_path, "two", 8, 40) as client:
                        if client.line()["replicas"] == 2:
                            told = client.line()
                            break
                    assert time.monotonic() < deadline and launcher.poll() is None
                assert told["texts"] == [expected_text(f"two {i}", 40) for i in range(8)]
                assert min(told["answered"]) >= 2, "both hosts work"
                launcher.send_signal(signal.SIGTERM)
                launcher.wait(30)
                with ask(hosts, tmp_path, "none", 0, 1) as client:
                    assert client.line(90) == {"replicas": 0}
        finally:
            if launcher.poll() is None:
                launcher.kill()
            launcher.communicate()


ASK = """
import json, re, sys, time, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor
prompt, num_requests, max_tokens, at_once = sys.argv[1], *map(int, sys.argv[2:])

def get(path, body=None, url="http://127.0.0.1:8123"):
    head = {"Authorization": "Bearer between-hosts", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url + path, data, head), timeout=60).read().decode()

def one(i):
    answer = get("/v1/completions", {"prompt": f"{prompt} {i}", "max_tokens": max_tokens})
    return json.loads(answer)["choices"][0]["text"]

def replicas():
    return int(float(re.search("(?m)^thalweg_replicas_ready (.*)", get("/metrics"))[1]))

def answered():
    found = []
    for host in (2, 3):
        try:
            page = get("/metrics", url=f"http://10.77.0.{host}:8000") if replicas() == 2 else ""
        except OSError:
            page = ""
        found.append(sum(float(x) for x in re.findall('thalweg_finished_total{reason="length"} (.*)', page)))
    return found

deadline = time.monotonic() + 20
while replicas() < 2 and num_requests and time.monotonic() < deadline:
    time.sleep(0.1)
while not num_requests and replicas() and time.monotonic() < deadline:
    time.sleep(0.1)
ready, start = replicas(), time.monotonic()
with ThreadPoolExecutor(at_once) as clients:
    answers = [clients.submit(one, i) for i in range(num_requests)]
    time.sleep(0.5)
    print(json.dumps({"replicas": ready}), flush=True)
    texts = [answer.result() for answer in answers]
seconds = time.monotonic() - start
print(json.dumps({"texts": texts, "answered": answered(), "seconds": seconds}), flush=True)
"""
