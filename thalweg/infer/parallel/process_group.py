"""The ranks of one inference engine: a gloo process group of ``torch.distributed`` and the processes in it.

Rank 0 has the scheduler, the sampler and the callers.  The group is the engine's own, never the default group: several
engines may live in one process, and the default group stays the user's.  Two ways to get one:

- :func:`spawn_workers` starts the other ranks as processes that load from a model's directory and meet at a
  ``TCPStore`` of rank 0.  They are started as ``python -m``, because ``torch.multiprocessing`` would run the user's
  main module once more in each of them, and torch elastic would take over the user's signal handlers.
- :func:`join_launched_group` takes a subgroup of the ranks that a launcher has started.

Messages are JSON, activations are tensors; both are sent point to point, in the same order on both sides.  Ranks on
accelerators have two more groups, of the device's own library, for the tensors there: of all ranks, and of a stage.

Ends: a rank leaves by dropping its group.  That closes its connections, so whoever waits for it gets an error.  A rank
that spins in shared memory has no connection to lose; therefore each rank watches the processes of the others on its
host and calls ``on_failure`` when one ends.  Rank 0 turns every error into :class:`WorkerDiedError`, which says which
process ended and how; spawned workers end with rank 0, so a SIGKILL leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]

from thalweg.comm.topology import get_host_key
from thalweg.device import resolve_device
from thalweg.infer.config import EngineConfig
from thalweg.parallel_dims import destroy_subgroup, init_distributed, without_communicator_split

_LENGTH = struct.Struct("!I")
_FRAME_BYTES = 4096  # of a message; longer ones have a second part
_NO_TIMEOUT = timedelta(days=365)  # an engine may idle as long as it likes; dead ranks are noticed otherwise
_JOIN_TIMEOUT_S = 600.0  # for spawned ranks to load the model
LOOPBACK = "127.0.0.1"


class WorkerDiedError(RuntimeError):
    """A rank of the engine has ended: what it computes a part of cannot go on."""


class InferenceGroup:
    """The ranks of an engine as one of them sees them.

    ``connect`` returns the process group, on the first use; all ranks of the engine do so together.
    With it come the two groups of the device, where there is one.  ``num_threads``: of each rank, 0 for as many as
    torch has.
    """

    def __init__(
        self, connect: Callable[[InferenceGroup], tuple[Any, Any]], rank: int, num_ranks: int, *, num_threads: int = 0
    ) -> None:
        self.rank, self.num_ranks, self.num_threads = rank, num_ranks, num_threads
        # Those that this rank has started, for ranks 1 and on.
        self.processes: list[subprocess.Popen[bytes]] = []
        self._connect = connect
        self._group: Any = None
        # Of all ranks and of this one's stage, for tensors of the device; None where the ranks compute on the host.
        self.device_groups: tuple[Any, Any] | None = None
        # The first rank that is known to have ended.
        self.failed_rank: int | None = None
        # Called with the number of a rank that has ended, from any thread.
        self.on_failure: list[Callable[[int], None]] = []
        self._closed = threading.Event()

    def connect(self) -> None:
        """Meet the other ranks and watch their processes; collective.  Raises WorkerDiedError."""
        self._group, self.device_groups = self._connect(self)
        address = torch.tensor([get_host_key(), os.getpid()])
        addresses = [torch.empty_like(address) for _ in range(self.num_ranks)]
        self._wait(self._group.allgather([addresses], [address]), 0)
        pids = [pid for host, pid in torch.stack(addresses).tolist() if host == int(address[0])]
        self.shares_host = len(pids) == self.num_ranks
        if self.shares_host:
            _watch_processes(weakref.ref(self), {rank: pid for rank, pid in enumerate(pids) if pid != os.getpid()})

    # Messages

    def send(self, message: dict[str, Any], to: Sequence[int]) -> None:
        """Send a message to ranks."""
        body = json.dumps(message, separators=(",", ":")).encode()
        data = bytearray(_LENGTH.pack(len(body)) + body).ljust(_FRAME_BYTES)
        for part in filter(None, (data[:_FRAME_BYTES], data[_FRAME_BYTES:])):
            self.send_tensor(torch.frombuffer(part, dtype=torch.uint8), to)

    def broadcast(self, message: dict[str, Any]) -> None:
        """Send a message from rank 0 to all others."""
        self.send(message, range(1, self.num_ranks))

    def receive(self, source: int = 0) -> dict[str, Any]:
        """Return the next message of a rank."""
        data = self.receive_tensor(torch.empty(_FRAME_BYTES, dtype=torch.uint8), source).numpy().tobytes()
        size = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        if size > len(data):
            rest = torch.empty(size - len(data), dtype=torch.uint8)
            data += self.receive_tensor(rest, source).numpy().tobytes()
        return json.loads(data[_LENGTH.size : size])

    def send_tensor(self, x: Tensor, to: Sequence[int]) -> None:
        """Send a contiguous tensor to ranks, and wait until it is gone."""
        works = [(rank, self._start("send", x, rank)) for rank in to]
        for rank, work in works:
            self._wait(work, rank)

    def receive_tensor(self, out: Tensor, source: int) -> Tensor:
        """Fill a contiguous tensor with what a rank sends; return it."""
        self._wait(self._start("recv", out, source), source)
        return out

    def exchange(self, x: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        """Return the tensors of these ranks, of which this is one, in their order."""
        tensors = [x if rank == self.rank else torch.empty_like(x) for rank in ranks]
        peers = [(rank, out) for rank, out in zip(ranks, tensors, strict=True) if rank != self.rank]
        works = [(rank, self._start("recv", out, rank)) for rank, out in peers]
        works += [(rank, self._start("send", x, rank)) for rank, _ in peers]
        for rank, work in works:
            self._wait(work, rank)
        return tensors

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order; among a launcher's ranks alone; collective."""
        if self._group is None:  # which torch would take for all ranks of the job
            raise WorkerDiedError(self.failure_message())
        values: list[Any] = [None] * self.num_ranks
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise WorkerDiedError(self.failure_message()) from error
        return values

    def _start(self, operation: str, x: Tensor, peer: int) -> Any:
        if self._group is None:
            raise WorkerDiedError(self.failure_message())
        group = self.device_groups[0] if self.device_groups and x.device.type != "cpu" else self._group
        try:
            return getattr(group, operation)([x], peer, 0)
        except RuntimeError as error:
            raise self._report_failure(peer) from error

    def _wait(self, work: Any, peer: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._report_failure(peer) from error

    # Ends

    def _report_failure(self, rank: int) -> WorkerDiedError:
        self.fail(rank)
        return WorkerDiedError(self.failure_message())

    def fail(self, rank: int) -> None:
        """Say that a rank has ended; only the first one counts."""
        if self.failed_rank is None:
            self.failed_rank = rank
        for callback in self.on_failure:
            callback(self.failed_rank)
        for device_group in self.device_groups or ():  # its waiting does not end with a connection
            with contextlib.suppress(RuntimeError):
                device_group.abort()

    def failure_message(self) -> str:
        """Say which rank has ended, and how."""
        if self._closed.is_set() and self.failed_rank is None:  # the processes have ended with it
            return "the engine was closed, or an error or Ctrl-C broke off one of its steps. Load the engine again"
        exited = [rank for rank, process in enumerate(self.processes, 1) if process.poll() is not None]
        rank = exited[0] if exited else self.failed_rank
        if rank is None:
            return "an inference rank is gone. Load the engine again"
        name = f"inference rank {rank} of {self.num_ranks}"
        if not 0 < rank <= len(self.processes):
            return f"{name} is gone: see its own output for the cause"
        process = self.processes[rank - 1]
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(2.0)
            exit_status = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            return f"{name} (process {process.pid}) {exit_status}; its output says more. Load the engine again"
        return f"{name} (process {process.pid}) has closed its connection. Load the engine again"

    def close(self) -> None:
        """Leave the group, and see to the end of the processes that this rank has started."""
        self._closed.set()
        groups = {id(group): group for group in (*(self.device_groups or ()), self._group)}
        self._group = self.device_groups = None
        self._connect = _refuse_connection
        for group in groups.values():
            if isinstance(group, dist.ProcessGroup):  # one that torch.distributed has a reference to
                destroy_subgroup(group)
        groups.clear()
        group = None  # the destructor closes the connections: the others' receive() fails
        for process in self.processes:
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _watch_processes(group: weakref.ref[InferenceGroup], pids: dict[int, int]) -> None:
    """Report processes that end, for as long as the group is open."""
    ranks = {os.pidfd_open(pid): rank for rank, pid in pids.items()}

    def watch() -> None:
        try:
            while True:
                exited: list[Any] = wait(ranks, 0.3)
                owner = group()
                if owner is None or owner._closed.is_set():
                    return None
                if exited:
                    return owner.fail(ranks[exited[0]])
                del owner  # a group that is dropped does not live on here
        finally:
            for fd in ranks:
                os.close(fd)

    if ranks:
        threading.Thread(target=watch, daemon=True, name="thalweg-infer-watch").start()


def _refuse_connection(group: InferenceGroup) -> Any:
    """Stand for the connection of a closed group."""
    raise WorkerDiedError(group.failure_message())


def connect_by_store(
    store: Store, device: torch.device | str = "cpu", ranks_per_stage: int = 1
) -> Callable[[InferenceGroup], tuple[Any, Any]]:
    """Return what connects the ranks that know a store: over the loopback interface, and those on accelerators by the
    device's own library."""
    device = torch.device(device)

    def connect(group: InferenceGroup) -> tuple[Any, Any]:
        store.set(f"ready/{group.rank}", "")
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        while not store.check([f"ready/{rank}" for rank in range(group.num_ranks)]):
            if any(process.poll() is not None for process in group.processes):
                raise WorkerDiedError(group.failure_message())
            if time.monotonic() > deadline:
                raise TimeoutError(f"inference rank {group.rank} has waited {_JOIN_TIMEOUT_S:.0f} s for the others")
            time.sleep(0.01)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = _NO_TIMEOUT
        on_host = gloo(store, group.rank, group.num_ranks, options)
        if device.type == "cpu":
            return on_host, None
        torch.accelerator.set_device_index(device)
        stage, rank_in_stage = divmod(group.rank, ranks_per_stage)
        whole = in_stage = _make_device_group(PrefixStore("devices", store), device, group.rank, group.num_ranks)
        if ranks_per_stage < group.num_ranks:
            prefixed = PrefixStore(f"devices of stage {stage}", store)
            in_stage = _make_device_group(prefixed, device, rank_in_stage, ranks_per_stage)
        return on_host, (whole, in_stage)

    return connect


def _make_device_group(store: Store, device: torch.device, rank: int, num_ranks: int) -> Any:
    """Return a group of the device's own library, of which torch.distributed knows nothing."""
    name = dist.get_default_backend_for_device(device.type).upper()
    if (backend := getattr(dist, f"ProcessGroup{name}", None)) is not None:
        return backend(store, rank, num_ranks)
    plugin = dist.Backend._plugins[name]  # of a device that was registered from outside
    timeout = timedelta(seconds=_JOIN_TIMEOUT_S)
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, num_ranks, timeout)
    fields: Any = distributed_c10d._DistributedBackendOptions()  # pyright: ignore[reportPrivateImportUsage]
    fields.store, fields.group_rank, fields.group_size, fields.timeout = store, rank, num_ranks, timeout
    return plugin.creator_fn(fields, None)


