"""Other processes of this machine: whether one still runs, and whether it is still the same one; the machine's name."""

import os
import re
import socket
from pathlib import Path


def process_start_time(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine did (proc(5), field 22).

    None where it is dead or a zombie, and without ``/proc``.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def is_process_alive(pid: int, start_time: int | None = None) -> bool:
    """Whether a process runs; with ``start_time``: that one, and no later one to which its pid has passed."""
    if os.path.exists("/proc/self/stat"):
        started = process_start_time(pid)
        return started is not None and start_time in (None, started)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's, so not the one whose start was noted
        return start_time is None
    return True


def get_hostname() -> str:
    """This host's name, as it may be part of a file's."""
    return re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())[:40] or "host"
