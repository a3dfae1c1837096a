"""Every rank says who it thinks it is before any of them waits for the others.

Ranks that were started by hand, by Kubernetes or by a scheduler may disagree: two with one RANK, another
WORLD_SIZE on one host, a MASTER_PORT that nobody listens on.  torch then waits, for half an hour, without a
word.  Here each rank lays a card in rank 0's store, rank 0 compares the cards as they come, and all ranks
raise the same one error, which names the variable, the values and the hosts.

Rank 0's store listens on MASTER_ADDR alone.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from thalweg.utils.env import RankInfo, get_launcher_variables

_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
_RESULT_TIMEOUT = 5.0  # seconds for the last words of rank 0 to be read
RankMessage = dict[str, Any]


def rendezvous(info: RankInfo, addr: str, port: int, timeout: float, on_wait: Callable[[str], None]) -> Store:
    """The store that all ranks of the job share, after a roll call; ``patience`` in seconds.

    Raises:
        ValueError: the ranks contradict each other, rank 0 cannot be reached, or some never come; alike on
            every rank that came.
    """
    names, hostname = get_launcher_variables(info.source), socket.gethostname()
    store_timeout = timedelta(seconds=timeout)
    if info.rank == 0:
        listener = _bind_listener(info, names, addr, port)
        bound_address = listener.getsockname()
        host = "localhost" if bound_address[0] in ("0.0.0.0", "::") else bound_address[0]
        server = TCPStore(
            host,
            bound_address[1],
            is_master=True,
            timeout=store_timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        store: Store = server
    else:
        try:
            store = TCPStore(addr, port, is_master=False, timeout=store_timeout, wait_for_workers=False)
        except RuntimeError as error:
            raise ValueError(
                f"rank {info.rank} on {hostname}: nobody answers at MASTER_ADDR={addr}, MASTER_PORT={port} "
                "within "
                f"{timeout:.0f} s: set both to where {names['rank']}=0 runs, and let the port through "
                "the firewall"
            ) from error
    messages_store = PrefixStore("roll", store)
    message_index = messages_store.add("count", 1) - 1
    messages_store.set(f"card/{message_index}", json.dumps(_rank_message(info, hostname)))
    if info.rank == 0:
        problem = _collect_messages(messages_store, info, names, timeout, on_wait)
        messages_store.set("verdict", problem)
        if problem:
            _wait_for_readers(messages_store, info.world_size)
    else:
        problem = _wait_result(messages_store, info, names, hostname, timeout)
        messages_store.add("read", 1)
        if not problem and message_index >= info.world_size:  # the roll was full before this rank came
            messages = [json.loads(messages_store.get(f"card/{n}")) for n in range(message_index + 1)]
            problem = find_mismatch(messages, names) or ""
    if problem:
        raise ValueError(problem)
    return store


def _rank_message(info: RankInfo, hostname: str) -> RankMessage:
    try:
        boot_id = _BOOT_ID_FILE.read_text().strip()
    except OSError:
        boot_id = ""
    return {
        "host": hostname,
        "machine": f"{hostname} {boot_id}",  # two machines may bear one name
        "pid": os.getpid(),
        "rank": info.rank,
        "world_size": info.world_size,
        "local_rank": info.local_rank,
        "local_world_size": info.local_world_size,
    }


def _bind_listener(info: RankInfo, names: dict[str, str], addr: str, port: int) -> socket.socket:
    hostname = socket.gethostname()
    try:
        family, kind, proto, _, bind_address = socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(
            f"MASTER_ADDR={addr} on {hostname} cannot be resolved ({error}): set it to an address"
        ) from error
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if info.local_world_size < info.world_size and str(bind_address[0]).startswith(("127.", "::1")):
        bind_address = ("", port)  # a name that means this host here and its true address elsewhere
    try:
        listener.bind(bind_address)
    except OSError as error:
        not_this_host = error.errno == 99  # EADDRNOTAVAIL
        if not_this_host and "KUBERNETES_SERVICE_HOST" in os.environ:  # a service's address, which leads here
            listener.bind(("", port))
            return listener
        listener.close()
        if not_this_host:
            raise ValueError(
                f"{names['rank']}=0 on {hostname}, but MASTER_ADDR={addr} is no address of this host: set "
                f"{names['rank']} or MASTER_ADDR right"
            ) from error
        raise ValueError(
            f"{names['rank']}=0 on {hostname} cannot listen on MASTER_PORT={port} "
            f"({os.strerror(error.errno or 0)}): "
            f"another job has it, or another process has {names['rank']}=0 too; set MASTER_PORT to a free one"
        ) from error
    return listener


def _collect_messages(
    messages_store: Store,
    info: RankInfo,
    names: dict[str, str],
    timeout: float,
    on_wait: Callable[[str], None],
) -> str:
    """Rank 0 reads the cards as they come; "" when all are there and agree, else what is wrong."""
    start, notified = time.monotonic(), False
    messages: list[RankMessage] = []
    while True:
        while len(messages) < messages_store.add("count", 0) and messages_store.check([f"card/{len(messages)}"]):
            messages.append(json.loads(messages_store.get(f"card/{len(messages)}")))
            if problem := find_mismatch(messages, names):
                return problem
        if len(messages) >= info.world_size:
            return find_local_size_mismatch(messages, names) or ""
        waited = time.monotonic() - start
        missing = sorted(set(range(info.world_size)) - {card["rank"] for card in messages})
        text = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        if waited > timeout:
            hosts = ", ".join(sorted({card["host"] for card in messages}))
            return (
                f"{names['world_size']}={info.world_size}, but {names['rank']} {text} did not come within "
                f"{timeout:.0f} s (ranks came from {hosts}): start them, with MASTER_ADDR and MASTER_PORT "
                "as here, or "
                f"set {names['world_size']} to the number that there is"
            )
        if waited > 30 and not notified:
            on_wait(f"waiting for rank {text}")
            notified = True
        time.sleep(0.02)


def _wait_result(messages_store: Store, info: RankInfo, names: dict[str, str], hostname: str, timeout: float) -> str:
    try:
        messages_store.wait(["verdict"], timedelta(seconds=timeout + _RESULT_TIMEOUT))
        return messages_store.get("verdict").decode()
    except RuntimeError as error:
        raise ValueError(
            f"rank {info.rank} on {hostname}: {names['rank']}=0 went away before all ranks had come; its error says why"
        ) from error


def _wait_for_readers(messages_store: Store, world_size: int) -> None:
    """The store ends with rank 0: wait until all have read what is wrong, those too who are still to come.

    One that finds no store would wait for it with all its patience, and then say something else.
    """
    deadline = time.monotonic() + _RESULT_TIMEOUT
    while time.monotonic() < deadline:
        if messages_store.add("read", 0) >= max(messages_store.add("count", 0), world_size) - 1:
            return
        time.sleep(0.02)


def find_mismatch(messages: list[RankMessage], names: dict[str, str]) -> str | None:
    """What the newest card contradicts, with the variable and both hosts."""
    message = messages[-1]
    for other in messages[:-1]:
        if message["world_size"] != other["world_size"]:
            return (
                f"{names['world_size']}={other['world_size']} on {other['host']} (rank {other['rank']}) and "
                f"{names['world_size']}={message['world_size']} on {message['host']} (rank {message['rank']}): set "
                "it alike "
                "everywhere"
            )
        if message["rank"] == other["rank"]:
            return (
                f"{names['rank']}={message['rank']} on {other['host']} (process {other['pid']}) and on "
                f"{message['host']} "
                f"(process {message['pid']}): number the ranks from 0 to {message['world_size'] - 1}, each once"
            )
        if message["machine"] == other["machine"] and message["local_rank"] == other["local_rank"]:
            return (
                f"{names['local_rank']}={message['local_rank']} on {message['host']} for rank {other['rank']} "
                "and for rank "
                f"{message['rank']}: number the ranks of a host from 0, each once"
            )
    return None


def find_local_size_mismatch(messages: list[RankMessage], names: dict[str, str]) -> str | None:
    """A local world size that is not the number of ranks on its host."""
    for message in messages:
        count = sum(other["machine"] == message["machine"] for other in messages)
        if message["local_world_size"] != count:
            return (
                f"{names['local_world_size']}={message['local_world_size']} on {message['host']} (rank "
                f"{message['rank']}), where "
                f"{count} {'rank runs' if count == 1 else 'ranks run'}: set it to {count}"
            )
    return None
