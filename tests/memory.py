"""What tests ask of this process's memory."""

from __future__ import annotations

import os
from pathlib import Path


def resident_bytes() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
