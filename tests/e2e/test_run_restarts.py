"""`thalweg run --max-restarts N`: a job that fails is started anew, and loads its newest checkpoint."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.e2e.launch_support import (
    EXIT_DEADLINE,
    Launch,
    free_port,
    wait_exited,
    wait_for_pids,
    wait_for_stderr,
    wait_for_texts,
    wait_output,
)
from tests.marks import nightly
from tests.repo.source import ROOT

# Saves before each third step and says each loss to the last digit.  In the starts that KILL_IN lists it stands still
# behind step 7 for whoever kills a rank.
TRAIN = """
import os, sys, time
from pathlib import Path
import torch
import thalweg

out, rank, world = Path(os.environ["OUT"], os.environ["PART"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
start = os.environ["THALWEG_RESTART_COUNT"]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
engine, *_ = thalweg.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 8 // world, "zero_optimization": {"stage": 2}, "steps_per_print": None,
    "checkpoint": {"resume": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})
_, state = engine.load_checkpoint(out / "ckpt")
for step in range(state["step"] if state else 0, 10):
    if step % 3 == 0:
        engine.save_checkpoint(out / "ckpt", client_state={"step": step})
    rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))[rank::world]
    loss = (engine(rows) - rows.sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
    if rank == 0:
        print(start, step, world, loss.item().hex(), flush=True)
    if step == int(os.environ.get("CRASH_AT", -1)):
        raise ValueError(f"no step {step}")
    if step == 7 and start in os.environ["KILL_IN"].split(","):
        (out / f"pid.{start}.{rank}.part").write_text(str(os.getpid()))
        os.rename(out / f"pid.{start}.{rank}.part", out / f"pid.{start}.{rank}")
        time.sleep(60)
engine.close()
"""


def _train(
    launch: Launch, folder: Path, kill_in: tuple[int, ...] = (), max_restarts: int = 0, num_ranks: int = 2
) -> tuple[int, list[list[str]], str]:
    """Exit code, what each step said, and standard error of a job whose last rank is killed in these starts."""
    folder.mkdir(exist_ok=True)
    options = ("--nproc", str(num_ranks), "--max-restarts", str(max_restarts))
    told = {"KILL_IN": ",".join(map(str, kill_in)), "PART": folder.name, "PYTHONPATH": str(ROOT)}
    job = launch(TRAIN, options=options, **told)
    for start in kill_in:
        os.kill(wait_for_pids(folder, f"pid.{start}.[01]", num_ranks)[-1], signal.SIGKILL)
    code, out, err = wait_output(job)
    return code, [line.split() for line in out.splitlines()], err


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_killed_rank_does_not_end_training(launch: Launch, tmp_path: Path, num_ranks: int) -> None:
    """Steps 6 and 7 are done twice, from the checkpoint before step 6, and have the same losses."""
    code, said, err = _train(launch, tmp_path / "killed", kill_in=(0,), max_restarts=1, num_ranks=num_ranks)
    assert code == 0 and "exit code 137: killed by signal 9" in err and "thalweg run: restart 1 of 1\n" in err
    steps = [("0", str(step)) for step in range(8)] + [("1", str(step)) for step in range(6, 10)]
    assert [(start, step) for start, step, *_ in said] == steps
    first, second = ({step: loss for one, step, _, loss in said if one == start} for start in "01")
    assert all(first[step] == second[step] for step in ("6", "7"))
    assert len({*first.values(), *second.values()}) == 10, "each step has a loss of its own"


@pytest.mark.nightly
def test_losses_are_those_of_a_run_that_was_not_killed(launch: Launch, tmp_path: Path) -> None:
    ends = {
        "whole": _train(launch, tmp_path / "whole"),
        "killed": _train(launch, tmp_path / "killed", kill_in=(0, 1), max_restarts=2),
        "control": _train(launch, tmp_path / "control", kill_in=(0,)),
    }
    losses = {name: {step: loss for _, step, _, loss in said} for name, (_, said, _) in ends.items()}
    assert {name: code for name, (code, *_) in ends.items()} == {"whole": 0, "killed": 0, "control": 137}
    assert losses["whole"] == losses["killed"] and len(losses["whole"]) == 10
    assert len(losses["control"]) == 8, "without --max-restarts it ends where it was killed"


@pytest.mark.nightly
def test_one_checkpoint_is_not_tried_for_ever(launch: Launch, tmp_path: Path) -> None:
    """R15: three restarts from the checkpoint of step 6, three from that of step 3, and a report; 93 were allowed."""
    told = {"KILL_IN": "", "PART": "", "PYTHONPATH": str(ROOT), "CRASH_AT": "8"}
    code, out, err = wait_output(launch(TRAIN, options=("--nproc", "1", "--max-restarts", "99"), **told), timeout=300)
    first = {line.split()[0]: line.split()[1] for line in reversed(out.splitlines())}
    assert list(reversed(first.items())) == [
        ("0", "0"),
        *((str(n), "6") for n in (1, 2, 3)),
        *((str(n), "3") for n in (4, 5, 6)),
    ]
    assert code == 1 and "RestartLoopError: 3 starts each from global_step6 and from global_step3 have crashed" in err
    assert err.count("ValueError: no step 8") >= 7 and "restart 7 of 99" in err and "restart 8 of 99" not in err


COUNTS = """
import os, sys, time
start, rank = os.environ["THALWEG_RESTART_COUNT"], os.environ["RANK"]
names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "MASTER_PORT")
with open(os.path.join(os.environ["OUT"], f"up.{start}.{rank}.part"), "w") as file:
    file.write(" ".join([str(os.getpid()), *(os.environ[name] for name in names)]))
