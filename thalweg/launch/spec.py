"""What the user asked for, and what this host makes of it: ranks, cores, devices.

A :class:`LaunchSpec` is plain data, so it can travel to another host as JSON; :func:`build_local_job` then counts
that host's own devices and cores.
"""

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from thalweg.launch.cpu_affinity import CpuBinding, assign_cores, cpu_quota, parse_list, physical_cores, usable_cpus
from thalweg.utils.env import DEVICE_VARIABLE


@dataclass(frozen=True)
class LaunchSpec:
    """The options of `thalweg run` that each host acts on; ``slots`` and ``chosen`` are one host's.

    ``kind`` says how ``target`` is started: a script file, a module as `python -m` would, or a program that is not
    Python.  ``master_port`` None takes a free one.  ``grace`` is the time in seconds that ranks which must end have
    between SIGTERM and SIGKILL.  ``environ`` is added to the ranks' environment.  The job starts anew up to
    ``max_restarts`` times when a rank fails; ``restart`` is the number of this start, 0 for the first, and
    ``num_crashes`` of those before it ended by themselves, not because a host was lost.
    """

    target: str
    arguments: tuple[str, ...] = ()
    kind: Literal["script", "module", "program"] = "script"
    nproc: str | None = None
    slots: int | None = None
    chosen: tuple[int, ...] | None = None
    threads: int | None = None
    cores: str | None = None
    bind: bool = True
    master_port: int | None = None
    grace: float = 4.0
    environ: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    restart: int = 0
    num_crashes: int = 0
    job_id: str = field(default_factory=lambda: secrets.token_hex(8))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Undo ``dataclasses.asdict`` and JSON."""
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        return cls(**values)


@dataclass(frozen=True)
class LocalJob:
    """The part of one host: ``nproc`` ranks, their cores, and what is added to their environment."""

    spec: LaunchSpec
    nproc: int
    cpu_binding: CpuBinding
    environ: Mapping[str, str]


def build_local_job(spec: LaunchSpec) -> LocalJob:
    """The job of this host.

    Raises:
        ValueError: more ranks than slots, cores that this process may not use, no GPU where one is asked for.
        FileNotFoundError: the script is not there.
    """
    _check_target(spec)
    num_gpus = 0 if {**os.environ, **spec.environ}.get(DEVICE_VARIABLE) == "cpu" else _count_gpus()
    nproc = _resolve_nproc(spec, num_gpus)
    cpus = parse_list(spec.cores, "cores") if spec.cores else usable_cpus()
    if not set(cpus) <= set(usable_cpus()):
        raise ValueError(f"--cores {spec.cores}: this process may use {','.join(map(str, usable_cpus()))} only")
    bind = spec.bind and num_gpus == 0  # torch's agent binds the ranks of GPUs by their NUMA node
    environ = {**spec.environ, **({} if spec.threads is None else {"OMP_NUM_THREADS": str(spec.threads)})}
    if spec.chosen is not None and num_gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, spec.chosen))
    cpu_binding = assign_cores(nproc, physical_cores(cpus), quota=cpu_quota(), bind=bind)
    return LocalJob(spec, nproc, cpu_binding, environ)


def _check_target(spec: LaunchSpec) -> None:
    """Raise ``FileNotFoundError`` where the program or script is not on this host."""
    if spec.kind == "program":
        if shutil.which(spec.target) is None:
            raise FileNotFoundError(f"there is no program {spec.target} on PATH")
    elif spec.kind == "script" and not os.path.exists(spec.target):
        program = "; a program wants --no-python" if shutil.which(spec.target) else ""
        raise FileNotFoundError(f"there is no script {spec.target} in {os.getcwd()}{program}")


def _resolve_nproc(spec: LaunchSpec, num_gpus: int) -> int:
    """Ranks of this host: what was asked for, else its slots, else its GPUs, else one."""
    requested, num_slots = spec.nproc, spec.slots if spec.chosen is None else len(spec.chosen)
    if requested is None:
        return num_slots or num_gpus or 1
    if requested == "gpu" and num_gpus == 0:
        raise ValueError("--nproc gpu: this host has no GPU; say how many ranks to run on its processor")
    by_keyword = {"gpu": num_gpus, "cpu": len(physical_cores(usable_cpus())), "auto": num_gpus or 1}
    if requested not in by_keyword and not (requested.isascii() and requested.isdecimal()):
        raise ValueError(f"--nproc {requested} is not a number, gpu, cpu or auto")
    nproc = by_keyword[requested] if requested in by_keyword else int(requested)
    if nproc < 1:
        raise ValueError(f"--nproc {requested} must be at least 1")
    if num_slots is not None and nproc > num_slots:
        raise ValueError(f"--nproc {nproc} is more than the {num_slots} slots that the hostfile or filter leaves")
    return nproc


def _count_gpus() -> int:
    import torch

    return torch.accelerator.device_count()
