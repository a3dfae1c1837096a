"""A job whose hosts are started by hand: two launchers that meet, here on one machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.launch_support import EXIT_DEADLINE, Launch, free_port, wait_output

SCRIPT = """
    import os, time
    rank = os.environ["RANK"]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    with open(os.path.join(os.environ["OUT"], "up" + rank), "w") as file:
        file.write(" ".join(os.environ[name] for name in names))
    if os.environ.get("RAISES") == rank:
        raise ValueError("no such shard: data/7")
    if "RAISES" in os.environ:
        time.sleep(120)
"""


def _options(index: int, port: int, nproc: int) -> tuple[str, ...]:
    meet = ("--master-addr", "127.0.0.1", "--master-port", str(port))
    return ("--num-nodes", "2", "--node-rank", str(index), *meet, "--nproc", str(nproc))


@pytest.mark.slow
def test_two_launchers_are_one_job_of_uneven_hosts(launch: Launch, tmp_path: Path) -> None:
    port = free_port()
    jobs = [launch(SCRIPT, options=_options(index, port, index + 1)) for index in (1, 0)]
    assert [wait_output(job)[0] for job in jobs] == [0, 0]
    told = [(tmp_path / f"up{rank}").read_text() for rank in range(3)]
    assert told == ["0 3 0 1 0", "1 3 0 2 1", "2 3 1 2 1"]


@pytest.mark.slow
def test_a_hostfile_without_ssh(launch: Launch, tmp_path: Path) -> None:
    """As `deepspeed --hostfile hosts --no_ssh --node_rank I` on each host; the file says how many ranks and where."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 slots=1\nworker-2 slots=2\n")
    words = ("--no_ssh", "--hostfile", str(hosts), "--master_port", str(free_port()), "-q", "--log_level", "error")
    jobs = [launch(SCRIPT, options=(*words, "--node_rank", str(index))) for index in (1, 0)]
    assert [wait_output(job)[0] for job in jobs] == [0, 0]
    told = [(tmp_path / f"up{rank}").read_text() for rank in range(3)]
    assert told == ["0 3 0 1 0", "1 3 0 2 1", "2 3 1 2 1"]


@pytest.mark.nightly
@pytest.mark.slow
def test_both_launchers_end_with_the_failure_of_one(launch: Launch, tmp_path: Path) -> None:
    port = free_port()
    jobs = [launch(SCRIPT, options=_options(index, port, 1), RAISES="1") for index in range(2)]
    while len(list(tmp_path.glob("up?"))) < 2 and any(job.poll() is None for job in jobs):
        time.sleep(0.05)
    began = time.monotonic()
    for job in jobs:
        code, _, err = wait_output(job)
        assert code == 1 and "rank 1 of 2 on" in err and "ValueError: no such shard: data/7" in err
    assert time.monotonic() - began < EXIT_DEADLINE


@pytest.mark.nightly
@pytest.mark.slow
def test_two_hosts_with_one_number_are_one_error(launch: Launch) -> None:
    """Whichever two of the three meet first: ranks that wait are stopped when the third comes."""
    port = free_port()
    jobs = [launch(SCRIPT, options=_options(index, port, 1), RAISES="none") for index in (0, 1, 1)]
    ends = [wait_output(job, timeout=120) for job in jobs]
    assert all(code == 2 and "--node-rank 1 is given on" in err for code, _, err in ends), ends
