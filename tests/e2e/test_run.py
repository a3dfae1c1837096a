"""`thalweg run` as a user meets it: real processes, each ended by its pid (rows 28, 30 and 31)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

RUN = [sys.executable, "-m", "thalweg", "run"]
GONE = 10.0  # seconds in which a broken job must have disappeared

Launch = Callable[..., "subprocess.Popen[str]"]


def clean_environ(**changes: str) -> dict[str, str]:
    """The environment without any launcher's variables."""
    families = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC_", "OMP_")
    return {k: v for k, v in os.environ.items() if not k.startswith(families)} | changes


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start `thalweg run` on a script's text; whatever is left at the end is killed by pid."""
    started = []

    def start(script: str, *arguments: str, options: tuple[str, ...] = ("--nproc", "2"), **environ: str):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script))
        process = subprocess.Popen(
            [*RUN, *options, str(path), *arguments],
            env=clean_environ(OUT=str(tmp_path), TMPDIR=str(tmp_path), **environ),
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    if all(process.returncode != -signal.SIGKILL for process in started):
        left = [
            path.name for path in tmp_path.iterdir() if path.name.startswith(("thalweg-", "torchelastic_"))
        ]
        assert not left, "a job leaves nothing on disk"


def finish(process: subprocess.Popen[str], timeout: float = 60.0) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def wait_for(folder: Path, pattern: str, count: int, timeout: float = 60.0) -> list[int]:
    """Wait until ``count`` files match and hold a pid each."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        texts = [path.read_text() for path in sorted(folder.glob(pattern))]
        if len(texts) == count and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.02)
    raise AssertionError(f"{pattern}: {count} ranks did not start in {timeout} s")


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_gone(pids: list[int], since: float) -> float:
    """Seconds from ``since`` until none of the processes is left."""
    while any(map(alive, pids)):
        assert time.monotonic() - since < GONE, f"still there: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.02)
    return time.monotonic() - since


# ------------------------------------------------------------------ what a rank sees

DESCRIBE = """
    import json, os, sys
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    seen = {name: os.environ.get(name) for name in (*names, "OMP_NUM_THREADS")}
    seen.update(argv=sys.argv, name=__name__, file=__file__, path0=sys.path[0])
    seen.update(main=sys.modules["__main__"].__dict__ is globals(), thalweg="thalweg" in sys.modules)
    seen.update(cpus=sorted(os.sched_getaffinity(0)))
    with open(os.path.join(os.environ["OUT"], f"rank{os.environ['RANK']}.json"), "w") as file:
        json.dump(seen, file)
"""


def test_ranks_see_their_variables_and_disjoint_cores(launch: Launch, tmp_path: Path) -> None:
    code, out, err = finish(launch(DESCRIBE, "x"))
    assert (code, out, err) == (0, "", ""), "a quiet script leaves a quiet terminal"
    seen = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for rank, one in enumerate(seen):
        assert (one["RANK"], one["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["MASTER_ADDR"]) == ("2", "2", "127.0.0.1")
        assert one["argv"] == [str(tmp_path / "script.py"), "x"] and one["file"] == str(
            tmp_path / "script.py"
        )
        assert (one["name"], one["main"], one["path0"]) == ("__main__", True, str(tmp_path))
        assert not one["thalweg"], "the launcher puts nothing of ours into the script's process"
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"] != "29500"
    usable = len(os.sched_getaffinity(0))
    assert seen[0]["OMP_NUM_THREADS"] == str(max(1, usable // 2)) or usable > 2
    if usable >= 2:
        assert not set(seen[0]["cpus"]) & set(seen[1]["cpus"])


def test_threads_and_binding_can_be_chosen(launch: Launch, tmp_path: Path) -> None:
    code, _, err = finish(launch(DESCRIBE, options=("--nproc", "2", "--threads", "3", "--no-bind")))
    assert (code, err) == (0, "")
    seen = json.loads((tmp_path / "rank1.json").read_text())
    assert seen["OMP_NUM_THREADS"] == "3" and seen["cpus"] == sorted(os.sched_getaffinity(0))
    assert finish(launch(DESCRIBE, OMP_NUM_THREADS="5"))[0] == 0
    assert json.loads((tmp_path / "rank1.json").read_text())["OMP_NUM_THREADS"] == "5", (
        "the user's own value wins"
    )


HARD = [
    "", " ", "$(touch pwned)", "`id`", "; rm -rf x", "a'b\"c", "$HOME", "$$", "${local_rank}", "%s",
    "\\", "*", "~", "--", "--nproc", "-m", "\n", "\t", "é漢", "\udcff", "&&", "|", ">x", "!", "#", "{a,b}",
    "--x=$(y)",
]  # fmt: skip


def test_arguments_are_delivered_exactly(launch: Launch, tmp_path: Path) -> None:
    script = """
        import os, sys
        with open(os.path.join(os.environ["OUT"], f"args{os.environ['RANK']}"), "wb") as file:
            file.write(b"\\0".join(map(os.fsencode, sys.argv[1:])))
    """
    assert finish(launch(script, *HARD))[0] == 0
    for rank in range(2):
        delivered = (tmp_path / f"args{rank}").read_bytes().split(b"\0")
        assert delivered == [os.fsencode(argument) for argument in HARD]
    assert not (tmp_path / "pwned").exists() and not (tmp_path / "x").exists()


def test_modules_programs_and_spawned_children(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "tool.py").write_text(textwrap.dedent(DESCRIBE))
    done = subprocess.run(
        [*RUN, "-m", "package.tool", "--help"], cwd=tmp_path, env=clean_environ(OUT=str(tmp_path))
    )
    seen = json.loads((tmp_path / "rank0.json").read_text())
    assert done.returncode == 0 and seen["argv"][1:] == ["--help"] and seen["name"] == "__main__"
    done = subprocess.run(
        [*RUN, "--no-python", "env"], cwd=tmp_path, env=clean_environ(), capture_output=True, text=True
    )
    assert done.returncode == 0 and "LOCAL_RANK=0\n" in done.stdout
    spawning = """
        import multiprocessing
        def square(x):
            return x * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [3]))
    """
    assert finish(launch(spawning, options=("--nproc", "1"))) == (0, "[9]\n", "")


# ------------------------------------------------------------------ how a job ends


@pytest.mark.parametrize(
    ("statement", "code", "said"),
    [
        ("sys.exit(3)", 3, "exit code 3"),
        ("os._exit(4)", 4, "exit code 4"),
        ("sys.exit('no data')", 1, "no data"),
        ("os.kill(os.getpid(), 9)", 137, "SIGKILL"),
        ("os.kill(os.getpid(), 11)", 139, "SIGSEGV"),
    ],
)
def test_the_exit_code_of_the_failed_rank_is_kept(
    launch: Launch, statement: str, code: int, said: str
) -> None:
    script = f"""
        import os, sys, time
        if os.environ["RANK"] == "1":
            {statement}
        time.sleep(60)
    """
    start = time.monotonic()
    got, _, err = finish(launch(script))
    assert got == code and said in err and "rank 1 of 2 failed first" in err
    if said == "SIGSEGV":
        assert "Fatal Python error: Segmentation fault" in err and "script.py" in err, "where it crashed"
    else:
        assert len(err.splitlines()) <= 3, err
    assert time.monotonic() - start < 30


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
    code, out, err = finish(launch(script))
    assert code == 1 and out == ""
    assert err.count("Traceback (most recent call last)") == 1
    assert "traceback of rank 1\n" in err and "ValueError: no such shard: data/7" in err
    assert 'raise ValueError(f"no such shard: {path}")' in err, "the script's own lines are shown"
    for noise in ("rank.py", "runpy", "importlib", "elastic", "ChildFailedError", "Connection closed"):
        assert noise not in err
    assert len(err.splitlines()) <= 12, err


def test_a_syntax_error_is_shown_as_python_shows_it(launch: Launch) -> None:
    code, _, err = finish(launch("def f(:\n    pass\n"))
    assert code == 1 and "SyntaxError" in err and "def f(:" in err and "rank.py" not in err


def test_the_scripts_own_excepthook_is_respected(launch: Launch) -> None:
    script = """
        import sys
        sys.excepthook = lambda kind, value, trace: print("hooked", value, file=sys.stderr)
        raise ValueError("boom")
    """
    code, _, err = finish(launch(script, options=("--nproc", "1")))
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
    ranks, helpers = wait_for(tmp_path, "pid[01]", 2), wait_for(tmp_path, "helper[01]", 2)
    killed = time.monotonic()
    os.kill(ranks[0], signal.SIGKILL)
    wait_gone([*ranks, *helpers], killed)
    code, _, err = finish(process, timeout=GONE)
    assert time.monotonic() - killed < GONE
    assert code == 137 and "rank 0 of 2 failed first" in err and "SIGKILL" in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_launcher_ends_the_ranks(
    launch: Launch, tmp_path: Path, number: int, code: int
) -> None:
    process = launch(NEST, options=("--nproc", "2", "--grace", "1"))
    pids = wait_for(tmp_path, "pid[01]", 2) + wait_for(tmp_path, "helper[01]", 2)
    sent = time.monotonic()
    process.send_signal(number)
    wait_gone(pids, sent)
    got, _, err = finish(process, timeout=GONE)
    assert got == code and "stopped by" in err and "Traceback" not in err


def test_ranks_do_not_outlive_a_killed_launcher(launch: Launch, tmp_path: Path) -> None:
    process = launch(NEST)
    ranks, helpers = wait_for(tmp_path, "pid[01]", 2), wait_for(tmp_path, "helper[01]", 2)
    process.kill()
    try:
        wait_gone(ranks, time.monotonic())
    finally:  # a grandchild has nobody left to end it but this test
        for pid in helpers:
            os.kill(pid, signal.SIGKILL)
    process.wait()
    assert list(tmp_path.glob("thalweg-run-*")), "nobody was left to remove it"
    assert finish(launch("", options=("--nproc", "1")))[0] == 0
    assert not list(tmp_path.glob("thalweg-run-*")), "the next job does"


def test_a_rank_that_raises_and_hangs_does_not_hold_the_job(launch: Launch) -> None:
    script = """
        import os, threading, time
        if os.environ["RANK"] == "0":
            threading.Thread(target=time.sleep, args=(120,)).start()
            raise KeyError("lost")
        time.sleep(120)
    """
    start = time.monotonic()
    code, _, err = finish(launch(script, options=("--nproc", "2", "--grace", "1")))
    assert code == 1 and "KeyError: 'lost'" in err and "rank 0 of 2 failed first" in err
    assert time.monotonic() - start < 30


# ------------------------------------------------------------------ side by side, and little said

MEET = """
    import os, time
    import torch, torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    name = f"{os.environ['JOB']}.{dist.get_rank()}"
    open(os.path.join(os.environ["OUT"], name), "w").write(os.environ["MASTER_PORT"])
    while len([n for n in os.listdir(os.environ["OUT"]) if n[:2] in ("a.", "b.")]) < 4:
        time.sleep(0.02)
    dist.all_reduce(total)
    assert total.item() == 4
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_jobs_run_at_once(launch: Launch, tmp_path: Path) -> None:
    """Each has a port of its own, also while somebody holds 29500."""
    with socket.socket() as busy:
        try:
            busy.bind(("127.0.0.1", 29500))
            busy.listen()
        except OSError:
            pass  # another program of this machine holds it, which serves as well
        jobs = [launch(MEET, JOB=name) for name in "ab"]
        assert [finish(job)[0] for job in jobs] == [0, 0]
    ports = {(tmp_path / f"{name}.0").read_text() for name in "ab"}
    assert len(ports) == 2


