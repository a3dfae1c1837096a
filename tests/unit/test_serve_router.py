"""A server that forwards to others: whom it asks, what it does when one is lost, full, slow, or not the same."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serve_support import ServerThread, run_router, run_toy_server, until
from tests.toy_engine import expected_text
from thalweg.serve.replicas import router as routing
from thalweg.serve.replicas.pool import PoolLimits
from thalweg.serve.replicas.router import RemoteReplica, ReplicaRouter

pytestmark = pytest.mark.waits
MODEL = {"id": "toy", "max_model_len": 2048}
ADAPTER = {"id": "tuned", "max_model_len": 2048}


class FakeReplica:
    """A server that answers a completion by ``answer(handler)``; it counts them."""

    def __init__(self, answer: Callable[[Any], object], models: list[dict[str, Any]] | None = None) -> None:
        self.answer, self.num_requests = answer, 0
        self.models = [MODEL, ADAPTER] if models is None else models
        self.healthy: bool | None = True  # None: silent
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                while fake.healthy is None:
                    time.sleep(0.02)
                reply(self, 200 if fake.healthy else 503, {"data": fake.models})

            def do_POST(self) -> None:
                fake.num_requests += 1
                self.rfile.read(int(self.headers["content-length"]))
                fake.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> FakeReplica:
        return self

    def __exit__(self, *_: object) -> None:
        self.healthy = False
        self._server.shutdown()
        self._server.server_close()


def reply(handler: Any, status: int, body: Any, **headers: str) -> None:
    data = json.dumps(body).encode()
    handler.send_response(status)
    headers = {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(data)


def refuse(status: int, code: str) -> Callable[[Any], None]:
    body = {"error": {"message": "no", "type": "x", "param": None, "code": code}}
    return lambda handler: reply(handler, status, body, Retry_After="7")


def hang_up(handler: Any) -> None:
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def half_an_answer(handler: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": ')
    hang_up(handler)


def half_a_stream(handler: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    event = b'data: {"choices": []}\n\n'
    handler.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
    time.sleep(0.05)
    hang_up(handler)


def value(server: ServerThread, name: str) -> float:
    lines = server.request_raw("GET", "/metrics", None)[2].splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.fixture(autouse=True)
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_PROBE_INTERVAL", 0.1)
    monkeypatch.setattr(routing, "_PROBE_TIMEOUT", 1.5)
    monkeypatch.setattr(routing, "_READY_TIMEOUT", 1.0)


def test_the_replica_with_the_least_to_do_is_asked() -> None:
    """Two equal ones share 8 requests; of a quick and a slow one the quick one gets most."""
    with (
        run_toy_server("toy:delay=0.01") as one,
        run_toy_server("toy:delay=0.01") as two,
        run_router([one.url, two.url]) as router,
        ThreadPoolExecutor(8) as clients,
    ):
        answers = [clients.submit(router.create_completion, f"k{i}", max_tokens=150) for i in range(8)]
        until(lambda: len(one.engines[0].running) == len(two.engines[0].running) == 4)
        assert value(router, 'thalweg_replica_outstanding{replica="1"}') == 4
        texts = [answer.result(30)["choices"][0]["text"] for answer in answers]
        assert texts == [expected_text(f"k{i}", 150) for i in range(8)]
        assert router.request("GET", "/health")[1]["replicas"] == 2 and value(router, "thalweg_outstanding ") == 0
        assert value(router, "thalweg_request_seconds_count") == 8
    with (
        run_toy_server("toy:delay=0.002") as quick,
        run_toy_server("toy:delay=0.05") as slow,
        run_router([slow.url, quick.url]) as router,
        ThreadPoolExecutor(4) as clients,
    ):
        list(clients.map(lambda i: router.create_completion(f"q{i}", max_tokens=20), range(40)))
        assert 20 <= slow.engines[0].generated < quick.engines[0].generated / 2


def test_everything_is_as_on_the_replica_itself() -> None:
    with run_toy_server() as replica, run_router([replica.url]) as router:
        body = {"prompt": "same", "max_tokens": 30, "seed": 3, "n": 2, "logprobs": 1}
        own, forwarded = (server.create_completion(**body) for server in (replica, router))
        assert forwarded["choices"] == own["choices"] and forwarded["usage"] == own["usage"]
        own, forwarded = (
            [event["choices"] for event in server.stream("/v1/completions", **body)[:-1]]
            for server in (replica, router)
        )
        texts = ["".join(c["text"] for (c,) in events if c["index"] == 1) for events in (own, forwarded)]
        assert texts == [expected_text("same", 30, 3, 1)] * 2
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
        answers = [server.post("/v1/chat/completions", **chat)[1]["choices"] for server in (replica, router)]
        assert answers[0] == answers[1]
        assert router.request("GET", "/v1/models") == replica.request("GET", "/v1/models")
        for path, wrong in (("/v1/completions", {"prompt": "x", "n": -1}), ("/v1/embeddings", {"input": "x"})):
            assert router.post(path, **wrong) == replica.post(path, **wrong)
        assert router.post("/mii/toy", prompts="m", max_new_tokens=4) == replica.post(
            "/mii/toy", prompts="m", max_new_tokens=4
        )
        assert router.request("GET", "/v1/models/none")[0] == router.request("GET", "/none")[0] == 404
        assert router.request_raw("GET", "/", None)[0] == 200


@pytest.mark.parametrize("how", [hang_up, half_an_answer])
def test_an_answer_of_which_nothing_was_passed_on_comes_from_another_replica(how: Callable[[Any], None]) -> None:
    with (
        FakeReplica(how) as broken,
        run_toy_server() as well,
        run_router([broken.url, well.url]) as router,
        ThreadPoolExecutor(2) as clients,
    ):
        texts = list(clients.map(lambda i: router.create_completion(f"r{i}", max_tokens=9), range(6)))
        assert [text["choices"][0]["text"] for text in texts] == [expected_text(f"r{i}", 9) for i in range(6)]
        assert broken.num_requests and value(router, "thalweg_retries_total") == broken.num_requests


def test_a_request_is_given_to_two_replicas_and_no_more() -> None:
    with contextlib.ExitStack() as stack:
        fakes = [stack.enter_context(FakeReplica(hang_up)) for _ in range(3)]
        with run_router([fake.url for fake in fakes]) as router:
            status, answer = router.post("/v1/completions", prompt="x")
            assert status == 503 and answer["error"]["code"] == "lost"
            assert sum(fake.num_requests for fake in fakes) == 2


def test_a_stream_that_has_begun_ends_with_an_error() -> None:
    with (
        FakeReplica(half_a_stream) as broken,
        FakeReplica(half_a_stream) as other,
        run_router([broken.url, other.url]) as router,
    ):
        events = router.stream("/v1/completions", prompt="x")
        assert events[0] == {"choices": []} and events[-1]["error"]["code"] == "lost"
        assert broken.num_requests + other.num_requests == 1


@pytest.mark.parametrize(("status", "code"), [(429, "overloaded"), (503, "shutting_down"), (401, "invalid_api_key")])
def test_what_a_replica_does_not_begin_another_does(status: int, code: str) -> None:
    with FakeReplica(refuse(status, code)) as full, run_toy_server() as well:
        with run_router([full.url, well.url]) as router:
            for i in range(3):
                text = router.create_completion(f"f{i}", max_tokens=5)["choices"][0]["text"]
                assert text == expected_text(f"f{i}", 5)
            assert full.num_requests
        with run_router([full.url]) as router:
            found, headers, answer = router.request_raw("POST", "/v1/completions", b'{"prompt": "x"}')
            if status == 401:  # the router's key is not the client's affair
                assert found == 503 and answer["error"]["code"] == "unavailable"
            else:
                assert (found, headers["retry-after"], answer["error"]["code"]) == (status, "7", code)


def test_a_request_that_cost_a_replica_its_engines_goes_to_no_other() -> None:
    lost = refuse(503, "lost")
    with FakeReplica(lost) as one, FakeReplica(lost) as two, run_router([one.url, two.url]) as router:
        assert router.post("/v1/completions", prompt="x")[1]["error"]["code"] == "lost"
        assert one.num_requests + two.num_requests == 1


def test_a_client_that_leaves_frees_its_kv_on_the_replica() -> None:
    with run_toy_server("toy:delay=0.005") as replica, run_router([replica.url]) as router:
        for stream in (False, True):
            data = json.dumps({"prompt": "gone", "max_tokens": 1000, "stream": stream}).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            with socket.create_connection(("127.0.0.1", router.port), timeout=10) as sock:
                sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
                until(lambda: replica.engines[0].used > 0)
            replica.wait_idle(2.0)
        until(lambda: value(router, "thalweg_cancelled_total") == 2)
        assert replica.engines[0].generated < 1000 and value(router, "thalweg_outstanding ") == 0


def test_a_replica_that_falls_silent_is_lost_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its host is gone without a word: no connection breaks, and nothing answers."""
    monkeypatch.setattr(routing, "_PROBE_INTERVAL", 0.2)
    monkeypatch.setattr(routing, "_PROBE_TIMEOUT", 1.0)
    held = threading.Event()
    with (
        FakeReplica(lambda handler: held.wait(30)) as silent,
        run_toy_server() as well,
        run_router([silent.url, well.url]) as router,
        ThreadPoolExecutor(2) as clients,
    ):
        answers = [clients.submit(router.create_completion, f"s{i}", max_tokens=5) for i in range(2)]
        until(lambda: silent.num_requests == 1)
        silent.healthy = None
        texts = {answer.result(30)["choices"][0]["text"] for answer in answers}
        assert texts == {expected_text(f"s{i}", 5) for i in range(2)}
        assert router.request("GET", "/health")[1]["replicas"] == 1
        silent.healthy = True
        until(lambda: router.request("GET", "/health")[1]["replicas"] == 2)
        held.set()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_replica_that_ends_finishes_what_it_has(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM to one of two: it takes no connections any more, and what it works on is not begun anew elsewhere."""
    look_up = socket.getaddrinfo

    def look_up_both(name: Any, *rest: Any, **fields: Any) -> list[Any]:  # as of a host with IPv4 and IPv6
        names = ["127.0.0.1", "127.0.0.2"] if name == "localhost" else [name]
        return [address for each in names for address in look_up(each, *rest, **fields)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up_both)
    with (
        run_toy_server("toy:delay=0.01") as one,
        run_toy_server("toy:delay=0.01") as two,
        run_router([f"http://{host}:{one.port}", two.url]) as router,
        ThreadPoolExecutor(4) as clients,
    ):
        streams = [clients.submit(router.stream, "/v1/completions", prompt=f"s{i}", max_tokens=200) for i in (0, 1)]
        answers = [clients.submit(router.create_completion, f"a{i}", max_tokens=200) for i in (0, 1)]
        until(lambda: len(one.engines[0].running) == len(two.engines[0].running) == 2)
        one.stop(wait=False)
        until(lambda: router.request("GET", "/health")[1]["replicas"] == 1)
        assert router.create_completion("new", max_tokens=5)["choices"][0]["text"] == expected_text("new", 5)
        assert [stream.result(30)[-1] for stream in streams] == ["[DONE]"] * 2
        texts = [answer.result(30)["choices"][0]["text"] for answer in answers]
        assert texts == [expected_text(f"a{i}", 200) for i in (0, 1)] and value(router, "thalweg_retries_total") == 0
        assert (one.engines[0].generated, two.engines[0].generated) == (400, 405)


def test_a_connection_on_which_nothing_comes_is_asked_after() -> None:
    """A host that has started anew refuses new ones, and says of an old one that it is none when it is asked."""

    async def keepalive(url: str) -> list[int]:
        async with RemoteReplica(0, url, None).connect("GET", "/health") as connection:
            sock = connection._writer.get_extra_info("socket")
            numbers = [getattr(socket, f"TCP_KEEP{name}") for name in ("IDLE", "INTVL", "CNT")]
            on = sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            return [on, *(sock.getsockopt(socket.IPPROTO_TCP, number) for number in numbers)]

    with FakeReplica(hang_up) as fake:
        on, idle, interval, count = asyncio.run(keepalive(fake.url))
    assert on and idle + interval * count <= 30


def test_an_unhealthy_replica_gets_nothing_new_and_comes_back() -> None:
    def answer(handler: Any) -> None:
        reply(handler, 200, {"choices": []})

    with FakeReplica(answer) as one, FakeReplica(answer) as two, run_router([one.url, two.url]) as router:
        one.healthy = False
        until(lambda: router.request("GET", "/health")[1]["replicas"] == 1)
        for _ in range(4):
            assert router.post("/v1/completions", prompt="x")[0] == 200
        assert (one.num_requests, two.num_requests) == (0, 4)
        two.healthy = False
        until(lambda: router.request("GET", "/health")[0] == 503)
        status, answer_ = router.post("/v1/completions", prompt="x")
        assert status == 503 and "/health is 503" in answer_["error"]["message"]
        one.healthy = True
        until(lambda: router.request("GET", "/health")[0] == 200)
        assert router.post("/v1/completions", prompt="x")[0] == 200 and one.num_requests == 1


LONGER = [{**MODEL, "max_model_len": 4096}, ADAPTER]
OTHER = [{**MODEL, "id": "another"}, ADAPTER]


@pytest.mark.parametrize(
    ("models", "said"),  # the first to answer says what the others must have
    [
        (LONGER, "max_model_len is (4096, not 2048|2048, not 4096)"),
        (OTHER, "'another', not 'toy'"),
        ([MODEL], "adapters"),
    ],
)
def test_the_model_must_be_the_same_on_each(models: list[dict[str, Any]], said: str) -> None:
    with FakeReplica(hang_up, models) as other, run_toy_server() as replica:
        with pytest.raises(RuntimeError, match=said), run_router([replica.url, other.url]):
            pass
        other.models = [MODEL, ADAPTER]
        with run_router([replica.url, other.url]) as router:
            assert router.request("GET", "/health")[1]["replicas"] == 2
            other.models = models  # it was started anew, with something else
            until(lambda: router.request("GET", "/health")[1]["replicas"] == 1)
            for i in range(3):
                assert router.create_completion(f"m{i}", max_tokens=3)
            assert other.num_requests == 0


def test_a_wrong_key_and_the_right_one() -> None:
    keys = ("a-replica-key",)
    with run_toy_server(api_keys=keys) as replica:
        for key in (None, "another-key"):
            with pytest.raises(RuntimeError, match="does not accept the key"), run_router([replica.url], key):
                pass
        with run_router([replica.url], keys[0], api_keys=("a-client-key",)) as router:
            body = {"prompt": "x", "max_tokens": 3}
            assert router.request("POST", "/v1/completions", body, Authorization="Bearer a-client-key")[0] == 200
            for wrong in ("Bearer a-replica-key", ""):
                assert router.request("POST", "/v1/completions", body, Authorization=wrong)[0] == 401


def test_a_full_router_refuses_and_a_drained_one_ends() -> None:
    with (
        run_toy_server("toy:delay=0.01") as replica,
        run_router([replica.url], pool_limits=PoolLimits(max_outstanding=2), drain_seconds=0.3) as router,
        ThreadPoolExecutor(2) as clients,
    ):
        events = [clients.submit(router.stream, "/v1/completions", prompt="long", max_tokens=1500) for _ in range(2)]
        until(lambda: len(replica.engines[0].running) == 2)
        status, headers, answer = router.request_raw("POST", "/v1/completions", b'{"prompt": "x"}')
        assert status == 429 and headers["retry-after"] == "1" and answer["error"]["code"] == "overloaded"
        router.stop()
        for event in events:
            assert event.result(10)[-1]["error"]["code"] == "shutting_down"
        replica.wait_idle(2.0)


def test_a_request_has_its_time() -> None:
    with run_toy_server("toy:delay=0.05") as replica, run_router([replica.url], request_seconds=0.4) as router:
        status, answer = router.post("/v1/completions", prompt="x", max_tokens=500)
        assert status == 504 and answer["error"]["code"] == "timeout"
        replica.wait_idle(2.0)


def test_it_waits_for_its_first_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    monkeypatch.setattr(routing, "_START_TIMEOUT", 0.3)
    with pytest.raises(RuntimeError, match="does not answer"), run_router([url]):
        pass
    with run_toy_server() as replica, run_router([url, replica.url]) as router:
        assert router.request("GET", "/health")[1]["replicas"] == 1


@pytest.mark.parametrize("url", ["nowhere", "ftp://host:1", "http://", "http://host:99999", "http://me@host:1"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        ReplicaRouter([url], None, "toy", PoolLimits())


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    files = str(tmp_path / "c.pem"), str(tmp_path / "k.pem")
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    make += ["-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run([*make, "-keyout", files[1], "-out", files[0]], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")
    return files


def test_https(certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_START_TIMEOUT", 0.3)
    with run_toy_server(tls_cert=certificate[0], tls_key=certificate[1]) as replica:
        url = f"https://127.0.0.1:{replica.port}"
        with pytest.raises(RuntimeError, match="does not answer"), run_router([url]):  # an unknown authority
            pass
        monkeypatch.setenv("SSL_CERT_FILE", certificate[0])
        with run_router([url]) as router:
            assert router.create_completion("tls", max_tokens=6)["choices"][0]["text"] == expected_text("tls", 6)
            assert router.stream("/v1/completions", prompt="tls", max_tokens=6)[-1] == "[DONE]"
