"""R23: bad requests.  No client's fault is a 5xx, no worker dies, and the server still answers.

The quick tier; ``bench/serve.py --fuzz N`` sends the same kinds by the million.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.marks import nightly
from tests.serve_fuzz import BAD_BODIES, bad_body, bad_bytes
from tests.serve_support import ServerThread, run_toy_server
from thalweg.serve.http.guard import HardenedProtocol

PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/mii/toy"]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with run_toy_server("toy:blocks=4096") as running:
        yield running
        running.wait_idle()
        assert running.engines == running.engines[:1], "the engine that began is the one that ends"
        assert running.create_completion("still here", max_tokens=2)


def send(server: ServerThread, path: str, body: bytes, **headers: str) -> tuple[int, object]:
    status, _, answer = server.request_raw("POST", path, body, **headers)
    return status, answer


def in_form(status: int, answer: object) -> bool:
    """Whether an answer is a success or a client's error in OpenAI's form."""
    if status == 200:
        return True
    error = answer["error"] if isinstance(answer, dict) else {}
    return 400 <= status < 500 and bool(error.get("message")) and set(error) == {"message", "type", "param", "code"}


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(
    [
        "prompt",
        "messages",
        "input",
        "prompts",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "seed",
        "stop",
        "max_tokens",
        "logprobs",
        "stream",
        "stream_options",
        "logit_bias",
        "tools",
        "tool_choice",
        "response_format",
        "stop_token_ids",
        "best_of",
        "echo",
        "suffix",
        "priority",
        "presence_penalty",
        "repetition_penalty",
        "min_tokens",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "structured_outputs",
        "user",
        "metadata",
        "chat_template_kwargs",
        "max_completion_tokens",
        "top_logprobs",
        "encoding_format",
        "dimensions",
        "max_length",
    ]
)
bodies = st.dictionaries(names | st.text(max_size=5), values, max_size=5)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(PATHS), fields=bodies, good=st.booleans())
def test_any_json_is_answered_in_form(server: ServerThread, path: str, fields: dict, good: bool) -> None:
    if good:  # the required field is there, so that what follows it is reached
        fields = {"prompt": "x", "max_tokens": 2, **fields} if path.endswith("/completions") else fields
        if "chat" in path:
            fields = {k: v for k, v in fields.items() if k != "prompt"}
            fields = {"messages": [{"role": "user", "content": "x"}], **fields}
    if isinstance(fields.get("max_tokens"), int):
        fields["max_tokens"] = min(fields["max_tokens"], 4)
    status, answer = send(server, path, json.dumps(fields).encode(errors="surrogatepass"))
    assert in_form(status, answer), (status, answer)


@pytest.mark.parametrize("name", sorted(BAD_BODIES))
@pytest.mark.parametrize("path", PATHS[:2])
def test_each_known_kind_of_bad_body(server: ServerThread, path: str, name: str) -> None:
    status, answer = send(server, path, BAD_BODIES[name])
    assert 400 <= status < 500 and in_form(status, answer), (name, status, answer)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n": 10**9}, "n"),
        ({"n": 0}, "n"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temprature": 0.5}, "did you mean temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 10**6}, "ask for at most"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"min_tokens": 20, "max_tokens": 3}, "min_tokens"),
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [999]}, "vocabulary"),
        ({"prompt": "x" * 5000}, "shorten"),
        ({"prompt": None}, "prompt"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 99}, "stop"),
        ({"seed": 2**70}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "no token"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 7}, "best_of"),
        ({"stream": "yes"}, "stream"),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ],
)
def test_the_message_names_the_field(server: ServerThread, fields: dict, said: str) -> None:
    status, answer = send(server, "/v1/completions", json.dumps({"prompt": "x", **fields}).encode())
    assert status == 400 and said in json.dumps(answer), answer
    assert len(answer["error"]["message"]) < 500  # type: ignore[index]


def test_a_good_request_would_pass(server: ServerThread) -> None:
    """Negative control: the same road with nothing wrong is 200."""
    assert send(server, "/v1/completions", b'{"prompt": "x", "max_tokens": 2, "user": "me"}')[0] == 200


def test_other_ways_to_ask_wrongly(server: ServerThread) -> None:
    good = b'{"prompt": "x"}'
    assert send(server, "/v1/completions", good, Content_Type="text/plain")[0] == 415
    assert send(server, "/v1/completions", good, Content_Encoding="gzip")[0] == 400
    assert server.request("GET", "/v1/completions")[0] == 405
    assert server.request("DELETE", "/v1/models")[0] == server.request("GET", "/mii/")[0] == 405
    for path in ("/nothing", "/v1/", "/%00", "/%ff%fe", "/../etc/passwd", "/" + "a" * 4000):
        status, answer = server.request("GET", path)
        assert status == 404 and in_form(status, answer), path


def test_a_body_over_the_limit(server: ServerThread) -> None:
    big = json.dumps({"prompt": "x" * 2**23}).encode()
    status, answer = send(server, "/v1/completions", big)
    assert status == 413 and in_form(status, answer) and "--body-bytes" in answer["error"]["message"]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    chunks = (b"x" * 65536 for _ in range(256))  # no Content-Length: counted as it comes
    connection.request("POST", "/v1/completions", chunks, {"Content-Type": "application/json"}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_a_body_as_langchain_and_long_chats_send_it_is_taken(server: ServerThread) -> None:
    """A thousand texts as tokens, 180,000 Chinese characters: refused for their lengths here, not for their bytes."""
    embedding, chat = {"input": [[100_000] * 230] * 1000}, [{"role": "user", "content": "\u6cb3" * 180_000}]
    for path, body in (("/v1/embeddings", embedding), ("/v1/chat/completions", {"messages": chat})):
        data = json.dumps(body).encode()
        assert len(data) > 2**20 and send(server, path, data)[0] == 400
    assert server.post("/v1/chat/completions", messages=chat)[1]["error"]["code"] == "context_length_exceeded"


def test_a_body_full_of_faults_is_refused_at_once(server: ServerThread) -> None:
    """Each of them was compared with each other one, while the server did nothing else."""
    for field, wrong, said in (
        ("prompt", [-1, "x"] * 15_000, "prompt.0: input should be greater than or equal to 0"),
        ("prompt", [["x", -1] * 15_000], "prompt.0.0: input should be a valid integer"),
        ("logit_bias", {str(i): (101, "x")[i % 2] for i in range(20_000)}, "logit_bias.0: input should be less than"),
    ):
        begun = time.process_time()
        status, answer = server.post("/v1/completions", **{"prompt": "x", field: wrong})
        assert status == 400 and said in answer["error"]["message"], answer
        assert time.process_time() - begun < 5


def test_raw_bytes_on_the_socket(server: ServerThread) -> None:
    """Things that are not HTTP get a 4xx or a closed connection, never a 5xx."""
    random_state = random.Random(7)
    for i in range(120):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
            sock.settimeout(10)
            sock.sendall(bad_bytes(random_state, i))
            try:
                with contextlib.suppress(OSError):  # ENOTCONN: the server has closed it already
                    sock.shutdown(socket.SHUT_WR)
                first = sock.recv(4096)
            except ConnectionError:
                continue
            if first:
                status = int(first.split(b" ", 2)[1])
                assert status == 200 or 400 <= status < 500, first


def test_random_bad_bodies(server: ServerThread) -> None:
    random_state = random.Random(3)
    for _ in range(150):
        path, body = bad_body(random_state)
        status, answer = send(server, path, body)
        assert in_form(status, answer), (path, body[:200], status, answer)


def test_slow_and_half_open_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence, a header a moment, a body that never ends: each is closed in time, and others are served."""
    from thalweg.serve.http.guard import BodyLimits

    monkeypatch.setattr(HardenedProtocol, "header_seconds", 0.5)
    with run_toy_server(body_limits=BodyLimits(timeout_seconds=0.5)) as server:

        def connect(data: bytes) -> socket.socket:
            sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
            sock.sendall(data)
            return sock

        start = time.monotonic()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
        head += b"Content-Type: application/json\r\n"
        silent = [connect(b"") for _ in range(20)]
        slow = [connect(b"GET / HTTP/1.1\r\nHost: loc") for _ in range(20)]
        short = [connect(head + b"\r\n{") for _ in range(20)]
        assert server.create_completion("meanwhile", max_tokens=2)
        feeder_done = threading.Event()

        def feed() -> None:
            while not feeder_done.wait(0.1):
                for sock in slow:
                    try:
                        sock.sendall(b"a")
                    except OSError:
                        return

        threading.Thread(target=feed, daemon=True).start()
        assert all(sock.recv(100) == b"" for sock in silent)
        assert all(sock.recv(2000).startswith(b"HTTP/1.1 408") for sock in short)
        answers = []
        for sock in slow:
            try:
                answers.append(sock.recv(100))
            except ConnectionResetError:  # it was still sending when it was told
                answers.append(b"")
        assert all(answer == b"" or answer.startswith(b"HTTP/1.1 408") for answer in answers)
        feeder_done.set()
        assert time.monotonic() - start < 8
        for sock in silent + slow + short:
            sock.close()


