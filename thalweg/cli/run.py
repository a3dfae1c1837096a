"""Start a script on several processes of this host, or of the hosts of a hostfile.

examples:
  thalweg run --nproc 2 train.py --config ds_config.json
  thalweg run --nproc 4 -m package.train --steps 100
  thalweg run --hostfile hosts --include a:0,1@b train.py      over ssh, from one place
  thalweg run --nproc 8 --max-restarts 3 train.py              the script loads its newest checkpoint
  thalweg run --num-nodes 2 --node-rank 1 --master-addr a --master-port 29500 --nproc 8 train.py

Everything after the script belongs to the script.  The ranks see RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (a free port, so two jobs can run at once).  The exit code is
that of the first rank that failed, 128 + n for signal n.
"""

import argparse
import os
import random
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from thalweg.cli.arguments import int_at_least
from thalweg.compat.startup import AS_DEEPSPEED, deepspeed_environ
from thalweg.launch.env_forwarding import collect_forwarded_env, read_assignments
from thalweg.launch.failure import JobResult
from thalweg.launch.hostfile import Host, filter_hosts, is_this_host, read_hostfile
from thalweg.launch.multi_node.static_nodes import parse_num_nodes, resolve_node
from thalweg.launch.spec import LaunchSpec, build_local_job
from thalweg.launch.worker import PASS_LOCAL_RANK
from thalweg.utils.env import DEVICE_VARIABLE

