"""What goes wrong, and how the server takes it: overload, clients that leave, engines that break (row 42)."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

import thalweg
from tests.serve_support import ServerThread, ThreadLauncher, run_server, run_toy_server, until
from tests.toy_engine import ToyTokenizer, expected_text, load_engine
from thalweg.serve.http.guard import HardenedProtocol
from thalweg.serve.mii import deployment
from thalweg.serve.openai.requests import ChatTokenizer
from thalweg.serve.replicas.pool import PoolLimits
from thalweg.serve.server import ServeOptions

pytestmark = pytest.mark.waits
USER = {"role": "user", "content": "x"}


def metrics(server: ServerThread) -> str:
    return server.request_raw("GET", "/metrics", None)[2]


def health(server: ServerThread) -> int:
    return server.request("GET", "/health")[0]


def begin(server: ServerThread, path: str = "completions", **body: object) -> socket.socket:
    """Send a request and read nothing."""
    data = json.dumps(({"max_tokens": 1000} if path == "completions" else {}) | body).encode()
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    sock.sendall(post(data, path))
    return sock


def post(data: bytes, path: str = "completions") -> bytes:
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def test_row42_overload_is_refused_at_once_and_what_was_admitted_completes() -> None:
    """60 requests at once for 20 places: 429 with Retry-After for the others, in no time; nothing stalls."""
    with run_toy_server("toy:delay=0.005,batch=4,blocks=40", pool_limits=PoolLimits(max_outstanding=20)) as server:

        def one(i: int) -> tuple[int, object, float, str]:
            start = time.monotonic()
            body = json.dumps({"prompt": f"load {i}", "max_tokens": 40}).encode()
            status, headers, answer = server.request_raw("POST", "/v1/completions", body)
            return status, headers, time.monotonic() - start, answer

        with ThreadPoolExecutor(60) as clients:
            answers = list(clients.map(one, range(60)))
        served_well = [i for i, (status, *_) in enumerate(answers) if status == 200]
        refused = [answer for answer in answers if answer[0] == 429]
        assert len(served_well) + len(refused) == 60 and len(served_well) >= 20 and refused
        for i in served_well:
            assert answers[i][3]["choices"][0]["text"] == expected_text(f"load {i}", 40)
        for _, headers, _, answer in refused:
            assert 1 <= int(headers["retry-after"]) <= 60 and answer["error"]["code"] == "overloaded"
        assert min(seconds for status, _, seconds, _ in answers if status == 429) < 0.5
        server.wait_idle()
        assert health(server) == 200 and server.create_completion("after", max_tokens=3)


def test_a_request_larger_than_the_server_is_the_clients_fault() -> None:
    with run_toy_server("toy:blocks=4", pool_limits=PoolLimits(max_outstanding=8)) as server:
        status, answer = server.post("/v1/completions", prompt="x", n=9)
        assert status == 400 and "split the request" in answer["error"]["message"]
        status, answer = server.post("/v1/completions", prompt="x", max_tokens=100)
        assert status == 400 and "KV blocks" in answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_whose_fault_it_is_follows_from_the_kind_of_error(stream: bool) -> None:
    """Not from the words of its message: one of the engine's speaks of a structure, too."""
    with run_toy_server() as server:
        status, answer = server.post("/v1/completions", prompt="FAULT", stream=stream)
        assert (status, answer["error"]["code"]) == (500, "engine_error")
        status, answer = server.post("/v1/completions", prompt="UNFIT", stream=stream)
        assert status == 400 and "no further text is allowed" in answer["error"]["message"]
        server.wait_idle()
        assert len(server.engines) == 1 and "thalweg_outstanding 0.0" in metrics(server)