def _device_of_rank(options: EngineConfig, rank: int) -> torch.device:
    """Return the device of a rank that is started here: the one so many after rank 0's."""
    first = resolve_device(options.device)
    if first.type == "cpu":
        return first
    count = torch.accelerator.device_count()
    if (first.index or 0) + options.num_ranks > count:
        raise ValueError(
            f"{options.num_ranks} ranks are to run one model, from {first} on, and torch sees {count} devices: ask for"
            " fewer ranks (tensor_parallel_size, pipeline_parallel_size, expert_parallel_size), or device cpu"
        )
    return torch.device(first.type, (first.index or 0) + rank)


def spawn_workers(model: str | Path, options: EngineConfig) -> InferenceGroup:
    """Start the other ranks that the options ask for as processes that load from a directory.

    Raises ValueError where there are fewer accelerators than ranks.
    """
    num_ranks = options.num_ranks
    devices = [_device_of_rank(options, rank) for rank in range(num_ranks)]
    num_threads = max(1, torch.get_num_threads() * options.pipeline_parallel_size // num_ranks)  # stages take turns
    worker_options = replace(options, tensor_parallel_size=1, pipeline_parallel_size=1, expert_parallel_size=1)
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    connect = connect_by_store(store, devices[0], options.ranks_per_stage)
    group = InferenceGroup(connect, 0, num_ranks, num_threads=num_threads)
    # Where rank 0 refuses the model, it says why; torch would add what it sees of each connection that is gone.
    environ = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, "OMP_NUM_THREADS": str(num_threads)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        environ.pop(name, None)
    try:
        for rank in range(1, num_ranks):
            fields = {
                "model": str(model), "options": {**asdict(worker_options), "device": str(devices[rank])},
                "rank": rank, "num_ranks": num_ranks, "ranks_per_stage": options.ranks_per_stage,
                "port": store.port, "num_threads": num_threads,
            }  # fmt: skip
            command = [sys.executable, "-m", "thalweg.infer.parallel.executor", json.dumps(fields)]
            group.processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environ, start_new_session=True
                )
            )
    except BaseException:
        for process in group.processes:
            process.kill()
        group.close()
        raise
    return group


