"""Handing a job to a scheduler: the command line of srun or mpirun, whose tasks are the ranks themselves.

The scheduler starts one process for each rank and sets its own variables, which ``utils/env.py`` reads.  What
goes on the command line is a list of words, never a shell's line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from thalweg.launch.hosts import Host
from thalweg.launch.outcome import Outcome
from thalweg.launch.request import Request


@dataclass(frozen=True)
class Tasks:
    """The ranks of a job: ``hosts`` where a hostfile or filter names them, else ``num_nodes`` of any kind."""

    request: Request
    hosts: tuple[Host, ...] = ()
    num_nodes: int | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    master_addr: str | None = None
    python: str | None = None
    extra: tuple[str, ...] = ()  # options for the scheduler's own command

    def per_node(self) -> int:
        """Ranks on each host.

        Raises:
            ValueError: the hosts differ, or nobody says.
        """
        asked = self.request.nproc
        if asked is not None:
            if not asked.isdecimal() or int(asked) < 1:
                raise ValueError(f"--nproc {asked}: a scheduler needs the number of ranks on each host")
            return int(asked)
        counts = {host.count for host in self.hosts}
        if len(counts) == 1 and None not in counts:
            return next(iter(counts)) or 1
        if not self.hosts:
            raise ValueError("--nproc is needed: the number of ranks on each host")
        raise ValueError(
            "the hosts have different numbers of slots: give --nproc, or use --launcher ssh, which takes "
            "each as it is"
        )

    def program(self) -> list[str]:
        """The words of one rank's command."""
        request, python = self.request, self.python or sys.executable
        if request.kind == "program":
            return [request.target, *request.arguments]
        return [
            python,
            "-u",
            *(["-m"] if request.kind == "module" else []),
            request.target,
            *request.arguments,
        ]


def srun(tasks: Tasks) -> list[str]:
    """SLURM's command: `srun` inside an allocation, or as a job of its own."""
    per_node = tasks.per_node()
    nodes = len(tasks.hosts) or tasks.num_nodes or int(os.environ.get("SLURM_NNODES", "1"))
    words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes * per_node}", f"--ntasks-per-node={per_node}"]
    words += ["--kill-on-bad-exit=1", "--export=ALL"]
    if tasks.hosts:
        words += [f"--nodelist={','.join(host.address for host in tasks.hosts)}", "--distribution=block"]
    return [*words, *tasks.extra, *tasks.program()]


def mpirun(tasks: Tasks) -> list[str]:
    """Open MPI's command; the first host is where rank 0 listens."""
    names = sorted({*tasks.environ, "MASTER_ADDR", "MASTER_PORT"})
    counts = [(host.address, host.count or tasks.per_node()) for host in tasks.hosts]
    if tasks.request.nproc is not None:
        counts = [(name, tasks.per_node()) for name, _ in counts]
    total = sum(count for _, count in counts) or tasks.per_node() * (tasks.num_nodes or 1)
    words = ["mpirun", "-n", str(total), "--bind-to", "none"]
    if counts:
        words += ["--host", ",".join(f"{name}:{count}" for name, count in counts)]
    elif tasks.num_nodes:
        words += ["--map-by", f"ppr:{tasks.per_node()}:node"]
    for name in names:
        words += ["-x", name]
    return [*words, *tasks.extra, *tasks.program()]


def environment(tasks: Tasks, port: int) -> dict[str, str]:
    """What the scheduler's command is started with."""
    found = {**os.environ, **tasks.environ, "MASTER_PORT": str(tasks.request.master_port or port)}
    first = tasks.master_addr or (tasks.hosts[0].address if tasks.hosts else None)
    if first is not None:
        found["MASTER_ADDR"] = first
    if tasks.request.threads is not None:
        found["OMP_NUM_THREADS"] = str(tasks.request.threads)
    return found


def run_command(words: Sequence[str], environ: Mapping[str, str]) -> Outcome:
    """Run a scheduler's command to its end; SIGTERM and SIGHUP are passed on.

    Raises:
        ValueError: the command is not installed.
    """
    try:
        process = subprocess.Popen(list(words), env=dict(environ))
    except FileNotFoundError as error:
        raise ValueError(f"there is no {words[0]} on PATH: use --launcher ssh, which needs none") from error
    before = {
        number: signal.signal(number, lambda got, _: process.send_signal(got))
        for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:  # the terminal sent it to the command as well, which ends its tasks
                continue
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    code = code if code >= 0 else 128 - code
    return Outcome(code, f"thalweg run: {words[0]} ended with exit code {code}\n" if code else "")