def test_a_full_queue_costs_no_tokenizing() -> None:
    encoded: list[str] = []

    class Counted(ToyTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            encoded.append(text)
            return super().encode(text, add_special_tokens)

    limits = PoolLimits(max_outstanding=1)
    with run_toy_server(
        "toy:delay=0.01", make_tokenizer=lambda: ChatTokenizer(Counted()), pool_limits=limits
    ) as server:
        sock = begin(server, prompt="first", stream=True)
        assert b"200" in sock.recv(64)
        for path, body in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": [USER]})):
            assert server.post(f"/v1/{path}", **body)[0] == 429
        assert encoded == ["first"]
        sock.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_kv(stream: bool) -> None:
    with run_toy_server("toy:delay=0.005") as server:
        sock = begin(server, prompt="gone", n=3, stream=stream)
        until(lambda: server.engines[0].used > 0)
        if stream:
            assert b"200" in sock.recv(64)
        left = time.monotonic()
        sock.close()
        server.wait_idle(2.0)
        assert time.monotonic() - left < 2.0 and server.engines[0].generated < 3000
        until(lambda: "thalweg_cancelled_total 1.0" in metrics(server))
        assert "thalweg_outstanding 0.0" in metrics(server)


def test_texts_whose_clients_have_left_are_not_embedded() -> None:
    """Each would be work for nobody, before the work for those who wait, and nothing would count it."""
    import torch  # noqa: F401  (the toy engine would, within the time allowed)

    with run_toy_server("toy-encoder") as server, ThreadPoolExecutor(1) as clients:
        embed, begun, go_on = server.engines[0].embed, list[list[int]](), threading.Event()

        def wait_and_embed(prompts: Any) -> Any:
            begun.extend(prompts)
            assert go_on.wait(30)
            return embed(prompts)

        server.engines[0].embed = wait_and_embed
        first = clients.submit(server.post, "/v1/embeddings", input="first")
        until(lambda: len(begun) == 1)
        gone = [begin(server, "embeddings", input=f"gone {i}") for i in range(8)]
        until(lambda: "thalweg_outstanding 9.0" in metrics(server))
        for sock in gone:
            sock.close()
        until(lambda: "thalweg_outstanding 1.0" in metrics(server))
        go_on.set()
        assert first.result(30)[0] == 200
        for text in ("after", "and after that"):
            status, answer = server.post("/v1/embeddings", input=text)
            assert status == 200 and answer["data"][0]["embedding"][0] == len(text)
        assert [bytes(tokens).decode() for tokens in begun] == ["first", "after", "and after that"]


def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HardenedProtocol, "write_seconds", 0.3)
    with run_toy_server("toy:length=100000,blocks=100000") as server:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        data = json.dumps({"prompt": "deaf", "max_tokens": 90000, "stream": True, "n": 8}).encode()
        sock.sendall(post(data))
        until(lambda: server.engines[0].used > 0)
        server.wait_idle(20.0)
        assert server.engines[0].generated < 8 * 90000, "cancelled, not finished"
        sock.close()


def test_a_client_that_reads_slowly_gets_all_of_a_large_answer() -> None:
    """The time begins again as long as less is left; without a socket, whose speed would be the machine's."""
    started: list[Any] = []
    call_later = lambda _, callback: started.append(callback) or SimpleNamespace(cancel=started.clear)
    transport = SimpleNamespace(left=900, get_write_buffer_size=lambda: transport.left, abort=lambda: aborted.append(1))
    protocol, aborted = object.__new__(HardenedProtocol), list[int]()
    protocol.loop, protocol._timers = SimpleNamespace(call_later=call_later), {}  # type: ignore[assignment]
    protocol.transport, protocol.flow = transport, FlowControl(transport)  # type: ignore[arg-type,assignment]

    def time_passes() -> None:
        started.pop()()

    transport.pause_reading = transport.resume_reading = lambda: None
    protocol.pause_writing()
    for transport.left in (600, 599):
        time_passes()
        assert len(started) == 1 and not aborted
    protocol.resume_writing()
    assert not started, "nothing is left to wait for"
    protocol.pause_writing()
    time_passes()
    assert aborted and not started


def test_a_request_that_takes_long_to_prepare_holds_nobody_up() -> None:
    """Building a grammar of seconds: others go on meanwhile, leaving cancels it, an error is the client's."""
    with run_toy_server("toy:delay=0.001") as server, ThreadPoolExecutor(2) as clients:
        start = time.monotonic()
        slow = clients.submit(server.create_completion, "slow one", max_tokens=5, guided_regex="slow 2.0")
        gone = begin(server, prompt="gone", guided_regex="slow 1.9")
        until(lambda: "thalweg_outstanding 2.0" in metrics(server))
        for i in range(5):
            text = server.create_completion(f"quick {i}", max_tokens=5)["choices"][0]["text"]
            assert text == expected_text(f"quick {i}", 5)
        assert not slow.done()
        gone.close()
        assert slow.result(10)["choices"][0]["text"] == expected_text("slow one", 5)
        assert time.monotonic() - start > 1.9
        status, answer = server.post("/v1/completions", prompt="x", guided_regex="nonsense")
        assert status == 400 and "not understood" in answer["error"]["message"]
        server.wait_idle(2.0)
        time.sleep(0.2)
        assert server.engines[0].generated == 30, "the one that left was never added"
        assert len(server.engines) == 1 and "thalweg_outstanding 0.0" in metrics(server)


