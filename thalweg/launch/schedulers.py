"""Handing a job to a scheduler: the command line of srun or mpirun, whose tasks are the ranks themselves.

The scheduler starts one process for each rank and sets its own variables, which ``utils/env.py`` reads.  What
goes on the command line is a list of words, never a shell's line.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from thalweg.launch.hostfile import Host
from thalweg.launch.spec import LaunchSpec


@dataclass(frozen=True)
class SchedulerJob:
    """The ranks of a job: ``hosts`` where a hostfile or filter names them, else ``num_nodes`` of any kind."""

    spec: LaunchSpec
    hosts: tuple[Host, ...] = ()
    num_nodes: int | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    master_addr: str | None = None
    python: str | None = None
    extra_args: tuple[str, ...] = ()  # options for the scheduler's own command

    def __post_init__(self) -> None:
        if any(host.chosen not in (None, tuple(range(host.num_slots or 0))) for host in self.hosts):
            raise ValueError("a scheduler chooses the slots itself: name whole hosts, or use --launcher ssh")

    def ranks_per_node(self) -> int:
        """Ranks on each host.

        Raises:
            ValueError: the hosts differ, or nobody says.
        """
        requested, counts = self.spec.nproc, {host.num_slots for host in self.hosts}
        if requested is not None:
            if not requested.isdecimal() or int(requested) < 1:
                raise ValueError(f"--nproc {requested}: a scheduler needs the number of ranks on each host")
            return int(requested)
        if len(counts) == 1 and (count := counts.pop()):
            return count
        if not self.hosts:
            raise ValueError("--nproc is needed: the number of ranks on each host")
        raise ValueError(
            "the hosts have different numbers of slots: give --nproc, or use --launcher ssh, which takes each as it is"
        )

    def worker_command(self) -> list[str]:
        """The words of one rank's command."""
        spec = self.spec
        python = {"script": ["-u"], "module": ["-u", "-m"]}.get(spec.kind)
        prefix = [] if python is None else [self.python or sys.executable, *python]
        return [*prefix, spec.target, *spec.arguments]


def build_srun_command(job: SchedulerJob) -> list[str]:
    """SLURM's command: `srun` inside an allocation, or as a job of its own."""
    per_node = job.ranks_per_node()
    nodes = len(job.hosts) or job.num_nodes or int(os.environ.get("SLURM_NNODES", "1"))
    command = ["srun", f"--nodes={nodes}", f"--ntasks={nodes * per_node}", f"--ntasks-per-node={per_node}"]
    command += ["--kill-on-bad-exit=1", "--export=ALL"]
    if job.hosts:
        command += [f"--nodelist={','.join(host.address for host in job.hosts)}", "--distribution=block"]
    return [*command, *job.extra_args, *job.worker_command()]


def build_mpirun_command(job: SchedulerJob) -> list[str]:
    """Open MPI's command; the first host is where rank 0 listens."""
    names = sorted({*job.environ, "MASTER_ADDR", "MASTER_PORT"})
    own = job.spec.nproc is None
    counts = [(host.address, (own and host.num_slots) or job.ranks_per_node()) for host in job.hosts]
    total = sum(count for _, count in counts) or job.ranks_per_node() * (job.num_nodes or 1)
    command = ["mpirun", "-n", str(total), "--bind-to", "none"]
    if counts:
        command += ["--host", ",".join(f"{name}:{count}" for name, count in counts)]
    elif job.num_nodes:
        command += ["--map-by", f"ppr:{job.ranks_per_node()}:node"]
    command += [word for name in names for word in ("-x", name)]
    return [*command, *job.extra_args, *job.worker_command()]


def build_environ(job: SchedulerJob, port: int) -> dict[str, str]:
    """What the scheduler's command is started with."""
    variables = {**os.environ, **job.environ, "MASTER_PORT": str(job.spec.master_port or port)}
    first = job.master_addr or (job.hosts[0].address if job.hosts else None)
    if first is not None:
        variables["MASTER_ADDR"] = first
    return variables


def run_command(command: list[str], environ: Mapping[str, str]) -> NoReturn:
    """Become a scheduler's command, whose signals and exit code are then the job's.

    Raises:
        ValueError: the command is not installed.
    """
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, environ)
    except FileNotFoundError as error:
        raise ValueError(f"there is no {command[0]} on PATH: use --launcher ssh, which needs none") from error
