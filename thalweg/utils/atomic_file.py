"""Files that no reader sees half of."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def publish_file(path: Path, write: Callable[[BinaryIO], object], mode: int = 0o666) -> None:
    """Let ``write`` fill a file beside ``path``, whose folder is made, and give it that name when it is whole.

    ``mode``: who may read it, within the process' umask.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # another host may write here too
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            write(file)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
