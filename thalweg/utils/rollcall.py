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

from thalweg.utils.env import RankInfo, variables_of

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ANSWER = 5.0  # seconds for the last words of rank 0 to be read
Card = dict[str, Any]


def meet(info: RankInfo, addr: str, port: int, patience: float, note: Callable[[str], None]) -> Store:
    """The store that all ranks of the job share, after a roll call; ``patience`` in seconds.

    Raises:
        ValueError: the ranks contradict each other, rank 0 cannot be reached, or some never come; alike on
            every rank that came.
    """
    names, here = variables_of(info.source), socket.gethostname()
    limit = timedelta(seconds=patience)
    if info.rank == 0:
        listener = _listen(info, names, addr, port)
        own = listener.getsockname()
        where = "localhost" if own[0] in ("0.0.0.0", "::") else own[0]
        server = TCPStore(
            where,
            own[1],
            is_master=True,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        store: Store = server
    else:
        try:
            store = TCPStore(addr, port, is_master=False, timeout=limit, wait_for_workers=False)
        except RuntimeError as error:
            raise ValueError(
                f"rank {info.rank} on {here}: nobody answers at MASTER_ADDR={addr}, MASTER_PORT={port} "
                "within "
                f"{patience:.0f} s: set both to where {names['rank']}=0 runs, and let the port through "
                "the firewall"
            ) from error
    calls = PrefixStore("roll", store)
    number = calls.add("count", 1) - 1
    calls.set(f"card/{number}", json.dumps(_card(info, here)))
    if info.rank == 0:
        verdict = _call(calls, info, names, patience, note)
        calls.set("verdict", verdict)
        if verdict:
            _linger(calls, info.world_size)
    else:
        verdict = _wait(calls, info, names, here, patience)
        calls.add("read", 1)
        if not verdict and number >= info.world_size:  # the roll was full before this rank came
            cards = [json.loads(calls.get(f"card/{n}")) for n in range(number + 1)]
            verdict = contradiction(cards, names) or ""
    if verdict:
        raise ValueError(verdict)
    return store


def _card(info: RankInfo, here: str) -> Card:
    try:
        boot = _BOOT.read_text().strip()
    except OSError:
        boot = ""
    return {
        "host": here,
        "machine": f"{here} {boot}",  # two machines may bear one name
        "pid": os.getpid(),
        "rank": info.rank,
        "world_size": info.world_size,
        "local_rank": info.local_rank,
        "local_world_size": info.local_world_size,
    }


def _listen(info: RankInfo, names: dict[str, str], addr: str, port: int) -> socket.socket:
    here = socket.gethostname()
    try:
        family, kind, proto, _, where = socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(
            f"MASTER_ADDR={addr} on {here} cannot be resolved ({error}): set it to an address"
        ) from error
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if info.local_world_size < info.world_size and str(where[0]).startswith(("127.", "::1")):
        where = ("", port)  # a name that means this host here and its true address elsewhere
    try:
        listener.bind(where)
    except OSError as error:
        foreign = error.errno == 99  # EADDRNOTAVAIL
        if foreign and "KUBERNETES_SERVICE_HOST" in os.environ:  # a service's address, which leads here
            listener.bind(("", port))
            return listener
        listener.close()
        if foreign:
            raise ValueError(
                f"{names['rank']}=0 on {here}, but MASTER_ADDR={addr} is no address of this host: set "
                f"{names['rank']} or MASTER_ADDR right"
            ) from error
        raise ValueError(
            f"{names['rank']}=0 on {here} cannot listen on MASTER_PORT={port} "
            f"({os.strerror(error.errno or 0)}): "
            f"another job has it, or another process has {names['rank']}=0 too; set MASTER_PORT to a free one"
        ) from error
    return listener


def _call(
    calls: Store, info: RankInfo, names: dict[str, str], patience: float, note: Callable[[str], None]
) -> str:
    """Rank 0 reads the cards as they come; "" when all are there and agree, else what is wrong."""
    began, told = time.monotonic(), False
    cards: list[Card] = []
    while True:
        while len(cards) < calls.add("count", 0) and calls.check([f"card/{len(cards)}"]):
            cards.append(json.loads(calls.get(f"card/{len(cards)}")))
            if problem := contradiction(cards, names):
                return problem
        if len(cards) >= info.world_size:
            return uneven(cards, names) or ""
        waited = time.monotonic() - began
        missing = sorted(set(range(info.world_size)) - {card["rank"] for card in cards})
        text = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        if waited > patience:
            came = ", ".join(sorted({card["host"] for card in cards}))
            return (
                f"{names['world_size']}={info.world_size}, but {names['rank']} {text} did not come within "
                f"{patience:.0f} s (ranks came from {came}): start them, with MASTER_ADDR and MASTER_PORT "
                "as here, or "
                f"set {names['world_size']} to the number that there is"
            )
        if waited > 30 and not told:
            note(f"waiting for rank {text}")
            told = True
        time.sleep(0.02)


def _wait(calls: Store, info: RankInfo, names: dict[str, str], here: str, patience: float) -> str:
    try:
        calls.wait(["verdict"], timedelta(seconds=patience + _ANSWER))
        return calls.get("verdict").decode()
    except RuntimeError as error:
        raise ValueError(
            f"rank {info.rank} on {here}: {names['rank']}=0 went away before all ranks had come; its "
            "error says why"
        ) from error


def _linger(calls: Store, world_size: int) -> None:
    """The store ends with rank 0: wait until all have read what is wrong, those too who are still to come.

    One that finds no store would wait for it with all its patience, and then say something else.
    """
    deadline = time.monotonic() + _ANSWER
    while time.monotonic() < deadline:
        if calls.add("read", 0) >= max(calls.add("count", 0), world_size) - 1:
            return
        time.sleep(0.02)


def contradiction(cards: list[Card], names: dict[str, str]) -> str | None:
    """What the newest card contradicts, with the variable and both hosts."""
    card = cards[-1]
    for other in cards[:-1]:
        if card["world_size"] != other["world_size"]:
            return (
                f"{names['world_size']}={other['world_size']} on {other['host']} (rank {other['rank']}) and "
                f"{names['world_size']}={card['world_size']} on {card['host']} (rank {card['rank']}): set "
                "it alike "
                "everywhere"
            )
        if card["rank"] == other["rank"]:
            return (
                f"{names['rank']}={card['rank']} on {other['host']} (process {other['pid']}) and on "
                f"{card['host']} "
                f"(process {card['pid']}): number the ranks from 0 to {card['world_size'] - 1}, each once"
            )
        if card["machine"] == other["machine"] and card["local_rank"] == other["local_rank"]:
            return (
                f"{names['local_rank']}={card['local_rank']} on {card['host']} for rank {other['rank']} "
                "and for rank "
                f"{card['rank']}: number the ranks of a host from 0, each once"
            )
    return None


def uneven(cards: list[Card], names: dict[str, str]) -> str | None:
    """A local world size that is not the number of ranks on its host."""
    for card in cards:
        count = sum(other["machine"] == card["machine"] for other in cards)
        if card["local_world_size"] != count:
            return (
                f"{names['local_world_size']}={card['local_world_size']} on {card['host']} (rank "
                f"{card['rank']}), where "
                f"{count} {'rank runs' if count == 1 else 'ranks run'}: set it to {count}"
            )
    return None
