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

from thalweg.cli.telling import say
from thalweg.serve.join import Lobby, Rank, Worker, parse_address
from thalweg.serve.spawn import EngineTask, Place, Running

_ALONE = ("127.", "localhost", "::1")


@dataclass(frozen=True)
class Hosts:
    """This process's part: ``workers`` replicas are to join, or it is a ``worker`` itself."""

    workers: int = 0
    worker: bool = False
    address: tuple[str, int] | None = None
    key: bytes = b""
    rank: Rank | None = None
    replicas: int = 1

    @classmethod
    def of(cls, args: argparse.Namespace) -> Hosts:
        """Read it from the options, or from a launcher's job; ValueError where they disagree."""
        named = args.workers is not None or args.workers_at or args.join
        rank = None if named else Rank.of(os.environ)
        if rank is not None:
            workers = 0 if rank.rank else (rank.world - 1) * args.replicas
            return cls(workers, rank.rank > 0, rank=rank, replicas=args.replicas)
        if not named:
            return cls()
        if args.join:
            if args.workers is not None or args.workers_at:
                raise ValueError("--join makes this a worker: it has no --workers of its own")
            return cls(0, True, parse_address(args.join), read_key(args), replicas=args.replicas)
        if not args.workers or args.workers < 0 or not args.workers_at:
            raise ValueError("--workers N and --workers-at HOST:PORT go together")
        return cls(args.workers, False, parse_address(args.workers_at), read_key(args))

    @contextlib.contextmanager
    def lobby(self, start: Callable[[int], Running], own: int) -> Iterator[Callable[[int], Running]]:
        """Yield what starts replicas, here and on the workers."""
        if not self.workers:
            yield start
            return
        address, key, store = self.address, self.key, None
        if self.rank is not None:
            address, key = (_own(self.rank.addr), 0), secrets.token_bytes(32)
        assert address is not None
        lobby = Lobby(address, key, own, start)
        try:
            if self.rank is not None:
                store = self.rank.tell(lobby.port, key)
            say(f"waiting for {self.workers} replicas at port {lobby.port}")
            yield lobby
        finally:
            lobby.close()
            del store

    def work(self, task: EngineTask, places: tuple[Place, ...]) -> int:
        """Be a worker until the server is gone, or a signal comes."""
        if self.rank is not None:
            address, key = self.rank.ask()
        else:
            assert self.address is not None
            address, key = self.address, self.key
        worker = Worker(address, key, task, places, self.replicas)

        def end(*_: Any) -> None:
            worker.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        worker.run()
        return 0


def _own(addr: str) -> str:
    """Return where to listen, given the name by which others know this host: "" for all addresses."""
    if addr.startswith(_ALONE):
        return addr
    try:
        found = str(socket.getaddrinfo(addr, 0, type=socket.SOCK_STREAM)[0][4][0])
        socket.create_server((found, 0), family=socket.AF_INET6 if ":" in found else socket.AF_INET).close()
    except OSError:  # a cluster's name for it
        return ""
    return "" if found.startswith("127.") else found  # Debian's 127.0.1.1 for its own name


def read_key(args: argparse.Namespace) -> bytes:
    """Return the secret of server and workers; ValueError where there is none."""
    if args.join_key_file is not None:
        return args.join_key_file.read_bytes().strip()
    key = os.environ.get("THALWEG_JOIN_KEY", "").encode()
    if not key:
        raise ValueError(
            "server and workers share a secret: --join-key-file, or the variable THALWEG_JOIN_KEY"
        )
    return key