os.rename(file.name, file.name.removesuffix(".part"))
while not os.path.exists(os.path.join(os.environ["OUT"], f"up.{start}.{1 - int(rank)}")):
    time.sleep(0.01)
if rank == "1" and sys.argv[1] == "fails":
    sys.exit(5 + int(start))
time.sleep(60 if sys.argv[1] == "hangs" else 0)
"""


def _told(folder: Path, start: int) -> list[list[str]]:
    return [(folder / f"up.{start}.{rank}").read_text().split()[1:] for rank in (0, 1)]


@pytest.mark.parametrize("own_port", [False, nightly(True)])
def test_a_script_that_always_fails_ends_after_the_last_restart(launch: Launch, tmp_path: Path, own_port: bool) -> None:
    """Each start has its own port, unless one was given; the exit code is the last failure's."""
    port = str(free_port())
    options = ("--nproc", "2", "--max_restarts=2", *(("--master-port", port) if own_port else ()))
    code, _, err = wait_output(launch(COUNTS, "fails", options=options))
    assert code == 7 and [err.count(f"exit code {code}") for code in (5, 6, 7)] == [1, 1, 1], err
    assert [line for line in err.splitlines() if "restart" in line] == [
        f"thalweg run: restart {n} of 2" for n in (1, 2)
    ]
    told = [_told(tmp_path, start) for start in range(3)]
    assert [rank[:2] for start in told for rank in start] == [[str(start), "2"] for start in (0, 0, 1, 1, 2, 2)]
    assert all(start[0] == start[1] for start in told), "the ranks of a start meet at one port"
    assert len({start[0][2] for start in told}) == (1 if own_port else 3)
    assert not own_port or told[0][0][2] == port


def test_a_killed_rank_is_started_again_and_a_stopped_job_is_not(launch: Launch, tmp_path: Path) -> None:
    job = launch(COUNTS, "hangs", options=("--nproc", "2", "--max-restarts", "3"))
    os.kill(int(wait_for_texts(tmp_path, "up.0.[01]", 2)[1].split()[0]), signal.SIGKILL)
    pids = [int(text.split()[0]) for text in wait_for_texts(tmp_path, "up.1.[01]", 2)]
    sent = time.monotonic()
    job.send_signal(signal.SIGTERM)
    code, _, err = wait_output(job, timeout=EXIT_DEADLINE)
    wait_exited(pids, sent)
    assert code == 143 and "exit code 137" in err and err.endswith("stopped by SIGTERM, and the ranks with it\n"), err
    assert [line for line in err.splitlines() if "restart" in line] == ["thalweg run: restart 1 of 3"]