def is_launched(num_ranks: int) -> bool:
    """Whether this process is one of several ranks of a launcher, to be taken in groups of ``num_ranks``."""
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    if num_ranks < 2 or world_size < 2 or ("RANK" not in os.environ and not dist.is_initialized()):
        return False
    if world_size % num_ranks:
        raise ValueError(f"{num_ranks} ranks are to run one model; that must divide the number of ranks, {world_size}")
    return True


def join_launched_group(options: EngineConfig, members: Sequence[int] | None = None) -> InferenceGroup:
    """Return this rank's group: n neighbours of ``members``, or of all the launcher's ranks; collective over the latter
    (to a rank that is no member what is returned means nothing)."""
    num_ranks, device, device_groups = options.num_ranks, resolve_device(options.device), None
    if not dist.is_initialized():
        if device.type == "cpu":
            dist.init_process_group("gloo", init_method="env://")
        else:
            init_distributed()
    ranks = list(range(dist.get_world_size()) if members is None else members)

    def join(size: int, backend: str, timeout: timedelta | None = None) -> Any:
        blocks = [ranks[first : first + size] for first in range(0, len(ranks), size)]
        with without_communicator_split():
            return dist.new_subgroups_by_enumeration(blocks, timeout, backend)[0]

    process_group = join(num_ranks, "gloo", _NO_TIMEOUT)
    if device.type != "cpu":
        backend = dist.get_default_backend_for_device(device.type)
        groups = {size: join(size, backend) for size in sorted({num_ranks, options.ranks_per_stage})}
        device_groups = groups[num_ranks], groups[options.ranks_per_stage]
    rank = (dist.get_rank() - ranks[0]) % num_ranks
    return InferenceGroup(lambda _: (process_group, device_groups), rank, num_ranks)
