"""How the hosts of a job meet, notice that one is lost, and tell each other why.

torch's part: its static rendezvous, which says who is who and leaves joining to others, as all hosts have numbers.
Ours is what that and torch's agent do not do (torch 2.13):

- **Ending the job.**  torch's agent asks how many hosts wait to join, never whether another host failed or fell
  silent: ranks that compute or sleep would run on, those in a collective until its timeout (gloo: 30 minutes).
  :meth:`NodeRendezvous.num_nodes_waiting`, which the agent calls every 50 ms, asks that instead.  A failed host is
  noticed after 1 to 2 s, a silent one after 5 to 7 s.
- **Heartbeats without clocks.**  Each host adds one to a number of its own in the store, again and again.  A host is
  silent when its number has not changed for ``heartbeat_timeout`` seconds of our own monotonic clock, whatever its
  clock says.
- **No pickle.**  What hosts write for each other are numbers and JSON: who reaches the port runs no code by it.
- **One address.**  torch opens stores that listen on every interface; here one store on one address serves the
  hosts and their ranks (``MASTER_ADDR``, ``MASTER_PORT``).
- **Contradictions.**  Two hosts with one number, other numbers of hosts, another script or version are one error
  everywhere, before a rank has started (:func:`join_nodes`).
- **Starting anew.**  One store serves all starts of a job: each has its number, host 0 opens it
  (:func:`_open_start`), and a host that comes early waits for that.
- **One report.**  All launchers of a job end with the first failure's report (:meth:`NodeRendezvous.finish`), which is
  also what says that the job is over.

torch's private names are touched here and in ``elastic_agent.py`` alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from thalweg import __version__
from thalweg.launch.failure import JobResult
from thalweg.launch.spec import LocalJob
from thalweg.utils import rendezvous
from thalweg.utils.rendezvous import Card
from thalweg.utils.timing import wait_until

RUN_ID = "thalweg"
STORE_TIMEOUT = 600.0  # seconds
_START = "thalweg-start"  # what keys of ours begin with; those of ranks do not
_CONNECT_TIMEOUT = 60.0  # seconds for a second line to a store that has answered once
_STARTUP_SECONDS = 60.0  # seconds from the start in which a launcher too many ends the job
_MUST_MATCH = {  # what every host must say alike, and what sets it
    "num_nodes": "--num-nodes",
    "target": "the script",
    "max_restarts": "--max-restarts",
    "thalweg": "thalweg's version",
    "torch": "torch's version",
}
T = TypeVar("T")


@dataclass(frozen=True)
class NodeSpec:
    """Which host of a job this is; host 0 listens at ``addr`` and ``port``, on ``listener``."""

    node_rank: int
    num_nodes: int
    addr: str
    port: int
    listener: socket.socket | None = None
    join_timeout: float = 600.0  # seconds to wait for hosts that are started by hand
    heartbeat_timeout: float = 5.0  # seconds without a heartbeat after which a host is gone
    has_launcher: bool = False  # one elsewhere stops this host with a signal, and knows why


class JobEndedError(RuntimeError):
    """Another host ended the job, or is gone; ``silent_node`` is the number of the one that is gone."""

    def __init__(self, silent_node: int | None = None) -> None:
        super().__init__()
        self.silent_node = silent_node


def in_thread(call: Callable[[], T]) -> Future[T]:
    """What ``call`` will return: torch's store waits in C++, on a dead line for minutes, and hears no signal there."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def bind_master(addr: str, port: int = 0, *, multi_node: bool = False) -> socket.socket:
    """The socket on which host 0 listens (``port`` 0: a free one).

    Raises:
        ValueError: the port is taken, or the name is unknown; the message has the cure.
    """
    try:
        return rendezvous.bind_listener(addr, port, multi_node=multi_node, allow_foreign=True)
    except socket.gaierror as error:
        raise ValueError(f"{addr} cannot be resolved ({error}): give --master-addr an address") from error
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had ({os.strerror(error.errno or 0)})"
        raise ValueError(f"port {port} of {addr} {reason}: leave out --master-port to get a free one") from error


def open_local_rendezvous(addr: str, port: int) -> StaticTCPRendezvous:
    """torch's static rendezvous for a job of one host; its store listens on ``addr`` (``port`` 0: a free one)."""
    store = rendezvous.serve_store(bind_master(addr, port), STORE_TIMEOUT)
    handler = StaticTCPRendezvous(addr, store.port, 0, 1, RUN_ID, int(STORE_TIMEOUT))
    handler._store = store  # torch's would listen on every interface
    return handler


def describe_host(job: LocalJob) -> Card:
    """What this host says of itself to the others."""
    own = {"host": socket.gethostname(), "nproc": job.nproc, "torch": torch.__version__, "thalweg": __version__}
    return {**own, "target": job.spec.target, "max_restarts": job.spec.max_restarts}


