"""DeepSpeed-MII's forms: ``thalweg.pipeline``, ``thalweg.serve`` and ``thalweg.client``.

``pipeline`` runs an engine in this process.  ``serve`` starts a server that outlives the program, under a
name; ``client`` finds it by that name, from any program of the same user.  The name is a file of mode 0600
in the user's own runtime folder with address, key and process, for this machine's programs alone; the server
removes it when it ends, and what a killed server left is removed by whoever looks next.
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
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thalweg.serve.client import iter_sse, post_json
from thalweg.serve.errors import ApiError
from thalweg.utils.atomic_file import publish_file
from thalweg.utils.processes import is_process_alive, process_start_time
from thalweg.utils.procfs import boot_id
from thalweg.utils.timing import wait_until

_DEFAULT_REST_PORT = 28080  # MII's


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
    max_length: int | None = None,
    trust_remote_code: bool = False,
    enable_restful_api: bool = False,
    restful_api_host: str | None = None,
    restful_api_port: int | None = None,
    arguments: Sequence[str] = (),
) -> Client:
    """Start `thalweg serve MODEL` as a process that goes on when this program ends; returns a client of it.

    ``arguments`` are further options of the command.  The server has a random key unless one is among them,
    or ``enable_restful_api`` says that others are to reach it: then it is as `thalweg serve` is, at
    ``restful_api_host`` and ``restful_api_port`` (28080), with a key only from THALWEG_API_KEY.
    Raises RuntimeError with the server's own words when it does not start, ValueError for a name in use.
    """
    name = deployment_name or f"{Path(model.rstrip('/')).name}-deployment"
    if _lookup_deployment(name) is not None:
        raise ValueError(f"a deployment {name!r} is running: take another name, or client(name).terminate_server()")
    command = [sys.executable, "-m", "thalweg", "serve", model, "--deployment", name, "--json"]
    if enable_restful_api:
        host, port = restful_api_host or host, restful_api_port or port or _DEFAULT_REST_PORT
    command += ["--host", host, "--port", str(port), "--replicas", str(replica_num)]
    command += ["--tensor-parallel", str(tensor_parallel)]
    command += ["--max-length", str(max_length)] if max_length is not None else []
    command += ["--trust-remote-code"] * trust_remote_code
    environ = dict(os.environ)
    if not (environ.get("THALWEG_API_KEY") or enable_restful_api):
        environ["THALWEG_API_KEY"] = secrets.token_hex(16)
    command += arguments
    with tempfile.TemporaryFile() as stderr_file:  # has no name, so nothing is left of it
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": stderr_file}
        process = subprocess.Popen(command, **streams, env=environ, start_new_session=True)
        assert process.stdout is not None
        with process.stdout:
            line = process.stdout.readline()  # ends when the server is ready, or ends
        if not line:
            process.wait()
            stderr_file.seek(0)
            raise RuntimeError(
                f"the server did not start: {stderr_file.read().decode(errors='replace').strip()[-2000:]}"
            )
    wait_until(lambda: _lookup_deployment(name), 2.0, 0.02)  # the record follows the line
    return client(name)


def client(model_or_deployment_name: str) -> Client:
    """Return a client of the deployment of that name (or of that model); ValueError where none runs."""
    candidates = (model_or_deployment_name, f"{Path(model_or_deployment_name.rstrip('/')).name}-deployment")
    for name in candidates:
        record = _lookup_deployment(name)
        if record is not None:
            return Client(name, record["url"], record["key"], record["pid"], record.get("start_time"))
    raise ValueError(
        f"no deployment {model_or_deployment_name!r} runs for this user: start it with thalweg.serve(model, "
        f"{model_or_deployment_name!r}) or `thalweg serve MODEL --deployment {model_or_deployment_name}`"
    )


class Client:
    """Talks to one deployment; call it, or :meth:`generate`, with one prompt or several."""

    def __init__(self, name: str, url: str, key: str | None, pid: int, start_time: int | None = None) -> None:
        """``start_time`` is the process's, by which it is told from a later one with the same pid."""
        self.name, self.url, self._key = name, url, key
        self._pid, self._start_time = pid, start_time

    def generate(
        self, prompts: str | Sequence[str], streaming_fn: Callable[[list[Response]], None] | None = None, **options: Any
    ) -> list[Response]:
        """Return one response for each prompt; ``options`` are MII's (``max_new_tokens``, ``top_p``, ...).

        With ``streaming_fn`` there is one prompt, and the function gets each piece as it comes.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if streaming_fn is not None:
            return self._stream(texts, streaming_fn, options)
        with self._post({"prompts": texts, **options}) as answer:
            return [Response(**fields) for fields in json.load(answer)]

    __call__ = generate

    def terminate_server(self) -> None:
        """End the server and wait until it is gone."""

        def is_gone() -> bool:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, os.WNOHANG)  # where it is our own child
            return not is_process_alive(self._pid, self._start_time)

        if _signal_process(self._pid, self._start_time, signal.SIGTERM):
            wait_until(is_gone, 60, 0.02)
        unregister_deployment(self.name, self._pid)

    def _stream(
        self, texts: list[str], streaming_fn: Callable[[list[Response]], None], options: dict[str, Any]
    ) -> list[Response]:
        if len(texts) != 1:
            raise ValueError("streaming_fn takes one prompt at a time")
        full_text, last = "", Response("", 0, 0, None)
        with self._post({"prompts": texts, **options, "stream": True}) as lines:
            try:
                for event in iter_sse(lines):
                    last = Response(**event)
                    full_text += last.generated_text
                    if last.generated_text:
                        streaming_fn([last])
            except ApiError as error:
                raise RuntimeError(error.message) from None
        return [replace(last, generated_text=full_text)]

    def _post(self, body: dict[str, Any]) -> Any:
        try:
            return post_json(f"{self.url}/mii/{urllib.parse.quote(self.name, safe='')}", body, self._key)
        except ApiError as error:
            error_class = ValueError if error.status < 500 and error.status != 429 else RuntimeError
            raise error_class(f"{error.status}: {error.message}") from None


def register_deployment(name: str, url: str, key: str | None) -> None:
    """Let :func:`client` find this process under ``name``."""
    path = _registry_path(name)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.parent.chmod(0o700)
    pid = os.getpid()
    record = {"name": name, "url": url, "key": key, "pid": pid, "start_time": process_start_time(pid)}
    publish_file(path, lambda file: file.write(json.dumps(record).encode()), mode=0o600)


def unregister_deployment(name: str, pid: int) -> None:
    """Undo :func:`register_deployment` of process ``pid``, and nobody else's."""
    with contextlib.suppress(OSError, ValueError):
        if json.loads(_registry_path(name).read_text())["pid"] == pid:
            _registry_path(name).unlink(missing_ok=True)


def _lookup_deployment(name: str) -> dict[str, Any] | None:
    try:
        record = json.loads(_registry_path(name).read_text())
    except (OSError, ValueError):
        return None
    if is_process_alive(record["pid"], record.get("start_time")):
        return record
    unregister_deployment(name, record["pid"])
    return None


def _registry_path(name: str) -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "thalweg" if base else Path.home() / ".cache" / "thalweg" / "run"
    key = f"{boot_id()} {name}"  # hosts that share a home have processes and addresses of their own
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _signal_process(pid: int, start_time: int | None, number: int) -> bool:
    """Send a signal to the process if it is still the same one; returns whether it is."""
    with contextlib.suppress(ProcessLookupError), contextlib.ExitStack() as stack:
        descriptor = None
        if hasattr(os, "pidfd_open"):  # from here on the pid cannot pass to another one unseen
            descriptor = os.pidfd_open(pid)
            stack.callback(os.close, descriptor)
        if is_process_alive(pid, start_time):
            if descriptor is not None:
                signal.pidfd_send_signal(descriptor, number)
            else:
                os.kill(pid, number)
            return True
    return False
