"""The first process on each host of a job; run as a file, with nothing but the standard library.

    python -u agent.py        its work comes as one line of JSON on standard input

Standard input and output are the line to the launcher.  Down come the job, where to meet, a sign of life
every few seconds, and perhaps a stop; its end means that the launcher is gone, and then the ranks go too.
Up go frames: a kind (``o``, ``e``: what the ranks wrote; ``j``: JSON), a length, the bytes.  So neither
arguments nor environment ever pass through a shell, and what a shell's start-up files print is told
apart from the job's output by the mark that comes first.
"""

import json
import os
import struct
import sys
import threading
from typing import Any

MARK = b"\x00thalweg-agent-1\n"
HEAD = struct.Struct(">cI")
MAX_FRAME = 1 << 20


class Channel:
    """The line up to the launcher; threads may share it."""

    def __init__(self, fd: int) -> None:
        self._fd, self._lock = fd, threading.Lock()
        self._write(MARK)

    def say(self, **message: Any) -> None:
        """Send one object."""
        self.send(b"j", json.dumps(message).encode())

    def send(self, kind: bytes, payload: bytes) -> None:
        """Send one frame."""
        with self._lock:
            self._write(HEAD.pack(kind, len(payload)) + payload)

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


def main() -> int:
    """Take the job and run it; returns this host's exit code."""
    inbox, channel = os.dup(0), Channel(os.dup(1))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    text = read_line(inbox)
    if not text:
        return 1
    order = json.loads(text)
    try:
        os.environ.update(order["environ"])
        os.chdir(order["cwd"])
        if not sys.flags.safe_path:  # the interpreter put this file's folder there
            sys.path[0] = order["root"]
        else:
            sys.path.insert(0, order["root"])
        from thalweg.launch.remote import serve
    except (OSError, ImportError) as error:
        channel.say(error=f"{type(error).__name__}: {error}")
        return 2
    return serve(order, channel, inbox)


if __name__ == "__main__":
    sys.exit(main())
