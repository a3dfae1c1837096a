"""Options of other launchers that `thalweg run` does not take, and what to do instead."""

from __future__ import annotations

# What to do, and the options for which it is said: DeepSpeed's, torchrun's, accelerate's, mpirun's, and guesses.
_HINTS = {
    "on each host: --num-nodes N --node-rank I --master-addr HOST --master-port P": "no-ssh",
    "leave it out; several hosts: on each host: --num-nodes N --node-rank I --master-addr HOST --master-port P":
        "rdzv-backend rdzv-endpoint",
    "ranks write to this terminal: send it to a file, or open one named by RANK in the script":
        "enable-each-rank-log log-dir redirects tee local-ranks-filter",
    "not built yet: start again with the ranks that are left, a checkpoint loads at any number of them":
        "elastic-training min-elastic-nodes max-elastic-nodes",
    "not built yet: start the same command again, the script loads its newest checkpoint": "max-restarts",
    "leave it out: ending this process ends all ranks": "save-pid",
    "`thalweg tune` searches a configuration": "autotuning",
    "--python PATH is the interpreter on the other hosts": "venv-script",
    "leave it out": "rdzv-id rdzv-conf monitor-interval start-method role",
    "--nproc N is the number of ranks of a host": "num-processes world-size np n",
    "--num-nodes N": "num-machines",
    "--node-rank I": "machine-rank",
    "--master-addr HOST": "main-process-ip",
    "--master-port P": "main-process-port",
    "leave it out: there is a rank for each GPU": "multi-gpu",
    "the configuration is the script's: put it behind the script": "config-file",
    "it is the script's: put it behind the script": "deepspeed deepspeed-config",
}  # fmt: skip


def hint_for_option(option: str) -> str | None:
    """Return what to do instead of ``option``, or None where nobody knows it."""
    name = option.partition("=")[0].lstrip("-").replace("_", "-")
    return next((hint for hint, names in _HINTS.items() if name in names.split()), None)
