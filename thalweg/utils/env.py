"""Which rank am I: the launchers' environment variables, read in one place.

Five families are understood, and the first that is complete decides:

    torchrun     RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE   (also `thalweg run`, accelerate; in a pod of
                 Kubernetes LOCAL_RANK may be missing: a pod is a host of one rank)
    Open MPI     OMPI_COMM_WORLD_RANK _SIZE _LOCAL_RANK _LOCAL_SIZE
    SLURM        SLURM_PROCID SLURM_STEP_NUM_TASKS|SLURM_NTASKS SLURM_LOCALID SLURM_*TASKS_PER_NODE
    PMI          PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS   (MPICH, Intel MPI, MVAPICH's MV2_*;
                 Cray's PMI_LOCAL_RANK PMI_LOCAL_SIZE)
    Kubeflow     PET_NODE_RANK PET_NNODES PET_MASTER_ADDR PET_MASTER_PORT   (one process in a pod)

None set means a bare ``python``: world size 1.  A family that is set in part, or that contradicts itself,
is an error: guessing here makes a job that waits for ranks which do not exist.  An ``sbatch`` script or an
``salloc`` shell carries SLURM's variables without being a task of a step; those are recognised, and are
world size 1.

The function is pure: it reads the mapping it is given and touches neither torch nor the network.
"""

import ipaddress
import os
import re
import tomllib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# What device "auto" means in this process and in those that it starts; ``cpu`` hides the accelerators.
DEVICE_VARIABLE = "THALWEG_DEVICE"
_PORTS = range(20000, 32000)  # below Linux's ephemeral range, so no outgoing connection holds one
_HOST_RANGE = re.compile(r"^(?P<prefix>[^\[\]]*)(?:\[(?P<first>\d+)[^\]]*\](?P<suffix>[^\[\]]*))?$")


@dataclass(frozen=True)
class RankInfo:
    """Where this process stands in its job.

    ``master_addr`` and ``master_port`` say where rank 0 listens; ``None`` where the launcher does not tell.
    ``source`` is ``"torchrun"``, ``"openmpi"``, ``"slurm"``, ``"pmi"``, ``"kubeflow"`` or ``"single"``.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str | None
    master_port: int | None
    source: str


@dataclass(frozen=True)
class _LauncherVariables:
    """One launcher's names for the four numbers; alternatives of a name are tried in order."""

    source: str
    rank: list[str]
    world_size: list[str]
    local_rank: list[str] = field(default_factory=list)
    local_world_size: list[str] = field(default_factory=list)
    job_id: list[str] = field(default_factory=list)


_TABLES = tomllib.loads(Path(__file__).with_name("launchers.toml").read_text(encoding="utf-8"))
_LAUNCHERS = {source: _LauncherVariables(source, **names) for source, names in _TABLES.items()}
_TORCHRUN, _OPENMPI, _SLURM = _LAUNCHERS["torchrun"], _LAUNCHERS["openmpi"], _LAUNCHERS["slurm"]
_PMI, _KUBEFLOW = _LAUNCHERS["pmi"], _LAUNCHERS["kubeflow"]


def get_launcher_variables(source: str) -> dict[str, str]:
    """The variables that a launcher of this ``source`` sets, by the fields of :class:`RankInfo`."""
    family = _LAUNCHERS.get(source, _TORCHRUN)
    return {
        "rank": family.rank[0],
        "world_size": family.world_size[0],
        "local_rank": (family.local_rank or ("LOCAL_RANK",))[0],
        "local_world_size": (family.local_world_size or ("the number of tasks on this host",))[0],
    }


