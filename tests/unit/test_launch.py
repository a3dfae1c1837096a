"""The launcher's decisions, without a process: cores, hostfiles, the first failure, argument splitting."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.cli import run
from thalweg.infer.parallel.process_group import WorkerDiedError
from thalweg.launch import schedulers
from thalweg.launch.cpu_affinity import assign_cores, cpu_quota, parse_list, physical_cores
from thalweg.launch.failure import Failure, collect_failures, format_report


@settings(deadline=None)
@given(
    nproc=st.integers(1, 20),
    sizes=st.lists(st.integers(1, 2), min_size=1, max_size=24),
    quota=st.none() | st.floats(0.1, 64),
)
def test_cores_are_disjoint_and_all_dealt(nproc: int, sizes: list[int], quota: float | None) -> None:
    cores, start = [], 0
    for size in sizes:
        cores.append(tuple(range(start, start + size)))
        start += size
    plan = assign_cores(nproc, cores, quota=quota)
    assert plan.num_threads >= 1
    assert plan.num_threads * nproc <= max(nproc, len(cores))
    if len(cores) < nproc:
        assert plan.cpus == ()
        return
    dealt = [cpu for share in plan.cpus for cpu in share]
    assert sorted(dealt) == list(range(start)), "each processor belongs to exactly one rank"
    assert len(plan.cpus) == nproc and min(len(share) for share in plan.cpus) >= 1
    for core in cores:
        assert sum(bool(set(core) & set(share)) for share in plan.cpus) == 1, "one core's threads stay together"


def test_cores_are_not_bound_on_request_and_a_quota_counts() -> None:
    cores = [(0,), (1,), (2,), (3,)]
    assert assign_cores(2, cores, bind=False).cpus == ()
    assert assign_cores(2, cores).num_threads == 2
    assert assign_cores(2, cores, quota=2.5).num_threads == 1


def test_siblings_and_nodes_are_read_from_sysfs(tmp_path: Path) -> None:
    for cpu in range(4):  # two nodes, processors 0 and 2 share a core, so do 1 and 3
        folder = tmp_path / f"cpu{cpu}"
        (folder / "topology").mkdir(parents=True)
        (folder / "topology/thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
        (folder / f"node{1 - cpu % 2}").mkdir()
    assert physical_cores([0, 1, 2, 3], tmp_path) == [(1, 3), (0, 2)]
    assert physical_cores([0, 1], tmp_path) == [(1,), (0,)], "only what this process may use"
    assert physical_cores([0, 1], tmp_path / "none") == [(0,), (1,)]


def test_cpu_lists_and_quotas() -> None:
    assert parse_list("0-3,8\n", "cores") == (0, 1, 2, 3, 8)
    for text in ("", "a", "1-", "-1", "1,,2"):
        with pytest.raises(ValueError, match="is not a list of cores: write it as 0-3,8"):
            parse_list(text, "cores")
    with pytest.raises(ValueError, match="3-1 is no range of cores"):
        parse_list("0,3-1", "cores")


@pytest.mark.parametrize(("text", "expected"), [("250000 100000", 2.5), ("max 100000", None), ("junk", None)])
def test_cgroup_quota(tmp_path: Path, text: str, expected: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert cpu_quota(tmp_path / "cpu.max") == expected
    assert cpu_quota(tmp_path / "absent") is None


def _record(folder: Path, rank: int, time_ns: int, kind: str, summary: str) -> None:
    record = {"rank": rank, "time_ns": time_ns, "type": kind, "summary": summary, "shown": False}
    record["traceback"] = f"Traceback of {rank}\n{summary}\n"
    (folder / f"{rank}.error").write_text(json.dumps(record))


PEER = ("builtins.RuntimeError", "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:1")
BUG = ("builtins.ValueError", "ValueError: boom")


@pytest.mark.parametrize(
    ("records", "codes", "exited", "first", "code"),
    [
        # the bug is first, whatever the clock says about those who lost their peer
        ({0: (1, *PEER), 1: (2, *BUG)}, {0: 1, 1: 1}, {0, 1}, 1, 1),
        ({0: (1, *BUG), 1: (2, *PEER)}, {0: 1, 1: 1}, {0, 1}, 0, 1),
        ({0: (5, *BUG), 1: (2, *BUG)}, {0: 1, 1: 1}, {0, 1}, 1, 1),
        # killed: no record, a peer wrote an error before anyone saw the death
        ({0: (5, *PEER)}, {0: 1, 1: -9}, {0, 1}, 1, 137),
        ({0: (5, *PEER)}, {0: 1, 1: 3}, {0, 1}, 1, 3),
        # both raised; the first was ended by the launcher before it had left
        ({0: (1, *BUG), 1: (2, *BUG)}, {1: 1, 0: -15}, {1}, 0, 1),
        # a bug, and the others ended by the launcher
        ({0: (5, *BUG)}, {0: 1, 1: -15, 2: -9}, {0}, 0, 1),
        # a peer of another host was lost, and the others of this one ended by the launcher
        ({1: (5, *PEER)}, {1: 1, 0: -15, 2: -9}, {1}, 1, 1),
        # nobody but the killed one failed
        ({}, {1: -11, 0: -15}, {1}, 1, 139),
        # only lost peers: the earliest
        ({0: (5, *PEER), 1: (4, *PEER)}, {0: 1, 1: 1}, {0, 1}, 1, 1),
        ({}, {2: 7}, {2}, 2, 7),
    ],
)
def test_the_first_failure_is_found(
    tmp_path: Path, records: dict, codes: dict, exited: set, first: int, code: int
) -> None:
    for rank, (time_ns, kind, summary) in records.items():
        _record(tmp_path, rank, time_ns, kind, summary)
    failures = collect_failures(tmp_path, codes, exited)
    assert (failures[0].rank, failures[0].exit_code) == (first, code)
    text = format_report(failures, 4)
    assert f"rank {first} of 4 failed first, exit code {code}" in text
    assert text.count("Traceback") <= 1 and "SIGTERM" not in text, "whom the launcher ended is no failure"


def test_a_line_that_announces_the_next_is_told_with_it() -> None:
    def tell(summary: str) -> str:
        return Failure(0, 1, 0, {"type": "builtins.ValueError", "summary": summary}).summary

    assert tell("ConfigError: 1 problem in x8.json:\n  a (line 2): unknown\n  b") == (
        "ConfigError: 1 problem in x8.json: a (line 2): unknown"
    )
    assert tell("ValueError: boom\nlist:\n  a") == "ValueError: boom" and tell("") == ""


@pytest.mark.parametrize(
    ("summary", "is_peer_loss"),
    [
        ("RuntimeError: cannot restore the optimizer", False),
        ("RuntimeError: the feature store has no row 7", False),
        ("RuntimeError: igloo_speer.bin is damaged", False),
        ("RuntimeError: [gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.2]:1", True),
        ("RuntimeError: Socket timed out", True),
        ("RuntimeError: ncclRemoteError: a call failed on a remote rank", True),
        ("RuntimeError: [1] is setting up NCCL communicator by store->get('0')", True),
        ("RuntimeError: writev: Broken pipe", True),
    ],
)
def test_a_rank_is_excused_only_for_words_about_a_lost_peer(summary: str, is_peer_loss: bool) -> None:
    record = {"type": "builtins.RuntimeError", "summary": summary}
    assert Failure(0, 1, 0, record).is_peer_loss is is_peer_loss


def test_a_rank_whose_inference_lost_a_peer_is_excused() -> None:
    kind = f"{WorkerDiedError.__module__}.{WorkerDiedError.__qualname__}"
    assert Failure(1, 1, 0, {"type": kind, "summary": "WorkerDiedError: inference rank 0 of 2 is gone"}).is_peer_loss


def test_the_report_names_signals_with_a_cure(tmp_path: Path) -> None:
    for number, hint in (
        (signal.SIGKILL, "out-of-memory"),
        (signal.SIGBUS, "/dev/shm"),
        (signal.SIGSEGV, "stack above"),
    ):
        text = format_report(collect_failures(tmp_path, {0: -number}, {0}), 1)
        assert number.name in text and hint in text
    assert "64" in format_report(collect_failures(tmp_path, {0: -64}, {0}), 1), "a real-time signal has no name"


@pytest.mark.parametrize(
    ("arguments", "mine", "script"),
    [
        (["a.py", "--nproc", "3"], [], ["a.py", "--nproc", "3"]),
        (["--nproc", "2", "a.py", "--", "-x"], ["--nproc", "2"], ["a.py", "--", "-x"]),
        (["--nproc=2", "-m", "pkg", "--help"], ["--nproc=2", "-m"], ["pkg", "--help"]),
        (["--no-bind", "a.py", ""], ["--no-bind"], ["a.py", ""]),
        (["--", "-odd.py", "x"], [], ["-odd.py", "x"]),
        (["--nproc"], ["--nproc"], []),
        (["--help"], ["--help"], []),
        (["-i", "localhost:0", "a.py", "-i"], ["-i", "localhost:0"], ["a.py", "-i"]),
    ],
)
def test_the_scripts_arguments_are_set_apart(arguments: list[str], mine: list[str], script: list[str]) -> None:
    parser = argparse.ArgumentParser(**run.PARSER_OPTIONS)
    run.add_arguments(parser)
    assert run.split_passthrough(parser, arguments) == (mine, script)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--min-elastic-nodes", "2"], "go with --elastic-training"),
        (["--elastic-training"], "needs --hostfile and ssh"),
        (["--elastic-training", "--hostfile", "HOSTS", "--no-ssh"], "needs --hostfile and ssh"),
        (["--elastic-training", "--hostfile", "HOSTS", "--launcher", "mpi"], "needs --hostfile and ssh"),
        (
            ["--elastic_training", "--hostfile", "HOSTS", "--min_elastic_nodes", "3"],
            "3 is more than the hosts of the start, which are 2",
        ),
        (
            ["--elastic_training", "--hostfile", "HOSTS", "--min_elastic_nodes", "2", "--max_elastic_nodes", "1"],
            "2 is more than the hosts of the start, which are 1",
        ),
        (["--launcher", "slurm", "--nproc", "2", "--max-restarts", "1"], "sbatch --requeue"),
        (["--launcher", "SLURM", "--nproc", "2", "--max-restarts", "1"], "sbatch --requeue"),
    ],
)
def test_restarts_that_cannot_be_are_refused(tmp_path: Path, words: list[str], problem: str) -> None:
    (tmp_path / "hosts").write_text("a\nb\n")
    with pytest.raises(ValueError, match=problem):
        run.run(_parse([str(tmp_path / "hosts") if word == "HOSTS" else word for word in words]))


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(**run.PARSER_OPTIONS)
    run.add_arguments(parser)
    return argparse.Namespace(**vars(parser.parse_args(words)), passthrough=["train.py"])


def test_mpirun_takes_the_number_of_threads_to_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(schedulers, "run_command", lambda *given: started.append(given))
    for words in (["--threads", "3"], []):
        args = _parse(["--launcher", "mpi", "--nproc", "2", *words])
        run._run_with_scheduler(args, run._build_spec(args), ())
    (command, environ), (plain, _) = started
    assert command[command.index("OMP_NUM_THREADS") - 1] == "-x" and environ["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in plain, "mpirun warns of a name that is not set"


def test_how_often_a_job_is_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's number for elastic training; torchrun's variable, which Kubeflow sets."""

    def asked(*words: str) -> int:
        return run._build_spec(_parse([*words])).max_restarts

    assert [asked(), asked("--elastic-training"), asked("--elastic-training", "--max_restarts", "0")] == [0, 100, 0]
    monkeypatch.setenv("PET_MAX_RESTARTS", "7")
    assert [asked(), asked("--max-restarts", "2")] == [7, 2]


