"""The server as a Ray Serve application, in Ray's own cluster of one host.

Ray is a large package with versions of its own, so it lives in an environment of its own: ``python -m venv
.venv-ray && .venv-ray/bin/pip install 'ray[serve]' httptools``; without it the test is skipped.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch_support import clean_environ
from tests.repo.source import ROOT
from tests.toy_engine import expected_text
from thalweg.infer.config import EngineConfig
from thalweg.serve.integrations.ray import RayApp
from thalweg.serve.replicas.launcher import EngineSpec
from thalweg.serve.replicas.pool import PoolLimits

OWN = ROOT / ".venv-ray" / "bin" / "python"
PYTHON = str(OWN) if OWN.exists() else sys.executable if importlib.util.find_spec("ray") else None

SCRIPT = """
import json, socket, sys, time, urllib.error, urllib.request
import ray
from ray import serve
from thalweg.serve.integrations.ray import application

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": port})
serve.run(application("toy:delay=0.01", name="toy", num_replicas=2, ray_actor_options={"num_cpus": 0.5},
                      loader="tests.toy_engine:load_engine"), blocking=False)

def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    head = {"Content-Type": "application/json"}
    call = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, head)
    try:
        with urllib.request.urlopen(call, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()

found = {"health": ask("/health"), "models": ask("/v1/models")}
found["text"] = ask("/v1/completions", {"prompt": "ray", "max_tokens": 20})
found["stream"] = ask("/v1/completions", {"prompt": "ray", "max_tokens": 20, "stream": True})
found["wrong"] = ask("/v1/completions", {"prompt": "ray", "temprature": 1})
# A client that leaves frees its place.
body = json.dumps({"prompt": "gone", "max_tokens": 2000, "stream": True}).encode()
sock = socket.create_connection(("127.0.0.1", port))
head = "POST /v1/completions HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Type: application/json\\r\\n"
sock.sendall(f"{head}Content-Length: {len(body)}\\r\\n\\r\\n".encode() + body)
sock.recv(100)
sock.close()
time.sleep(1.0)
busy = [line for _ in range(8) for line in ask("/metrics")[1].splitlines()
        if line.startswith("thalweg_outstanding ") and not line.endswith(" 0.0")]
found["busy"] = busy
print(json.dumps(found), flush=True)
serve.shutdown()
ray.shutdown()
"""


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="ray is not installed: see the head of this file")
def test_a_ray_application_is_the_same_server(tmp_path: Path) -> None:
    assert PYTHON is not None
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # the names of its sockets have a limit
        about = {
            "RAY_TMPDIR": short,
            "HOME": short,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
        }
        environ = clean_environ(PYTHONPATH=str(ROOT), **about)
        done = subprocess.run(
            [PYTHON, "-c", SCRIPT], env=environ, capture_output=True, text=True, timeout=200, cwd=tmp_path
        )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"health')))
    want = expected_text("ray", 20)
    assert found["health"][0] == 200 and json.loads(found["models"][1])["data"][0]["id"] == "toy"
    assert json.loads(found["text"][1])["choices"][0]["text"] == want
    events = [line[6:] for line in found["stream"][1].split("\n\n") if line.startswith("data: {")]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == want
    assert found["stream"][1].endswith("data: [DONE]\n\n")
    assert found["wrong"][0] == 400 and "did you mean temperature" in found["wrong"][1]
    assert found["busy"] == []


def test_without_ray_the_error_names_the_cure() -> None:
    if importlib.util.find_spec("ray"):
        pytest.skip("ray is installed")
    from thalweg.serve.integrations.ray import application

    with pytest.raises(ImportError, match=r"pip install 'ray\[serve\]'"):
        application("model")


def test_the_application_has_an_engine_from_the_servers_start_to_its_end() -> None:
    """What a server of Ray's says to it, without Ray."""
    spec = EngineSpec("toy:delay=0.0", EngineConfig(), "tests.toy_engine:load_engine")
    app = RayApp(spec, "toy", (), PoolLimits())
    asked = json.dumps({"prompt": "ray", "max_tokens": 20}).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "headers": headers,
        "query_string": b"", "root_path": "", "http_version": "1.1", "scheme": "http",
    }  # fmt: skip
    answer: list[Any] = []

    async def run() -> tuple[Any, Any]:
        to_app, from_app = asyncio.Queue[Any](), asyncio.Queue[Any]()
        lifespan = asyncio.create_task(app({"type": "lifespan"}, to_app.get, from_app.put))
        await to_app.put({"type": "lifespan.startup"})
        begun = await from_app.get()
        app.check()
        request = asyncio.Queue[Any]()
        await request.put({"type": "http.request", "body": asked, "more_body": False})

        async def send(message: Any) -> None:
            answer.append(message)

        await app(scope, request.get, send)
        await to_app.put({"type": "lifespan.shutdown"})
        await lifespan
        return begun, await from_app.get()

    begun, ended = asyncio.run(run())
    assert begun["type"] == "lifespan.startup.complete" and ended["type"] == "lifespan.shutdown.complete"
    assert answer[0]["status"] == 200
    assert json.loads(answer[1]["body"])["choices"][0]["text"] == expected_text("ray", 20)
    with pytest.raises(RuntimeError, match="shutting down"):
        app.check()
