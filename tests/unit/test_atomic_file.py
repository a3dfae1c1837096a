"""Files that no reader sees half of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import pytest

from thalweg.utils.atomic_file import publish_file


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    publish_file(path, lambda file: file.write(b"old"))

    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish_file(path, fail)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"old"


def test_two_hosts_whose_processes_have_one_number_write_apart(tmp_path: Path) -> None:
    """One writes while the other does, which here is the same process."""
    path, names = tmp_path / "file", []

    def write(file: BinaryIO) -> None:
        names.append(os.path.basename(file.name))
        if len(names) == 1:
            publish_file(path, write)
        file.write(b"whole")

    publish_file(path, write)
    assert len(set(names)) == 2 and path.read_bytes() == b"whole" and list(tmp_path.iterdir()) == [path]
