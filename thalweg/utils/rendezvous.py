"""Processes that were started one by one find out whether they agree, before any of them waits for the others.

Ranks started by hand, by Kubernetes or by a scheduler may disagree: two with one RANK, another WORLD_SIZE on
one host, a MASTER_PORT that nobody listens on.  torch then waits half an hour without a word.  Here each
process puts a card with what it believes into one store, the first process compares the cards as they come, and
all raise the same error, which names the variable, the values and the hosts (:func:`exchange_cards`).
The ranks of a job do so (:func:`rendezvous`), and so do the launchers of several hosts
(:mod:`thalweg.launch.rendezvous`).

The store listens on the one address that was chosen: torch's own listens on every interface, so the socket is
bound here and handed over.
"""

import errno
import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from thalweg.utils.env import RankInfo, get_launcher_variables
from thalweg.utils.procfs import boot_id
from thalweg.utils.timing import wait_until

_READ_TIMEOUT = 5.0  # seconds in which the others read what the first process found
_WAIT_SLICE = 0.5  # seconds; torch waits in C++, where no signal is heard
Card = dict[str, Any]


def bind_listener(addr: str, port: int, *, multi_node: bool, allow_foreign: bool) -> socket.socket:
    """A socket bound to ``addr`` and ``port`` (0: a free one), not listening yet.

    ``multi_node``: a name that only leads back to this host (Debian's 127.0.1.1 for its own) is bound on all
    interfaces.  ``allow_foreign``: so is an address that is not this host's own, such as a service's, which
    leads here from outside.

    Raises:
        OSError: the name is unknown (``socket.gaierror``), the port taken, or the address another host's.
    """
    if multi_node and "KUBERNETES_SERVICE_HOST" in os.environ:
        wait_until(lambda: _is_known(addr), 60.0, interval=0.5)  # a pod's own name comes into the DNS after the pod
    found = socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, proto, _, address = found[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if multi_node and str(address[0]).startswith(("127.", "::1")):
            address = ("", port)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL or not allow_foreign:
                raise
            listener.bind(("", port))
    except OSError:
        listener.close()
        raise
    return listener


def _is_known(addr: str) -> bool:
    try:
        return bool(socket.getaddrinfo(addr, None))
    except socket.gaierror:
        return False


def serve_store(listener: socket.socket, timeout: float) -> TCPStore:
    """A store of this process on ``listener``, which it takes over; ``timeout`` of each call, in seconds.

    Code of this process that opens a multi-tenant store on the same port, as torch's rendezvous does, shares it.
    """
    host, port = listener.getsockname()[:2]
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout), "wait_for_workers": False, "multi_tenant": True}
    addr = "localhost" if host in ("0.0.0.0", "::") else host
    return TCPStore(addr, port, is_master=True, master_listen_fd=listener.detach(), **options)


def connect_store(addr: str, port: int, timeout: float) -> TCPStore:
    """A client of the store at ``addr``; ``timeout`` of connecting and of each call, in seconds.

    Raises:
        RuntimeError: nobody answers.
    """
    return TCPStore(addr, port, is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False)


class LateArrivalError(ValueError):
    """The others had agreed before this process came, and have no place for it."""


def exchange_cards(
    store: Store,
    card: Card,
    num_cards: int,
    timeout: float,
    find_problem: Callable[[list[Card]], str | None],
    describe_missing: Callable[[str, list[Card]], str],
    on_wait: Callable[[str], None],
) -> list[Card]:
    """Every process's card, in order of arrival; ``card["index"]`` 0 is the first process, which compares.

    ``find_problem`` is asked at each card that comes, with all cards so far.  ``on_wait`` is called once after
    a while, and ``describe_missing`` after ``timeout`` seconds, with the first few indices that did not come (and the
    cards that did).

    Raises:
        ValueError: the cards contradict each other, or some never came; the same text everywhere.
        LateArrivalError: the others agree, without this process.
        RuntimeError: the first process went away.
    """

    def collect_cards() -> tuple[list[Card], str]:
        """The cards, and "" when all came and agree, else what is wrong."""
        start, notified = time.monotonic(), False
        cards: list[Card] = []
        while True:
            # A process has its number a moment before its card is there.
            while len(cards) < store.add("count", 0) and store.check([f"card/{len(cards)}"]):
                cards.append(json.loads(store.get(f"card/{len(cards)}")))
                if problem := find_problem(cards):
                    return cards, problem
            waited = time.monotonic() - start
            if len(cards) >= num_cards:
                return cards, ""
            if waited > timeout:
                return cards, describe_missing(_list_missing(cards, num_cards), cards)
            if waited > 15 and not notified:
                on_wait(_list_missing(cards, num_cards))
                notified = True
            time.sleep(0.02)

    number = store.add("count", 1) - 1
    store.set(f"card/{number}", json.dumps(card))
    if card["index"] == 0:
        cards, problem = collect_cards()
        store.set("verdict", json.dumps([cards, problem]))
        if problem:
            # The store ends with this process: wait until all have read what is wrong, those too who are still to come.
            # One that finds no store would wait for it as long as it may, and then say something else.
            wait_until(
                lambda: store.add("read", 0) >= max(store.add("count", 0), num_cards) - 1, _READ_TIMEOUT, interval=0.02
            )
    else:
        _wait_for_key(store, "verdict", timeout + _READ_TIMEOUT)
        cards, problem = json.loads(store.get("verdict"))
        store.add("read", 1)
        if not problem and number >= num_cards:
            raise LateArrivalError(find_problem([*cards, card]) or "all had come before this one")
    if problem:
        raise ValueError(problem)
    return cards


