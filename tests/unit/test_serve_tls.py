"""TLS: connections amid their handshake are counted, and end (slow or silent clients)."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve_support import ServerThread, run_toy_server
from tests.toy_engine import expected_text
from thalweg.serve.http.guard import HandshakeGuard, HardenedProtocol
from thalweg.serve.server import ServeOptions

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl for a certificate")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = str(folder / "c.pem"), str(folder / "k.pem")
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    make += ["-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


@contextlib.contextmanager
def serving(files: tuple[str, str], model: str = "toy") -> Iterator[ServerThread]:
    with run_toy_server(model, tls_cert=files[0], tls_key=files[1]) as server:
        yield server


def ask(server: ServerThread, files: tuple[str, str], prompt: str, pieces: int = 1) -> str:
    """A completion over TLS, its request sent in pieces; the text."""
    body = json.dumps({"prompt": prompt, "max_tokens": 9}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    data = f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
    with secure(server, files) as sock:
        step = -(-len(data) // pieces)
        for at in range(0, len(data), step):
            sock.sendall(data[at : at + step])
            time.sleep(0.01 * (pieces > 1))
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
    return json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"]


def secure(server: ServerThread, files: tuple[str, str]) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=files[0])
    plain = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    return context.wrap_socket(plain, server_hostname="127.0.0.1")


def closed(sock: socket.socket, seconds: float) -> bool:
    """Whether the other side hangs up within that time."""
    sock.settimeout(seconds)
    try:
        while sock.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_requests_and_streams_pass(files: tuple[str, str]) -> None:
    with serving(files) as server:
        for pieces in (1, 7):
            assert ask(server, files, f"tls {pieces}", pieces) == expected_text(f"tls {pieces}", 9)


def test_handshakes_that_never_end_are_counted_and_closed(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six clients connect where four may, and say nothing, half of a greeting, or what is no TLS."""
    monkeypatch.setattr(HardenedProtocol, "max_connections", 4)
    monkeypatch.setattr(HandshakeGuard, "handshake_seconds", 2.0)
    with serving(files, "toy:delay=0.01") as server:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)]
        silent[0].sendall(b"\x16\x03\x01\x02\x00\x01\x00")
        time.sleep(0.2)
        beyond = socket.create_connection(("127.0.0.1", server.port))
        assert closed(beyond, 1.0), "the fifth is refused at once"
        assert not closed(silent[1], 0.05), "the others have their time"
        with pytest.raises(OSError):
            secure(server, files)
        assert all(closed(sock, 6.0) for sock in silent)
        wrong = socket.create_connection(("127.0.0.1", server.port))
        wrong.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert closed(wrong, 1.5), "what is no TLS ends at once"
        leaves = socket.create_connection(("127.0.0.1", server.port))
        leaves.close()
        time.sleep(0.1)
        busy = [secure(server, files) for _ in range(3)]  # handshakes that ended: room for one more
        assert ask(server, files, "after") == expected_text("after", 9)
        for sock in (*silent, beyond, wrong, *busy):
            sock.close()


def test_a_server_ends_amid_a_handshake(files: tuple[str, str]) -> None:
    with serving(files) as server:
        silent = socket.create_connection(("127.0.0.1", server.port))
        time.sleep(0.1)
        start = time.monotonic()
        server.stop()
        assert time.monotonic() - start < 8 and closed(silent, 1.0)


def test_files_that_are_no_certificate_are_refused_before_anything_is_loaded(
    files: tuple[str, str], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="check both files"):
        ServeOptions("m", tls_cert=files[1], tls_key=files[0])
    locked = tmp_path / "locked.pem"
    command = ["openssl", "ec", "-in", files[1], "-aes128", "-passout", "pass:word", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ValueError, match="without a passphrase"):
        ServeOptions("m", tls_cert=files[0], tls_key=str(locked))
