"""DeepSpeed-MII's forms: ``thalweg.pipeline``, ``thalweg.serve`` and ``thalweg.client``.

``pipeline`` runs an engine in this process.  ``serve`` starts a server that outlives the program, under a
name; ``client`` finds it by that name, from any program of the same user.  The name is a file of mode 0600
in the user's own runtime folder with address, key and process; the server removes it when it ends, and what
a killed server left is removed by whoever looks next.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_START_SECONDS = 600.0


@dataclass(frozen=True)
class Response:
    """What was generated for one prompt; lengths are in tokens."""

    generated_text: str
    prompt_length: int
    generated_length: int
    finish_reason: str | None

    def __str__(self) -> str:
        """Return the text."""
        return self.generated_text


def serve(
    model: str,
    deployment_name: str | None = None,
    *,
    replica_num: int = 1,
    tensor_parallel: int = 1,
    host: str = "127.0.0.1",
    port: int = 0,
    arguments: Sequence[str] = (),
) -> Client:
    """Start `thalweg serve MODEL` as a process that goes on when this program ends; returns a client of it.

    ``arguments`` are further options of the command.  The server has a random key unless one is among them.
    Raises RuntimeError with the server's own words when it does not start, ValueError for a name in use.
    """
    name = deployment_name or f"{Path(model.rstrip('/')).name}-deployment"
    if _read_record(name) is not None:
        raise ValueError(
            f"a deployment {name!r} is running: take another name, or client(name).terminate_server()"
        )
    command = [sys.executable, "-m", "thalweg", "serve", model, "--deployment", name, "--json"]
    command += ["--host", host, "--port", str(port), "--replicas", str(replica_num)]
    command += ["--tensor-parallel", str(tensor_parallel), *arguments]
    environ = {**os.environ, "THALWEG_API_KEY": os.environ.get("THALWEG_API_KEY") or secrets.token_hex(16)}
    with tempfile.TemporaryFile() as said:  # has no name, so nothing is left of it
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            env=environ,
            start_new_session=True,
        )
        assert process.stdout is not None
        with process.stdout:
            line = process.stdout.readline()  # ends when the server is ready, or ends
        if not line:
            process.wait()
            said.seek(0)
            raise RuntimeError(
                f"the server did not start: {said.read().decode(errors='replace').strip()[-2000:]}"
            )
    for _ in range(100):  # the record follows the line
        if _read_record(name) is not None:
            break
        time.sleep(0.02)
    return client(name)


def client(model_or_deployment_name: str) -> Client:
    """Return a client of the deployment of that name (or of that model); ValueError where none runs."""
    tried = (model_or_deployment_name, f"{Path(model_or_deployment_name.rstrip('/')).name}-deployment")
    for name in tried:
        record = _read_record(name)
        if record is not None:
            return Client(name, record["url"], record["key"], record["pid"])
    raise ValueError(
        f"no deployment {model_or_deployment_name!r} runs for this user: start it with thalweg.serve(model, "
        f"{model_or_deployment_name!r}) or `thalweg serve MODEL --deployment {model_or_deployment_name}`"
    )


class Client:
    """Talks to one deployment; call it, or :meth:`generate`, with one prompt or several."""

    def __init__(self, name: str, url: str, key: str | None, pid: int) -> None:
        self.name, self.url, self._key, self._pid = name, url, key, pid

    def generate(
        self,
        prompts: str | Sequence[str],
        streaming_fn: Callable[[list[Response]], None] | None = None,
        **options: Any,
    ) -> list[Response]:
        """Return one response for each prompt; ``options`` are MII's (``max_new_tokens``, ``top_p``, ...).

        With ``streaming_fn`` there is one prompt, and the function gets each piece as it comes.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if streaming_fn is not None:
            return self._stream(texts, streaming_fn, options)
        with self._open(f"/mii/{self.name}", {"prompts": texts, **options}) as answer:
            return [Response(**fields) for fields in json.load(answer)]

    __call__ = generate

    def terminate_server(self) -> None:
        """End the server and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGTERM)
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and _alive(self._pid):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(self._pid, os.WNOHANG)  # where it is our own child
                time.sleep(0.02)
        forget_deployment(self.name, self._pid)

    def _stream(
        self, texts: list[str], streaming_fn: Callable[[list[Response]], None], options: dict[str, Any]
    ) -> list[Response]:
        if len(texts) != 1:
            raise ValueError("streaming_fn takes one prompt at a time")
        fields = {"max_tokens": options.get("max_new_tokens", 1024), "top_p": options.get("top_p", 0.9)}
        if not options.get("do_sample", True):
            fields = {**fields, "temperature": 0.0, "top_p": 1.0}
        fields |= {
            name: options[name] for name in ("temperature", "top_k", "stop", "seed") if name in options
        }
        body = {"prompt": texts[0], "stream": True, "stream_options": {"include_usage": True}, **fields}
        whole, reason, usage = "", None, {}
        with self._open("/v1/completions", body) as lines:
            for line in lines:
                data = line.removeprefix(b"data: ").strip()
                if not data or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    whole, reason = whole + choice["text"], choice["finish_reason"]
                    streaming_fn([Response(choice["text"], 0, 0, reason)])
        return [Response(whole, usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0), reason)]

    def _open(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            return urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            with contextlib.suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["error"]["message"]
            kind = ValueError if error.code < 500 and error.code != 429 else RuntimeError
            raise kind(f"{error.code}: {text}") from None
        except urllib.error.URLError as error:
            raise ConnectionError(f"{self.name} at {self.url} does not answer: {error.reason}") from None


def record_deployment(name: str, url: str, key: str | None) -> None:
    """Let :func:`client` find this process under ``name``."""
    path = _record_path(name)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.parent.chmod(0o700)
    part = path.with_suffix(f".{secrets.token_hex(4)}")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"name": name, "url": url, "key": key, "pid": os.getpid()}, file)
    part.replace(path)


def forget_deployment(name: str, pid: int) -> None:
    """Undo :func:`record_deployment` of process ``pid``, and nobody else's."""
    with contextlib.suppress(OSError, ValueError):
        if json.loads(_record_path(name).read_text())["pid"] == pid:
            _record_path(name).unlink(missing_ok=True)


def _read_record(name: str) -> dict[str, Any] | None:
    try:
        record = json.loads(_record_path(name).read_text())
    except (OSError, ValueError):
        return None
    if _alive(record["pid"]):
        return record
    forget_deployment(name, record["pid"])
    return None


def _record_path(name: str) -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "thalweg" if base else Path.home() / ".cache" / "thalweg" / "run"
    return folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True