@pytest.mark.slow
def test_eight_quiet_ranks_say_nothing(launch: Launch) -> None:
    script = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 0:
            print("done")
        dist.destroy_process_group()
    """
    code, out, err = finish(launch(script, options=("--nproc", "8")), timeout=120)
    assert (code, out) == (0, "done\n")
    assert len(err.splitlines()) <= 2, err


# ------------------------------------------------------------------ wrong use


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "no script was given"),
        (["absent.py"], "there is no script absent.py"),
        (["--nproc", "0", "script.py"], "at least 1"),
        (["--nproc", "two", "script.py"], "not a number"),
        (["--nproc", "gpu", "script.py"], "no GPU"),
        (["--num-nodes", "2", "script.py"], "not built yet"),
        (["--nnodes=1:4", "script.py"], "not built yet"),
        (["--node_rank", "1", "script.py"], "not built yet"),
        (["--launcher", "slurm", "script.py"], "not built yet"),
        (["--include", "worker-1:0,1", "script.py"], "not built yet"),
        (["--master_addr", "10.1.2.3", "script.py"], "not built yet"),
        (["--as-deepspeed", "script.py"], "not built yet"),
        (["--hostfile", "hosts", "script.py"], "not built yet"),
        (["--hostfile", "nowhere", "script.py"], "nowhere"),
        (["--cores", "9999", "script.py"], "may use"),
        (["--threads", "0", "script.py"], "at least 1"),
        (["--master-port", "70000", "script.py"], "not a port"),
        (["--unknown", "script.py"], "--help"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_paragraph_and_code_two(
    options: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    from thalweg.cli import main, run

    (tmp_path / "script.py").write_text("print('ran')")
    (tmp_path / "hosts").write_text("worker-1 slots=4\nworker-2 slots=4\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "_count_gpus", lambda: 0)
    try:
        code = main(["run", *options])
    except SystemExit as leaving:
        code = leaving.code
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    assert said in captured.err and len(captured.err.strip().splitlines()) == 1, captured.err


def test_a_busy_master_port_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from thalweg.cli import main

    (tmp_path / "script.py").write_text("")
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        code = main(["run", "--master-port", str(busy.getsockname()[1]), str(tmp_path / "script.py")])
    assert code == 2 and "leave out --master-port" in capsys.readouterr().err


def test_a_chosen_master_port_is_used(launch: Launch, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert finish(launch(DESCRIBE, options=("--num_gpus", "2", "--master_port", str(port))))[0] == 0
    assert json.loads((tmp_path / "rank1.json").read_text())["MASTER_PORT"] == str(port)
