"""Fine-tune a model: SFT, a reward model, then PPO, DPO or GRPO; or all of it.

examples:
  thalweg rlhf sft --model_name_or_path ./base --data_path chats.jsonl --output_dir out
  thalweg rlhf all --config rlhf.json --nproc 2
  thalweg rlhf grpo --config rlhf.json --reward_function rewards.py:score --num_train_steps 100

A config file is JSON with the options below, `algorithm`, `nproc` and `device` too, for one step in a block of its name
("ppo": {...}); flags go over it.
The same command goes on with a run that died.  `thalweg chat OUT/ppo/model` talks to the result.
"""

import argparse
import json
import os
import sys
from dataclasses import fields
from typing import Any

from thalweg.rlhf import config as rlhf_config
from thalweg.utils.env import DEVICE_VARIABLE

PARSER_OPTIONS = {"allow_abbrev": False}
ALGORITHMS = ("ppo", "dpo", "grpo")
# Options that belong to the run, not to a step of it, and what they are by default.
_OF_THE_RUN = {"algorithm": "ppo", "nproc": 1, "device": "auto"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand: :class:`RLHFConfig`'s fields, by their own names."""
    parser.add_argument("step", choices=(*rlhf_config.STEPS, "all"), help="what to run")
    parser.add_argument("--config", metavar="FILE", help="a JSON file of options")
    parser.add_argument("--algorithm", choices=ALGORITHMS, help="what follows SFT in `all` (ppo)")
    parser.add_argument(
        "--step", dest="only", nargs="+", type=int, choices=(1, 2, 3), default=(), help="of `all` these steps alone"
    )
    parser.add_argument("--nproc", type=int, metavar="N", help="ranks on this host (1)")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, ... (auto: the accelerator)")
    unset: dict[str, Any] = {"default": argparse.SUPPRESS}
    options = {each.name: each for each in fields(rlhf_config.RLHFConfig)}
    for name, own in ({name: name for name in options} | rlhf_config.ALIASES).items():
        each = options[own]
        help_text = each.metadata["help"].replace("%", "%%") + f" ({each.default!r})"
        how: dict[str, Any] = {"help": help_text if name == own else argparse.SUPPRESS, **unset}
        annotation = str(each.type)
        if "tuple" in annotation:
            how["nargs"] = "*"
        elif "bool" in annotation:
            how["action"] = "store_true"
        else:
            how["type"] = next((kind for kind in (int, float) if kind.__name__ in annotation), str)
            how["choices"] = each.metadata["choices"] and [x for x in each.metadata["choices"] if x is not None]
        parser.add_argument(f"--{name}", **how)
        if "_" in name:  # some of their scripts have dashes
            how |= {"dest": name, "help": argparse.SUPPRESS}
            parser.add_argument(f"--{name.replace('_', '-')}", **how)
    hidden: dict[str, Any] = {"nargs": "?", "const": True, "type": _parse_value, "help": argparse.SUPPRESS, **unset}
    for name in sorted({*rlhf_config.IGNORED, *rlhf_config.REFUSED, *rlhf_config.SWITCHES}):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", **hidden)


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def run(args: argparse.Namespace) -> int:
    """Run the steps on this host's ranks; 0 when the model is there."""
    own = {"step", "only", "config", "passthrough", *_OF_THE_RUN}
    flags = {key: value for key, value in vars(args).items() if key not in own}
    if args.only and args.step != "all":
        raise ValueError(f"--step chooses of `thalweg rlhf all`: leave it out of {args.step}")
    options = rlhf_config.read_mapping(args.config)
    in_file = {key: options.pop(key, default) for key, default in _OF_THE_RUN.items()}
    algorithm, nproc, device = (getattr(args, key) or in_file[key] for key in _OF_THE_RUN)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r}; it may be {', '.join(ALGORITHMS)}")
    config = rlhf_config.load_rlhf_config(options, algorithm if args.step == "all" else args.step, **flags)
    if device != "auto":
        os.environ[DEVICE_VARIABLE] = device
    if nproc > 1 and "RANK" not in os.environ:
        return _launch(nproc)
    from thalweg.rlhf.steps import run_all, run_step

    model = run_all(options, algorithm, args.only, **flags) if args.step == "all" else run_step(args.step, config)
    if os.environ.get("RANK", "0") == "0":
        print(model)
    return 0


def _launch(nproc: int) -> int:
    from thalweg.launch.local import run_local
    from thalweg.launch.spec import LaunchSpec, build_local_job

    spec = LaunchSpec("thalweg", tuple(sys.argv[1:]), "module", str(nproc))
    return run_local(build_local_job(spec)).show()
