"""How a job of `thalweg run` ends: the first failure's code and traceback, and nobody left (row 31)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.launch_support import EXIT_DEADLINE, Launch, wait_exited, wait_for_pids, wait_output
from tests.marks import nightly


@pytest.mark.parametrize(
    ("statement", "code", "said"),
    [
        nightly("os._exit(4)", 4, "exit code 4"),
        ("os.kill(os.getpid(), 11)", 139, "SIGSEGV"),
        nightly("sys.exit(3)", 3, "exit code 3"),
        nightly("sys.exit('no data')", 1, "no data"),
        nightly("os.kill(os.getpid(), 9)", 137, "SIGKILL"),
    ],
)
def test_the_exit_code_of_the_failed_rank_is_kept(launch: Launch, statement: str, code: int, said: str) -> None:
    script = f"""
        import os, sys, time
        if os.environ["RANK"] == "1":
            {statement}
        time.sleep(60)
    """
    start = time.monotonic()
    got, _, err = wait_output(launch(script))
    assert got == code and said in err and "rank 1 of 2 failed first" in err
    if said == "SIGSEGV":
        assert "Fatal Python error: Segmentation fault" in err and "script.py" in err, "where it crashed"
    else:
        assert len(err.splitlines()) <= 3, err
    assert time.monotonic() - start < 30


@pytest.mark.nightly
def test_the_first_traceback_is_shown_once(launch: Launch) -> None:
    script = """
        import datetime
        import torch, torch.distributed as dist
        def load(path):
            raise ValueError(f"no such shard: {path}")
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=50))
        if dist.get_rank() == 1:
            load("data/7")
        dist.all_reduce(torch.ones(4))
    """
    code, out, err = wait_output(launch(script))
    assert code == 1 and out == ""
    assert err.count("Traceback (most recent call last)") == 1
    assert "traceback of rank 1\n" in err and "ValueError: no such shard: data/7" in err
    assert 'raise ValueError(f"no such shard: {path}")' in err, "the script's own lines are shown"
    for noise in ("launch/worker.py", "runpy", "importlib", "elastic", "ChildFailedError", "Connection closed"):
        assert noise not in err
    assert len(err.splitlines()) <= 12, err


@pytest.mark.nightly
def test_a_syntax_error_is_shown_as_python_shows_it(launch: Launch) -> None:
    code, _, err = wait_output(launch("def f(:\n    pass\n"))
    assert code == 1 and "SyntaxError" in err and "def f(:" in err and "launch/worker.py" not in err


@pytest.mark.nightly
def test_the_scripts_own_excepthook_is_respected(launch: Launch) -> None:
    script = """
        import sys
        sys.excepthook = lambda kind, value, trace: print("hooked", value, file=sys.stderr)
        raise ValueError("boom")
    """
    code, _, err = wait_output(launch(script, options=("--nproc", "1")))
    assert code == 1 and "hooked boom" in err and "Traceback" not in err


NEST = """
    import os, signal, subprocess, sys, time
    rank = os.environ["RANK"]
    helper = subprocess.Popen(["sleep", "120"])
    if rank == "1":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for name, pid in ((f"helper{rank}", helper.pid), (f"pid{rank}", os.getpid())):
        with open(os.path.join(os.environ["OUT"], name + ".part"), "w") as file:
            file.write(str(pid))
        os.rename(file.name, os.path.join(os.environ["OUT"], name))
    time.sleep(120)
