"""`thalweg serve` as a user has it: real processes, signals, TLS, what is left behind (R25)."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import thalweg
from tests.e2e.launch_support import clean_environ, is_alive, wait_exited
from tests.marks import nightly
from tests.repo.source import ROOT
from tests.toy_engine import expected_text

SERVE = [sys.executable, "-m", "thalweg", "serve"]
TOY = ["--loader", "tests.toy_engine:load_engine", "--port", "0", "--json"]


class Running:
    """A server process that has said where it is."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url
        self.port = int(url.rpartition(":")[2])

    def descendants(self) -> list[int]:
        """The replicas."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for path in tasks for pid in path.read_text().split()]

    def post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def health(self) -> int:
        try:
            return urllib.request.urlopen(self.url + "/health", timeout=10).status
        except urllib.error.HTTPError as error:
            return error.code


def environ(home: Path) -> dict[str, str]:
    changes = {"HOME": str(home), "TMPDIR": str(home), "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(home)}
    return clean_environ(**changes)


@contextlib.contextmanager
def serving(home: Path, model: str = "toy", *options: str) -> Iterator[Running]:
    process = subprocess.Popen(
        [*SERVE, model, *TOY, *options],
        env=environ(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield Running(process, json.loads(line)["url"])
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def left_behind(home: Path) -> list[str]:
    return [str(path) for path in home.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


@pytest.mark.parametrize("to_all", [False, True])
def test_sigterm_finishes_what_runs(tmp_path: Path, to_all: bool) -> None:
    """Sent to the server, or to each of its processes, as systemd and SLURM do."""
    with serving(tmp_path, "toy:delay=0.01", "--replicas", "2") as server, ThreadPoolExecutor(6) as clients:
        replicas = server.descendants()
        assert len(replicas) == 2 and server.health() == 200
        answers = [clients.submit(server.post, "/v1/completions", prompt=f"t{i}", max_tokens=90) for i in range(6)]
        time.sleep(0.4)
        for pid in (*replicas, server.process.pid) if to_all else (server.process.pid,):
            os.kill(pid, signal.SIGTERM)
        texts = [answer.result(30)["choices"][0]["text"] for answer in answers]
        assert texts == [expected_text(f"t{i}", 90) for i in range(6)]
        assert server.process.wait(20) == 0
        wait_exited(replicas, time.monotonic())
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", server.port), timeout=2)
    assert not left_behind(tmp_path)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, "toy:delay=0.05") as server, ThreadPoolExecutor(1) as clients:
        answer = clients.submit(server.post, "/v1/completions", prompt="long", max_tokens=2000)
        time.sleep(0.4)
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.process.poll() is None, "one signal waits"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0 and time.monotonic() - start < 10
        with pytest.raises(urllib.error.HTTPError) as caught:
            answer.result(10)
        assert caught.value.code == 503


def test_r25_nothing_is_left_after_any_end(tmp_path: Path) -> None:
    """SIGTERM, SIGINT, SIGKILL at work: no process, file, port, shared memory stays."""
    rng = random.Random(5)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGKILL):
        with serving(tmp_path, "toy:delay=0.01", "--replicas", "2", "--drain-seconds", "0.2") as server:
            replicas = server.descendants()
            for pid in (server.process.pid, *replicas):
                assert "/dev/shm" not in Path(f"/proc/{pid}/maps").read_text()
            busy = socket.create_connection(("127.0.0.1", server.port))
            data = json.dumps({"prompt": "x", "max_tokens": 1500, "stream": True}).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            busy.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            if rng.random() < 0.7:
                busy.recv(100)
            server.process.send_signal(number)
            server.process.wait(20)
            wait_exited(replicas, time.monotonic())
            busy.close()
            with pytest.raises(OSError):
                socket.create_connection(("127.0.0.1", server.port), timeout=2)
    assert not left_behind(tmp_path)


def test_a_killed_replica_comes_back(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        (replica,) = server.descendants()
        os.kill(replica, signal.SIGKILL)
        assert server.post("/v1/completions", prompt="x", max_tokens=5)["choices"][0]["text"] == expected_text("x", 5)
        assert server.descendants() != [replica] and not is_alive(replica)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--host", "0.0.0.0"], 2, "--api-key"),
        (["--host", "192.0.2.1", "--api-key", "long-enough"], 1, "that this machine has"),
        nightly(["--api-key", "short"], 2, "8 characters"),
        nightly(["--ssl-certfile", "nothing.pem"], 2, "both"),
        nightly(["--kv-memory", "many"], 2, "80GiB"),
        nightly(["--replicas", "0"], 2, "at least 1"),
        nightly(["--max-length", "0"], 2, "max_model_len is 0"),
        (["--quantize", "int3"], 2, "int4"),
    ],
)
def test_wrong_use_is_one_paragraph_and_exit_code_2(tmp_path: Path, options: list[str], code: int, said: str) -> None:
    done = subprocess.run([*SERVE, "toy", *TOY, *options], env=environ(tmp_path), capture_output=True, text=True)
    assert done.returncode == code and said in done.stderr and done.stdout == ""
    assert "Traceback" not in done.stderr


def test_a_model_that_is_not_there_and_a_port_that_is_taken(tmp_path: Path) -> None:
    done = subprocess.run([*SERVE, "missing", *TOY], env=environ(tmp_path), capture_output=True, text=True)
    assert done.returncode == 1 and "missing is not there" in done.stderr
    assert "Traceback" not in done.stderr
    (tmp_path / "empty").mkdir()
    for model, said in (("./misspelt", "no folder ./misspelt"), (str(tmp_path / "empty"), "config.json")):
        done = subprocess.run([*SERVE, model], env=environ(tmp_path), capture_output=True, text=True)
        assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [*SERVE, "toy", *TOY, "--port", port]
        done = subprocess.run(command, env=environ(tmp_path), capture_output=True, text=True)
    assert done.returncode == 1 and "choose another --port" in done.stderr


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_tls_and_a_key_on_all_addresses(tmp_path: Path) -> None:
    certificate, key, keys = (tmp_path / name for name in ("c.pem", "k.pem", "keys"))
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    command += [
        "-addext",
        "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run(command, check=True, capture_output=True)
    keys.write_text("# ours\na-secret-key\n")
    options = ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--host", "0.0.0.0"]
    with serving(tmp_path, "toy", *options, "--api-key-file", str(keys)) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(certificate))
        url = f"https://127.0.0.1:{server.port}/v1/models"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url, context=context)
        request = urllib.request.Request(url, headers={"Authorization": "Bearer a-secret-key"})
        assert json.load(urllib.request.urlopen(request, context=context))["data"][0]["id"] == "toy"
        with pytest.raises(urllib.error.URLError):  # negative control: an unknown authority
            urllib.request.urlopen(request)


def test_serve_client_and_terminate_in_miis_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="no deployment"):
        thalweg.client("river")
    client = thalweg.serve("toy", "river", arguments=["--loader", "tests.toy_engine:load_engine"])
    try:
        (record,) = (tmp_path / "thalweg").iterdir()
        assert record.stat().st_mode & 0o777 == 0o600 and record.parent.stat().st_mode & 0o777 == 0o700
        responses = client(["DeepSpeed is", "Seattle"], max_new_tokens=12, do_sample=False)
        assert [response.generated_text for response in responses] == [
            expected_text("DeepSpeed is", 12), expected_text("Seattle", 12)]  # fmt: skip
        assert responses[0].prompt_length == 12 and responses[0].finish_reason == "length"
        pieces: list[str] = []
        again = thalweg.client("river").generate(
            "one", lambda part: pieces.append(str(part[0])), max_new_tokens=9, do_sample=False
        )
        assert "".join(pieces) == again[0].generated_text == expected_text("one", 9)
        with pytest.raises(ValueError, match="did you mean max_new_tokens"):
            client("x", max_new_token=3)
        with pytest.raises(ValueError, match="is running"):
            thalweg.serve("toy", "river")
    finally:
        client.terminate_server()
    with pytest.raises(ValueError, match="no deployment"):
        thalweg.client("river")
    assert not left_behind(tmp_path)


def test_chat_in_the_terminal(tmp_path: Path) -> None:
    want = expected_text("User: How deep?\nAssistant:", 30)
    command = [sys.executable, "-m", "thalweg", "chat"]
    options = ["--max-tokens", "30", "--temperature", "0"]
    local = [*command, "toy", "--loader", "tests.toy_engine:load_engine", *options]
    done = subprocess.run(local, input="How deep?\n", env=environ(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == want.strip(), done.stderr
    encoder = [*command, "toy-encoder", "--loader", "tests.toy_engine:load_engine"]
    done = subprocess.run(encoder, input="Hi\n", env=environ(tmp_path), capture_output=True, text=True)
    assert done.returncode == 2 and "encoder" in done.stderr and not done.stdout
    with serving(tmp_path) as server:
        remote = [*command, "--url", server.url, *options]
        done = subprocess.run(remote, input="How deep?\n", env=environ(tmp_path), capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.strip() == want.strip(), done.stderr
