"""Check a config, all faults at once, and print what each option resolves to.

examples:
  thalweg config ds_config.json
  thalweg config ds_config.json --world-size 8 --json
  thalweg config - < ds_config.json

A config with faults: each of them on standard error, exit code 2.
"""

import argparse
import json
import os
import sys

from thalweg.cli.arguments import int_at_least
from thalweg.config import ConfigError, load_config
from thalweg.utils.env import read_rank_info


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    add = parser.add_argument
    add("file", nargs="?", metavar="FILE", help="JSON with comments, url-safe base64 of it, or - for standard input")
    add("--world-size", type=int_at_least(1), metavar="N", help="ranks in all (else the launcher's, else 1)")
    add("--json", action="store_true", help="print the resolved config as one JSON object")
    add("--reference", action="store_true", help="print every option there is, as Markdown")


def run(args: argparse.Namespace) -> int:
    """Print the resolved config and return 0, or the problems on standard error and return 2."""
    if args.reference:
        from thalweg.config.reference import config_reference

        print(config_reference(), end="")
        return 0
    if args.file is None:
        print("thalweg config: name a FILE, - for standard input, or --reference", file=sys.stderr)
        return 2
    source = args.file
    if source == "-":
        text = sys.stdin.read()
        source = text if text.lstrip().startswith("{") else "{" + text + "\n}"
    ranks = args.world_size or read_rank_info(os.environ).world_size
    try:
        config = load_config(source, world_size=ranks)
    except ConfigError as error:
        print(f"thalweg config: {error}", file=sys.stderr)
        sized = ("train_batch_size", "data_parallel_size")
        if args.world_size is None and any(p.path in sized for p in error.problems):
            print("  (to check the config for another number of ranks, add --world-size N)", file=sys.stderr)
        return 2
    print(json.dumps(config.to_dict(), indent=2) if args.json else config.describe())
    return 0