def test_the_hostfile_of_a_cluster_is_taken_where_deepspeed_takes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``/job/hostfile`` by itself, for the command that is DeepSpeed's."""

    def hosts(*words: str) -> list[str]:
        return [host.address for host in run._select_hosts(_parse([*words]))]

    assert Path("/job/hostfile") == run._CLUSTER_HOSTFILE
    monkeypatch.setattr(run, "_CLUSTER_HOSTFILE", tmp_path / "hostfile")
    assert hosts("--as-deepspeed") == []
    (tmp_path / "hostfile").write_text("a slots=2\nb slots=2\n")
    (tmp_path / "own").write_text("c slots=2\n")
    assert hosts("--as-deepspeed") == ["a", "b"] and hosts() == []
    assert hosts("--as-deepspeed", "--hostfile", str(tmp_path / "own")) == ["c"]


WRITES_LINES = """
import os, sys, time
rank, folder = int(os.environ["RANK"]), sys.argv[1]
open(f"{folder}/{rank}.up", "w").close()
while len([name for name in os.listdir(folder) if name.endswith(".up")]) < 2:
    time.sleep(0.001)
for i in range(300):
    print("rank", rank, "line", i, "abc" * (i * 37 % 4000), "end", file=sys.stderr if i % 3 == 0 else sys.stdout)
"""