def _wait_for_key(store: Store, key: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            return store.wait([key], timedelta(seconds=_WAIT_SLICE))
        except DistStoreError:
            if time.monotonic() > deadline:
                raise


def _list_missing(cards: list[Card], num_cards: int) -> str:
    """The first few indices of which there is no card."""
    missing = sorted(set(range(num_cards)) - {card["index"] for card in cards})
    return ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")


def rendezvous(info: RankInfo, addr: str, port: int, timeout: float, on_wait: Callable[[str], None]) -> Store:
    """The store that all ranks of the job share, after they have compared what they believe; ``timeout`` in seconds.

    Raises:
        ValueError: the ranks contradict each other, rank 0 cannot be reached, or some never come; alike on
            every rank that came.
    """
    names, hostname = get_launcher_variables(info.source), socket.gethostname()
    if info.rank == 0:
        store = serve_store(_bind_rank0(info, names, addr, port), timeout)
    else:
        try:
            store = connect_store(addr, port, timeout)
        except RuntimeError as error:
            raise ValueError(
                f"rank {info.rank} on {hostname}: nobody answers at MASTER_ADDR={addr}, MASTER_PORT={port} within "
                f"{timeout:.0f} s: set both to where {names['rank']}=0 runs, and let the port through the firewall"
            ) from error

    def find_problem(cards: list[Card]) -> str | None:
        problem = find_mismatch(cards, names)
        return problem or (find_local_size_mismatch(cards, names) if len(cards) == info.world_size else None)

    def describe_missing(missing: str, cards: list[Card]) -> str:
        hosts = ", ".join(sorted({card["host"] for card in cards}))
        return (
            f"{names['world_size']}={info.world_size}, but {names['rank']} {missing} "
            f"did not come within {timeout:.0f} s (ranks came from {hosts}): start them, with MASTER_ADDR and "
            f"MASTER_PORT as here, or set {names['world_size']} to the number that there is"
        )

    try:
        card = {
            "index": info.rank,
            "host": hostname,
            "machine": f"{hostname} {boot_id()}",  # two machines may bear one name
            "pid": os.getpid(),
            "world_size": info.world_size,
            "local_rank": info.local_rank,
            "local_world_size": info.local_world_size,
        }
        known = PrefixStore("cards", store), card, info.world_size, timeout
        exchange_cards(*known, find_problem, describe_missing, lambda missing: on_wait(f"waiting for rank {missing}"))
    except RuntimeError as error:
        raise ValueError(
            f"rank {info.rank} on {hostname}: {names['rank']}=0 exited during rendezvous; see its error"
        ) from error
    return store


def _bind_rank0(info: RankInfo, names: dict[str, str], addr: str, port: int) -> socket.socket:
    rank0, multi_node = f"{names['rank']}=0 on {socket.gethostname()}", info.local_world_size < info.world_size
    try:
        in_kubernetes = "KUBERNETES_SERVICE_HOST" in os.environ
        return bind_listener(addr, port, multi_node=multi_node, allow_foreign=in_kubernetes)
    except socket.gaierror as error:
        raise ValueError(
            f"MASTER_ADDR={addr} on {socket.gethostname()} cannot be resolved ({error}): set it to an address"
        ) from error
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(
                f"{rank0}, but MASTER_ADDR={addr} is no address of this host: set {names['rank']} or MASTER_ADDR right"
            ) from error
        raise ValueError(
            f"{rank0} cannot listen on MASTER_PORT={port} ({os.strerror(error.errno or 0)}): another job has it, "
            f"or another process has {names['rank']}=0 too; set MASTER_PORT to a free one"
        ) from error


def find_mismatch(cards: list[Card], names: dict[str, str]) -> str | None:
    """What the newest rank's card contradicts, with the variable and both hosts."""
    card = cards[-1]
    for other in cards[:-1]:
        if card["world_size"] != other["world_size"]:
            return (
                f"{names['world_size']}={other['world_size']} on {other['host']} (rank {other['index']}) and "
                f"{names['world_size']}={card['world_size']} on {card['host']} (rank {card['index']}): set it alike "
                "everywhere"
            )
        if card["index"] == other["index"]:
            return (
                f"{names['rank']}={card['index']} on {other['host']} (process {other['pid']}) and on {card['host']} "
                f"(process {card['pid']}): number the ranks from 0 to {card['world_size'] - 1}, each once"
            )
        if card["machine"] == other["machine"] and card["local_rank"] == other["local_rank"]:
            return (
                f"{names['local_rank']}={card['local_rank']} on {card['host']} for rank {other['index']} and for rank "
                f"{card['index']}: number the ranks of a host from 0, each once"
            )
    return None


def find_local_size_mismatch(cards: list[Card], names: dict[str, str]) -> str | None:
    """A local world size that is not the number of ranks on its host."""
    for card in cards:
        count = sum(other["machine"] == card["machine"] for other in cards)
        if card["local_world_size"] != count:
            return (
                f"{names['local_world_size']}={card['local_world_size']} on {card['host']} (rank {card['index']}), "
                f"where {count} {'rank runs' if count == 1 else 'ranks run'}: set it to {count}"
            )
    return None
