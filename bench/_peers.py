"""Where the peers live, and the environment in which they run at their best.

Imports nothing but the standard library: the environment of the peers runs it too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from _isa import asked_isa, with_isa

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".venv-peers"
PEERS_PYTHON = PEERS / "bin" / "python"


def deepspeed_missing_reason() -> str | None:
    """Return why DeepSpeed cannot take part, or None when it can."""
    if not PEERS_PYTHON.exists():
        return "no .venv-peers: run `make bench-peers`"
    if asked_isa() and not (_extensions() / "ready").exists():
        return f"its operators are not compiled for {asked_isa()}: run `make bench-peers-{asked_isa()}`"
    if not (PEERS / ".ready").exists():
        return "its operators are not compiled yet: run `make bench-peers`"
    return None


def _extensions() -> Path:
    return PEERS / with_isa("torch_extensions")


def aio_missing_reason() -> str | None:
    """Return why DeepSpeed's asynchronous-I/O operator cannot take part, or None when it can."""
    if missing := deepspeed_missing_reason():
        return missing
    if not (_extensions() / "async_io" / "async_io.so").exists():
        return "its async_io operator is not compiled: install libaio-dev and run `make bench-peers`"
    return None


def deepspeed_env(local_ranks: int = 1) -> dict[str, str]:
    """Return the variables under which DeepSpeed starts on CPU ranks.

    Its C++ operators are compiled once, into the environment of the peers, and found there;
    `LOCAL_SIZE` is the number of ranks on this host, which its CPU accelerator asks for.
    """
    compiler = {"CXX": str(Path(__file__).with_name(f"_cxx_{asked_isa()}.sh"))} if asked_isa() else {}
    return {
        **compiler,
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": str(local_ranks),
        "TORCH_EXTENSIONS_DIR": str(_extensions()),
        "PATH": f"{PEERS / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONWARNINGS": "ignore",
    }


def remove_deepspeed_shm(port: str) -> int:
    """Remove the shared memory that DeepSpeed's ranks leave behind; return how many bytes there were.

    It names its segments after the user, `MASTER_ADDR` and `MASTER_PORT`, so each group of ranks here has
    a port of its own, used as a name alone (the ranks meet through a file).
    """
    total = 0
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_*"):
        total += path.stat().st_size
        path.unlink()
    return total


def python_for(contestant: str) -> str:
    """Return the interpreter that runs a contestant."""
    return str(PEERS_PYTHON) if contestant.startswith("deepspeed") else sys.executable