def test_row42_a_dead_engine_thread_fails_health() -> None:
    """The engine raises in its thread: the stream ends with an error, /health is 503 until a new one runs."""
    with run_toy_server("toy:delay=0.002") as server:
        assert health(server) == 200
        events = server.stream("/v1/completions", prompt="CRASH now", max_tokens=50)
        assert events[-1]["error"]["code"] == "lost" and "try again" in events[-1]["error"]["message"]
        assert len(events) > 1
        until(lambda: health(server) == 200)
        assert len(server.engines) == 2 and server.engines[0].closed
        assert server.create_completion("again", max_tokens=4)["choices"][0]["text"] == expected_text("again", 4)
        assert "thalweg_replica_restarts_total 1.0" in metrics(server)


def test_row42_health_fails_while_no_replica_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thalweg.serve.replicas.pool._RESTART_BACKOFF", (1.0,))
    with run_toy_server("toy:delay=0.002") as server:
        server.stream("/v1/completions", prompt="CRASH now", max_tokens=50)
        status, answer = server.request("GET", "/health")
        assert status == 503 and "RuntimeError: the toy engine broke" in answer["error"]["message"]
        assert server.create_completion("waits for the next", max_tokens=3)
        assert health(server) == 200


def test_row42_replicas_that_keep_dying_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thalweg.serve.replicas.pool._RESTART_BACKOFF", (0.0, 0.0, 30.0))
    with run_toy_server("toy") as server:
        for _ in range(2):
            assert server.post("/v1/completions", prompt="CRASH!", max_tokens=5)[0] == 503
            time.sleep(0.1)
        start = time.monotonic()
        status, headers, answer = server.request_raw("POST", "/v1/completions", b'{"prompt": "x"}')
        assert status == 503 and headers["retry-after"] and time.monotonic() - start < 5
        assert "the toy engine broke" in answer["error"]["message"]


def test_an_engine_that_never_gets_ready_is_given_up() -> None:
    def load_late() -> Any:
        time.sleep(3.0)
        return load_engine("toy")

    limits = PoolLimits(start_seconds=0.3)
    start = time.monotonic()
    with (
        pytest.raises(RuntimeError, match=r"not ready in 0\.3 s"),
        run_server(load_late, lambda: ChatTokenizer(ToyTokenizer()), pool_limits=limits),
    ):
        pass
    assert time.monotonic() - start < 10


def test_whatever_a_restart_raises_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thalweg.serve.replicas.pool._RESTART_BACKOFF", (0.05,))
    started: list[int] = []
    launcher = ThreadLauncher(lambda: load_engine("toy"))

    def start_replica(index: int) -> Any:
        started.append(index)
        if len(started) in (2, 3):
            raise KeyError("boom")
        return launcher(index)

    with run_server(lambda: None, lambda: ChatTokenizer(ToyTokenizer()), start_replica) as server:
        server.stream("/v1/completions", prompt="CRASH now", max_tokens=50)
        until(lambda: health(server) == 200)
        assert len(started) == 4 and server.create_completion("again", max_tokens=4)


def test_a_chat_template_holds_up_nobody() -> None:
    class Slow(ToyTokenizer):
        chat_template: Any = "slow"

        def apply_chat_template(self, *_: Any, **__: Any) -> str:
            time.sleep(2.0)
            return "rendered"

    with (
        run_toy_server(make_tokenizer=lambda: ChatTokenizer(Slow())) as server,
        ThreadPoolExecutor(1) as clients,
    ):
        answer = clients.submit(server.post, "/v1/chat/completions", messages=[USER], max_tokens=5)
        until(lambda: "thalweg_outstanding 1.0" in metrics(server))
        start = time.monotonic()
        assert health(server) == 200 and not answer.done()
        assert time.monotonic() - start < 1.0
        assert answer.result(20)[1]["choices"][0]["message"]["content"] == expected_text("rendered", 5)


