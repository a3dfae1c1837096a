"""The ranks of an engine of several processes: how rank 0 gets the others, and the lines between them.

``spawned`` starts them as processes that load from a model's directory and end with their socket;
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

from thalweg.infer.api import EngineOptions

_LENGTH = struct.Struct("!I")
_HANG_UP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
_GONE = "an inference rank is gone: see its own output for the cause"
_MEET_SECONDS = 600.0  # for the ranks of a team to find each other


class RankLost(RuntimeError):
    """A rank of the team has ended: what it had a part in cannot go on."""


class Line:
    """Frames of JSON on a stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; OSError when the other side is gone."""
        body = json.dumps(message, separators=(",", ":")).encode()
        self.sock.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> dict[str, Any]:
        """Return the next message; raises RankLost when the other side is gone."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return json.loads(self._exactly(length))

    def send_handle(self, handle: int) -> None:
        """Send a file descriptor."""
        socket.send_fds(self.sock, [b"m"], [handle])

    def receive_handle(self) -> int:
        """Return a file descriptor, which is the caller's to close."""
        size = array.array("i").itemsize
        data, extra, _, _ = self.sock.recvmsg(1, socket.CMSG_SPACE(size))
        handles = array.array("i")
        for level, kind, value in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                handles.frombytes(value[: len(value) - len(value) % size])
        if not data:
            raise RankLost(_GONE)
        assert len(handles) == 1, "the memory comes after the plan"
        return handles[0]

    def _exactly(self, length: int) -> bytes:
        # Unbuffered: what is read ahead would lose the descriptor that comes with it.
        found = bytearray()
        while len(found) < length:
            try:
                piece = self.sock.recv(length - len(found))
            except OSError:
                piece = b""
            if not piece:
                raise RankLost(_GONE)
            found += piece
        return bytes(found)

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


class Peers:
    """The other ranks as rank 0 sees them: a line to each, and how it ended.

    ``threads``: of each rank, 0 for as many as torch has there.
    """

    def __init__(
        self, lines: Sequence[Line], processes: Sequence[subprocess.Popen[bytes]] = (), threads: int = 0
    ) -> None:
        self.lines, self._processes = list(lines), list(processes)
        self.size, self.threads = 1 + len(self.lines), threads

    @property
    def started(self) -> bool:
        """Whether they are processes that were started here."""
        return bool(self._processes)

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message to all; raises RankLost, at the end, where one is gone."""
        gone = []
        for rank, line in enumerate(self.lines, 1):
            try:
                line.send(message)
            except OSError:
                gone.append(rank)
        if gone:
            raise RankLost(self.cause(gone[0]))

    def hear(self) -> list[dict[str, Any]]:
        """Return a message of each."""
        found = []
        for rank, line in enumerate(self.lines, 1):
            try:
                found.append(line.receive())
            except (RankLost, OSError):
                raise RankLost(self.cause(rank)) from None
        return found

    def cause(self, rank: int) -> str:
        """Say how a rank ended."""
        name = f"inference rank {rank} of {self.size}"
        if rank > len(self._processes):
            return f"{name} is gone: see its own output for the cause"
        process = self._processes[rank - 1]
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(2.0)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            return f"{name} (process {process.pid}) {how}; its output says more. Load the engine again"
        return f"{name} (process {process.pid}) has closed its line. Load the engine again"

    def lost(self) -> str:
        """Say which rank is gone."""
        for rank, line in enumerate(self.lines, 1):
            if hung_up([line.sock.fileno()], 0):
                return self.cause(rank)
        return "an inference rank is gone. Load the engine again"

    def close(self) -> None:
        """Hang up, and see to the end of what was started."""
        for line in self.lines:
            line.close()
        for process in self._processes:
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def hung_up(fds: Sequence[int], milliseconds: int) -> bool:
    """Whether one of the sockets is dead, after waiting so long for it."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, _HANG_UP)
    return any(event & ~select.POLLNVAL for _, event in poll.poll(milliseconds))


def spawned(model: str | Path, options: EngineOptions) -> Peers:
    """Start the other ranks that the options ask for as processes that load from a directory."""
    size = options.ranks
    if torch.device(options.device).type != "cpu":
        raise ValueError(
            f"{size} ranks are to run one model on {options.device}: start a process for each GPU"
            f" (thalweg run --nproc {size}), each of which calls init_inference"
        )
    threads = max(1, torch.get_num_threads() * options.pipeline_parallel // size)  # stages take turns
    alone = replace(options, tensor_parallel=1, pipeline_parallel=1, expert_parallel=1)
    lines: list[Line] = []
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            lines.append(Line(ours))
            fields = {
                "model": str(model), "options": asdict(alone), "rank": rank, "size": size,
                "fd": theirs.fileno(), "threads": threads,
            }  # fmt: skip
            with theirs:
                command = [sys.executable, "-m", "thalweg.infer.parallel", json.dumps(fields)]
                environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
                for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
                    environ.pop(name, None)
                processes.append(
                    subprocess.Popen(
                        command,
                        pass_fds=(theirs.fileno(),),
                        stdin=subprocess.DEVNULL,
                        env=environ,
                        start_new_session=True,
                        stdout=subprocess.DEVNULL,
                    )
                )
    except BaseException:
        Peers(lines, processes).close()
        raise
    return Peers(lines, processes, threads)


@contextlib.contextmanager
def saved(model: Any) -> Iterator[str]:
    """Write a live model where other processes can read it, for as long as the context is open."""
    with tempfile.TemporaryDirectory(prefix="thalweg-team-") as folder:
        model.save_pretrained(folder)
        yield folder


def launched(size: int) -> bool:
    """Whether this process is one of several ranks of a launcher, to be taken in teams of ``size``."""
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    if size < 2 or world < 2 or ("RANK" not in os.environ and not dist.is_initialized()):
        return False
    if world % size:
        raise ValueError(f"{size} ranks are to run one model; that must divide the number of ranks, {world}")
    return True


def gathered(size: int) -> Peers | tuple[Line, int]:
    """Find this rank's team, ranks ``size * i`` to ``size * i + size - 1`` of one host; collective.

    Returns the peers on the first rank of a team, a line to it and one's place in the team on the others.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method="env://")
    rank, world = dist.get_rank(), dist.get_world_size()
    token = list(secrets.token_bytes(16))
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    mine = torch.tensor(token, dtype=torch.uint8, device=device)
    every = [torch.empty_like(mine) for _ in range(world)]
    place, first = rank % size, rank - rank % size
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with door:
        if place == 0:
            door.bind(_address(token))
            door.listen(size)
        dist.all_gather(every, mine)  # the doors are open before anybody knows them
        if place:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(_address(every[first].tolist()))
            except OSError as error:
                raise RuntimeError(
                    f"rank {rank} cannot reach rank {first} ({error.strerror}): inference in parallel needs"
                    " the ranks of a team on one host"
                ) from error
            line = Line(sock)
            line.send({"rank": place})
            return line, place
        lines: dict[int, Line] = {}
        door.settimeout(_MEET_SECONDS)
        while len(lines) < size - 1:
            sock, _ = door.accept()
            sock.settimeout(None)
            if not _of_this_user(sock):
                sock.close()
                continue
            line = Line(sock)
            lines[int(line.receive()["rank"])] = line
    return Peers([lines[i] for i in range(1, size)])


def _of_this_user(sock: socket.socket) -> bool:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] == os.getuid()


def _address(token: list[int]) -> str:
    return "\0thalweg-team-" + bytes(token).hex()