def read_rank_info(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Read rank, world size and rendezvous address from the launcher's variables.

    Raises ``ValueError`` that names the variable and the cure when a launcher's variables are set in part,
    are not numbers, or contradict each other.
    """
    is_torchrun = all(name in environ for name in get_launcher_variables("torchrun").values())
    # A scheduler's variables may be of the process that started this one's launcher.
    scheduler = None if is_torchrun else _from_scheduler(environ)
    has_rank, has_world = "RANK" in environ, "WORLD_SIZE" in environ
    if has_rank and has_world:
        return _from_torchrun(environ, scheduler)
    if scheduler is None and not (has_rank or has_world) and environ.get("PET_NNODES", "1") not in ("1", "1:1"):
        return _from_kubeflow(environ)
    if scheduler is None:
        set_names = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in environ]
        if set_names:
            missing = [name for name in ("RANK", "WORLD_SIZE") if name not in environ]
            present, absent = " and ".join(set_names), " and ".join(missing)
            raise ValueError(
                f"{present} {'is' if len(set_names) == 1 else 'are'} set but {absent} "
                f"{'is' if len(missing) == 1 else 'are'} not: start the program with `thalweg run --nproc N "
                "script.py` (or torchrun, srun, mpirun), which sets them all, or "
                f"`unset {' '.join(set_names)}` to run one process alone"
            )
        return RankInfo(0, 1, 0, 1, None, None, "single")
    for name, value in (("RANK", scheduler.rank), ("WORLD_SIZE", scheduler.world_size)):
        if name in environ and _parse_integer(environ, name) != value:
            raise ValueError(
                f"{name}={environ[name]} contradicts {value}, which {scheduler.source} gives this process: "
                f"`unset {name}`, or let one launcher set all of RANK, WORLD_SIZE and LOCAL_RANK"
            )
    return scheduler


def _from_torchrun(environ: Mapping[str, str], scheduler: RankInfo | None) -> RankInfo:
    rank, world_size = _parse_integer(environ, "RANK"), _parse_integer(environ, "WORLD_SIZE")
    local_rank = _first_integer(environ, _TORCHRUN.local_rank)
    local_world_size = _first_integer(environ, _TORCHRUN.local_world_size)
    addr, port = _read_master(environ)
    if local_rank is None or local_world_size is None:
        if scheduler is not None and (scheduler.rank, scheduler.world_size) == (rank, world_size):
            local = (scheduler.local_rank, scheduler.local_world_size)
        elif "KUBERNETES_SERVICE_HOST" in environ and addr is not None and not _is_this_host(addr):
            local = (0, 1)
        elif world_size == 1 or addr is None or _is_this_host(addr):
            local = (rank, world_size)
        else:
            name, hint = ("LOCAL_RANK", 0) if local_rank is None else ("LOCAL_WORLD_SIZE", 1)
            raise ValueError(
                f"RANK={rank}, WORLD_SIZE={world_size} are set and MASTER_ADDR={addr} may be another host, but {name} "
                f"is not set: export {name} (with one process on each host: {name}={hint}), or start with torchrun"
            )
        local_rank = local[0] if local_rank is None else local_rank
        local_world_size = local[1] if local_world_size is None else local_world_size
    return _validate(_TORCHRUN, RankInfo(rank, world_size, local_rank, local_world_size, addr, port, "torchrun"))


def _from_kubeflow(environ: Mapping[str, str]) -> RankInfo:
    """A plain ``python`` in a pod whose variables are meant for torchrun: it is the pod's one rank."""
    rank, num_hosts = _read_rank_and_size(environ, _KUBEFLOW)
    per_node = environ.get("PET_NPROC_PER_NODE", "1")
    if per_node not in ("1", "auto", "cpu"):
        raise ValueError(
            f"PET_NPROC_PER_NODE={per_node} asks for several ranks in this pod, but this is a plain python: start it "
            "with `thalweg run script.py` or torchrun, which read it"
        )
    addr, text = read_meeting_point(environ)
    if not addr:
        raise ValueError("PET_NNODES is set but PET_MASTER_ADDR is not: set it to the address of the first pod")
    number = _parse_integer({"PET_MASTER_PORT": text}, "PET_MASTER_PORT")
    return _validate(_KUBEFLOW, RankInfo(rank, num_hosts, 0, 1, addr, number, "kubeflow"))


def read_meeting_point(environ: Mapping[str, str]) -> tuple[str | None, str]:
    """Address and port of the first host, by the variables that torchrun reads, as text."""
    endpoint = environ.get("PET_RDZV_ENDPOINT", "")
    host, _, port = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", "")
    addr = environ.get("PET_MASTER_ADDR") or host or environ.get("MASTER_ADDR")
    return addr, environ.get("PET_MASTER_PORT") or port or environ.get("MASTER_PORT") or "29500"


def _from_scheduler(environ: Mapping[str, str]) -> RankInfo | None:
    """What Open MPI, SLURM or PMI says, or None when none of them started this process."""
    if _first_set(environ, _OPENMPI.rank + _OPENMPI.world_size):
        return _from_mpi(environ, _OPENMPI)
    slurm = _from_slurm(environ) if _is_slurm_task(environ) else None
    by_slurm = slurm and (slurm.rank, slurm.world_size)
    # `srun --mpi=pmi2` sets both families; mpiexec's proxies run under an srun of another meaning.
    if _first_set(environ, _PMI.rank + _PMI.world_size) and _read_rank_and_size(environ, _PMI) != by_slurm:
        return _from_mpi(environ, _PMI)
    return slurm


def _from_mpi(environ: Mapping[str, str], family: _LauncherVariables) -> RankInfo:
    rank, world_size = _read_rank_and_size(environ, family)
    local_rank = _first_integer(environ, family.local_rank)
    local_world_size = _first_integer(environ, family.local_world_size)
    if local_rank is None or local_world_size is None:
        if world_size != 1:
            names = family.local_rank[:1] if local_rank is None else family.local_world_size[:1]
            raise ValueError(
                f"{_first_set(environ, family.rank)} is set but {names[0]} is not, so the ranks of this host "
                f"cannot be told apart: export {names[0]}, or start with `thalweg run --nproc N script.py`"
            )
        local_rank, local_world_size = 0, 1
    addr, port = _read_master(environ)
    if local_world_size == world_size:  # one host: nobody needs to be told where it is
        addr = addr or "127.0.0.1"
        port = port or _derive_port(environ, family, fallback=str(os.getppid()))
    elif addr is not None:
        port = port or _derive_port(environ, family, fallback=None)
    return _validate(family, RankInfo(rank, world_size, local_rank, local_world_size, addr, port, family.source))


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    if "SLURM_PROCID" not in environ:  # an salloc shell
        return False
    if "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ or "SLURM_STEP_NUM_TASKS" in environ:
        return True
    batch = environ.get("ENVIRONMENT") == "BATCH"  # the body of an sbatch script
    return not (batch or environ.get("SLURM_JOB_NAME") in ("bash", "interactive"))


def _from_slurm(environ: Mapping[str, str]) -> RankInfo:
    rank, world_size = _read_rank_and_size(environ, _SLURM)
    local_world_size = _slurm_local_world_size(environ, world_size)
    local_rank = _first_integer(environ, _SLURM.local_rank)
    if local_rank is None:
        if world_size != 1:
            raise ValueError(
                "SLURM_PROCID is set but SLURM_LOCALID is not: start the program as a task of `srun`, which "
                "sets both, or export SLURM_LOCALID"
            )
        local_rank = 0
    addr, port = _read_master(environ)
    if addr is None:
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
        addr = _first_host(nodes) if nodes else ("127.0.0.1" if local_world_size == world_size else None)
    port = port or _derive_port(environ, _SLURM, fallback=None)
    return _validate(_SLURM, RankInfo(rank, world_size, local_rank, local_world_size, addr, port, "slurm"))


def _slurm_local_world_size(environ: Mapping[str, str], world_size: int) -> int:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in environ:
            counts = _parse_tasks_per_node(environ, name)
            node = _first_integer(environ, ("SLURM_NODEID",)) or 0
            if sum(counts) == world_size and node < len(counts):
                return counts[node]
    if (per_node := _first_integer(environ, ("SLURM_NTASKS_PER_NODE",))) is not None:
        return min(per_node, world_size)
    nodes = _first_integer(environ, ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")) or 1
    if world_size % nodes:
        raise ValueError(
            f"SLURM runs {world_size} tasks on {nodes} nodes and does not say how many are on this one: "
            "start with `srun --ntasks-per-node=N`"
        )
    return world_size // nodes


def _parse_tasks_per_node(environ: Mapping[str, str], name: str) -> list[int]:
    """Expand SLURM's ``2(x3),1`` to ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for item in environ[name].split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", item)
        if match is None:
            raise ValueError(
                f"{name}={environ[name]!r} is not SLURM's form, such as '2(x3),1': unset it to run without"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_host(nodes: str) -> str:
    """The first host of SLURM's ``gpu[07-09,12],login1``: rank 0 runs there."""
    match = _HOST_RANGE.match(re.split(r",(?![^\[]*\])", nodes)[0].strip())
    if match is None:
        raise ValueError(f"cannot read the first host of SLURM's node list {nodes!r}: export MASTER_ADDR")
    return f"{match['prefix']}{match['first'] or ''}{match['suffix'] or ''}"


def _derive_port(environ: Mapping[str, str], family: _LauncherVariables, fallback: str | None) -> int | None:
    """A port all ranks agree on without talking: a hash of the job's identity, None when it has none."""
    name = _first_set(environ, family.job_id)
    if name is None and fallback is None:
        return None
    step = environ.get("SLURM_STEP_ID", "")
    identity = f"{family.source}:{environ[name] if name else fallback}:{step}"
    return _PORTS[zlib.crc32(identity.encode()) % len(_PORTS)]


def _read_master(environ: Mapping[str, str]) -> tuple[str | None, int | None]:
    addr = environ.get("MASTER_ADDR") or None
    port = _first_integer(environ, ("MASTER_PORT",))
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"MASTER_PORT={port} is not a port: set it to a number from 1 to 65535, the same on each rank")
    return addr, port


def _validate(family: _LauncherVariables, info: RankInfo) -> RankInfo:
    names, problem = get_launcher_variables(family.source), None
    if info.world_size < 1:
        problem = f"{names['world_size']}={info.world_size} must be at least 1"
    elif not 0 <= info.rank < info.world_size:
        problem = f"{names['rank']}={info.rank} must be from 0 to {info.world_size - 1}, as the world size is "
        problem += f"{info.world_size} ({names['world_size']})"
    elif not 1 <= info.local_world_size <= info.world_size:
        problem = f"{names['local_world_size']}={info.local_world_size} must be from 1 to "
        problem += f"{info.world_size}, the world size ({names['world_size']})"
    elif not 0 <= info.local_rank < info.local_world_size:
        problem = f"{names['local_rank']}={info.local_rank} must be from 0 to {info.local_world_size - 1}, as "
        problem += f"{info.local_world_size} ranks run on this host ({names['local_world_size']})"
    if problem is not None:
        raise ValueError(
            f"{problem}: start all ranks with one launcher, or unset its variables to run one process alone"
        )
    return info


def _read_rank_and_size(environ: Mapping[str, str], family: _LauncherVariables) -> tuple[int, int]:
    for names in (family.rank, family.world_size):
        if _first_set(environ, names) is None:
            set_name = _first_set(environ, family.rank + family.world_size)
            raise ValueError(
                f"{set_name} is set but {names[0]} is not: start the program with srun, mpirun or `thalweg run "
                f"--nproc N script.py`, which set both, or `unset {set_name}` to run one process alone"
            )
    return _first_integer(environ, family.rank) or 0, _first_integer(environ, family.world_size) or 0


def _first_integer(environ: Mapping[str, str], names: Sequence[str]) -> int | None:
    name = _first_set(environ, names)
    return None if name is None else _parse_integer(environ, name)


def _parse_integer(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if re.fullmatch(r"-?[0-9]{1,10}", text) is None:
        raise ValueError(f"{name}={environ[name]!r} is not a whole number: set it to one, or unset it")
    return int(text)


def _first_set(environ: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in environ), None)


def is_loopback(host: str) -> bool:
    """Whether a host, a name or an address, is this one by its own interface alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_this_host(addr: str) -> bool:
    return addr in ("ip6-localhost", "0.0.0.0") or is_loopback(addr)