def _open_start(store: Store, restart: int) -> int:
    """Let the hosts into start ``restart``, without what the ranks of the last one left: theirs has the same names."""
    for key in store.list_keys() if restart else ():
        if not key.startswith(_START):
            store.delete_key(key)
    store.set(f"{_START}/number", str(restart))
    return restart


def _wait_for_start(store: Store, timeout: float) -> int:
    """The number of the start that host 0 has opened and that has not ended."""
    key = f"{_START}/number"

    def is_open() -> bool:
        return store.check([key]) and not store.check([f"{_START}/{store.get(key).decode()}/end/result"])

    if not wait_until(is_open, timeout):
        raise ValueError(f"--node-rank 0 did not come within {timeout:.0f} s: start `thalweg run` there too")
    return int(store.get(key))


def join_nodes(node: NodeSpec, card: Card, restart: int = 0, store: Store | None = None) -> NodeRendezvous:
    """Meet the other launchers and compare ``card`` with theirs.

    Host 0 opens start ``restart`` of the job on its ``store``; the others take its number.

    Raises:
        ValueError: two hosts claim one place, contradict each other, one never comes or host 0 cannot be reached.
    """
    card = {**card, "index": node.node_rank, "num_nodes": node.num_nodes}
    try:
        store = store or in_thread(lambda: rendezvous.connect_store(node.addr, node.port, node.join_timeout)).result()
    except RuntimeError as error:
        raise ValueError(
            f"{socket.gethostname()} cannot reach {node.addr}, port {node.port}, where the first host of the job "
            "listens: check --master-addr and --master-port, and that a firewall lets it through"
        ) from error

    def notify(missing: str) -> None:
        sys.stderr.write(f"thalweg run: waiting for --node-rank {missing}\n")

    def describe_missing(missing: str, cards: list[Card]) -> str:
        return (
            f"--node-rank {missing} did not come within {node.join_timeout:.0f} s: start "
            f"`thalweg run` there too, with --master-addr {node.addr} --master-port {node.port}"
        )

    try:
        restart = _wait_for_start(store, node.join_timeout) if node.node_rank else _open_start(store, restart)
        known = PrefixStore(f"{_START}/{restart}/cards", store), card, node.num_nodes, node.join_timeout
        cards = rendezvous.exchange_cards(*known, find_mismatch, describe_missing, notify)
    except rendezvous.LateArrivalError as error:
        nodes = NodeRendezvous(node, [card], store, restart)
        # It may come for one that was killed: then the others miss that soon, and a job that starts anew has a place.
        if card["max_restarts"] and wait_until(nodes.is_closed, 3 * node.heartbeat_timeout, interval=0.1):
            return join_nodes(node, card)
        if not nodes.is_under_way():  # a job that is is not stopped by a stray launcher
            nodes._end_with(JobResult(2, f"thalweg run: {error}\n"))
        raise
    except RuntimeError as error:
        raise ValueError(
            f"{card['host']} lost its line to the first host of the job, at {node.addr}, port {node.port}, before "
            "all hosts had come: see what that host says"
        ) from error
    nodes = NodeRendezvous(node, sorted(cards, key=lambda one: one["index"]), store, restart)
    nodes._heart.start()
    return nodes


def find_mismatch(cards: list[Card]) -> str | None:
    """What is wrong between hosts, in one sentence with the option and both hosts; None if nothing is."""
    card = cards[-1]
    for other in cards[:-1]:
        if other["index"] == card["index"]:
            return (
                f"--node-rank {card['index']} is given on {other['host']} and on {card['host']}: number the hosts "
                f"from 0 to {card['num_nodes'] - 1}, each once"
            )
        for key, option in _MUST_MATCH.items():
            if other.get(key) != card.get(key):
                return (
                    f"{option} is {other.get(key)} on {other['host']} and {card.get(key)} on {card['host']}: "
                    "make them equal"
                )
    return None