def test_a_pid_that_has_passed_to_another_process_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed server leaves its record; the process that then gets its pid is none of ours."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with subprocess.Popen(["sleep", "60"]) as bystander:
        try:
            deployment.register_deployment("river", "http://127.0.0.1:1", None)
            (record,) = (tmp_path / "thalweg").iterdir()
            fields = json.loads(record.read_text())
            assert thalweg.client("river").url == "http://127.0.0.1:1", "this process runs, and is the same"
            record.write_text(json.dumps({**fields, "pid": bystander.pid}))
            with pytest.raises(ValueError, match="no deployment"):
                thalweg.client("river")
            assert not record.exists()
            url = "http://127.0.0.1:1"
            deployment.Client("river", url, None, bystander.pid, fields["start_time"]).terminate_server()
            time.sleep(0.1)
            assert bystander.poll() is None
            own = deployment.process_start_time(bystander.pid)
            deployment.Client("river", url, None, bystander.pid, own).terminate_server()
            bystander.wait(5)  # control: the same process is ended, or this raises TimeoutExpired
        finally:
            bystander.kill()


def test_a_deployment_of_another_host_that_shares_the_home_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(deployment, "boot_id", lambda: "the other", raising=False)
    deployment.register_deployment("river", "http://127.0.0.1:1", None)
    (record,) = (tmp_path / "thalweg").iterdir()
    record.write_text(json.dumps({**json.loads(record.read_text()), "start_time": 1}))  # no process of this host
    monkeypatch.setattr(deployment, "boot_id", lambda: "this one", raising=False)
    with pytest.raises(ValueError, match="no deployment"):
        thalweg.client("river")
    assert record.exists()
    deployment.register_deployment("river", "http://127.0.0.1:2", None)
    assert thalweg.client("river").url == "http://127.0.0.1:2" and record.exists()


def test_row42_a_stalled_engine_fails_health_and_is_replaced() -> None:
    """An engine that hangs in a step answers no heartbeat's question "progress?": 503, then a new process."""
    limits = PoolLimits(stall_seconds=0.6)
    with run_toy_server("toy:delay=0.002", processes=True, pool_limits=limits) as server:
        assert health(server) == 200
        events: list[object] = []
        client = threading.Thread(
            target=lambda: events.extend(server.stream("/v1/completions", prompt="HANG", max_tokens=50))
        )
        client.start()
        until(lambda: health(server) == 503)
        assert "no progress" in server.request("GET", "/health")[1]["error"]["message"]
        until(lambda: health(server) == 200, 20)
        client.join(10)
        assert events[-1]["error"]["code"] == "lost"  # type: ignore[index]
        assert server.create_completion("again", max_tokens=4)["choices"][0]["text"] == expected_text("again", 4)


def children() -> list[int]:
    """The replicas that this process started."""
    found = {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}
    return sorted(pid for pid in found if "thalweg.serve.replicas.launcher" in Path(f"/proc/{pid}/cmdline").read_text())


def test_replicas_share_the_load_and_a_killed_one_is_replaced() -> None:
    """8 whole answers are worked on by 2 processes; one is killed: all 8 come, as if nothing had happened."""
    with run_toy_server("toy:delay=0.01", processes=True, num_replicas=2) as server:
        pids = children()
        assert len(pids) == 2
        with ThreadPoolExecutor(8) as clients:
            answers = [clients.submit(server.create_completion, f"k{i}", max_tokens=60) for i in range(8)]
            until(lambda: all(f'thalweg_running{{replica="{i}"}} 4.0' in metrics(server) for i in (0, 1)))
            os.kill(pids[0], signal.SIGKILL)
            texts = [answer.result(30)["choices"][0]["text"] for answer in answers]
        assert texts == [expected_text(f"k{i}", 60) for i in range(8)]
        assert health(server) == 200
        until(lambda: "thalweg_replicas_ready 2.0" in metrics(server), 30)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def test_a_request_that_kills_engines_is_tried_twice_and_no_more() -> None:
    with run_toy_server("toy", processes=True) as server:
        status, answer = server.post("/v1/completions", prompt="EXIT!", max_tokens=5)
        assert status == 503 and answer["error"]["code"] == "lost" and "code 9" in answer["error"]["message"]
        until(lambda: health(server) == 200, 30)
        assert "thalweg_replica_restarts_total 2.0" in metrics(server)


