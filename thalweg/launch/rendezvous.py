"""Where the hosts of a job meet: one store on host 0, on the address that was chosen and no other.

torch's own rendezvous lets its store listen on every interface and picks its port in two steps, between which
another program may take it.  Here the socket is bound first, to the address, and the store is given that
socket.  The ranks later meet in the same store (``MASTER_ADDR``, ``MASTER_PORT``).
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry

BACKEND_NAME = "thalweg"
_STORE_TIMEOUT = timedelta(seconds=600)


def bind_listener(addr: str, port: int = 0, multi_node: bool = False) -> socket.socket:
    """A socket bound to ``addr`` and ``port`` (0: a free one).

    An address that is not this host's own, such as a cluster's name for it, is listened for on all; so is one
    that only leads back here although there are ``several`` hosts (Debian's 127.0.1.1 for its own name).

    Raises:
        ValueError: the port is taken, or the name is unknown; the message has the cure.
    """
    try:
        family, kind, proto, _, bind_address = socket.getaddrinfo(
            addr, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ValueError(f"{addr} cannot be resolved ({error}): give --master-addr an address") from error
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if multi_node and str(bind_address[0]).startswith(("127.", "::1")):
        bind_address = ("", port)
    try:
        listener.bind(bind_address)
    except OSError as error:
        if error.errno != 99:  # EADDRNOTAVAIL: a service's address, which leads here from outside
            listener.close()
            raise ValueError(f"port {port} of {addr} is in use: leave out --master-port to get a free one") from error
        listener.bind(("", port))
    return listener


class StaticRendezvous(RendezvousHandler):
    """The rendezvous of a fixed number of hosts; ``listener`` is host 0's socket (:func:`bind`)."""

    def __init__(self, addr: str, port: int, node_rank: int, num_nodes: int, listener: socket.socket | None) -> None:
        self.addr, self.port = addr, port
        self._node_rank, self._num_nodes = node_rank, num_nodes
        self._server_store: Store | None = None
        if listener is not None:
            self.port = listener.getsockname()[1]
            self._server_store = TCPStore(
                listener.getsockname()[0] if listener.getsockname()[0] not in ("0.0.0.0", "::") else "localhost",
                self.port,
                is_master=True,
                timeout=_STORE_TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )

    def connect(self, timeout: float) -> Store:
        """A connection of its own to the store; ``timeout`` in seconds, of connecting and of each call.

        Raises:
            ValueError: host 0 does not answer.
        """
        try:
            store_timeout = timedelta(seconds=timeout)
            return TCPStore(self.addr, self.port, is_master=False, timeout=store_timeout, wait_for_workers=False)
        except (DistNetworkError, RuntimeError) as error:
            raise ValueError(
                f"{socket.gethostname()} cannot reach {self.addr}, port {self.port}, where the first host "
                "of the "
                "job listens: check --master-addr and --master-port, and that a firewall lets it through"
            ) from error

    def is_reachable(self, timeout: float) -> bool:
        """Whether somebody listens where host 0 should; the store's own client would try for longer."""
        try:
            socket.create_connection((self.addr, self.port), timeout).close()
        except OSError:
            return False
        return True

    # What torch's agent asks for

    @property
    def use_agent_store(self) -> bool:
        """Ranks do not open a store of their own."""
        return True

    def get_backend(self) -> str:
        """Our name in torch's registry."""
        return BACKEND_NAME

    def next_rendezvous(self) -> RendezvousInfo:
        """All hosts are known: no waiting."""
        store = PrefixStore("agents", self._server_store or self.connect(_STORE_TIMEOUT.total_seconds()))
        return RendezvousInfo(store, self._node_rank, self._num_nodes, RendezvousStoreInfo(self.addr, self.port))

    def is_closed(self) -> bool:
        """Never: a job has one round."""
        return False

    def set_closed(self) -> None:
        """There is nobody to tell."""

    def num_nodes_waiting(self) -> int:
        """Hosts do not join later."""
        return 0

    def get_run_id(self) -> str:
        """One store serves one job."""
        return BACKEND_NAME

    def shutdown(self) -> bool:
        """The store goes with the process."""
        return True


def register_rendezvous() -> None:
    """Let torch's agent find a :class:`StaticRendezvous` in ``rdzv_configs["rendezvous"]``."""
    rendezvous_handler_registry.register(BACKEND_NAME, _get_rendezvous)


def _get_rendezvous(parameters: Any) -> RendezvousHandler:
    return parameters.config["rendezvous"]
