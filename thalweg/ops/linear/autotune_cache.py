"""Which candidate computes which product on this machine: measured once, kept on disk.

A key is ``threads/kind/dtype/rows/KxN`` with the rows rounded up to a power of two; the
table maps it to the name of a candidate.  Candidates differ by rounding, so the ranks of
a job should choose alike: on one machine the cache file sees to it (the first process
measures under a file lock, the others wait and read), across machines the caller sends
:meth:`AutotuneCache.export_table` of one rank to :meth:`AutotuneCache.import_table` of all.

The file holds names of candidates only.  One that is damaged, foreign or of another
version is as good as none; one that cannot be written costs a measurement per process.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from thalweg.ops.linear.autotune import benchmark_kernels, select_fastest
from thalweg.ops.linear.kernels import JIT_FALLBACKS, KERNELS, is_usable
from thalweg.utils.atomic_file import publish_file
from thalweg.utils.procfs import read_fields

BenchmarkFn = Callable[[str, torch.dtype, int, int, int], dict[str, float]]

_FORMAT = 1
_LOCK_TIMEOUT_S = 5.0
_MAX_JIT_SHAPES = 384  # exact products; less than oneDNN's cache, which the rest of torch uses too
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@cache
def get_cpu_name() -> str:
    """Name the processor as exactly as the system tells: vendor, family, model, stepping, vector unit."""
    field_names = ("vendor_id", "cpu family", "model", "model name", "stepping", "CPU implementer", "CPU part")
    fields = read_fields("/proc/cpuinfo")
    parts = [fields[key] for key in field_names if key in fields] or [platform.processor()]
    return " / ".join([platform.machine(), *parts, torch.backends.cpu.get_cpu_capability()])


def get_cache_dir() -> Path | None:
    """Return ``$THALWEG_CACHE_DIR``, else the user's cache directory; None where there is no home."""
    if chosen := os.environ.get("THALWEG_CACHE_DIR"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "thalweg"
    try:
        return Path.home() / ".cache" / "thalweg"
    except RuntimeError:
        return None


def round_up_pow2(rows: int) -> int:
    """Round a row count up to a power of two."""
    return 1 << max(rows - 1, 0).bit_length()


class AutotuneCache:
    """The choices of one process, backed by a file that the machine's processes share."""

    def __init__(self, directory: Path | None, benchmark: BenchmarkFn = benchmark_kernels) -> None:
        self._benchmark = benchmark
        self._entries: dict[str, str] = {}
        self._file_entries: dict[str, str] | None = None  # as `known` has found it
        self._resolved: dict[tuple[int, str, torch.dtype, int, int, int], str] = {}
        self._num_jit_shapes = 0
        self._lock = threading.RLock()
        self._machine = {"processor": get_cpu_name(), "torch": torch.__version__}
        digest = hashlib.sha256(json.dumps(self._machine, sort_keys=True).encode()).hexdigest()[:16]
        self._path = None if directory is None else directory / f"linear-{digest}.json"

    def best_kernel(self, kind: str, dtype: torch.dtype, rows: int, k: int, n: int) -> str:
        """Return the candidate for a product of this kind ((rows, k) by n columns), measuring if need be.

        An answer stands for the life of the process: forward, recomputation and backward agree.
        """
        product = (torch.get_num_threads(), kind, dtype, rows, k, n)
        name = self._resolved.get(product)
        if name is None:
            with self._lock:
                name = self._resolve(kind, dtype, rows, k, n)
                # oneDNN compiles a kernel for each exact shape (0.5 to 1 ms) and keeps 1,024 of them: batches
                # of ever new lengths would compile at every call, which costs more than a kernel gains.
                if name in JIT_FALLBACKS:
                    self._num_jit_shapes += 1
                    name = name if self._num_jit_shapes <= _MAX_JIT_SHAPES else JIT_FALLBACKS[name]
                self._resolved[product] = name
        return name

    def lookup(self, kind: str, dtype: torch.dtype, rows: int, k: int, n: int) -> str | None:
        """What :meth:`pick` would answer without measuring, or None; for these threads, else for others."""
        key = _entry_key(kind, dtype, round_up_pow2(rows), k, n)
        rest = key[key.index("/") :]
        with self._lock:
            if self._file_entries is None:
                self._file_entries = self._read()
            picks = self._file_entries | self._entries
        return picks.get(key) or next((name for other, name in sorted(picks.items()) if other.endswith(rest)), None)

    def export_entries(self) -> dict[str, str]:
        """Return every choice known to this process, the file's included, as JSON-ready strings."""
        with self._lock:
            self._entries = self._read() | self._entries
            return dict(sorted(self._entries.items()))

    def import_entries(self, entries: Mapping[str, str]) -> int:
        """Take another process's choices over our own and return how many were usable here."""
        valid = {key: name for key, name in entries.items() if _is_valid_entry(key, name)}
        with self._lock:
            self._entries.update(valid)
            self._resolved.clear()
        return len(valid)

    def _resolve(self, kind: str, dtype: torch.dtype, rows: int, k: int, n: int) -> str:
        rows = round_up_pow2(rows)
        key = _entry_key(kind, dtype, rows, k, n)
        if key in self._entries:
            return self._entries[key]
        self._entries = self._read() | self._entries
        if key not in self._entries:
            with _file_lock(self._path):
                self._entries = self._read() | self._entries
                if key not in self._entries:
                    self._entries[key] = select_fastest(self._benchmark(kind, dtype, rows, k, n))
                    self._write()
        return self._entries[key]

    def _read(self) -> dict[str, str]:
        if self._path is None:
            return {}
        try:
            content = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            return {}
        picks = content.get("picks")
        if content.get("identity") != self._machine or not isinstance(picks, dict):
            return {}
        return {key: name for key, name in picks.items() if _is_valid_entry(key, name)}

    def _write(self) -> None:
        if self._path is None:
            return
        content = {"format": _FORMAT, "identity": self._machine, "picks": self._entries}
        with contextlib.suppress(OSError):
            text = json.dumps(content, indent=1, sort_keys=True)
            publish_file(self._path, lambda file: file.write(text.encode()), mode=0o600)


def _entry_key(kind: str, dtype: torch.dtype, rows: int, k: int, n: int) -> str:
    return f"{torch.get_num_threads()}/{kind}/{str(dtype).removeprefix('torch.')}/{rows}/{k}x{n}"


def _is_valid_entry(key: Any, name: Any) -> bool:
    if not isinstance(key, str) or not isinstance(name, str):
        return False
    parts = key.split("/")
    if len(parts) != 5 or parts[1] not in KERNELS or parts[2] not in _DTYPES:
        return False
    return name in KERNELS[parts[1]] and is_usable(parts[1], name, _DTYPES[parts[2]])


@contextlib.contextmanager
def _file_lock(path: Path | None) -> Iterator[None]:
    """Hold the lock beside ``path``, or go on without it where there is none or it does not come free."""
    with contextlib.ExitStack() as stack:
        # No folder to write to: each process measures for itself.
        with contextlib.suppress(OSError):
            if path is not None:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, descriptor)
                deadline = time.monotonic() + _LOCK_TIMEOUT_S
                while time.monotonic() <= deadline:
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except OSError:
                        time.sleep(0.002)
        yield


@cache
def get_autotune_cache() -> AutotuneCache:
    """Return this process's table, made at the first use."""
    return AutotuneCache(get_cache_dir())
