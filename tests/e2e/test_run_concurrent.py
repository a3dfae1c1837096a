"""Jobs side by side (row 30), and how little many ranks say (row 28)."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.e2e.launch_support import Launch, wait_output
from tests.marks import nightly

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


@pytest.mark.nightly
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


TRAIN = """
    import torch
    import thalweg
    torch.set_num_threads(1)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine, *_ = thalweg.initialize(model=torch.nn.Linear(4, 1), config=config)
    for _ in range(5):
        loss = engine(torch.ones(2, 4)).square().mean()
        engine.backward(loss)
        engine.step()
    if torch.distributed.get_rank() == 0:
        print("done")
    engine.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [nightly(2), nightly(8)])
def test_row28_ranks_that_train_stay_within_a_budget_of_lines(launch: Launch, ranks: int) -> None:
    """The resolved config, once: no rank but one says it."""
    code, out, err = wait_output(launch(TRAIN, options=("--nproc", str(ranks))), timeout=240)
    assert (code, out) == (0, "done\n"), err
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) <= 40, err
    for name in ("optimizer.params.lr", "train_batch_size", "data_parallel_size"):
        assert err.count(f" {name} ") == 1, err