@pytest.mark.nightly
def test_a_port_that_is_taken_is_no_failure_to_start_again_after(launch: Launch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, _, err = wait_output(launch(COUNTS, "fails", options=("--max-restarts", "3", "--master-port", port)))
    assert code == 2 and f"port {port} of 127.0.0.1 is in use" in err and "restart" not in err


FAILS = """
import os, subprocess, sys
helper = subprocess.Popen(["sleep", "120"])
with open(os.path.join(os.environ["OUT"], f"pids.{os.getpid()}"), "w") as file:
    file.write(f"{os.getpid()} {helper.pid}")
sys.exit(3)
"""


@pytest.mark.parametrize("delay", [0.0, *map(nightly, (0.05, 0.1, 0.2, 0.3))])
def test_a_signal_between_two_starts_ends_everything(launch: Launch, tmp_path: Path, delay: float) -> None:
    job = launch(FAILS, options=("--nproc", "1", "--max-restarts", "99"))
    wait_for_stderr(job, "restart 2 of 99\n")
    time.sleep(delay)
    sent = time.monotonic()
    job.send_signal(signal.SIGTERM)
    code, _, err = wait_output(job, timeout=EXIT_DEADLINE)
    assert code == 143 and err.endswith("stopped by SIGTERM, and the ranks with it\n"), err
    wait_exited([int(pid) for path in tmp_path.glob("pids.*") for pid in path.read_text().split()], sent)


@pytest.mark.nightly
def test_hosts_that_are_started_by_hand_start_anew_together(launch: Launch, tmp_path: Path) -> None:
    """Rank 1 of host 1 fails in the first start; both launchers say so and meet again at the same port."""
    port = str(free_port())
    meet = ("--num-nodes", "2", "--master-addr", "127.0.0.1", "--master-port", port, "--max-restarts", "1")
    jobs = [launch(COUNTS, "fails", options=(*meet, "--node-rank", str(rank))) for rank in (0, 1)]
    for job in jobs:
        code, _, err = wait_output(job)
        assert code == 6 and "exit code 5" in err and "exit code 6" in err, err
        assert err.count("thalweg run: restart 1 of 1\n") == 1
    assert [_told(tmp_path, start) for start in (0, 1)] == [[[str(start), "1", port]] * 2 for start in (0, 1)]


@pytest.mark.nightly
def test_training_on_hosts_that_are_started_by_hand_goes_on(launch: Launch, tmp_path: Path) -> None:
    """The ranks of both starts meet in one store of host 0."""
    meet = ("--num-nodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--max-restarts", "1")
    told = {"KILL_IN": "0", "PART": "", "PYTHONPATH": str(ROOT)}
    jobs = [launch(TRAIN, options=(*meet, "--node-rank", str(rank)), **told) for rank in (0, 1)]
    os.kill(wait_for_pids(tmp_path, "pid.0.[01]", 2)[1], signal.SIGKILL)
    (code, out, err), (other, _, _) = [wait_output(job) for job in jobs]
    assert (code, other) == (0, 0), err
    steps = [tuple(line.split()[:3]) for line in out.splitlines()]
    assert steps == [("0", str(step), "2") for step in range(8)] + [("1", str(step), "2") for step in range(6, 10)]


@pytest.mark.nightly
@pytest.mark.parametrize("is_missed", [True, False])
@pytest.mark.parametrize(("killed", "next_start"), [(1, 1), (0, 0)])
def test_a_launcher_that_was_killed_comes_back_by_hand(
    launch: Launch, tmp_path: Path, killed: int, next_start: int, is_missed: bool
) -> None:
    """As a pod that Kubernetes replaces: the other launcher waits for it, and host 0's number of the start counts.

    It comes when the other has missed it, or at once.
    """
    meet = ("--num-nodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--max-restarts", "3")
    jobs = [launch(COUNTS, "hangs", options=(*meet, "--node-rank", str(rank))) for rank in (0, 1)]
    wait_for_texts(tmp_path, "up.0.[01]", 2)
    jobs[killed].kill()
    if is_missed:
        wait_for_stderr(jobs[1 - killed], "restart 1 of 3")
    for path in tmp_path.glob("up.*"):
        path.unlink()
    jobs[killed] = launch(COUNTS, "hangs", options=(*meet, "--node-rank", str(killed)))
    told = wait_for_texts(tmp_path, f"up.{next_start}.[01]", 2)
    pids = [int(text.split()[0]) for text in told]
    assert [text.split()[1:3] for text in told] == [[str(next_start), "3"]] * 2
    jobs[0].send_signal(signal.SIGTERM)
    for job in jobs:
        code, _, err = wait_output(job)
        assert code == 143 and "stopped by SIGTERM" in err, err
    wait_exited(pids, time.monotonic())


@pytest.mark.nightly
def test_a_launcher_that_waits_for_the_first_host_hears_a_signal(launch: Launch, tmp_path: Path) -> None:
    meet = ("--num-nodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--max-restarts", "3")
    jobs = [launch(COUNTS, "hangs", options=(*meet, "--node-rank", str(rank))) for rank in (0, 1)]
    wait_for_texts(tmp_path, "up.0.[01]", 2)
    jobs[0].kill()
    wait_for_stderr(jobs[1], "restart 1 of 3")
    time.sleep(1)
    jobs[1].send_signal(signal.SIGTERM)
    code, _, err = wait_output(jobs[1], timeout=EXIT_DEADLINE)
    assert code == 143 and "Traceback" not in err, err
