"""The ranks of an engine of several processes: how rank 0 gets the others, and the lines between them.

``spawn_workers`` starts them as processes that load from a model's directory and end with their socket;
``gathered`` finds them among the ranks of ``torch.distributed``, where each is a process of the user's own.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thalweg.infer.config import EngineConfig

_LENGTH = struct.Struct("!I")
_HANGUP_EVENTS = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
_WORKER_GONE = "an inference rank is gone: see its own output for the cause"
_JOIN_TIMEOUT_S = 600.0  # for the ranks of a team to find each other


class WorkerDiedError(RuntimeError):
    """A rank of the team has ended: what it had a part in cannot go on."""


class WorkerChannel:
    """Frames of JSON on a stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; OSError when the other side is gone."""
        body = json.dumps(message, separators=(",", ":")).encode()
        self.sock.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> dict[str, Any]:
        """Return the next message; raises RankLost when the other side is gone."""
        (length,) = _LENGTH.unpack(self._recv_exactly(_LENGTH.size))
        return json.loads(self._recv_exactly(length))

    def send_fd(self, fd: int) -> None:
        """Send a file descriptor."""
        socket.send_fds(self.sock, [b"m"], [fd])

    def receive_fd(self) -> int:
        """Return a file descriptor, which is the caller's to close."""
        size = array.array("i").itemsize
        data, extra, _, _ = self.sock.recvmsg(1, socket.CMSG_SPACE(size))
        fds = array.array("i")
        for level, kind, value in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(value[: len(value) - len(value) % size])
        if not data:
            raise WorkerDiedError(_WORKER_GONE)
        assert len(fds) == 1, "the memory comes after the plan"
        return fds[0]

    def _recv_exactly(self, length: int) -> bytes:
        # Unbuffered: what is read ahead would lose the descriptor that comes with it.
        buffer = bytearray()
        while len(buffer) < length:
            try:
                piece = self.sock.recv(length - len(buffer))
            except OSError:
                piece = b""
            if not piece:
                raise WorkerDiedError(_WORKER_GONE)
            buffer += piece
        return bytes(buffer)

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


