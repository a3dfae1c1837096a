"""Ranks are read from the environment of each launcher (row 29); what is set in part is an error."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.utils import log, versions
from thalweg.utils.env import RankInfo, read_rank_info

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "29400",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_NTASKS": "6", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "gpu[07-09]",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-host-77@1",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    """The environment less some variables."""
    return {name: value for name, value in environ.items() if name not in names}


def test_bare_python_is_world_size_one() -> None:
    assert read_rank_info({}) == RankInfo(0, 1, 0, 1, None, None, "single")
    assert read_rank_info({"MASTER_ADDR": "h", "MASTER_PORT": "1"}).source == "single", "left over in a shell"


COMPLETE = [
    (TORCHRUN, (3, 8, 1, 2, "10.0.0.5", 29400, "torchrun")),
    ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5"},
     (1, 2, 1, 2, "127.0.0.1", 5, "torchrun")),
    ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, 0, 1, None, None, "torchrun")),
    ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "head"}, (0, 1, 0, 1, "head", None, "torchrun")),
    (SRUN | {"MASTER_PORT": "6000"}, (5, 6, 1, 2, "gpu07", 6000, "slurm")),
    (SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "6000"}, (5, 6, 1, 2, "head", 6000, "slurm")),
    (SRUN | {"RANK": "5", "WORLD_SIZE": "6", "MASTER_ADDR": "head", "MASTER_PORT": "6"},
     (5, 6, 1, 2, "head", 6, "torchrun")),
    (SRUN | {"WORLD_SIZE": "6", "MASTER_PORT": "6000"}, (5, 6, 1, 2, "gpu07", 6000, "slurm")),
    (SRUN | TORCHRUN, (3, 8, 1, 2, "10.0.0.5", 29400, "torchrun")),
    (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "6", "MASTER_PORT": "6000"}, (5, 6, 1, 2, "gpu07", 6000, "slurm")),
    (MPIRUN | {"MASTER_PORT": "6000"}, (1, 2, 1, 2, "127.0.0.1", 6000, "openmpi")),
    # mpirun inside an sbatch script: SLURM's variables are the script's, not the rank's
    (MPIRUN | {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "ENVIRONMENT": "BATCH",
               "MASTER_PORT": "6"}, (1, 2, 1, 2, "127.0.0.1", 6, "openmpi")),
    (MPICH | {"MASTER_PORT": "6000"}, (1, 4, 1, 4, "127.0.0.1", 6000, "pmi")),
    # mpiexec's proxies started by srun, one on each node
    (MPICH | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0", "MASTER_PORT": "6"},
     (1, 4, 1, 4, "127.0.0.1", 6, "pmi")),
    ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "0",
      "MV2_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "head", "MASTER_PORT": "6"},
     (0, 2, 0, 1, "head", 6, "pmi")),
    # mpiexec of HPE Cray's PALS; and one launcher on each host, started by a scheduler that does not say all
    *(({"PMI_RANK": "3", "PMI_SIZE": "4", rank: "1", size: "2", "MASTER_ADDR": "head", "MASTER_PORT": "6"},
       (3, 4, 1, 2, "head", 6, "pmi"))
      for rank, size in (("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"), ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"))),
    *((TORCHRUN | outer, (3, 8, 1, 2, "10.0.0.5", 29400, "torchrun"))
      for outer in ({"PMI_RANK": "1", "PMI_SIZE": "2"}, {"OMPI_COMM_WORLD_RANK": "0"},
                    without(SRUN, "SLURM_STEP_TASKS_PER_NODE") | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_NNODES": "2"})),
]  # fmt: skip


@pytest.mark.parametrize(("environ", "expected"), COMPLETE)
def test_complete_environments(environ: dict[str, str], expected: tuple) -> None:
    assert read_rank_info(environ) == RankInfo(*expected)


@pytest.mark.parametrize(
    ("per_node", "node", "expected"),
    [("2(x3)", 0, 2), ("4,2", 0, 4), ("4,2", 1, 2), ("1,2(x2),1", 2, 2), ("6", 0, 6)],
)
def test_slurm_tasks_per_node(per_node: str, node: int, expected: int) -> None:
    environ = SRUN | {"SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_NODEID": str(node)}
    assert read_rank_info(environ).local_world_size == expected


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[07-09,12]", "gpu07"),
        ("gpu[3,5],login1", "gpu3"),
        ("rack-a[001-010]-ib,x", "rack-a001-ib"),
        ("a.b.c,d", "a.b.c"),
    ],
)
def test_slurm_first_host(nodes: str, first: str) -> None:
    assert read_rank_info(SRUN | {"SLURM_STEP_NODELIST": nodes}).master_addr == first


def test_schedulers_without_a_port_agree_on_one() -> None:
    ports = {read_rank_info(SRUN | {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r % 2)}).master_port for r in range(6)}
    assert len(ports) == 1
    assert read_rank_info(SRUN | {"SLURM_JOB_ID": "4243"}).master_port not in ports, "two jobs, two ports"
    assert read_rank_info(SRUN | {"SLURM_STEP_ID": "1"}).master_port not in ports, "two steps, two ports"
    first = read_rank_info(MPIRUN).master_port
    assert (
        first == read_rank_info(MPIRUN | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}).master_port
    )
    assert first is not None and first != 29500


@pytest.mark.parametrize(
    "environ",
    [
        without(SRUN, "SLURM_PROCID"),  # an salloc shell
        without(SRUN, "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS") | {"SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_NAME": "interactive"},
    ],
)
def test_a_slurm_shell_is_no_rank(environ: dict[str, str]) -> None:
    assert read_rank_info(environ).source == "single"


BROKEN = [
    (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE"),
    (without(TORCHRUN, "RANK"), "RANK"),
    ({"LOCAL_RANK": "0"}, "RANK and WORLD_SIZE are not"),
    (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK"),
    (without(TORCHRUN, "LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE"),
    (TORCHRUN | {"RANK": "8"}, "RANK=8"),
    (TORCHRUN | {"RANK": "-1"}, "RANK=-1"),
    (TORCHRUN | {"RANK": "one"}, "RANK='one'"),
    (TORCHRUN | {"RANK": ""}, "RANK=''"),
    (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
    (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2"),
    (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9"),
    (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
    (TORCHRUN | {"MASTER_PORT": "x"}, "MASTER_PORT='x'"),
    (without(SRUN, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), "SLURM_STEP_NUM_TASKS"),
    (without(SRUN, "SLURM_LOCALID"), "SLURM_LOCALID"),
    (SRUN | {"SLURM_PROCID": "6"}, "SLURM_PROCID=6"),
    (SRUN | {"WORLD_SIZE": "4"}, "WORLD_SIZE=4 contradicts 6"),
    (SRUN | {"RANK": "4"}, "RANK=4 contradicts 5"),
    (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE='two'"),
    (without(MPIRUN, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE"),
    (without(MPIRUN, "OMPI_COMM_WORLD_LOCAL_RANK"), "OMPI_COMM_WORLD_LOCAL_RANK"),
    (without(MPICH, "PMI_SIZE"), "PMI_SIZE"),
    (without(MPICH, "MPI_LOCALNRANKS"), "MPI_LOCALNRANKS"),
]


@pytest.mark.parametrize(("environ", "named"), BROKEN)
def test_broken_environments_name_the_variable_and_the_cure(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=r"unset|export|start|set it") as caught:
        read_rank_info(environ)
    assert named in str(caught.value)


FAMILIES = [*TORCHRUN, *SRUN, *MPIRUN, *MPICH]


@settings(deadline=None, max_examples=400)
@given(
    st.dictionaries(st.sampled_from(FAMILIES), st.sampled_from(["0", "1", "2", "4", "", "x", "-1", "2(x2)", "9" * 40]))
)
def test_any_environment_gives_consistent_ranks_or_one_clear_error(environ: dict[str, str]) -> None:
    try:
        info = read_rank_info(environ)
    except ValueError as error:
        problem = str(error)
    else:
        problem = ""
    if problem:
        assert any(name in problem for name in FAMILIES) or "SLURM" in problem
        return
    assert 0 <= info.rank < info.world_size
    assert 0 <= info.local_rank < info.local_world_size <= info.world_size
    assert info.master_port is None or 0 < info.master_port < 65536


def test_only_rank_zero_informs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    logger = log.get_logger("thalweg.test_env")
    caplog.set_level("INFO", logger="thalweg.test_env")  # a command in this process may have set another
    for rank, expected in ((0, ["a", "b"]), (1, ["b"])):
        caplog.clear()
        monkeypatch.setattr(log, "current_rank", lambda rank=rank: rank)
        logger.info("a")
        logger.warning("b")
        assert [record.message for record in caplog.records] == expected


def test_loggers_live_below_thalweg_and_have_no_handler() -> None:
    logger = log.get_logger("somewhere")
    assert logger.name == "thalweg.somewhere" and log.get_logger("thalweg.x").name == "thalweg.x"
    assert log.get_logger("somewhere") is logger and len(logger.filters) == 1
    assert not logger.handlers


def test_console_respects_the_program_and_knows_levels() -> None:
    root = logging.getLogger(log.ROOT)
    level, handlers = root.level, list(root.handlers)
    try:
        log.enable_console("warning")
        assert root.level == logging.WARNING
        assert root.handlers == handlers, "pytest has set up logging; nothing is added"
        with pytest.raises(ValueError, match="use debug"):
            log.enable_console("loud")
    finally:
        root.setLevel(level)


@pytest.mark.parametrize(
    ("version", "said"),
    [("2.10.0", "older"), ("2.11.0+cu130", ""), ("2.15.1", ""), ("2.16.0.dev20270101+cpu", "newer"), ("3.0", "newer")],
)
def test_a_newer_torch_than_tried_is_said(version: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    assert said in versions.torch_version_problem(version) and bool(said) == bool(
        versions.torch_version_problem(version)
    )
    for _ in range(2):
        versions.warn_of_untried_torch(version)
    assert caplog.text.count("than the tried ones") == bool(said), "once"
