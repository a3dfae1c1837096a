"""Replicas on other hosts: they connect to the front, prove that they know its key, and are like any other.

    host 0:  thalweg serve MODEL --workers 2 --workers-at 0.0.0.0:8100 --join-key-file key
    host 1:  thalweg serve MODEL --join host0:8100 --join-key-file key
    host 2:  the same

The front's :class:`WorkerListener` listens.  A worker connects once for each of its replicas, waits until it is
called, and hands the connection to a process like those of ``spawn.py``.  When that ends the worker connects
anew, so a replica that died is replaced from its own host; a worker more than the front has places for waits
as a spare.  Under ``thalweg run`` (several ranks) rank 0 is the front, the others are workers, and the key is
a random one that they find in the job's store.

Who connects must answer a challenge with an HMAC of the key, and so must the front: neither can be an
impostor.  What passes then is not encrypted: join over a network of your own.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from thalweg.serve.engine_process import EXIT_SERVER_ENDED
from thalweg.serve.replicas.launcher import (
    EngineSpec,
    ProcessLauncher,
    ReplicaHandle,
    ReplicaProcess,
    ReplicaResources,
)
from thalweg.utils.log import get_logger

_LOG = get_logger(__name__)
_MAGIC = b"thalweg join 1\n"
_ACTIVATE = b"+"
_NONCE_BYTES = 32
_HANDSHAKE_TIMEOUT = 5.0  # for a client to prove itself
_JOIN_TIMEOUT = 600.0  # that a replica's place waits for a worker
_RECONNECT_TIMEOUT = 30.0  # that a worker tries to reach a front that it had
_MAX_UNAUTHENTICATED = 64  # connections that have not proved themselves


class AuthenticationError(ConnectionError):
    """The other side does not know the key, or speaks something else."""


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; ValueError with the form where it is none."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is no address: write it as HOST:PORT")
    return host.strip("[]"), int(port)


class WorkerListener:
    """Starts replicas: the first ``own`` by ``start`` here, the others are workers that join at ``address``.

    Raises OSError where the address cannot be had, ValueError for a key that is too short.
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        num_local: int,
        start_local: Callable[[int], ReplicaHandle],
    ) -> None:
        self._key, self._num_local, self._start_local = _check_key(key), num_local, start_local
        self._workers: queue.Queue[_RemoteReplica] = queue.Queue()
        self._closed = threading.Event()
        self._unauthenticated = threading.Semaphore(_MAX_UNAUTHENTICATED)
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True, name="thalweg-serve-lobby").start()

    def __call__(self, index: int) -> ReplicaHandle:
        """Start replica ``index``: here, or wait for a worker.  OSError when none joins in time."""
        if index < self._num_local:
            return self._start_local(index)
        deadline = time.monotonic() + _JOIN_TIMEOUT
        while not self._closed.is_set() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                worker = self._workers.get(timeout=0.2)
                if worker.activate():
                    return worker
        raise OSError("the server ends" if self._closed.is_set() else f"no worker joined at port {self.port}")

    def close(self) -> None:
        """Let nobody in any more; whoever waits for a worker gets an error."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self._workers.get_nowait().sock.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, peer = self._listener.accept()
            except OSError:
                if not self._closed.is_set():
                    time.sleep(0.1)  # no descriptors, for a moment
                continue
            if not self._unauthenticated.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._authenticate, args=(sock, str(peer[0])), daemon=True).start()

    def _authenticate(self, sock: socket.socket, peer: str) -> None:
        try:
            _front_handshake(sock, self._key)
            _enable_keepalive(sock)
            self._workers.put(_RemoteReplica(sock, f"worker {peer}"))
        except OSError as error:
            _LOG.warning("a connection from %s was not let in: %s", peer, error)
            sock.close()
        finally:
            self._unauthenticated.release()


class _RemoteReplica:
    """A replica on another host; it ends with its connection."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.sock, self.name = sock, name

    def activate(self) -> bool:
        """Let it begin; False where it has left the lobby."""
        with contextlib.suppress(OSError):
            if self.exit_code() is None:
                self.sock.sendall(_ACTIVATE)
                return True
        self.sock.close()
        return False

    def exit_code(self) -> int | None:
        """None while the connection stands; the worker's process ends on the other host, unseen."""
        try:
            self.sock.getpeername()
            data = self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return 0
        return None if data else 0

    def terminate(self, grace: float) -> None:
        """Hang up: the replica ends, and its host's worker joins anew."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


class RemoteWorker:
    """Offers ``count`` replicas to the front at ``address`` until it is gone, or :meth:`stop`."""

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        engine_spec: EngineSpec,
        resources: tuple[ReplicaResources, ...],
        num_replicas: int = 1,
    ) -> None:
        self._address, self._key, self._num_replicas = address, _check_key(key), num_replicas
        self._launcher = ProcessLauncher(engine_spec, resources)
        self._stopping = threading.Event()
        self._running: dict[int, ReplicaProcess] = {}
        self._error: AuthenticationError | None = None

    def run(self) -> None:
        """Work; returns when the front is gone.  Raises :class:`Refused`, also where there never was one."""
        threads = [
            threading.Thread(target=self._run_replica, args=(i,), daemon=True) for i in range(self._num_replicas)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)  # signals are looked at in between
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End all replicas."""
        self._stopping.set()
        for process in list(self._running.values()):
            process.kill()

    def _run_replica(self, index: int) -> None:
        timeout = _JOIN_TIMEOUT
        while not self._stopping.is_set():
            try:
                sock = self._connect(timeout)
            except AuthenticationError as error:
                self._error = error
                return
            if sock is None:
                if timeout == _JOIN_TIMEOUT and not self._stopping.is_set():
                    self._error = AuthenticationError(
                        f"nobody answers at {_format_address(self._address)}: is the front running?"
                    )
                return
            timeout = _RECONNECT_TIMEOUT
            process = self._running[index] = self._launcher.start_on(index, sock)
            while process.exit_code() is None:
                if self._stopping.wait(0.1):
                    process.kill()
                    break
            process.terminate(0.0)
            if process.exit_code() == EXIT_SERVER_ENDED:
                return
            self._stopping.wait(0.5)  # a model that cannot be loaded is not tried at full speed

    def _connect(self, timeout: float) -> socket.socket | None:
        deadline = time.monotonic() + timeout
        while not self._stopping.is_set() and time.monotonic() < deadline:
            try:
                sock = socket.create_connection(self._address, timeout=_HANDSHAKE_TIMEOUT)
            except OSError:
                self._stopping.wait(0.3)
                continue
            try:
                _worker_handshake(sock, self._key)
                _enable_keepalive(sock)
                self._wait_for_activation(sock)
            except AuthenticationError:
                sock.close()
                raise
            except OSError:  # it ended just then
                sock.close()
                self._stopping.wait(0.3)
                deadline = max(deadline, time.monotonic() + _RECONNECT_TIMEOUT)
                continue
            return sock
        return None

    def _wait_for_activation(self, sock: socket.socket) -> None:
        sock.settimeout(0.3)
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                if not sock.recv(1):
                    raise ConnectionError("the front hung up")
                break
        sock.settimeout(None)


