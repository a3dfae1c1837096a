"""``thalweg serve`` over several hosts: who serves, who gives replicas, how they find each other."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from thalweg.cli.console import log_stderr
from thalweg.serve.replicas.launcher import EngineSpec, ReplicaHandle, ReplicaResources
from thalweg.serve.replicas.remote import LaunchRank, RemoteWorker, WorkerListener, parse_address

_LOOPBACK_PREFIXES = ("127.", "localhost", "::1")


@dataclass(frozen=True)
class ClusterRole:
    """This process's part: ``workers`` replicas are to join, or it is a ``worker`` itself."""

    num_workers: int = 0
    is_worker: bool = False
    address: tuple[str, int] | None = None
    join_key: bytes = b""
    launch_rank: LaunchRank | None = None
    num_replicas: int = 1

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> ClusterRole:
        """Read it from the options, or from a launcher's job; ValueError where they disagree."""
        is_explicit = args.workers is not None or args.workers_at or args.join
        launch_rank = None if is_explicit else LaunchRank.from_env(os.environ)
        if launch_rank is not None:
            num_workers = 0 if launch_rank.rank else (launch_rank.world_size - 1) * args.replicas
            return cls(num_workers, launch_rank.rank > 0, launch_rank=launch_rank, num_replicas=args.replicas)
        if not is_explicit:
            return cls()
        if args.join:
            if args.workers is not None or args.workers_at:
                raise ValueError("--join makes this a worker: it has no --workers of its own")
            return cls(0, True, parse_address(args.join), read_join_key(args), num_replicas=args.replicas)
        if not args.workers or args.workers < 0 or not args.workers_at:
            raise ValueError("--workers N and --workers-at HOST:PORT go together")
        return cls(args.workers, False, parse_address(args.workers_at), read_join_key(args))

    @contextlib.contextmanager
    def listen(
        self, start_local: Callable[[int], ReplicaHandle], num_local: int
    ) -> Iterator[Callable[[int], ReplicaHandle]]:
        """Yield what starts replicas, here and on the workers."""
        if not self.num_workers:
            yield start_local
            return
        address, key, store = self.address, self.join_key, None
        if self.launch_rank is not None:
            address, key = (_bind_address(self.launch_rank.master_addr), 0), secrets.token_bytes(32)
        assert address is not None
        listener = WorkerListener(address, key, num_local, start_local)
        try:
            if self.launch_rank is not None:
                store = self.launch_rank.publish_address(listener.port, key)
            log_stderr(f"waiting for {self.num_workers} replicas at port {listener.port}")
            yield listener
        finally:
            listener.close()
            del store

    def run_worker(self, engine_spec: EngineSpec, placements: tuple[ReplicaResources, ...]) -> int:
        """Be a worker until the server is gone, or a signal comes."""
        if self.launch_rank is not None:
            address, key = self.launch_rank.wait_for_address()
        else:
            assert self.address is not None
            address, key = self.address, self.join_key
        worker = RemoteWorker(address, key, engine_spec, placements, self.num_replicas)

        def stop_worker(*_: Any) -> None:
            worker.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop_worker)
        worker.run()
        return 0


def _bind_address(host: str) -> str:
    """Return where to listen, given the name by which others know this host: "" for all addresses."""
    if host.startswith(_LOOPBACK_PREFIXES):
        return host
    try:
        address = str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
        socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError:  # a cluster's name for it
        return ""
    return "" if address.startswith("127.") else address  # Debian's 127.0.1.1 for its own name


def read_join_key(args: argparse.Namespace) -> bytes:
    """Return the secret of server and workers; ValueError where there is none."""
    if args.join_key_file is not None:
        return args.join_key_file.read_bytes().strip()
    key = os.environ.get("THALWEG_JOIN_KEY", "").encode()
    if not key:
        raise ValueError("server and workers share a secret: --join-key-file, or the variable THALWEG_JOIN_KEY")
    return key