def _start_rank(folder: Path, rank: int, script: str, output: int) -> subprocess.Popen:
    worker = Path(run.__file__).parents[1] / "launch" / "worker.py"
    (folder / "script.py").write_text(script)
    arguments = [str(folder), str(os.getpid()), "1", "-", "script", str(folder / "script.py"), str(folder)]
    return subprocess.Popen(
        [sys.executable, "-u", str(worker), *arguments],
        stdout=output, stderr=output, env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
    )  # fmt: skip


def test_lines_of_two_ranks_are_whole(tmp_path: Path) -> None:
    """Both streams of both ranks are one pipe; lines are longer than what a pipe takes as one."""
    read_end, write_end = os.pipe()
    ranks = [_start_rank(tmp_path, rank, WRITES_LINES, write_end) for rank in range(2)]
    os.close(write_end)
    with os.fdopen(read_end, "rb") as output:
        lines = output.read().decode().split("\n")
    assert [rank.wait(10) for rank in ranks] == [0, 0]
    wanted = {f"rank {rank} line {i} {'abc' * (i * 37 % 4000)} end" for rank in range(2) for i in range(300)}
    torn = [line[:60] for line in lines[:-1] if line not in wanted]
    assert not torn and len(lines) == 601 and lines[-1] == "", (len(torn), torn[:3])