def whole_answer(sock: socket.socket) -> bytes:
    with sock.makefile("rb") as file:
        head = b"".join(iter(file.readline, b"\r\n"))
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        return head + file.read(int(length))


@pytest.mark.parametrize("method", ["PUT", nightly("GET")])
def test_a_body_that_nobody_reads_holds_no_connection(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HardenedProtocol, "unread_body_seconds", 1.0)
    with run_toy_server() as server, socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        head = f"{method} /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n".encode()
        sock.sendall(head)
        assert whole_answer(sock).startswith(b"HTTP/1.1 ")
        sock.sendall(b"12345")
        time.sleep(1.2)
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert whole_answer(sock).startswith(b"HTTP/1.1 200"), "what came in time ends no connection"
        sock.sendall(head)
        assert whole_answer(sock).startswith(b"HTTP/1.1 ")
        with contextlib.suppress(ConnectionError):
            for _ in range(4):
                sock.sendall(b"1")  # one short of the whole
                time.sleep(0.4)
            assert sock.recv(100) == b"", "it would wait for ever"


def test_too_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HardenedProtocol, "max_connections", 30)
    with run_toy_server() as server:
        held = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(60)]
        time.sleep(0.2)
        refused = 0
        for sock in held:
            sock.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                refused += sock.recv(200).startswith(b"HTTP/1.1 429")
        assert refused == 30
        for sock in held:
            sock.close()
        time.sleep(0.2)
        assert server.create_completion("room again", max_tokens=2)
