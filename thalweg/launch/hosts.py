"""Hostfiles and the --include/--exclude filters, as far as one host goes.

A hostfile has a line ``host slots=N`` for each host; a filter is ``host:0,2@other:1``, as DeepSpeed's
launcher reads them.  A job over more than one host is refused here, before anything starts.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"^(?P<host>\S+)(?:\s+slots=(?P<slots>\d+))?$")
_ONE_HOST = "jobs over several hosts are not built yet; leave it out to run on this host alone"


@dataclass(frozen=True)
class Slots:
    """The device slots of this host that a job takes: their number, and which, where a filter named them."""

    count: int
    chosen: tuple[int, ...] | None = None


def is_this_host(name: str) -> bool:
    """Whether ``name`` is this machine."""
    return name.startswith("127.") or name in (
        "localhost",
        "::1",
        socket.gethostname(),
        socket.gethostname().partition(".")[0],
    )


def read_hostfile(path: Path) -> int | None:
    """Slots of the one host in the file, which must be this one; None where it does not say.

    Raises ``ValueError`` for a malformed line, an empty file, or any other host.
    """
    hosts: dict[str, int | None] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.match(text)
        if match is None:
            raise ValueError(f"{path}, line {number}: {text!r} is not `host slots=N`")
        if match["host"] in hosts:
            raise ValueError(
                f"{path}, line {number}: {match['host']} is there twice; give each host one line"
            )
        hosts[match["host"]] = int(match["slots"]) if match["slots"] else None
    if not hosts:
        raise ValueError(f"{path} names no host: add `localhost slots=N`, or leave out --hostfile")
    strangers = [host for host in hosts if not is_this_host(host)]
    if len(hosts) > 1 or strangers:
        raise ValueError(f"--hostfile {path} names {', '.join(hosts)}: {_ONE_HOST}")
    return next(iter(hosts.values()))


def select_slots(slots: int | None, include: str | None, exclude: str | None) -> Slots | None:
    """Apply ``--include`` or ``--exclude`` to this host's ``slots``; None when there is neither and no count.

    Raises ``ValueError`` for both at once, other hosts, or slots that are not there.
    """
    if include is not None and exclude is not None:
        raise ValueError("--include and --exclude say the same thing twice: give one of them")
    if include is None and exclude is None:
        return None if slots is None else Slots(slots)
    flag, text = ("--include", include) if include is not None else ("--exclude", exclude or "")
    named = _parse_filter(flag, text)
    if flag == "--include":
        if named is None:
            return None if slots is None else Slots(slots)
        chosen = named
    else:
        if slots is None:
            raise ValueError(
                "--exclude needs to know how many slots there are: add --hostfile, or use --include"
            )
        chosen = tuple(slot for slot in range(slots) if named is not None and slot not in named)
    if slots is not None and (beyond := [slot for slot in (named or ()) if slot >= slots]):
        raise ValueError(f"{flag} {text} names slot {beyond[0]}, but this host has slots 0 to {slots - 1}")
    if not chosen:
        raise ValueError(f"{flag} {text} leaves no slot to run on")
    return Slots(len(chosen), chosen)


def _parse_filter(flag: str, text: str) -> tuple[int, ...] | None:
    host, _, slots = text.partition(":")
    if "@" in text or not is_this_host(host):
        raise ValueError(f"{flag} {text} names another host: {_ONE_HOST}")
    if not slots:
        return None
    if re.fullmatch(r"\d+(,\d+)*", slots) is None:
        raise ValueError(f"{flag} {text} is not `localhost:0,1`")
    return tuple(sorted({int(slot) for slot in slots.split(",")}))
