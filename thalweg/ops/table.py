"""Which candidate computes which product on this machine: measured once, kept on disk.

A key is ``threads/kind/dtype/rows/KxN`` with the rows rounded up to a power of two; the
table maps it to the name of a candidate.  Candidates differ by rounding, so the ranks of
a job should choose alike: on one machine the cache file sees to it (the first process
measures under a file lock, the others wait and read), across machines the caller sends
:meth:`KernelTable.export_table` of one rank to :meth:`KernelTable.import_table` of all.

The file holds names of candidates only.  One that is damaged, foreign or of another
version is as good as none; one that cannot be written costs a measurement per process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from thalweg.ops.measure import choose, measure_product
from thalweg.ops.products import CANDIDATES, COMPILED, REFERENCE, usable

Measure = Callable[[str, torch.dtype, int, int, int], dict[str, float]]

_FORMAT = 1
_LOCK_SECONDS = 5.0
_MAX_COMPILED = 384  # exact products; less than oneDNN's cache, which the rest of torch uses too
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@cache
def processor_name() -> str:
    """Name the processor as exactly as the system tells: vendor, family, model, stepping, vector unit."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "CPU implementer", "CPU part")
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines():
            key, _, value = line.partition(":")
            if key.strip() in wanted:
                found[key.strip()] = value.strip()
    parts = [found[key] for key in wanted if key in found] or [platform.processor()]
    return " / ".join([platform.machine(), *parts, torch.backends.cpu.get_cpu_capability()])


def cache_directory() -> Path | None:
    """Return ``$THALWEG_CACHE_DIR``, else the user's cache directory; None where there is no home."""
    if chosen := os.environ.get("THALWEG_CACHE_DIR"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "thalweg"
    try:
        return Path.home() / ".cache" / "thalweg"
    except RuntimeError:
        return None


def bucket(rows: int) -> int:
    """Round a row count up to a power of two."""
    return 1 << max(rows - 1, 0).bit_length()


class KernelTable:
    """The choices of one process, backed by a file that the machine's processes share."""

    def __init__(self, directory: Path | None, measure: Measure = measure_product) -> None:
        self._measure = measure
        self._picks: dict[str, str] = {}
        self._file: dict[str, str] | None = None  # as `known` has found it
        self._answers: dict[tuple[int, str, torch.dtype, int, int, int], str] = {}
        self._compiled = 0
        self._lock = threading.RLock()
        self._fixed = False
        self._identity = {"processor": processor_name(), "torch": torch.__version__}
        digest = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()[:16]
        self._path = None if directory is None else directory / f"linear-{digest}.json"

    def pick(self, kind: str, dtype: torch.dtype, rows: int, k: int, n: int) -> str:
        """Return the candidate for a product of this kind ((rows, k) by n columns), measuring if need be.

        An answer stands for the life of the process: forward, recomputation and backward agree.
        """
        product = (torch.get_num_threads(), kind, dtype, rows, k, n)
        name = self._answers.get(product)
        if name is None:
            with self._lock:
                name = self._admit(self._decide(product[0], kind, dtype, bucket(rows), k, n))
                self._answers[product] = name
        return name

    def known(self, kind: str, dtype: torch.dtype, rows: int, k: int, n: int) -> str | None:
        """What :meth:`pick` would answer without measuring, or None; for these threads, else for others."""
        rest = f"/{kind}/{str(dtype).removeprefix('torch.')}/{bucket(rows)}/{k}x{n}"
        with self._lock:
            if self._file is None:
                self._file = self._read()
            picks = self._file | self._picks
        mine = picks.get(f"{torch.get_num_threads()}{rest}")
        return mine or next((name for key, name in sorted(picks.items()) if key.endswith(rest)), None)

    def _admit(self, name: str) -> str:
        # oneDNN compiles a kernel for each exact shape (0.5 to 1 ms) and keeps 1,024 of them: batches
        # of ever new lengths would compile at every call, which costs more than a kernel gains.
        if name in COMPILED:
            if self._compiled >= _MAX_COMPILED:
                return COMPILED[name]
            self._compiled += 1
        return name

    def export_table(self) -> dict[str, str]:
        """Return every choice known to this process, the file's included, as JSON-ready strings."""
        with self._lock:
            self._picks = self._read() | self._picks
            return dict(sorted(self._picks.items()))

    def import_table(self, table: Mapping[str, str], *, fixed: bool = False) -> int:
        """Take another process's choices over our own and return how many were usable here.

        With ``fixed``, products that the table does not name go to torch's own operator, so
        that processes on several machines can never measure differently afterwards.
        """
        good = {key: name for key, name in table.items() if _valid(key, name)}
        with self._lock:
            self._picks.update(good)
            self._answers.clear()
            self._fixed = fixed
        return len(good)

    def _decide(self, threads: int, kind: str, dtype: torch.dtype, rows: int, k: int, n: int) -> str:
        key = f"{threads}/{kind}/{str(dtype).removeprefix('torch.')}/{rows}/{k}x{n}"
        if key in self._picks:
            return self._picks[key]
        if self._fixed:
            return REFERENCE
        self._picks = self._read() | self._picks
        if key not in self._picks:
            with _file_lock(self._path):
                self._picks = self._read() | self._picks
                if key not in self._picks:
                    self._picks[key] = choose(self._measure(kind, dtype, rows, k, n))
                    self._write()
        return self._picks[key]

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
        if content.get("identity") != self._identity or not isinstance(picks, dict):
            return {}
        return {key: name for key, name in picks.items() if _valid(key, name)}

    def _write(self) -> None:
        if self._path is None:
            return
        content = {"format": _FORMAT, "identity": self._identity, "picks": self._picks}
        with contextlib.suppress(OSError):
            folder, stem = self._path.parent, self._path.stem
            descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=stem, suffix=".tmp")
            try:
                with os.fdopen(descriptor, "w") as file:
                    json.dump(content, file, indent=1, sort_keys=True)
                os.replace(temporary, self._path)
            except BaseException:
                os.unlink(temporary)
                raise


def _valid(key: Any, name: Any) -> bool:
    if not isinstance(key, str) or not isinstance(name, str):
        return False
    parts = key.split("/")
    if len(parts) != 5 or parts[1] not in CANDIDATES or parts[2] not in _DTYPES:
        return False
    return name in CANDIDATES[parts[1]] and usable(parts[1], name, _DTYPES[parts[2]])


@contextlib.contextmanager
def _file_lock(path: Path | None) -> Iterator[None]:
    """Hold the lock beside ``path``, or go on without it where there is none or it does not come free."""
    try:
        import fcntl
    except ImportError:  # no such locks on Windows: each process measures for itself
        yield
        return
    try:
        if path is None:
            raise OSError("no cache directory")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.002)
        yield
    finally:
        os.close(descriptor)


@cache
def default_table() -> KernelTable:
    """Return this process's table, made at the first use."""
    return KernelTable(cache_directory())
