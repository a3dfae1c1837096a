"""fio, the measure of a disk: reads and writes past the page cache, each at the best of four settings."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

BLOCK = 8 << 20


class Fio:
    """fio over files of ``nbytes`` in ``folder``, which times itself.

    ``rates``: the bytes a second of "read" and "write" at the best setting; writes go over blocks that are there.
    """

    SETTINGS = ((1, 4), (1, 16), (4, 4), (4, 16))  # jobs, depth of each

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.nbytes, self.folder = nbytes, folder
        self.settings: dict[str, tuple[int, int]] = {}
        self.rates: dict[str, float] = {}
        for verb in ("write", "read"):
            found = {setting: self._run(verb, *setting) for setting in self.SETTINGS}
            self.settings[verb] = min(found, key=lambda setting: found[setting])
            self.rates[verb] = nbytes / found[self.settings[verb]]

    @staticmethod
    def is_installed() -> bool:
        """Whether there is a fio to run."""
        return shutil.which("fio") is not None

    def _run(self, verb: str, jobs: int, depth: int) -> float:
        command = [
            "fio", f"--name=fio{jobs}", f"--directory={self.folder}", f"--size={self.nbytes // jobs}", f"--bs={BLOCK}",
            f"--numjobs={jobs}", f"--iodepth={depth}", "--group_reporting", "--ioengine=io_uring", "--direct=1",
            f"--rw={verb}", "--overwrite=1", "--output-format=json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        return self.nbytes / job[verb]["bw_bytes"]

    def move(self, verb: str) -> float:
        """Transfer the whole file; returns seconds."""
        return self._run(verb, *self.settings[verb])

    def close(self) -> None:
        """Remove the files."""
        for path in self.folder.glob("fio?.*.0"):
            path.unlink()
