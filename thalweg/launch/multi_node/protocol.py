"""The line between a launcher and its agent on another host: marks, frames and lines.

Up go frames: a kind (``o``, ``e``: what the ranks wrote; ``j``: JSON), a length, the bytes.  Before the first
comes a mark, which tells them apart from what a login shell prints.  Down go lines of JSON, and blank ones as
a sign of life.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from typing import Any

MAGIC = b"\x00thalweg-agent-1\n"
HEADER = struct.Struct(">cI")
MAX_FRAME_BYTES = 1 << 20


class LauncherChannel:
    """The line up to the launcher; threads may share it."""

    def __init__(self, fd: int) -> None:
        self._fd, self._lock = fd, threading.Lock()
        self._write(MAGIC)

    def send_json(self, **message: Any) -> None:
        """Send one object."""
        self.send_frame(b"j", json.dumps(message).encode())

    def send_frame(self, kind: bytes, payload: bytes) -> None:
        """Send one frame."""
        with self._lock:
            self._write(HEADER.pack(kind, len(payload)) + payload)

    def _write(self, payload: bytes) -> None:
        view = memoryview(payload)
        while view:
            view = view[os.write(self._fd, view) :]


def read_line(fd: int) -> bytes:
    """One line, without its end; shorter where the stream ended.  Nothing beyond it is read."""
    line = bytearray()
    while (byte := os.read(fd, 1)) and byte != b"\n":
        line += byte
    return bytes(line)
