"""Running the server: options, the socket, signals, drain.

SIGTERM or SIGINT once: no new connections, requests on old ones get 503, what was admitted is finished, for
at most ``drain_seconds``; then streams end with an error that says so.  A second signal ends at once.
"""

import asyncio
import contextlib
import errno
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from thalweg.serve.app import build_app, build_router_app
from thalweg.serve.http.guard import BodyLimits, HandshakeGuard, HardenedProtocol, RequestGuard, tls_context
from thalweg.serve.openai.requests import ChatTokenizer
from thalweg.serve.openai.responses import AppState
from thalweg.serve.replicas.launcher import ReplicaProcess
from thalweg.serve.replicas.pool import BasePool, PoolLimits, ReplicaPool
from thalweg.serve.replicas.router import ReplicaRouter
from thalweg.utils.env import is_loopback
from thalweg.utils.log import get_logger

_LOG = get_logger(__name__)
_RESERVED_FDS, _MIN_CONNECTIONS = 64, 8
_BIND_HINTS = {
    errno.EADDRNOTAVAIL: "use 127.0.0.1, or an address that this machine has",
    errno.EACCES: "choose another --port, 1024 at least",
}


@dataclass(frozen=True)
class ServeOptions:
    """How to serve; the defaults suit a server for this host alone."""

    # The name that clients ask for.
    model: str
    # Other names under which they may.
    aliases: tuple[str, ...] = ()
    # Another address needs a key.
    host: str = "127.0.0.1"
    # 0 takes a free one.
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    num_replicas: int = 1
    # The name under ``/mii/``; the model's where none is given.
    deployment_name: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    drain_seconds: float = 30.0
    # Time that a request may take from its admission; None: any.
    request_seconds: float | None = 600.0
    pool_limits: PoolLimits = field(default_factory=PoolLimits)
    body_limits: BodyLimits = field(default_factory=BodyLimits)

    def __post_init__(self) -> None:
        if any(len(key) < 8 or not key.isascii() or key != key.strip() for key in self.api_keys):
            raise ValueError("an API key must have at least 8 characters, all ASCII, and no blanks around it")
        if not self.api_keys and not is_loopback(self.host):
            raise ValueError(
                f"{self.host} can be reached from other machines: give a key with --api-key or "
                "--api-key-file, or serve on 127.0.0.1"
            )
        if self.num_replicas < 1:
            raise ValueError(f"replicas is {self.num_replicas}; it must be at least 1")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port {self.port} is not a port: 0 to 65535, 0 for a free one")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("TLS needs both a certificate and its key")
        for path in (self.tls_cert, self.tls_key):
            if path is not None and not Path(path).is_file():
                raise FileNotFoundError(f"{path} is not there: TLS needs it")
        if self.tls_cert and self.tls_key:
            tls_context(self.tls_cert, self.tls_key)  # better now than after the model was loaded
        for name in ("drain_seconds", "request_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1e7:
                raise ValueError(f"{name} is {value}; it must be a number of seconds")


async def serve(
    options: ServeOptions,
    start_replica: Callable[[int], ReplicaProcess],
    load_tokenizer: Callable[[], ChatTokenizer],
    on_ready: Callable[[str], None] = lambda url: None,
    stop_event: asyncio.Event | None = None,
) -> None:
    """Serve until a signal; ``on_ready`` is called with the address once requests are taken.

    Setting ``stop_event`` is the first signal.  Raises RuntimeError when a replica does not start, OSError when the
    address cannot be had.
    """

    async def start(pool: ReplicaPool) -> ASGIApp:
        tokenizer_task = asyncio.ensure_future(asyncio.to_thread(load_tokenizer))
        try:
            model_info = await pool.start()
            tokenizer, created = await tokenizer_task, int(time.time())
        finally:
            tokenizer_task.cancel()
            await asyncio.gather(tokenizer_task, return_exceptions=True)
        app_state = AppState(pool, tokenizer, model_info, options.model, created, options.aliases)
        return build_app(app_state, options.deployment_name)

    await _run_server(options, partial(ReplicaPool, start_replica, options.num_replicas), start, on_ready, stop_event)


async def serve_router(
    options: ServeOptions,
    replica_urls: Sequence[str],
    replica_key: str | None,
    on_ready: Callable[[str], None] = lambda url: None,
    stop_event: asyncio.Event | None = None,
) -> None:
    """Forward requests to other servers until a signal; RuntimeError where one has another model or key."""

    async def start(router: ReplicaRouter) -> ASGIApp:
        await router.start()
        return build_router_app(router)

    make_pool = partial(ReplicaRouter, replica_urls, replica_key, options.model)
    await _run_server(options, make_pool, start, on_ready, stop_event)


async def _run_server(
    options: ServeOptions,
    make_pool: Callable[[PoolLimits], Any],
    start: Callable[[Any], Awaitable[ASGIApp]],
    on_ready: Callable[[str], None],
    stop_event: asyncio.Event | None,
) -> None:
    """Bind the address, start what stands behind the server, and listen until it has drained."""
    max_connections = _raise_fd_limit()
    with contextlib.closing(_bind(options.host, options.port)) as sock:
        pool = make_pool(replace(options.pool_limits, request_seconds=options.request_seconds))
        try:
            app = RequestGuard(await start(pool), options.api_keys, options.body_limits, pool.metrics.count_response)
            url = _url(options, sock.getsockname()[1])
            config = _uvicorn_config(options, app, max_connections)
            server = _DrainingServer(config, pool, options.drain_seconds, lambda: on_ready(url))
            stop_task = asyncio.create_task(server.wait_for_stop(stop_event or asyncio.Event()))
            try:
                await server.serve(sockets=[sock])
            finally:
                stop_task.cancel()
        finally:
            await pool.close()


def _uvicorn_config(options: ServeOptions, app: ASGIApp, max_connections: int) -> uvicorn.Config:
    http_protocol: Any = type("_Protocol", (HardenedProtocol,), {"max_connections": max_connections})
    make_protocol: Any = http_protocol
    if options.tls_cert and options.tls_key:
        context = tls_context(options.tls_cert, options.tls_key)
        make_protocol = lambda **fields: HandshakeGuard(http_protocol(**fields), context)
    return uvicorn.Config(
        app, http=make_protocol, ws="none", lifespan="off", timeout_keep_alive=75,  # load balancers: 60
        log_config=None, log_level="error", access_log=False, server_header=False, proxy_headers=False,
        backlog=2048 if max_connections == HardenedProtocol.max_connections else _MIN_CONNECTIONS,  # accepted at a time
    )  # fmt: skip


class _DrainingServer(uvicorn.Server):
    """uvicorn with our way of ending."""

    def __init__(
        self, config: uvicorn.Config, pool: BasePool, drain_seconds: float, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._pool, self._drain_seconds, self._on_ready = pool, drain_seconds, on_ready
        self._loop = asyncio.get_running_loop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._begin_shutdown)

    async def wait_for_stop(self, stop_event: asyncio.Event) -> None:
        await stop_event.wait()
        self._begin_shutdown()

    def _begin_shutdown(self) -> None:
        if self._pool.draining:  # the second signal
            self._pool.abort_all()
            self._loop.call_later(0.5, self._force_close)
            return
        _LOG.info("finishing what runs: %d outstanding (at most %g s)", self._pool.num_outstanding, self._drain_seconds)
        self._pool.draining = True
        self.should_exit = True
        self._loop.call_later(self._drain_seconds, self._pool.abort_all)
        self._loop.call_later(self._drain_seconds + 2.0, self._force_close)

    def _force_close(self) -> None:
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # a client that does not read must not hold the exit


def _bind(host: str, port: int) -> socket.socket:
    bare_host = host.strip("[]")
    try:
        family, _, _, _, address = socket.getaddrinfo(bare_host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(f"{host} is no address of this machine ({error}): use 127.0.0.1, or one it has") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        hint = _BIND_HINTS.get(error.errno or 0, "choose another --port")
        raise OSError(f"cannot listen on {host}:{port} ({error.strerror}): {hint}") from None
    sock.setblocking(False)
    return sock


def _url(options: ServeOptions, port: int) -> str:
    host = f"[{options.host.strip('[]')}]" if ":" in options.host else options.host
    return f"{'https' if options.tls_cert else 'http'}://{host}:{port}"


def _raise_fd_limit() -> int:
    """Return how many connections to take, after raising the limit of descriptors, of which each is one.

    The usual soft limit of 1,024 is too few for a server.  Where it cannot be raised, connections beyond it
    would be left waiting with no answer, and a lost replica could not be replaced.
    """
    max_connections = HardenedProtocol.max_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target: Any = max_connections + _RESERVED_FDS * 8
    if soft == resource.RLIM_INFINITY or soft >= target:
        return max_connections
    new_limit = target if hard == resource.RLIM_INFINITY else min(target, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
    max_connections = min(max_connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _RESERVED_FDS)
    if max_connections < _MIN_CONNECTIONS:
        raise OSError(f"{max_connections} descriptors are left for connections: raise the limit (ulimit -n 4096)")
    return max_connections