def test_what_is_no_line_yet_comes_when_it_is_flushed(tmp_path: Path) -> None:
    script = """
import os, sys, time
print("held", end=" ")
os.write(1, b"|")
print("asked", end="? ", flush=True)
os.write(1, b"|")
print("\\r 10%", end="")
os.write(1, b"|")
if os.fork() == 0:
    print(" child", end="")
    sys.stdout.flush()
    os._exit(0)
os.wait()
print("x" * 3_000_000, end="")
os.write(1, b"|")
print("last", end="")
"""
    read_end, write_end = os.pipe()
    rank = _start_rank(tmp_path, 0, script, write_end)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as output:
        text = output.read().decode()
    assert rank.wait(10) == 0
    assert text.replace("x" * 3_000_000, "X") == "|held asked? |\r 10%| childX|last"


@pytest.mark.parametrize("note", ["a note\nof two lines", ""])
def test_an_error_with_a_note_is_summed_up_by_its_own_line(tmp_path: Path, note: str) -> None:
    rank = _start_rank(tmp_path, 0, f"error = ValueError('boom')\nerror.add_note({note!r})\nraise error", 2)
    assert rank.wait(60) == 1
    report = format_report(collect_failures(tmp_path, {0: 1}, {0}), 1)
    assert report.splitlines()[-1] == "thalweg run: rank 0 of 1 failed, exit code 1: ValueError: boom"
    assert note in report


def test_an_error_that_says_nothing_is_reported(tmp_path: Path) -> None:
    _record(tmp_path, 0, 1, "custom.Error", "")
    assert "failed, exit code 1: \n" in format_report(collect_failures(tmp_path, {0: 1}, {0}), 1)
