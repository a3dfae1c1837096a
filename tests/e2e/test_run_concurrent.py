"""Jobs side by side (row 30), and how little eight ranks say (row 28)."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.e2e.launch_support import Launch, wait_output

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
        assert [wait_output(job)[0] for job in jobs] == [0, 0]
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
    code, out, err = wait_output(launch(script, options=("--nproc", "8")), timeout=120)
    assert (code, out) == (0, "done\n")
    assert len(err.splitlines()) <= 2, err