"""


def test_killing_one_rank_ends_the_job(launch: Launch, tmp_path: Path) -> None:
    """Rank 0 is killed; rank 1 ignores SIGTERM; both have a child process: all are gone in 10 s."""
    process = launch(NEST)
    ranks, helpers = wait_for_pids(tmp_path, "pid[01]", 2), wait_for_pids(tmp_path, "helper[01]", 2)
    killed = time.monotonic()
    os.kill(ranks[0], signal.SIGKILL)
    wait_exited([*ranks, *helpers], killed)
    code, _, err = wait_output(process, timeout=EXIT_DEADLINE)
    assert time.monotonic() - killed < EXIT_DEADLINE
    assert code == 137 and "rank 0 of 2 failed first" in err and "SIGKILL" in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), nightly(signal.SIGINT, 130)])
def test_a_signal_to_the_launcher_ends_the_ranks(launch: Launch, tmp_path: Path, number: int, code: int) -> None:
    process = launch(NEST, options=("--nproc", "2", "--grace", "1"))
    pids = wait_for_pids(tmp_path, "pid[01]", 2) + wait_for_pids(tmp_path, "helper[01]", 2)
    sent = time.monotonic()
    process.send_signal(number)
    wait_exited(pids, sent)
    got, _, err = wait_output(process, timeout=EXIT_DEADLINE)
    assert got == code and "stopped by" in err and "Traceback" not in err


@pytest.mark.parametrize("in_step", [False, nightly(True)])
def test_a_warning_before_the_end_reaches_each_rank_once(launch: Launch, tmp_path: Path, in_step: bool) -> None:
    """Slurm signals all processes of a step, a trap in its script the launcher alone."""
    script = """
        import os, signal, time
        calls = []
        signal.signal(signal.SIGUSR1, lambda *_: calls.append(1))
        name = os.path.join(os.environ["OUT"], "pid" + os.environ["RANK"])
        with open(name + ".part", "w") as file:
            file.write(str(os.getpid()))
        os.rename(file.name, name)
        for _ in range(1000):
            time.sleep(0.05)
            if calls:
                time.sleep(1)
                break
        print("calls:", len(calls))
    """
    process = launch(script, **({"SLURM_STEP_ID": "0"} if in_step else {}))
    ranks = wait_for_pids(tmp_path, "pid[01]", 2)
    for pid in (process.pid, *(ranks if in_step else ())):
        os.kill(pid, signal.SIGUSR1)
    code, out, err = wait_output(process)
    assert (code, out, err) == (0, "calls: 1\ncalls: 1\n", "")


def test_ranks_do_not_outlive_a_killed_launcher(launch: Launch, tmp_path: Path) -> None:
    process = launch(NEST)
    ranks, helpers = wait_for_pids(tmp_path, "pid[01]", 2), wait_for_pids(tmp_path, "helper[01]", 2)
    process.kill()
    try:
        wait_exited(ranks, time.monotonic())
    finally:  # a grandchild has nobody left to end it but this test
        for pid in helpers:
            os.kill(pid, signal.SIGKILL)
    process.wait()
    assert list(tmp_path.glob("thalweg-run-*")), "nobody was left to remove it"
    other_host = tmp_path / "other" / "sitecustomize.py"
    other_host.parent.mkdir()
    other_host.write_text("import socket\nsocket.gethostname = lambda: 'another'\n")
    paths = os.pathsep.join([str(other_host.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    assert wait_output(launch("", options=("--nproc", "1"), PYTHONPATH=paths))[0] == 0
    assert list(tmp_path.glob("thalweg-run-*")), "a host cannot see whether another's process lives"
    assert wait_output(launch("", options=("--nproc", "1")))[0] == 0
    assert not list(tmp_path.glob("thalweg-run-*")), "the next job does"


@pytest.mark.nightly
def test_a_rank_that_raises_and_hangs_does_not_hold_the_job(launch: Launch) -> None:
    script = """
        import os, threading, time
        if os.environ["RANK"] == "0":
            threading.Thread(target=time.sleep, args=(120,)).start()
            raise KeyError("lost")
        time.sleep(120)
    """
    start = time.monotonic()
    code, _, err = wait_output(launch(script, options=("--nproc", "2", "--grace", "1")))
    assert code == 1 and "KeyError: 'lost'" in err and "rank 0 of 2 failed first" in err
    assert time.monotonic() - start < 30
