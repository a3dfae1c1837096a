"""What the user asked for, and what this host makes of it: ranks, cores, devices.

A :class:`Request` is plain data, so it can travel to another host as JSON; :func:`make_job` then counts that
host's own devices and cores.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from thalweg.launch.cores import cpu_quota, parse_cpu_list, physical_cores, plan_cores, usable_cpus

if TYPE_CHECKING:
    from thalweg.launch.local import Job
    from thalweg.launch.peers import Place

Kind = Literal["script", "module", "program"]


@dataclass(frozen=True)
class Request:
    """The options of `thalweg run` that each host acts on; ``slots`` and ``chosen`` are one host's."""

    target: str
    arguments: tuple[str, ...] = ()
    kind: Kind = "script"
    nproc: str | None = None
    slots: int | None = None
    chosen: tuple[int, ...] | None = None
    threads: int | None = None
    cores: str | None = None
    bind: bool = True
    master_port: int | None = None
    grace: float = 4.0
    environ: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Request:
        """Undo ``dataclasses.asdict`` and JSON."""
        chosen = fields["chosen"]
        return cls(
            **{
                **fields,
                "arguments": tuple(fields["arguments"]),
                "chosen": None if chosen is None else tuple(chosen),
            }
        )


def make_job(request: Request, place: Place | None = None) -> Job:
    """The job of this host.

    Raises:
        ValueError: more ranks than slots, cores that this process may not use, no GPU where one is asked for.
        FileNotFoundError: the script is not there.
    """
    from thalweg.launch.local import Job

    check_target(request)
    num_gpus = _count_gpus()
    nproc = resolve_nproc(request, num_gpus)
    cpus = parse_cpu_list(request.cores) if request.cores else usable_cpus()
    if not set(cpus) <= set(usable_cpus()):
        raise ValueError(
            f"--cores {request.cores}: this process may use {','.join(map(str, usable_cpus()))} only"
        )
    bind = request.bind and num_gpus == 0  # torch's agent binds the ranks of GPUs by their NUMA node
    environ = dict(request.environ)
    if request.threads is not None:
        environ["OMP_NUM_THREADS"] = str(request.threads)
    if request.chosen is not None and num_gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, request.chosen))
    return Job(
        nproc=nproc,
        target=request.target,
        arguments=request.arguments,
        kind=request.kind,
        cores=plan_cores(nproc, physical_cores(cpus), quota=cpu_quota(), bind=bind),
        master_port=request.master_port,
        grace=request.grace,
        environ=environ,
        place=place,
    )


def check_target(request: Request) -> None:
    """Raise ``FileNotFoundError`` where the program or script is not on this host."""
    if request.kind == "program":
        if shutil.which(request.target) is None:
            raise FileNotFoundError(f"there is no program {request.target} on PATH")
    elif request.kind == "script" and not os.path.exists(request.target):
        program = "; a program wants --no-python" if shutil.which(request.target) else ""
        raise FileNotFoundError(f"there is no script {request.target} in {os.getcwd()}{program}")


def resolve_nproc(request: Request, num_gpus: int) -> int:
    """Ranks of this host: what was asked for, else its slots, else its GPUs, else one."""
    asked, limit = request.nproc, request.slots if request.chosen is None else len(request.chosen)
    if asked is None:
        return limit or num_gpus or 1
    if asked == "gpu" and num_gpus == 0:
        raise ValueError("--nproc gpu: this host has no GPU; say how many ranks to run on its processor")
    named = {"gpu": num_gpus, "cpu": len(physical_cores(usable_cpus())), "auto": num_gpus or 1}
    if asked not in named and not (asked.isascii() and asked.isdecimal()):
        raise ValueError(f"--nproc {asked} is not a number, gpu, cpu or auto")
    nproc = named[asked] if asked in named else int(asked)
    if nproc < 1:
        raise ValueError(f"--nproc {asked} must be at least 1")
    if limit is not None and nproc > limit:
        raise ValueError(f"--nproc {nproc} is more than the {limit} slots that the hostfile or filter leaves")
    return nproc


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()