class WorkerGroup:
    """The other ranks as rank 0 sees them: a line to each, and how it ended.

    ``threads``: of each rank, 0 for as many as torch has there.
    """

    def __init__(
        self,
        channels: Sequence[WorkerChannel],
        processes: Sequence[subprocess.Popen[bytes]] = (),
        num_threads: int = 0,
    ) -> None:
        self.channels, self._processes = list(channels), list(processes)
        self.num_ranks, self.num_threads = 1 + len(self.channels), num_threads

    @property
    def is_spawned(self) -> bool:
        """Whether they are processes that were started here."""
        return bool(self._processes)

    def broadcast(self, message: dict[str, Any]) -> None:
        """Send a message to all; raises RankLost, at the end, where one is gone."""
        dead_ranks = []
        for rank, channel in enumerate(self.channels, 1):
            try:
                channel.send(message)
            except OSError:
                dead_ranks.append(rank)
        if dead_ranks:
            raise WorkerDiedError(self.exit_cause(dead_ranks[0]))

    def gather(self) -> list[dict[str, Any]]:
        """Return a message of each."""
        messages = []
        for rank, channel in enumerate(self.channels, 1):
            try:
                messages.append(channel.receive())
            except (WorkerDiedError, OSError):
                raise WorkerDiedError(self.exit_cause(rank)) from None
        return messages

    def exit_cause(self, rank: int) -> str:
        """Say how a rank ended."""
        name = f"inference rank {rank} of {self.num_ranks}"
        if rank > len(self._processes):
            return f"{name} is gone: see its own output for the cause"
        process = self._processes[rank - 1]
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(2.0)
            exit_status = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            return f"{name} (process {process.pid}) {exit_status}; its output says more. Load the engine again"
        return f"{name} (process {process.pid}) has closed its line. Load the engine again"

    def failure_message(self) -> str:
        """Say which rank is gone."""
        for rank, channel in enumerate(self.channels, 1):
            if peer_closed([channel.sock.fileno()], 0):
                return self.exit_cause(rank)
        return "an inference rank is gone. Load the engine again"

    def close(self) -> None:
        """Hang up, and see to the end of what was started."""
        for channel in self.channels:
            channel.close()
        for process in self._processes:
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def peer_closed(fds: Sequence[int], timeout_ms: int) -> bool:
    """Whether one of the sockets is dead, after waiting so long for it."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, _HANGUP_EVENTS)
    return any(event & ~select.POLLNVAL for _, event in poll.poll(timeout_ms))


def spawn_workers(model: str | Path, options: EngineConfig) -> WorkerGroup:
    """Start the other ranks that the options ask for as processes that load from a directory."""
    num_ranks = options.num_ranks
    if torch.device(options.device).type != "cpu":
        raise ValueError(
            f"{num_ranks} ranks are to run one model on {options.device}: start a process for each GPU"
            f" (thalweg run --nproc {num_ranks}), each of which calls init_inference"
        )
    num_threads = max(1, torch.get_num_threads() * options.pipeline_parallel_size // num_ranks)  # stages take turns
    worker_options = replace(options, tensor_parallel_size=1, pipeline_parallel_size=1, expert_parallel_size=1)
    channels: list[WorkerChannel] = []
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(1, num_ranks):
            driver_socket, worker_socket = socket.socketpair()
            channels.append(WorkerChannel(driver_socket))
            fields = {
                "model": str(model), "options": asdict(worker_options), "rank": rank, "size": num_ranks,
                "fd": worker_socket.fileno(), "threads": num_threads,
            }  # fmt: skip
            with worker_socket:
                command = [sys.executable, "-m", "thalweg.infer.parallel.executor", json.dumps(fields)]
                environ = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
                for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
                    environ.pop(name, None)
                processes.append(
                    subprocess.Popen(
                        command,
                        pass_fds=(worker_socket.fileno(),),
                        stdin=subprocess.DEVNULL,
                        env=environ,
                        start_new_session=True,
                        stdout=subprocess.DEVNULL,
                    )
                )
    except BaseException:
        WorkerGroup(channels, processes).close()
        raise
    return WorkerGroup(channels, processes, num_threads)


@contextlib.contextmanager
def saved_to_tempdir(model: Any) -> Iterator[str]:
    """Write a live model where other processes can read it, for as long as the context is open."""
    with tempfile.TemporaryDirectory(prefix="thalweg-team-") as folder:
        model.save_pretrained(folder)
        yield folder


def is_launched(num_ranks: int) -> bool:
    """Whether this process is one of several ranks of a launcher, to be taken in teams of ``size``."""
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    if num_ranks < 2 or world_size < 2 or ("RANK" not in os.environ and not dist.is_initialized()):
        return False
    if world_size % num_ranks:
        raise ValueError(f"{num_ranks} ranks are to run one model; that must divide the number of ranks, {world_size}")
    return True


def join_launched_group(group_size: int) -> WorkerGroup | tuple[WorkerChannel, int]:
    """Find this rank's team, ranks ``size * i`` to ``size * i + size - 1`` of one host; collective.

    Returns the peers on the first rank of a team, a line to it and one's place in the team on the others.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method="env://")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    token = list(secrets.token_bytes(16))
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    local_address = torch.tensor(token, dtype=torch.uint8, device=device)
    all_addresses = [torch.empty_like(local_address) for _ in range(world_size)]
    local_rank, leader = rank % group_size, rank - rank % group_size
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener:
        if local_rank == 0:
            listener.bind(_address(token))
            listener.listen(group_size)
        dist.all_gather(all_addresses, local_address)  # the doors are open before anybody knows them
        if local_rank:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(_address(all_addresses[leader].tolist()))
            except OSError as error:
                raise RuntimeError(
                    f"rank {rank} cannot reach rank {leader} ({error.strerror}): inference in parallel needs"
                    " the ranks of a team on one host"
                ) from error
            channel = WorkerChannel(sock)
            channel.send({"rank": local_rank})
            return channel, local_rank
        channels: dict[int, WorkerChannel] = {}
        listener.settimeout(_JOIN_TIMEOUT_S)
        while len(channels) < group_size - 1:
            sock, _ = listener.accept()
            sock.settimeout(None)
            if not _is_same_user(sock):
                sock.close()
                continue
            channel = WorkerChannel(sock)
            channels[int(channel.receive()["rank"])] = channel
    return WorkerGroup([channels[i] for i in range(1, group_size)])


def _is_same_user(sock: socket.socket) -> bool:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] == os.getuid()


def _address(token: list[int]) -> str:
    return "\0thalweg-team-" + bytes(token).hex()
