"""`thalweg run`: start a script on several processes of this host."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from thalweg.launch.cores import cpu_quota, parse_cpu_list, physical_cores, plan_cores, usable_cpus
from thalweg.launch.hosts import Slots, is_this_host, read_hostfile, select_slots

_EPILOG = """examples:
  thalweg run --nproc 2 train.py --config ds_config.json
  thalweg run --nproc 4 -m package.train --steps 100

Everything after the script belongs to the script.  The ranks see RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (a free port, so two jobs can run at once).  The exit code is
that of the first rank that failed, 128 + n for signal n.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `run` to the command line."""
    parser = subparsers.add_parser(
        "run",
        help="start a script on several processes of this host",
        description="Start a script on several processes of this host.",
        usage="thalweg run [--nproc N] [options] [-m] SCRIPT [ARGUMENT ...]",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    # fmt: off
    add("--nproc", "--nproc-per-node", "--nproc_per_node", "--num-gpus", "--num_gpus", metavar="N",
        help="number of ranks: a number, or gpu, cpu or auto (default: the number of GPUs, 1 without)")
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as in `python -m`")
    add("--no-python", "--no_python", action="store_true", help="SCRIPT is a program, not Python")
    add("--threads", type=int, metavar="T",
        help="threads of each rank (default: its share of the cores, or OMP_NUM_THREADS where that is set)")
    add("--cores", "--bind-core-list", "--bind_core_list", metavar="LIST",
        help="cores to share out, such as 0-3,8 (default: all that this process may use)")
    add("--no-bind", action="store_true", help="let the ranks move between cores")
    add("--master-port", "--master_port", type=int, metavar="P",
        help="port of the rendezvous (default: a free one)")
    add("--grace", type=float, default=4.0, metavar="S",
        help="seconds between SIGTERM and SIGKILL for ranks that must end (default: 4)")
    add("--hostfile", type=Path, metavar="FILE", help="`localhost slots=N`; more hosts are not built yet")
    add("--include", "-i", metavar="SPEC", help="slots of this host to use, such as localhost:0,1")
    add("--exclude", "-e", metavar="SPEC", help="slots of this host to leave out")
    # fmt: on
    habits = parser.add_argument_group("taken for the sake of habit, on one host")
    habits.add_argument("--num-nodes", "--num_nodes", "--nnodes", default="1", metavar="1")
    habits.add_argument("--node-rank", "--node_rank", type=int, default=0, metavar="0")
    habits.add_argument("--master-addr", "--master_addr", default="127.0.0.1", metavar="HOST")
    habits.add_argument(
        "--launcher", choices=("local", "ssh", "pdsh", "slurm", "mpi", "openmpi"), default="local"
    )
    for names in (("--standalone",), ("--no-local-rank", "--no_local_rank"),
                  ("--bind-cores-to-rank", "--bind_cores_to_rank"), ("--as-deepspeed",)):  # fmt: skip
        habits.add_argument(*names, action="store_true")


def split_passthrough(parser: argparse.ArgumentParser, arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the launcher's options from the script and what is the script's.

    argparse would take `--` out of the script's arguments and read the script's options as the launcher's.
    """
    takes_value = {name: action.nargs != 0 for action in parser._actions for name in action.option_strings}
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        if argument == "--":
            return arguments[:position], arguments[position + 1 :]
        if not argument.startswith("-") or argument == "-":
            return arguments[:position], arguments[position:]
        position += 2 if takes_value.get(argument) else 1
    return arguments, []


def run(args: argparse.Namespace) -> int:
    """Start the job and return its exit code."""
    _refuse_several_hosts(args)
    target = _check_target(args)
    if args.master_port is not None and not 0 < args.master_port < 65536:
        raise ValueError(f"--master-port {args.master_port} is not a port: leave it out to get a free one")
    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads {args.threads} must be at least 1")
    if not 0 <= args.grace < 1e6:
        raise ValueError(f"--grace {args.grace} must be a number of seconds, 0 or more")
    slots = select_slots(read_hostfile(args.hostfile) if args.hostfile else None, args.include, args.exclude)

    from thalweg.launch.local import Job, port_is_free, run_local

    if args.master_port is not None and not port_is_free(args.master_port):
        raise ValueError(f"port {args.master_port} is in use: leave out --master-port to get a free one")
    num_gpus = _count_gpus()
    nproc = _resolve_nproc(args.nproc, slots, num_gpus)
    cpus = parse_cpu_list(args.cores) if args.cores else usable_cpus()
    if not set(cpus) <= set(usable_cpus()):
        raise ValueError(
            f"--cores {args.cores}: this process may use {','.join(map(str, usable_cpus()))} only"
        )
    bind = not args.no_bind and num_gpus == 0  # torch's agent binds the ranks of GPUs by their NUMA node
    environ = {"OMP_NUM_THREADS": str(args.threads)} if args.threads is not None else {}
    if slots is not None and slots.chosen is not None and num_gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots.chosen))
    outcome = run_local(
        Job(
            nproc=nproc,
            target=target,
            arguments=tuple(args.passthrough[1:]),
            kind="program" if args.no_python else "module" if args.module else "script",
            cores=plan_cores(nproc, physical_cores(cpus), quota=cpu_quota(), bind=bind),
            master_port=args.master_port,
            grace=args.grace,
            environ=environ,
        )
    )
    sys.stderr.write(outcome.report)
    return outcome.code


def _refuse_several_hosts(args: argparse.Namespace) -> None:
    if args.num_nodes not in ("1", "1:1"):
        what = f"--num-nodes {args.num_nodes}"
    elif args.node_rank != 0:
        what = f"--node-rank {args.node_rank}"
    elif args.launcher != "local":
        what = f"--launcher {args.launcher}"
    elif not is_this_host(args.master_addr):
        what = f"--master-addr {args.master_addr}"
    elif args.as_deepspeed:
        raise ValueError(
            "--as-deepspeed is not built yet: change `import deepspeed` to `import thalweg as deepspeed`"
        )
    else:
        return
    raise ValueError(
        f"{what}: jobs over several hosts are not built yet; leave it out to run on this host alone"
    )


def _check_target(args: argparse.Namespace) -> str:
    target = args.passthrough[0] if args.passthrough else ""
    if not target:
        raise ValueError("no script was given: `thalweg run --nproc 2 train.py`; see `thalweg run --help`")
    if args.module and args.no_python:
        raise ValueError("-m and --no-python exclude each other: give one of them")
    if args.no_python:
        if shutil.which(target) is None:
            raise FileNotFoundError(f"there is no program {target} on PATH")
    elif not args.module and not os.path.exists(target):
        raise FileNotFoundError(f"there is no script {target} in {os.getcwd()}")
    return target


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _resolve_nproc(asked: str | None, slots: Slots | None, num_gpus: int) -> int:
    limit = None if slots is None else slots.count
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
