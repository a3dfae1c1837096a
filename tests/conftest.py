"""Which tests share the machine when several workers run them (``make test``), and which have it alone.

A test marked ``alone`` measures time, or looks at what all processes share: it waits until the workers' other
tests are over, and they wait for it.  Two locks of the file system in a folder of this run::

    gate    held for a moment before each test, and for as long as a test that wants to be alone waits
    room    shared by ordinary tests while they run, taken by one alone
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def _file_lock(path: Path, operation: int) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, operation)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run a test when its turn has come."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    run: Path = item.config._tmp_path_factory.getbasetemp().parent  # type: ignore[attr-defined]
    operation = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with (run / "room").open("w") as running_lock:
        with _file_lock(run / "gate", fcntl.LOCK_EX):
            fcntl.flock(running_lock, operation)
        return (yield)
