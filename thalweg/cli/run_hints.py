"""Options of other launchers that `thalweg run` does not take, and what to do instead."""

from __future__ import annotations

_MANUAL_NODES = "on each host: --num-nodes N --node-rank I --master-addr HOST --master-port P"
_OUTPUT = "ranks write to this terminal: send it to a file, or open one named by RANK in the script"
_ELASTIC = "not built yet: start again with the ranks that are left, a checkpoint loads at any number of them"
_RESTART = "not built yet: start the same command again, the script loads its newest checkpoint"
_HINTS = {
    # DeepSpeed
    "no-ssh": _MANUAL_NODES,
    "save-pid": "leave it out: ending this process ends all ranks",
    "enable-each-rank-log": _OUTPUT,
    "elastic-training": _ELASTIC,
    "min-elastic-nodes": _ELASTIC,
    "max-elastic-nodes": _ELASTIC,
    "autotuning": "`thalweg tune` searches a configuration",
    "venv-script": "--python PATH is the interpreter on the other hosts",
    # torchrun
    "rdzv-backend": "leave it out; several hosts: " + _MANUAL_NODES,
    "rdzv-endpoint": "leave it out; several hosts: " + _MANUAL_NODES,
    "rdzv-id": "leave it out",
    "rdzv-conf": "leave it out",
    "max-restarts": _RESTART,
    "monitor-interval": "leave it out",
    "start-method": "leave it out",
    "role": "leave it out",
    "log-dir": _OUTPUT,
    "redirects": _OUTPUT,
    "tee": _OUTPUT,
    "local-ranks-filter": _OUTPUT,
    # accelerate, mpirun, and guesses
    "num-processes": "--nproc N is the number of ranks of a host",
    "num-machines": "--num-nodes N",
    "machine-rank": "--node-rank I",
    "main-process-ip": "--master-addr HOST",
    "main-process-port": "--master-port P",
    "multi-gpu": "leave it out: there is a rank for each GPU",
    "config-file": "the configuration is the script's: put it behind the script",
    "deepspeed": "it is the script's: put it behind the script",
    "deepspeed-config": "it is the script's: put it behind the script",
    "world-size": "--nproc N is the number of ranks of a host",
    "np": "--nproc N is the number of ranks of a host",
    "n": "--nproc N is the number of ranks of a host",
}


def hint_for_option(option: str) -> str | None:
    """Return what to do instead of ``option``, or None where nobody knows it."""
    return _HINTS.get(option.partition("=")[0].lstrip("-").replace("_", "-"))
