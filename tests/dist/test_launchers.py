"""Ranks as srun, mpirun, torchrun and others leave them: they meet or say what is wrong (row 29)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks

Environ = dict[str, str]
FAMILIES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "SLURM_",
    "OMPI_",
    "PMI_",
    "MPI_",
    "PET_",
    "TORCHELASTIC_",
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun(rank: int, world: int, port: int) -> Environ:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def srun(rank: int, world: int, port: int) -> Environ:
    return {
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": str(world),
        "SLURM_NODEID": "0",
        "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": str(world), "SLURM_JOB_ID": str(port),
        "SLURM_STEP_NODELIST": "localhost",
    }  # fmt: skip


def mpirun(rank: int, world: int, port: int) -> Environ:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(world),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": str(world),
        "PMIX_NAMESPACE": str(port),
    }  # fmt: skip


def mpich(rank: int, world: int, port: int) -> Environ:
    return {
        "PMI_RANK": str(rank), "PMI_SIZE": str(world),
        "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


LAUNCHERS = (torchrun, srun, mpirun, mpich)


def _set(environ: Environ) -> None:
    for name in [name for name in os.environ if name.startswith(FAMILIES)]:
        del os.environ[name]
    os.environ.update(environ)


def _meet(rank: int, world: int, ports: list[int]) -> list[tuple[str, int, float]]:
    import thalweg

    found = []
    for launcher, port in zip(LAUNCHERS, ports, strict=True):
        _set(launcher(rank, world, port))
        info = thalweg.init_distributed(timeout=60)
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        found.append((info.source, info.local_world_size, total.item()))
        dist.destroy_process_group()
    return found


def test_row29_ranks_of_every_launcher_meet() -> None:
    ports = [free_port() for _ in LAUNCHERS]
    for found in run_ranks(_meet, 3, ports, init=False):
        assert found == [("torchrun", 3, 3.0), ("slurm", 3, 3.0), ("openmpi", 3, 3.0), ("pmi", 3, 3.0)]


def _change(case: str, rank: int, port: int) -> Environ:
    """The environment of one rank of three, wrong in one place on rank 2."""
    last = rank == 2
    changes: dict[str, Callable[[Environ], Environ]] = {
        "world": lambda e: e | ({"WORLD_SIZE": "4"} if last else {}),
        "rank": lambda e: e | ({"RANK": "1"} if last else {}),
        "local rank": lambda e: e | ({"LOCAL_RANK": "1"} if last else {}),
        "local world": lambda e: e | ({"LOCAL_WORLD_SIZE": "2"} if rank == 1 else {}),
        "port": lambda e: e | ({"MASTER_PORT": "1"} if last else {}),
        "slurm": lambda e: (
            srun(rank, 3, port) | ({"SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"} if last else {})
        ),
    }
    return changes[case](torchrun(rank, 3, port))


def _errors(rank: int, world: int, cases: list[tuple[str, int, float]]) -> list[str]:
    import thalweg

    told = []
    for case, port, patience in cases:
        _set(_change(case, rank, port))
        try:
            thalweg.init_distributed(timeout=patience)
            told.append("")
            dist.destroy_process_group()
        except ValueError as error:
            told.append(str(error))
    return told


def test_row29_a_wrong_environment_is_one_error_with_variable_and_host() -> None:
    names = {
        "world": "WORLD_SIZE=",
        "rank": "RANK=1 on ",
        "local rank": "LOCAL_RANK=1 on ",
        "local world": "LOCAL_WORLD_SIZE=2 on ",
        "slurm": "SLURM_STEP_NUM_TASKS=",
    }
    cases = [(case, free_port(), 30.0) for case in names]
    told = run_ranks(_errors, 3, cases, init=False)
    host = socket.gethostname()
    for index, (case, said) in enumerate(names.items()):
        errors = {one[index] for one in told}
        assert len(errors) == 1, f"{case}: not the same error everywhere: {errors}"
        (error,) = errors
        assert said in error and host in error, error
    assert "WORLD_SIZE=3 on" in told[0][0] or "WORLD_SIZE=4 on" in told[0][0]


def _late(rank: int, world: int, port: int) -> list[str]:
    time.sleep(2.0 if rank == 1 else 0.0)
    return _errors(rank, world, [("world", port, 4.0)])


def test_who_comes_after_the_error_is_told_the_same_one() -> None:
    told = run_ranks(_late, 3, free_port(), init=False, timeout=60)
    assert told[0] == told[1] == told[2] and "WORLD_SIZE=" in told[1][0], told


@pytest.mark.nightly
def test_a_rank_that_never_comes_is_named_on_both_sides() -> None:
    told = run_ranks(_errors, 3, [("port", free_port(), 4.0)], init=False, timeout=60)
    assert all("RANK 2 did not come within 4 s" in one[0] and "MASTER_PORT" in one[0] for one in told[:2]), told
    assert "rank 2 on" in told[2][0] and "MASTER_PORT=1" in told[2][0]


def _right(rank: int, world: int, port: int) -> str:
    import thalweg

    _set(torchrun(rank, 3, port))
    thalweg.init_distributed(timeout=30)
    dist.destroy_process_group()
    return ""


def test_negative_control_a_right_environment_has_no_error() -> None:
    assert run_ranks(_right, 3, free_port(), init=False) == ["", "", ""]


def _tensor_groups(rank: int, world: int) -> list[tuple[int, list[str]]]:
    """Hosts of a tensor group and what is said: two ranks a host, then three and one."""
    import logging

    from thalweg.parallel.tensor.tensor_parallel import warn_cross_host_groups

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("thalweg").addHandler(handler)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found = []
    for hosts in ((0, 0, 1, 1), (0, 0, 0, 1)):
        os.environ["THALWEG_HOST"] = f"host {hosts[rank]}"
        said.clear()
        world_group = dist.group.WORLD
        assert world_group is not None
        most = warn_cross_host_groups(groups[rank // 2], world_group, 12, 768, torch.device("cpu"))
        found.append((most, list(said)))
    return found


def test_a_tensor_group_over_two_hosts_is_told_with_its_traffic() -> None:
    results = run_ranks(_tensor_groups, 4)
    assert all(found[0] == (1, []) and found[1][0] == 2 for found in results)
    assert [len(found[1][1]) for found in results] == [1, 0, 0, 0], "rank 0 alone speaks"
    # 4 all-reduces of 768 fp32 a block and token, 2(n-1)/n of each sent
    assert "144.0 KiB a token" in results[0][1][1][0] and "autotp_size = 2" in results[0][1][1][0]
