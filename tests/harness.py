"""Forked gloo ranks for the distributed tests.

``run_ranks(fn, world_size, *args)`` runs ``fn(rank, world_size, *args)`` in that many
processes and returns their results by rank.  The processes are forked from one server
that has torch loaded (multiprocessing's forkserver), so four ranks start in a fraction
of a second; ``fn`` must be a module-level function.  A rank that raises fails the test
with its traceback; one that hangs is killed by its process handle after twice ``timeout`` s,
which is what two cores with nothing else to do may take.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TIMEOUT_FACTOR = 2.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "tests.preload"])


def _rank_main(
    fn: Callable[..., Any], rank: int, world_size: int, store: str, init: bool, results: Any, args: tuple
) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if init:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        results.put((rank, None, fn(rank, world_size, *args)))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
        raise SystemExit(1) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, init: bool = True
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` on forked ranks and return the results by rank."""
    results = _context.Queue()
    with tempfile.TemporaryDirectory(prefix="thalweg-test-") as folder:
        store = str(Path(folder) / "store")
        processes = [
            _context.Process(target=_rank_main, args=(fn, rank, world_size, store, init, results, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect_results(processes, results, world_size, _TIMEOUT_FACTOR * timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect_results(processes: list[Any], results: Any, world_size: int, timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    results_by_rank: dict[int, Any] = {}
    errors: dict[int, str] = {}
    grace: float | None = None
    while len(results_by_rank) + len(errors) < world_size:
        try:
            rank, error, value = results.get(timeout=0.2)
        except queue.Empty:
            finished = results_by_rank.keys() | errors.keys()
            dead = [i for i, p in enumerate(processes) if not p.is_alive() and i not in finished]
            for rank in dead:
                if processes[rank].exitcode not in (0, 1):
                    errors[rank] = f"rank {rank} died with exit code {processes[rank].exitcode}"
            if time.monotonic() > deadline or (grace is not None and time.monotonic() > grace):
                break
        else:
            if error is None:
                results_by_rank[rank] = value
            else:
                errors[rank] = error
        if errors and grace is None:
            grace = time.monotonic() + 5.0
    if errors:
        text = "\n".join(f"--- rank {rank} ---\n{error}" for rank, error in sorted(errors.items()))
        raise AssertionError(f"{len(errors)} of {world_size} ranks failed\n{text}")
    if len(results_by_rank) < world_size:
        missing = sorted(set(range(world_size)) - set(results_by_rank))
        raise AssertionError(f"ranks {missing} did not finish within {timeout} s")
    return [results_by_rank[rank] for rank in range(world_size)]