def test_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    with run_toy_server("toy:delay=0.01", drain_seconds=20.0) as server, ThreadPoolExecutor(4) as clients:
        answers = [clients.submit(server.create_completion, f"d{i}", max_tokens=60) for i in range(4)]
        kept = http.client.HTTPConnection("127.0.0.1", server.port)
        until(lambda: len(server.engines[0].running) == 4)
        server.stop(wait=False)
        until(lambda: refused(server.port))
        texts = [answer.result(30)["choices"][0]["text"] for answer in answers]
        assert texts == [expected_text(f"d{i}", 60) for i in range(4)]
        server.stop()
        kept.close()
        assert server.engines[0].closed


def refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return True
    return False


def test_the_time_for_draining_is_limited() -> None:
    with run_toy_server("toy:delay=0.01", drain_seconds=0.3) as server:
        events: list[object] = []
        client = threading.Thread(
            target=lambda: events.extend(server.stream("/v1/completions", prompt="long", max_tokens=2000))
        )
        client.start()
        until(lambda: bool(server.engines[0].running))
        start = time.monotonic()
        server.stop()
        client.join(10)
        assert time.monotonic() - start < 5
        assert events[-1]["error"]["code"] == "shutting_down"  # type: ignore[index]


def test_a_request_may_not_take_for_ever() -> None:
    with run_toy_server("toy:delay=0.01", request_seconds=0.3) as server:
        status, answer = server.post("/v1/completions", prompt="slow", max_tokens=2000)
        assert status == 504 and answer["error"]["code"] == "timeout"
        server.wait_idle(2.0)


def test_an_engine_that_cannot_start_ends_the_server() -> None:
    for processes in (False, True):
        with (
            pytest.raises(RuntimeError, match="is not there"),
            run_toy_server("missing", processes=processes),
        ):
            pass


def test_keys() -> None:
    with run_toy_server(api_keys=("first-secret", "second-secret")) as server:
        for path in ("/v1/models", "/metrics"):
            assert server.request("GET", path)[0] == 401
            for wrong in (
                "Bearer first-secre",
                "Bearer first-secrett",
                "Basic first-secret",
                "Bearer",
                "first-secret",
            ):
                assert server.request("GET", path, Authorization=wrong)[0] == 401, wrong
            for key in ("first-secret", "second-secret"):
                assert server.request("GET", path, Authorization=f"Bearer {key}")[0] == 200
        assert server.request("POST", "/v1/completions", {"prompt": "x"})[0] == 401
        assert health(server) == 200 and server.request_raw("GET", "/", None)[0] == 200


def test_names_of_other_hosts_are_refused_without_a_key() -> None:
    with run_toy_server() as server:
        assert server.request("GET", "/v1/models", Host="evil.example")[0] == 403
        assert server.request("GET", "/v1/models", Host="evil.example:8000")[0] == 403
        for name in ("localhost", "127.0.0.1:1234", "[::1]:80", "LOCALHOST:1"):
            assert server.request("GET", "/v1/models", Host=name)[0] == 200
    with run_toy_server(api_keys=("first-secret",)) as server:
        assert server.request("GET", "/v1/models", Host="proxy", Authorization="Bearer first-secret")[0] == 200


def test_options_that_cannot_be() -> None:
    for fields, said in [
        ({"host": "0.0.0.0"}, "api-key"),
        ({"host": "::"}, "api-key"),
        ({"host": "example.com"}, "api-key"),
        ({"api_keys": ("short",)}, "8 characters"),
        ({"num_replicas": 0}, "at least 1"),
        ({"port": 70000}, "port"),
        ({"tls_cert": "x.pem"}, "both"),
        ({"drain_seconds": float("nan")}, "seconds"),
    ]:
        with pytest.raises(ValueError, match=said):
            ServeOptions("m", **fields)
    ServeOptions("m", host="0.0.0.0", api_keys=("long-enough",))
    ServeOptions("m", host="127.0.0.2")
