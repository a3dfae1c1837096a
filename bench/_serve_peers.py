"""The servers of the serving bench: how each is started, and how one knows that it is ready."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from _peers import ROOT

VLLM = ROOT / ".venv-vllm" / "bin" / "python"
KV_TOKENS = 48640
"""Room for the KV of 64 sequences of the longest kind, which each server has.  Left alone, ``transformers``
takes most of the memory, for masks of (batch tokens, KV tokens), too."""
_CB_BLOCK_TOKENS = 256  # tokens in a block of transformers' cache
SERVERS = ("thalweg", "transformers", "transformers-cb", "vllm")
_START_SECONDS = 600.0


def missing_reason(name: str) -> str | None:
    """Return why a server cannot take part, or None."""
    if name == "vllm" and not VLLM.exists():
        return "not installed: make bench-vllm"
    return None


def server_command(name: str, folder: Path, port: int, dtype: str, extra: list[str]) -> list[str]:
    """Return the command line; ``dtype`` is fp32 or bf16."""
    long = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    if name == "thalweg":
        line = [sys.executable, "-m", "thalweg", "serve", str(folder), "--port", str(port)]
        return [*line, "--dtype", dtype, "--name", str(folder), *extra]
    if name.startswith("transformers"):
        program = str(Path(sys.executable).with_name("transformers"))
        batching = []
        if name.endswith("-cb"):
            batching = ["--continuous-batching", "--cb-num-blocks", str(KV_TOKENS // _CB_BLOCK_TOKENS)]
            batching += ["--cb-max-batch-tokens", "512"]  # as many as ours
        line = [program, "serve", str(folder), "--port", str(port), "--device", "cpu", "--dtype", long]
        return [*line, *batching]
    line = [str(VLLM), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--dtype", long]
    return [
        *line,
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--max-model-len",
        "2048",
        "--max-num-seqs",
        "64",
    ]


class PeerServer:
    """A server that runs while the context is open; ``port`` is where."""

    def __init__(self, name: str, folder: Path, dtype: str, threads: int, extra: list[str]) -> None:
        self.name, self.port = name, free_port()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
        }
        environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "TQDM_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if name == "vllm":
            environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
            environ.pop("PYTHONPATH")
        self._process = subprocess.Popen(
            server_command(name, folder, self.port, dtype, extra),
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    def __enter__(self) -> PeerServer:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} did not start: {self.tail()}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2):
                    return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self.__exit__(None, None, None)
        raise RuntimeError(f"{self.name} was not ready after {_START_SECONDS:.0f} s: {self.tail()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(20)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self.log.close()

    def tail(self) -> str:
        """Return the end of what it said."""
        self.log.seek(0)
        lines = [line for line in self.log.read().decode(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-3:])[-400:]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
