"""Which hosts a job takes, and which of their slots: hostfiles and the --include/--exclude filters.

A hostfile has a line ``host slots=N`` for each host (``user@host`` too; without ``slots`` the host counts its
own devices).  A filter is ``host:0,2@other`` as DeepSpeed's launcher reads it: hosts joined by ``@``, each
with slots or as a whole.  Names come from files and command lines, so they are checked before anybody hands
them to another program.
"""

import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from thalweg.launch.cpu_affinity import parse_list
from thalweg.utils.env import is_loopback

_HOST_LINE = re.compile(r"^(?P<host>\S+)(?:\s+slots=(?P<slots>\d+))?(?:\s+max[-_]slots=\d+)?$")
_HOSTNAME = re.compile(
    r"^(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?(?:[A-Za-z0-9_][A-Za-z0-9_.-]*|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.%a-z]*)$"
)


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
    own = socket.gethostname()
    return is_loopback(name) or name in (own, own.partition(".")[0])


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of the file in its order, which is that of the ranks.

    Raises ``ValueError`` for a malformed line or name, a host that is there twice, or an empty file.
    """
    return parse_hostfile(path.read_text().splitlines(), str(path))


def parse_hostfile(lines: Iterable[str], path: str) -> tuple[Host, ...]:
    """:func:`read_hostfile` of the lines of a file; ``path`` is what errors call it."""
    hosts: list[Host] = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _HOST_LINE.match(text)
        if match is None:
            raise ValueError(f"{path}, line {number}: {text!r} is not `host slots=N`")
        name = check_hostname(match["host"], f"{path}, line {number}")
        if any(Host(name).address == host.address for host in hosts):
            raise ValueError(f"{path}, line {number}: {name} is there twice; give each host one line")
        hosts.append(Host(name, int(match["slots"]) if match["slots"] else None))
    usable = tuple(host for host in hosts if host.slots != 0)
    if not usable:
        raise ValueError(f"{path} names no host: add `localhost slots=N`, or leave out --hostfile")
    return usable


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
    if not hosts and exclude is not None:
        raise ValueError("--exclude needs to know what there is: add --hostfile, or use --include")
    hosts, named = hosts or [Host(name) for name in filters], {}
    for name, slots in filters.items():
        # With or without a user, or by another name of this host.
        same = (h for h in hosts if name in (h.name, h.address) or (is_this_host(name) and is_this_host(h.address)))
        if (host := next(same, None)) is None:
            names = ", ".join(host.name for host in hosts)
            raise ValueError(f"{flag} {text} names {name}, which is not in the hostfile: {names}")
        if slots is not None and host.slots is not None and slots[-1] >= host.slots:
            raise ValueError(f"{flag} {text} names slot {slots[-1]}, but {name} has slots 0 to {host.slots - 1}")
        named[host.name] = slots
    if include is not None:
        chosen = [replace(host, chosen=named[host.name]) for host in hosts if host.name in named]
    else:
        chosen = [left for host in hosts if (left := _exclude_slots(host, named.get(host.name, ())))]
    if not chosen:
        raise ValueError(f"{flag} {text} leaves no slot to run on")
    return tuple(chosen)


def _exclude_slots(host: Host, slots: tuple[int, ...] | None) -> Host | None:
    """What is left of a host without ``slots``; None: without any."""
    if not slots:
        return None if slots is None else host
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
        filters[name] = parse_list(slots, f"slots in {flag} {text}") if colon else None
    return filters
