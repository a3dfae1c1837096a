"""``deepspeed.launcher.runner``: hostfiles and filters of hosts in its forms, over :mod:`thalweg.launch.hostfile`."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from thalweg.launch.hostfile import Host, filter_hosts, parse_hostfile

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Slots by host; None where there is no such file."""
    path = Path(hostfile_path)
    return _parse_hostfile(path.read_text().splitlines()) if path.is_file() else None


def _parse_hostfile(hostfile_lines: Iterable[str]) -> dict[str, int]:
    slots = OrderedDict((host.name, host.slots) for host in parse_hostfile(hostfile_lines, "the hostfile"))
    if unknown := [name for name, count in slots.items() if count is None]:
        raise ValueError(f"the hostfile does not say how many slots {unknown[0]} has: write `{unknown[0]} slots=N`")
    return slots  # type: ignore[return-value]


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """The slots of each host that a filter leaves, which may be none.

    Raises:
        ValueError: both filters, or one that names what is not there.
    """
    hosts = [Host(name, len(slots)) for name, slots in host_info.items()]
    try:
        left = filter_hosts(hosts, _merge_hosts(include_str), _merge_hosts(exclude_str))
    except ValueError as error:
        if "leaves no slot" in str(error):
            return {}
        raise
    return {host.name: list(host_info[host.name] if host.chosen is None else host.chosen) for host in left}


def _merge_hosts(text: str) -> str | None:
    """``a:0@a:1`` as ``a:0,1``: a host may be named more than once."""
    slots: dict[str, list[str]] = {}
    for item in text.split("@") if text else ():
        name, colon, numbers = item.partition(":")
        slots.setdefault(name, []).extend(sorted({*numbers.split(",")}) if colon else ())
    merged = (f"{name}:{','.join(sorted({*numbers}))}" if numbers else name for name, numbers in slots.items())
    return "@".join(merged) or None
