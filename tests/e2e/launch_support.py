"""Starts `thalweg run` for the end-to-end tests and sees that nothing of it stays."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

RUN_COMMAND = [sys.executable, "-m", "thalweg", "run"]
EXIT_DEADLINE = 10.0  # seconds in which a broken job must have disappeared

Launch = Callable[..., "subprocess.Popen[str]"]


def clean_environ(**changes: str) -> dict[str, str]:
    """The environment without any launcher's variables."""
    families = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC_", "OMP_")
    return {k: v for k, v in os.environ.items() if not k.startswith(families)} | changes


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start `thalweg run` on a script's text; whatever is left at the end is killed by pid."""
    started = []

    def start(script: str, *arguments: str, options: tuple[str, ...] = ("--nproc", "2"), **environ: str):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script))
        process = subprocess.Popen(
            [*RUN_COMMAND, *options, str(path), *arguments],
            env=clean_environ(OUT=str(tmp_path), TMPDIR=str(tmp_path), **environ),
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    if all(process.returncode != -signal.SIGKILL for process in started):
        left = [path.name for path in tmp_path.iterdir() if path.name.startswith(("thalweg-", "torchelastic_"))]
        assert not left, "a job leaves nothing on disk"


def wait_output(process: subprocess.Popen[str], timeout: float = 60.0) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def wait_for_stderr(process: subprocess.Popen[str], text: str) -> None:
    """Read standard error up to the line with ``text``."""
    assert process.stderr is not None
    line = ""
    while text not in line:
        line = process.stderr.readline()
        assert line, f"the job has ended, and never said {text!r}"


def wait_for_texts(folder: Path, pattern: str, count: int, timeout: float = 60.0) -> list[str]:
    """Wait until ``count`` files match and hold something each."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        texts = [path.read_text() for path in sorted(folder.glob(pattern))]
        if len(texts) == count and all(texts):
            return texts
        time.sleep(0.02)
    raise AssertionError(f"{pattern}: {count} ranks did not start in {timeout} s")


def wait_for_pids(folder: Path, pattern: str, count: int, timeout: float = 60.0) -> list[int]:
    """Wait until ``count`` files match and hold a pid each."""
    return [int(text) for text in wait_for_texts(folder, pattern, count, timeout)]


def free_port() -> int:
    """A port of this host that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_exited(pids: list[int], since: float) -> float:
    """Seconds from ``since`` until none of the processes is left."""
    while any(map(is_alive, pids)):
        assert time.monotonic() - since < EXIT_DEADLINE, f"still there: {[pid for pid in pids if is_alive(pid)]}"
        time.sleep(0.02)
    return time.monotonic() - since