def _front_handshake(sock: socket.socket, key: bytes) -> None:
    sock.settimeout(_HANDSHAKE_TIMEOUT)
    worker_hello = _read_exactly(sock, len(_MAGIC) + _NONCE_BYTES)
    if not worker_hello.startswith(_MAGIC):
        raise AuthenticationError("it speaks something else")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(nonce + _hmac_proof(key, b"front", worker_hello[len(_MAGIC) :] + nonce))
    if not hmac.compare_digest(
        _read_exactly(sock, 32), _hmac_proof(key, b"worker", worker_hello[len(_MAGIC) :] + nonce)
    ):
        raise AuthenticationError("it does not know the key")


def _worker_handshake(sock: socket.socket, key: bytes) -> None:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(_MAGIC + nonce)
    answer = _read_exactly(sock, _NONCE_BYTES + 32)
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _hmac_proof(key, b"front", nonce + answer[:_NONCE_BYTES])):
        raise AuthenticationError("the front has another key: give both the same --join-key-file")
    sock.sendall(_hmac_proof(key, b"worker", nonce + answer[:_NONCE_BYTES]))


def _hmac_proof(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.new(key, role + nonces, hashlib.sha256).digest()


def _read_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    """Read so many bytes within the time for a proof, however slowly they come."""
    deadline, data = time.monotonic() + _HANDSHAKE_TIMEOUT, b""
    while len(data) < num_bytes:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        chunk = sock.recv(num_bytes - len(data))
        if not chunk:
            raise ConnectionError("it hung up")
        data += chunk
    return data


def _enable_keepalive(sock: socket.socket) -> None:
    """A host that is gone without a word is noticed within some ten seconds."""
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 4),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 10_000),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _check_key(key: bytes) -> bytes:
    if len(key) < 16:
        raise ValueError("the key for joining must have at least 16 characters, as `openssl rand -hex 16` gives")
    return key


def _format_address(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


@dataclass(frozen=True)
class LaunchRank:
    """This process's part of a job that a launcher started."""

    rank: int
    world_size: int
    master_addr: str
    master_port: int
    agent_hosts_store: bool
    """Whether the launcher keeps the store."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> LaunchRank | None:
        """Return it, or None outside of a job of several ranks."""
        try:
            rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
            addr, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        except (KeyError, ValueError):
            return None
        hosted = environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
        return cls(rank, world, addr, port, hosted) if world > 1 else None

    def _connect_store(self) -> Any:
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        master = self.rank == 0 and not self.agent_hosts_store
        return TCPStore(self.master_addr, self.master_port, is_master=master, wait_for_workers=False)

    def publish_address(self, port: int, key: bytes) -> Any:
        """Say where the lobby is; returns the store, to be kept as long as workers may ask."""
        store = self._connect_store()
        store.set("thalweg/serve", json.dumps({"port": port, "key": key.hex()}))
        return store

    def wait_for_address(self) -> tuple[tuple[str, int], bytes]:
        """Wait until rank 0 has said it; returns address and key."""
        message = json.loads(self._connect_store().get("thalweg/serve"))
        return (self.master_addr, message["port"]), bytes.fromhex(message["key"])