class NodeRendezvous(StaticTCPRendezvous):
    """The hosts of ``cards`` (by their numbers), for torch's agent; ends when one of them does."""

    def __init__(self, node: NodeSpec, cards: list[Card], store: Store, restart: int) -> None:
        super().__init__(node.addr, node.port, node.node_rank, node.num_nodes, RUN_ID, int(STORE_TIMEOUT))
        self._node, self._cards, self.restart = node, cards, restart
        self._control_store = PrefixStore(f"{_START}/{restart}", store)
        self._interval = node.heartbeat_timeout / 5
        self._beats = [0] * node.num_nodes  # by host, as last read
        self._changes: dict[int, tuple[int, float]] = {}  # by host: its beats, and when we saw them change
        self._silent: set[int] = set()
        self._has_ended, self._stopped = False, threading.Event()
        self._heart = threading.Thread(target=self._send_heartbeats, name="thalweg-heartbeat", daemon=True)

    @property
    def num_ranks(self) -> int:
        """Ranks of all hosts."""
        return sum(card["nproc"] for card in self._cards)

    def next_rendezvous(self) -> RendezvousInfo:
        """The agent gets a connection of its own, as its barrier would hold up the heartbeats on ours."""
        store = rendezvous.connect_store(self._node.addr, self._node.port, _CONNECT_TIMEOUT)
        self._store = PrefixStore(f"{_START}/{self.restart}", store)
        return super().next_rendezvous()

    def _send_heartbeats(self) -> None:
        """Show the others that this host lives, until :meth:`shutdown`."""
        with contextlib.suppress(RuntimeError):  # the line is lost for good: our own beats no longer change
            while True:
                self._control_store.add(f"beats/{self._node.node_rank}", 1)
                self._beats = [self._control_store.add(f"beats/{rank}", 0) for rank in range(self._node.num_nodes)]
                self._has_ended = self.is_closed()
                if self._stopped.wait(self._interval):
                    return

    def is_under_way(self) -> bool:
        """Whether the job started a while ago, by the beats of host 0."""
        return self._control_store.add("beats/0", 0) * self._interval > _STARTUP_SECONDS

    def is_closed(self) -> bool:
        """Whether some host has ended the job."""
        return self._control_store.check(["end/result"])

    def num_nodes_waiting(self) -> int:
        """0: hosts do not join later.  Called every 50 ms by the agent; looks at what the heartbeats brought.

        Raises:
            JobEndedError: another host ended the job, or is silent.
        """
        own, now = self._node.node_rank, time.monotonic()
        if self._has_ended:
            raise JobEndedError
        for rank, beats in enumerate(self._beats):
            if self._changes.get(rank, (None, now))[0] != beats:
                self._changes[rank] = (beats, now)
        silent = {rank for rank, (_, when) in self._changes.items() if now - when > self._node.heartbeat_timeout}
        if own in silent and own == 0:
            self._changes.clear()  # the store is our own: this process was suspended
        elif own in silent:
            raise JobEndedError(0)  # our own heartbeat does not arrive in host 0's store
        elif silent:
            self._silent = silent
            raise JobEndedError(min(silent))
        return 0

    def shutdown(self) -> bool:
        """Stop the heartbeats; a thread that is in C++ while the interpreter ends aborts the process."""
        self._stopped.set()
        self._heart.join(2.0)
        return not self._heart.is_alive()

    def lost_result(self, node_rank: int) -> JobResult:
        """The report of a host that is gone."""
        card, first = self._cards[node_rank], sum(one["nproc"] for one in self._cards[:node_rank])
        ranks = f"rank {first}" if card["nproc"] == 1 else f"ranks {first} to {first + card['nproc'] - 1}"
        text = (
            f"thalweg run: host {card['host']} ({ranks}) is gone: no sign of life for "
            f"{self._node.heartbeat_timeout:.0f} s; the ranks of the other hosts were stopped\n"
        )
        # Where host 0 is lost it may be this host that was cut off; the others know.
        return JobResult(1, text, is_certain=node_rank != 0, can_restart=True, lost_node=node_rank)

    def finish(self, result: JobResult | None, wait: float) -> JobResult | None:
        """Tell the others that the job has failed; returns the job's one result, None where nobody knows it.

        ``result`` is this host's, None where its ranks were only stopped.  A certain one is the job's unless
        there is one; else another host's is waited for, ``wait`` seconds.  Host 0, whose store it is, stays
        until the others have read it.
        """
        with contextlib.suppress(Exception):  # host 0 and its store are gone, or the line is dead
            return in_thread(lambda: self._agree(result, wait)).result(2 * wait + 2.0)
        return result

    def _agree(self, result: JobResult | None, wait: float) -> JobResult | None:
        store = self._control_store
        wait_until(lambda: (result and result.is_certain) or self.is_closed(), wait)
        if result is not None:
            result = self._end_with(result)
        elif self.is_closed():
            result = JobResult(*json.loads(store.get("end/result")))
        else:
            return None
        store.add("end/read", 1)
        if self._node.node_rank == 0:
            wait_until(lambda: store.add("end/read", 0) >= self._node.num_nodes - len(self._silent), wait)
        return result

    def _end_with(self, result: JobResult) -> JobResult:
        """Make ``result`` the job's unless there is one, and end the job; returns the job's."""
        text = json.dumps([result.exit_code, result.report, True, result.can_restart, result.lost_node])
        return JobResult(*json.loads(self._control_store.compare_set("end/result", "", text)))
