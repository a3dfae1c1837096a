"""The pytest plugin of a run: who answers ``import deepspeed``, how ranks start, what becomes of each test.

DeepSpeed's tests start their ranks in a pool that imports torch anew, and a rank that fails leaves the others waiting
for ten minutes, after which the whole run ends.  Here ranks are forked from the test process, and those that wait for
a failed one are ended.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import socket
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("THALWEG_UNIT_TESTS_OF") != "deepspeed":
    import thalweg.compat.deepspeed  # noqa: F401

    ON_THALWEG = True
else:
    ON_THALWEG = False

TIMEOUT = float(os.environ.get("DS_UNITTEST_TIMEOUT", "90"))
_GRACE = 3.0  # seconds for the other ranks to fail by themselves
_context = multiprocessing.get_context("fork")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """The tests are imported: their ranks start as here, and a test has at most so many sets of parameters.  Those that
    are named are taken in that order; those that have their outcome already are not run again."""
    named = json.loads(os.environ.get("THALWEG_UNIT_NAMED", "null"))
    if named is not None:
        items[:] = sorted((item for item in items if item.nodeid in named), key=lambda item: named.index(item.nodeid))
    sample, by_function = int(os.environ.get("THALWEG_UNIT_SAMPLE", "0")), {}
    for item in items:
        by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    if sample:
        # Spread over all sets, the first and the last among them.
        spread = [
            {group[i * (len(group) - 1) // max(1, sample - 1)] for i in range(sample)} for group in by_function.values()
        ]
        items[:] = [item for item in items if any(item in kept for kept in spread)]
    done = set(json.loads(os.environ.get("THALWEG_UNIT_DONE", "[]")))
    items[:] = [item for item in items if item.nodeid not in done]
    if ON_THALWEG:
        _call_probe_of_optimizer_files()
    else:
        _load_operators()
    import_module("torch._dynamo")  # a process's first optimizer imports it, for seconds: forked ranks find it there
    executor = import_module("unit.common").DistributedExec
    executor._launch_procs = _launch_ranks
    executor._launch_with_file_store = _launch_with_store


def _load_operators() -> None:
    """DeepSpeed looks for each compiled operator for seconds: the forked ranks find those of most tests loaded."""
    accelerator = import_module("deepspeed.accelerator").get_accelerator()
    for name in ("ShareMemCommBuilder", "CPUAdamBuilder", "FusedAdamBuilder"):
        accelerator.create_op_builder(name).load(verbose=False)


def _call_probe_of_optimizer_files() -> None:
    """The tests of checkpoints watch a private method of DeepSpeed's engine, which names a file of optimizer states, to
    see that none is read.  Thalweg has no such method: here it gets one, called where Thalweg reads such states."""
    training_state: Any = import_module("thalweg.checkpoint.training_state")
    engines = import_module("thalweg.compat.deepspeed.live_engines").live_engines
    restore_module = training_state.restore_module

    def restore_and_tell(checkpoint: Any, module: Any, optimizer: Any, **options: Any) -> Any:
        for engine in engines():
            if optimizer is not None and engine.optimizer is optimizer:
                engine._get_optimizer_ckpt_name()
        return restore_module(checkpoint, module, optimizer, **options)

    training_state.restore_module = restore_and_tell
    import_module("thalweg.compat.deepspeed.engine").DeepSpeedEngine._get_optimizer_ckpt_name = lambda engine: ""


def pytest_runtest_logreport(report: Any) -> None:
    """One line of JSON for each test."""
    if report.when != "call" and report.outcome == "passed":
        return
    text = ""
    if report.outcome == "skipped":
        text = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    elif report.outcome == "failed":
        text = report.longreprtext
    outcome = "xfailed" if hasattr(report, "wasxfail") and report.outcome == "skipped" else report.outcome
    _write({"test": report.nodeid, "outcome": outcome, "text": text, "seconds": round(report.duration, 2)})


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported."""
    if report.outcome == "failed":
        _write({"test": report.nodeid, "outcome": "not collected", "text": report.longreprtext, "seconds": 0})


def _write(line: dict[str, Any]) -> None:
    with open(os.environ["THALWEG_UNIT_RESULTS"], "a") as file:
        file.write(json.dumps(line) + "\n")


def _launch_with_store(self: Any, request: Any, world_size: Any) -> None:
    folder = request.getfixturevalue("tmpdir")
    for number, ranks in enumerate([world_size] if isinstance(world_size, int) else world_size):
        self._launch_procs(ranks, f"file://{folder}/store{number}_{time.monotonic_ns()}")


def _launch_ranks(self: Any, num_ranks: int, init_method: str) -> None:
    common = import_module("unit.common")
    devices = common.get_accelerator().device_count()
    if devices < num_ranks:
        pytest.skip(f"{num_ranks} devices required, {devices} available")
    self.reuse_dist_env = self.non_daemonic_procs = False
    results, port = _context.Queue(), _find_free_port()
    args = (num_ranks, port, init_method)
    ranks = [_context.Process(target=_run_rank, args=(results, self, rank, *args)) for rank in range(num_ranks)]
    for rank in ranks:
        rank.start()
    found: dict[int, tuple[str, str]] = {}
    deadline = time.monotonic() + TIMEOUT
    while len(found) < num_ranks and time.monotonic() < deadline:
        try:
            number, outcome, text = results.get(timeout=0.1)
        except queue.Empty:
            for number, rank in enumerate(ranks):
                if not rank.is_alive() and number not in found and rank.exitcode:
                    found[number] = ("failed", f"rank {number} died with exit code {rank.exitcode}")
        else:
            found[number] = (outcome, text)
        if any(outcome == "failed" for outcome, _ in found.values()):
            deadline = min(deadline, time.monotonic() + _GRACE)
    for rank in ranks:
        rank.join(0.2 if len(found) < num_ranks else 5)
        if rank.is_alive():
            rank.kill()
            rank.join()
    # DeepSpeed names its shared memory after the port, and leaves it behind.
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"):
        path.unlink()
    failed = [f"--- rank {number} ---\n{text}" for number, (outcome, text) in found.items() if outcome == "failed"]
    if failed or len(found) < num_ranks:
        pytest.fail("\n".join(failed) or f"no answer within {TIMEOUT} s", pytrace=False)
    skipped = [text for outcome, text in found.values() if outcome == "skipped"]
    if skipped:
        pytest.skip(skipped[0])


def _find_free_port() -> int:
    """A port that no other run beside this one has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run_rank(results: Any, test: Any, rank: int, num_ranks: int, port: int, init_method: str) -> None:
    try:
        message = test._dist_run(rank, num_ranks, port, init_method)
        test._dist_destroy()
        results.put((rank, "skipped" if message else "passed", message))
    except BaseException:
        results.put((rank, "failed", traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)
