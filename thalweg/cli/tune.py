"""Search configurations with the plan, measure the best few, write the best one.

examples:
  thalweg tune --model config.json --config ds_config.json --devices-per-node 2 --output tuned.json
  thalweg tune --model ./gpt2 --config ds_config.json --best 5 --timeout 300 --json

The batch of a step stays what the config says; stage, recomputation and its split into micro-batches
are searched.  Candidates are planned first; the best few are measured on this machine's processor, each
in processes of their own.  The result is a config that `thalweg.initialize` takes.
"""

import argparse
import json
import sys
from pathlib import Path

from thalweg.cli.arguments import int_at_least, log_stderr
from thalweg.cli.plan import add_model_options, check_parent_folder, cluster_options, read_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    add_model_options(parser)
    parser.add_argument(
        "--best", type=int_at_least(0), default=3, metavar="N", help="candidates to measure (3; 0 measures none)"
    )
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds for each of them (120)")
    parser.add_argument("--output", metavar="FILE", help="write the best config there")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Search, measure, write; returns the exit code (1 if nothing fits)."""
    import thalweg.engine  # noqa: F401  (a rank imports it: its pages count)
    from thalweg.config import load, resolve
    from thalweg.config.reader import read_source
    from thalweg.plan.planner import build_planner
    from thalweg.plan.search.tuner import tune
    from thalweg.plan.spec.run_spec import apply_changes
    from thalweg.zero.options import get_model_size

    check_parent_folder("--output", args.output)
    planner = build_planner(args.model, **cluster_options(args))
    source = read_config(args)
    model_size = get_model_size(planner.meta_model.model)
    config = resolve(load(source), world_size=planner.cluster.world_size, model=model_size)
    result = tune(planner, config, args.model, num_measured=args.best, timeout=args.timeout, progress=log_stderr)
    if result.best is None:
        print("thalweg tune: no candidate fits; try `thalweg plan` for what is missing", file=sys.stderr)
        return 1
    # As it was written, so that what is left open stays open.
    written = source if isinstance(source, dict) else dict(read_source(source)[0].tree)
    best = apply_changes(written, result.best.changes)
    if args.output:
        Path(args.output).write_text(json.dumps(best, indent=2) + "\n")
    if args.json:
        facts = {"changes": result.best.changes, "ruled_out": result.num_ruled_out}
        print(json.dumps({"best": best, **facts, "trials": [trial.to_dict() for trial in result.trials]}))
    else:
        print(json.dumps(best, indent=2))
    return 0