Limits = dict[str, int]
SCHEDULERS = ("slurm", "mpi", "openmpi")
_CLUSTER_HOSTFILE = Path("/job/hostfile")  # DeepSpeed's own default
# Options of other launchers that are not taken, by what to do instead.
_OTHER_OPTIONS = tomllib.loads(Path(__file__).with_name("run_hints.toml").read_text(encoding="utf-8"))
PARSER_OPTIONS = {"usage": "thalweg run [--nproc N] [options] [-m] SCRIPT [ARGUMENT ...]", "allow_abbrev": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    add = parser.add_argument
    # fmt: off
    add("--nproc", "--nproc-per-node", "--nproc_per_node", "--num-gpus", "--num_gpus", "--num-accelerators",
        "--num_accelerators", metavar="N",
        help="number of ranks: a number, or gpu, cpu or auto (default: the number of GPUs, 1 without)")
    add("--device", metavar="NAME",
        help="cpu, or an accelerator such as cuda or xpu: what a config's device auto means (default: the accelerator)")
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as in `python -m`")
    add("--no-python", "--no_python", action="store_true", help="SCRIPT is a program, not Python")
    add("--threads", type=int_at_least(1), metavar="T",
        help="threads of each rank (default: its share of the cores, or OMP_NUM_THREADS where that is set)")
    add("--cores", "--bind-core-list", "--bind_core_list", metavar="LIST",
        help="cores to share out, such as 0-3,8 (default: all that this process may use)")
    add("--no-bind", action="store_true", help="let the ranks move between cores")
    add("--master-port", "--master_port", type=int, metavar="P",
        help="port of the rendezvous (default: a free one)")
    add("--grace", type=float, default=4.0, metavar="S",
        help="seconds between SIGTERM and SIGKILL for ranks that must end (default: 4)")
    add("--max-restarts", "--max_restarts", type=int_at_least(0), metavar="N",
        default=os.environ.get("PET_MAX_RESTARTS"),
        help="start the job anew up to N times when a rank fails (default: 0; with --elastic-training 100)")
    add("--hostfile", "-H", type=Path, metavar="FILE", help="a line `host slots=N` for each host")
    add("--include", "-i", metavar="SPEC", help="hosts and slots to use, such as a:0,1@b")
    add("--exclude", "-e", metavar="SPEC", help="hosts and slots to leave out")
    add("--env", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for all ranks")
    add("--launcher", choices=("local", "ssh", "pdsh", *SCHEDULERS), default="local", type=str.lower,
        help="how hosts are reached (default: ssh where a hostfile names others)")
    add("--launcher-args", "--launcher_args", default="", metavar="WORDS", help="added to srun or mpirun")
    add("--ssh", metavar="COMMAND", help="what takes a host and a command line in place of ssh")
    add("--ssh-port", "--ssh_port", type=int, metavar="P", help="the port of the ssh servers")
    add("--python", metavar="PATH", help="the interpreter on the other hosts (default: this one's path)")
    add("--as-deepspeed", action="store_true",
        help="`import deepspeed` is Thalweg, in the script and in all that it starts; without a script, print the "
             "variables for a shell: eval \"$(thalweg run --as-deepspeed)\"")
    add("--local-rank", action="store_true", help="put --local_rank=N before the script's arguments")
    add = parser.add_argument_group("with a hostfile, over ssh").add_argument
    add("--elastic-training", "--elastic_training", action="store_true",
        help="when a host is lost, start anew without it; it rejoins at a later restart")
    add("--min-elastic-nodes", "--min_elastic_nodes", type=int_at_least(1), metavar="M",
        help="end the job when fewer hosts are left (default: 1)")
    add("--max-elastic-nodes", "--max_elastic_nodes", type=int_at_least(1), metavar="K",
        help="use up to K hosts at once; the others of the hostfile stand in for lost ones (default: all)")
    add = parser.add_argument_group("started by hand on each host (PET_NNODES and the like are read too)").add_argument
    add("--num-nodes", "--num_nodes", "--nnodes", metavar="N", help="number of hosts")
    add("--node-rank", "--node_rank", metavar="I", help="which of them this is, from 0")
    add("--master-addr", "--master_addr", metavar="HOST", help="where the first host listens")
    add("--no-ssh", "--no_ssh", action="store_true",
        help="the hosts of the hostfile are these: --node-rank says which")
    add = parser.add_argument_group("taken for the sake of habit").add_argument
    for names in (("--standalone",), ("--no-local-rank", "--no_local_rank"), ("--force-multi", "--force_multi"),
                  ("--no-ssh-check", "--no_ssh_check"), ("--bind-cores-to-rank", "--bind_cores_to_rank"),
                  ("-q", "--quiet")):
        add(*names, action="store_true")
    add("--log-level", "--log_level", metavar="LEVEL")
    # fmt: on


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
        name = argument.partition("=")[0]
        plain = name.lstrip("-").replace("_", "-")
        hints = _OTHER_OPTIONS.items() if name not in takes_value else ()
        if hint := next((hint for hint, names in hints if plain in names), None):
            raise ValueError(f"{name} is no option of `thalweg run`: {hint}")
        position += 2 if takes_value.get(argument) else 1
    return arguments, []


def run(args: argparse.Namespace) -> int:
    """Start the job and return its exit code."""
    if args.as_deepspeed and not args.passthrough:
        names = " ".join(f"{name}={shlex.quote(value)}" for name, value in deepspeed_environ(os.environ).items())
        print(f"export {names}")
        return 0
    spec = _build_spec(args)
    hosts = _select_hosts(args)
    limits = _elastic_limits(args, hosts)
    if args.launcher in SCHEDULERS:
        _run_with_scheduler(args, spec, hosts)
    if args.no_ssh and hosts:
        result = _run_on_this_host(args, spec, _select_own(args, hosts))
    elif len(hosts) > 1 or (hosts and (not is_this_host(hosts[0].address) or args.launcher in ("ssh", "pdsh"))):
        result = _run_over_ssh(args, spec, hosts, limits)
    else:
        result = _run_on_this_host(args, spec, hosts)
    return result.show()


def _added_environ(args: argparse.Namespace) -> dict[str, str]:
    """What the ranks' environment needs for `import deepspeed` to be Thalweg, --local_rank and --device."""
    opted_in = args.as_deepspeed or os.environ.get(AS_DEEPSPEED) == "1"
    passes = args.local_rank and not args.no_local_rank
    asked = ({DEVICE_VARIABLE: args.device} if args.device else {}) | ({PASS_LOCAL_RANK: "1"} if passes else {})
    return (deepspeed_environ(os.environ) if opted_in else {}) | asked


def _build_spec(args: argparse.Namespace) -> LaunchSpec:
    target = args.passthrough[0] if args.passthrough else ""
    if not target:
        raise ValueError("no script was given: `thalweg run --nproc 2 train.py`; see `thalweg run --help`")
    if args.module and args.no_python:
        raise ValueError("-m and --no-python exclude each other: give one of them")
    if args.master_port is not None and not 0 < args.master_port < 65536:
        raise ValueError(f"--master-port {args.master_port} is not a port: leave it out to get a free one")
    if not 0 <= args.grace < 1e6:
        raise ValueError(f"--grace {args.grace} must be a number of seconds, 0 or more")
    return LaunchSpec(
        target=target,
        arguments=tuple(args.passthrough[1:]),
        kind="program" if args.no_python else "module" if args.module else "script",
        bind=not args.no_bind,
        environ=_added_environ(args) | read_assignments(os.environ, args.env),
        max_restarts=(100 if args.elastic_training else 0) if args.max_restarts is None else args.max_restarts,
        **{name: getattr(args, name) for name in ("nproc", "threads", "cores", "master_port", "grace")},
    )


def _elastic_limits(args: argparse.Namespace, hosts: tuple[Host, ...]) -> Limits:
    """``min_hosts`` and ``max_hosts`` of a start of the job; empty where it needs all hosts."""
    low, high = args.min_elastic_nodes, args.max_elastic_nodes
    if not args.elastic_training:
        if low or high:
            raise ValueError("--min-elastic-nodes and --max-elastic-nodes go with --elastic-training: add it")
        return {}
    if not hosts or args.no_ssh or args.launcher in SCHEDULERS:
        raise ValueError("--elastic-training needs --hostfile and ssh: --max-restarts N alone starts anew on all hosts")
    most = len(hosts[:high])
    if low and low > most:
        raise ValueError(f"--min-elastic-nodes {low} is more than the hosts of the start, which are {most}")
    return {"min_hosts": low or 1, "max_hosts": most}


def _select_hosts(args: argparse.Namespace) -> tuple[Host, ...]:
    """The hosts that are named, cut to ``--num-nodes`` where ranks are started from here."""
    hostfile = args.hostfile or (_CLUSTER_HOSTFILE if args.as_deepspeed and _CLUSTER_HOSTFILE.is_file() else None)
    hosts = filter_hosts(read_hostfile(hostfile) if hostfile else (), args.include, args.exclude)
    if hosts and args.num_nodes is not None:
        number = parse_num_nodes("--num-nodes", args.num_nodes)
        if number > len(hosts):
            raise ValueError(f"--num-nodes {number}: the hostfile or filter leaves {len(hosts)} hosts")
        return hosts[:number]
    return hosts


def _select_own(args: argparse.Namespace, hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    """This host's entry of the hostfile, which says how many hosts are started by hand and where they meet."""
    args.num_nodes, args.master_addr = str(len(hosts)), args.master_addr or hosts[0].address
    text = args.node_rank or os.environ.get("PET_NODE_RANK", "")
    return hosts[int(text) :][:1] if text.isdecimal() else ()


def _run_on_this_host(args: argparse.Namespace, spec: LaunchSpec, hosts: tuple[Host, ...]) -> JobResult:
    """The ranks of this host alone, or its part of a job whose other parts are started by hand."""
    from thalweg.launch.local import exit_process, run_local

    if hosts:
        spec = replace(spec, slots=hosts[0].slots, chosen=hosts[0].chosen)
    spec, node = resolve_node(spec, args.num_nodes, args.node_rank, args.master_addr, os.environ)
    result = run_local(build_local_job(spec), node)
    if node is not None and result.exit_code:
        exit_process(result.show())
    return result


def _run_over_ssh(args: argparse.Namespace, spec: LaunchSpec, hosts: tuple[Host, ...], limits: Limits) -> JobResult:
    from thalweg.launch.multi_node.ssh import SSH_COMMAND, MultiNodeJob, run_multi_node

    ssh = tuple(shlex.split(args.ssh)) if args.ssh else SSH_COMMAND
    if args.ssh_port is not None:
        ssh = (*ssh, "-p", str(args.ssh_port))
    environ = collect_forwarded_env({**os.environ, **_added_environ(args)}, args.env, (Path.home(), Path.cwd()))
    return run_multi_node(MultiNodeJob(hosts, spec, ssh, args.python, args.master_addr, environ, **limits))


def _run_with_scheduler(args: argparse.Namespace, spec: LaunchSpec, hosts: tuple[Host, ...]) -> NoReturn:
    from thalweg.launch import schedulers

    if spec.max_restarts:
        raise ValueError("--max-restarts is not for a scheduler's ranks: it starts them anew with `sbatch --requeue`")
    num_nodes = None if args.num_nodes is None else parse_num_nodes("--num-nodes", args.num_nodes)
    environ = collect_forwarded_env({**os.environ, **_added_environ(args)}, args.env, (Path.home(), Path.cwd()))
    environ |= {} if spec.threads is None else {"OMP_NUM_THREADS": str(spec.threads)}
    words = tuple(shlex.split(args.launcher_args))
    tasks = schedulers.SchedulerJob(spec, hosts, num_nodes, environ, args.master_addr, args.python, words)
    command = schedulers.build_srun_command if args.launcher == "slurm" else schedulers.build_mpirun_command
    port = random.SystemRandom().choice(range(20000, 32000))
    schedulers.run_command(command(tasks), schedulers.build_environ(tasks, port))
