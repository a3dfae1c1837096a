"""Which hosts a job takes, and which of their slots: hostfiles and the --include/--exclude filters.

A hostfile has a line ``host slots=N`` for each host (``user@host`` too; without ``slots`` the host counts its
own devices).  A filter is ``host:0,2@other`` as DeepSpeed's launcher reads it: hosts joined by ``@``, each
with slots or as a whole.  Names come from files and command lines, so they are checked before anybody hands
them to another program.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_HOST_LINE = re.compile(r"^(?P<host>\S+)(?:\s+slots=(?P<slots>\d+))?(?:\s+max[-_]slots=\d+)?$")
_HOSTNAME = re.compile(
    r"^(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?(?:[A-Za-z0-9_][A-Za-z0-9_.-]*|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.%a-z]*)$"
)
_MAX_SLOTS = 65536  # of one host
_SLOT_LIST = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


@dataclass(frozen=True)
class Host:
    """A host of the job; ``slots`` None: as many as it has devices.  ``chosen``: the slots that a filter
    names."""

    name: str
    slots: int | None = None
    chosen: tuple[int, ...] | None = None

    @property
    def num_slots(self) -> int | None:
        """Slots to use, where that is known."""
        return self.slots if self.chosen is None else len(self.chosen)

    @property
    def address(self) -> str:
        """The name without a user."""
        return self.name.rpartition("@")[2]


def is_this_host(name: str) -> bool:
    """Whether ``name`` is this machine."""
    return name.startswith("127.") or name in (
        "localhost",
        "::1",
        socket.gethostname(),
        socket.gethostname().partition(".")[0],
    )


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of the file in its order, which is that of the ranks.

    Raises ``ValueError`` for a malformed line or name, a host that is there twice, or an empty file.
    """
    hosts: dict[str, Host] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _HOST_LINE.match(text)
        if match is None:
            raise ValueError(f"{path}, line {number}: {text!r} is not `host slots=N`")
        name = check_hostname(match["host"], f"{path}, line {number}")
        if any(Host(name).address == host.address for host in hosts.values()):
            raise ValueError(f"{path}, line {number}: {name} is there twice; give each host one line")
        hosts[name] = Host(name, int(match["slots"]) if match["slots"] else None)
    usable = {name: host for name, host in hosts.items() if host.slots != 0}
    if not usable:
        raise ValueError(f"{path} names no host: add `localhost slots=N`, or leave out --hostfile")
    return tuple(usable.values())


def check_hostname(name: str, where: str) -> str:
    """``name`` if it can be a host's; a name such as ``-oProxyCommand=x`` or ``a;b`` is refused."""
    if _HOSTNAME.fullmatch(name) is None:  # `match` would let a line feed at the end pass
        raise ValueError(f"{where}: {name!r} is not a host's name: letters, digits, dots and dashes")
    return name


def filter_hosts(hosts: Sequence[Host], include: str | None, exclude: str | None) -> tuple[Host, ...]:
    """Apply ``--include`` or ``--exclude``; ``hosts`` empty means this host alone, with unknown slots.

    Raises ``ValueError`` for both at once, unknown hosts, slots that are not there, or nothing left.
    """
    if include is not None and exclude is not None:
        raise ValueError("--include and --exclude say the same thing twice: give one of them")
    if include is None and exclude is None:
        return tuple(hosts)
    flag, text = ("--include", include) if include is not None else ("--exclude", exclude or "")
    filters = _parse_filter(flag, text)
    known = {host.name: host for host in hosts} or _hosts_from_filters(flag, filters)
    for name, slots in filters.items():
        if _find_host(known, name) is None:
            raise ValueError(f"{flag} {text} names {name}, which is not in the hostfile: {', '.join(known)}")
        host = known[_find_host(known, name) or name]
        if slots is not None and host.slots is not None and (out_of_range := [s for s in slots if s >= host.slots]):
            raise ValueError(f"{flag} {text} names slot {out_of_range[0]}, but {name} has slots 0 to {host.slots - 1}")
    named = {_find_host(known, name) or name: slots for name, slots in filters.items()}
    if flag == "--include":
        chosen = [
            host if named[name] is None else replace(host, chosen=named[name])
            for name, host in known.items()
            if name in named
        ]
    else:
        chosen = [
            left for name, host in known.items() if (left := _exclude_slots(host, name in named, named.get(name)))
        ]
    if not chosen:
        raise ValueError(f"{flag} {text} leaves no slot to run on")
    return tuple(chosen)


def _find_host(known: Mapping[str, Host], name: str) -> str | None:
    """The key of ``name``: itself, the same host with a user, or another name of this host."""
    for key, host in known.items():
        if name in (key, host.address) or (is_this_host(name) and is_this_host(host.address)):
            return key
    return None


def _hosts_from_filters(flag: str, filters: Mapping[str, tuple[int, ...] | None]) -> dict[str, Host]:
    if flag == "--exclude":
        raise ValueError("--exclude needs to know what there is: add --hostfile, or use --include")
    return {name: Host(name) for name in filters}


def _exclude_slots(host: Host, named: bool, slots: tuple[int, ...] | None) -> Host | None:
    """What is left of a host after ``--exclude``."""
    if not named:
        return host
    if slots is None:
        return None
    if host.slots is None:
        raise ValueError(f"--exclude {host.name}:...: the hostfile does not say how many slots it has")
    remaining = tuple(slot for slot in range(host.slots) if slot not in slots)
    return replace(host, chosen=remaining) if remaining else None


def _parse_filter(flag: str, text: str) -> dict[str, tuple[int, ...] | None]:
    """``a:0,2@b`` as {"a": (0, 2), "b": None}; ``user@host`` cannot be written here, ``host`` finds it."""
    filters: dict[str, tuple[int, ...] | None] = {}
    for item in text.split("@"):
        name, colon, slots = item.strip().partition(":")
        check_hostname(name, f"{flag} {text}")
        if name in filters:
            raise ValueError(f"{flag} {text} names {name} twice")
        if colon and _SLOT_LIST.fullmatch(slots) is None:
            raise ValueError(f"{flag} {text}: {item} is not `{name}:0,1`")
        filters[name] = _parse_slots(slots, f"{flag} {text}") if colon else None
    return filters


def _parse_slots(text: str, where: str) -> tuple[int, ...]:
    slot_ids: set[int] = set()
    for item in text.split(","):
        first, _, last = item.partition("-")
        start, stop = int(first), int(last or first)
        if not start <= stop < _MAX_SLOTS:
            raise ValueError(f"{where}: {item} is no range of slots: write the lower one first, as in 0-3")
        slot_ids.update(range(start, stop + 1))
    return tuple(sorted(slot_ids))
