"""Forked gloo ranks for the distributed tests.

``run_ranks(fn, world_size, *args)`` runs ``fn(rank, world_size, *args)`` in that many processes and returns their
results by rank.  The processes are forked from one server that has torch loaded (multiprocessing's forkserver), so
four ranks start in a fraction of a second; ``fn`` must be a module-level function.  A rank that raises fails the
test with its traceback; one that hangs is killed by its process handle after twice ``timeout`` s, which is what two
cores with nothing else to do may take.

A test module that says ``REUSE_RANKS = True`` gets ranks that stay for its next test: a check then costs the forming
of a process group, and not two forks, the imports that only ranks make and the compiling of kernels.  Between two
tests such a rank puts back what ``_RankState`` lists, globals of modules and methods of classes among it.  What it
cannot put back needs ranks of its own (``run_ranks(..., reuse=False)``): ranks that are to die, or that measure their
memory, count their threads, open files or warnings.  Ranks of which one failed or hung are not used again.

``run_ranks(..., device="sim")`` gives ranks whose accelerator is simulated (``tests/simdevice``), a device for each;
``pytest --device cuda`` gives those tests real ones, which ranks share where there are too few, and the
name "cuda" for an argument that says "sim".  Rank functions ask ``simdevice.accelerator()`` for the device's name.
Tests that look into the simulated device itself say ``device="simulated"`` and are left out there.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import pickle
import queue
import random
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import FunctionType
from typing import Any

_TIMEOUT_FACTOR = 2.0
GC_THRESHOLD = 20_000, 20, 20  # Python's collector took 7% of the tests' time, by 700 objects each time
_MAX_REUSED_RANKS = 4  # a larger world would hold its memory while other tests run
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "tests.preload"])


def start_fork_server() -> None:
    """Let it load what ranks share while tests are collected; without, the first ranks wait for it."""
    multiprocessing.forkserver.ensure_running()


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    init: bool = True,
    reuse: bool | None = None,
    device: str | None = None,
    backend: str | None = None,
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` on forked ranks and return the results by rank.

    ``init``: the ranks form the default process group first, of ``backend`` (by default of what serves the host's
    tensors and the device's).  ``reuse``: take ranks that earlier tests left, and leave them to later ones; None: what
    the test's module says.  ``device``: "cpu", or "sim" for a simulated accelerator of each rank's own ("simulated":
    never a real one); None: what the option ``--device`` says.
    """
    device = device or _pools.default_device
    if _pools.default_device == "cuda" and device == "simulated":
        import pytest

        pytest.skip("looks into the simulated device itself")
    if _pools.default_device == "cuda" and device == "sim":
        device, args = "cuda", tuple("cuda" if isinstance(arg, str) and arg == "sim" else arg for arg in args)
    device = "sim" if device == "simulated" else device
    if device == "sim":
        from tests import simdevice

        if (reason := simdevice.missing_tool()) is not None:
            import pytest

            pytest.skip(reason)
        simdevice.build()
    backend = _choose_backend(device, backend)
    timeout *= _TIMEOUT_FACTOR
    if (_pools.reuse_by_default if reuse is None else reuse) and init and world_size <= _MAX_REUSED_RANKS:
        return _pools.run(fn, world_size, device, backend, args, timeout)
    results = _context.Queue()
    with tempfile.TemporaryDirectory(prefix="thalweg-test-") as folder:
        store = str(Path(folder) / "store")
        processes = [
            _context.Process(
                target=_rank_main, args=(fn, rank, world_size, device, store, backend if init else None, results, args)
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect_results(processes, results, world_size, timeout)
        finally:
            _end(processes)


def is_device_real() -> bool:
    """Whether tests of a device run on a GPU, whose kernels round as they like."""
    return _pools.default_device == "cuda"


def _choose_backend(device: str, backend: str | None) -> str:
    backend = backend or ("gloo" if device == "cpu" else f"cpu:gloo,{device}:simccl")
    return backend.replace("simccl", "nccl") if device == "cuda" else backend


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    device: str,
    store: str,
    backend: str | None,
    results: Any,
    args: tuple,
) -> None:
    _enter_rank(rank, world_size, device)
    error, value = _run_on_rank(fn, rank, world_size, store, backend, args)
    results.put((rank, error, value))
    if error is not None:
        raise SystemExit(1)


def _enter_rank(rank: int, world_size: int, device: str) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    faulthandler.enable(_fault_file(os.getpid()).open("w"))
    # A rank's own children (a loader's workers) are forked as in a user's job.  By default they would come from another
    # server, which would first import all that this one has.
    multiprocessing.set_start_method("fork", force=True)
    import torch

    torch.set_num_threads(1)
    if device == "cpu":  # where there is a GPU, the numbers that a device is held to are the processor's all the same
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif device == "sim":
        from tests import simdevice

        simdevice.register(num_devices=world_size)
        torch.accelerator.set_device_index(rank)
    elif device == "cuda":
        count = torch.cuda.device_count()
        if count < world_size:
            _share_device(rank, rank % count)
            count = 1
        torch.cuda.set_device(rank % count)


def _share_device(rank: int, index: int) -> None:
    """NCCL takes two ranks on one device where they say that they are on two hosts; then it talks through sockets."""
    os.environ.update(CUDA_VISIBLE_DEVICES=str(index), NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo")
    # Kernels of two processes take turns on a device, and those that wait for another's bytes are better few.
    os.environ.update(NCCL_IB_DISABLE="1", NCCL_MAX_NCHANNELS="1", NCCL_NVLS_ENABLE="0")


def _run_on_rank(
    fn: Callable[..., Any], rank: int, world_size: int, store: str, backend: str | None, args: tuple
) -> tuple[str | None, Any]:
    """(traceback, None) or (None, what ``fn`` returns); no process group is left."""
    import torch
    import torch.distributed as dist
    from torch.utils._pytree import tree_map_only

    try:
        if backend:
            dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
            dist.barrier()  # one that ends at once would hang up on another that still connects
        value = fn(rank, world_size, *args)
        if torch.accelerator.is_available():  # a tensor of a device cannot leave its process
            value = tree_map_only(torch.Tensor, lambda x: x if x.device.type == "cpu" else x.detach().cpu(), value)
        return None, value
    except BaseException:
        return traceback.format_exc(), None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# ---- ranks that stay --------------------------------------------------------------------------------


_METHODS = (FunctionType, classmethod, staticmethod, property)


class _RankState:
    """What a test may change in its rank's process, and ``restore`` puts back."""

    def __init__(self, device: str) -> None:
        import numpy
        import torch

        self.device = device
        self.environment, self.folder = dict(os.environ), os.getcwd()
        self.path, self.threads = list(sys.path), set(threading.enumerate())
        self.random, self.numpy = random.getstate(), numpy.random.get_state()
        self.torch, self.log_level = torch.get_rng_state(), _package_logger().level
        self.seen_modules: set[str] = set()
        self.globals: dict[str, dict[str, Any]] = {}
        self.methods: dict[type, dict[str, Any]] = {}
        self._note_new_modules()

    def _note_new_modules(self) -> None:
        names = sys.modules.keys() - self.seen_modules
        self.seen_modules |= names
        for name in names:
            if name.partition(".")[0] not in ("thalweg", "tests"):
                continue
            module = sys.modules[name]
            self.globals[name] = dict(vars(module))
            for value in self.globals[name].values():
                if isinstance(value, type) and value.__module__ == name:
                    self.methods[value] = {k: v for k, v in vars(value).items() if isinstance(v, _METHODS)}

    def restore(self) -> None:
        """As at the start; the collector runs, so that what the test left is freed now and not in the next."""
        import numpy
        import torch

        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.path[:] = self.path
        for name, values in self.globals.items():
            current = vars(sys.modules[name])
            for key, value in values.items():
                if current.get(key) is not value:
                    current[key] = value
        for owner, methods in self.methods.items():
            for key, method in methods.items():
                if vars(owner).get(key) is not method:
                    setattr(owner, key, method)
        self._note_new_modules()
        random.setstate(self.random)
        numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.device != "cpu":
            from tests import simdevice

            simdevice.restore(int(os.environ["RANK"]))
            if self.device == "cuda":
                torch.cuda.empty_cache()
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch._dynamo.reset()
        _package_logger().setLevel(self.log_level)
        # What is left is mostly modules and what they keep: the next collection need not look through it again.
        gc.collect()
        gc.freeze()

    def left_threads(self) -> list[str]:
        """Names of Python threads that the test did not end."""
        ours = self.threads | {t for t in threading.enumerate() if t.name == "QueueFeederThread"}  # of the results
        return [thread.name for thread in threading.enumerate() if thread not in ours]


def _package_logger() -> Any:
    import logging

    return logging.getLogger("thalweg")


def _rank_loop(rank: int, world_size: int, device: str, jobs: Connection, results: Any) -> None:
    """Run one function after another until the test process closes the pipe."""
    _enter_rank(rank, world_size, device)
    state = _RankState(device)
    while True:
        try:
            job = jobs.recv_bytes()
        except EOFError:
            return
        error, value = _run_job(job, rank, world_size)
        if error is not None:
            results.put((rank, error, None))
            return
        state.restore()
        # A thread that the test left could write into the next one: better new ranks.
        results.put((rank, None, (value, state.left_threads())))
        del value


def _run_job(job: bytes, rank: int, world_size: int) -> tuple[str | None, Any]:
    try:
        fn, store, backend, args = pickle.loads(job)
    except BaseException:
        return traceback.format_exc(), None
    return _run_on_rank(fn, rank, world_size, store, backend, args)


@dataclass
class _RankPool:
    """Forked ranks of one world that wait for their next function."""

    world_size: int
    device: str
    processes: list[Any] = field(default_factory=list)
    jobs: list[Connection] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.results = _context.Queue()
        for rank in range(self.world_size):
            end, of_rank = _context.Pipe()
            args = (rank, self.world_size, self.device, of_rank, self.results)
            process = _context.Process(target=_rank_loop, args=args)
            process.start()
            of_rank.close()
            self.processes.append(process)
            self.jobs.append(end)

    def run(self, fn: Callable[..., Any], backend: str, args: tuple, timeout: float) -> tuple[list[Any], bool]:
        """The results by rank, and whether the ranks can be used again."""
        with tempfile.TemporaryDirectory(prefix="thalweg-test-") as folder:
            job = pickle.dumps((fn, str(Path(folder) / "store"), backend, args))
            for connection in self.jobs:
                connection.send_bytes(job)
            found = _collect_results(self.processes, self.results, self.world_size, timeout)
        return [value for value, _ in found], not any(threads for _, threads in found)

    def close(self) -> None:
        """End the ranks; those that wait for a function end by themselves."""
        for connection in self.jobs:
            connection.close()
        for process in self.processes:
            process.join(timeout=5)
        _end(self.processes)


class _Pools:
    """The pools of this process, one for each world size and device."""

    def __init__(self) -> None:
        self.reuse_by_default, self.default_device = False, "cpu"
        self._waiting: dict[tuple[int, str], _RankPool] = {}

    def run(
        self, fn: Callable[..., Any], world_size: int, device: str, backend: str, args: tuple, timeout: float
    ) -> list[Any]:
        pool = self._waiting.pop((world_size, device), None) or _RankPool(world_size, device)
        try:
            results, reusable = pool.run(fn, backend, args, timeout)
        except BaseException:
            _end(pool.processes)
            raise
        if reusable:
            self._waiting[world_size, device] = pool
        else:
            pool.close()
        return results

    def close(self) -> None:
        """End all waiting ranks."""
        while self._waiting:
            self._waiting.popitem()[1].close()


_pools = _Pools()
# Before multiprocessing joins the children of a process that ends.
multiprocessing.util.Finalize(None, _pools.close, exitpriority=100)


def enter_module(reuse_ranks: bool) -> None:
    """A test module begins: ranks of the one before end, and ``reuse_ranks`` is what ``run_ranks`` does by default."""
    _pools.close()
    _pools.reuse_by_default = reuse_ranks


def set_default_device(device: str) -> None:
    """What ``run_ranks`` gives a test that does not say where it runs."""
    _pools.default_device = device
    if device == "cuda":  # the fork server must not begin to use the device that its ranks are to use
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    else:  # a rank that compiles one function starts no pool of processes for it, each of which would import torch
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def _end(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
        _fault_file(process.pid).unlink(missing_ok=True)


def _fault_file(pid: int) -> Path:
    """Where a rank's process says what its threads were at when a signal of the kernel's ended it."""
    return Path(tempfile.gettempdir(), f"thalweg-fault-{pid}")


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
                    file = _fault_file(processes[rank].pid)
                    stacks = file.read_text(errors="replace") if file.exists() else ""
                    errors[rank] = f"rank {rank} died with exit code {processes[rank].exitcode}\n{stacks}"
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
