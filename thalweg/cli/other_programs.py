"""DeepSpeed's and MII's programs by their own names, over the subcommands here.

The files of ``cli/bin`` call :func:`run` with their name; ``python -m deepspeed.env_report`` and the like run this
file, and it sees the module's name in ``__spec__``.  Each program is a function of its arguments that returns those of
``thalweg``.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from thalweg.cli import main


def run(program: str, arguments: Sequence[str]) -> int:
    """Run a program of DeepSpeed's or MII's; returns its exit code."""
    return main(_PROGRAMS[program](arguments))


def run_deepspeed(args: Sequence[str] | None = None) -> NoReturn:
    """``deepspeed.launcher.runner.main``: the command line; ends this process with the job's exit code.

    Raises:
        ValueError: hosts are both counted and named.
    """
    from thalweg.cli.run import add_arguments, split_passthrough

    words, parser = list(sys.argv[1:] if args is None else args), _parser("deepspeed", "run")
    add_arguments(parser)
    given = parser.parse_known_args(split_passthrough(parser, words)[0])[0]
    if (given.include or given.exclude) and (given.num_nodes or given.nproc):
        raise ValueError("--num_nodes and --num_gpus do not go with --include and --exclude: name hosts or count them")
    raise SystemExit(run("deepspeed", words))


def _deepspeed(arguments: Sequence[str]) -> list[str]:
    """The launcher; unlike `thalweg run` it tells the script its --local_rank, unless told not to."""
    return ["run", "--as-deepspeed", "--local-rank", *arguments]


def _ds_report(arguments: Sequence[str]) -> list[str]:
    parser = _parser("ds_report", "doctor")
    for name in ("--hide_operator_status", "--hide_errors_and_warnings"):
        parser.add_argument(name, action="store_true", help="nothing is compiled: there is no operator to report")
    parser.parse_args(arguments)
    return ["doctor"]


def _zero_to_fp32(arguments: Sequence[str]) -> list[str]:
    parser = _parser("zero_to_fp32", "ckpt export --dtype fp32")
    add = parser.add_argument
    add("checkpoint_dir", type=Path)
    add("output_dir", type=Path, help="written as safetensors; of a file's name (pytorch_model.bin) its folder")
    add("-t", "--tag")
    add("--max_shard_size", default="5GB", metavar="SIZE")
    add("--safe_serialization", action="store_true", help="always so")
    add("-d", "--debug", action="store_true")
    add("--exclude_frozen_parameters", action="store_true", help="said where a checkpoint is saved")
    given = parser.parse_args(arguments)
    if given.exclude_frozen_parameters:
        parser.error("a checkpoint does not say which were frozen: save it with exclude_frozen_parameters=True")
    units = {"KB": 1e3, "MB": 1e6, "GB": 1e9}
    number, unit = given.max_shard_size[:-2], given.max_shard_size[-2:].upper()
    if unit not in units or not number.isdecimal():
        parser.error(f"--max_shard_size {given.max_shard_size} is no size such as 5GB")
    is_file = given.output_dir.suffix in (".bin", ".pt", ".safetensors")
    out = given.output_dir.parent if is_file else given.output_dir
    words = ["ckpt", "export", str(given.checkpoint_dir), str(out), "--dtype", "fp32"]
    words += ["--max-shard-bytes", str(int(number) * units[unit])]
    return [*words, "--tag", given.tag] if given.tag else words


def _ds_to_universal(arguments: Sequence[str]) -> list[str]:
    """Every checkpoint that Thalweg reads, DeepSpeed's too, loads at any layout: a copy is one under the new name."""
    parser = _parser("ds_to_universal", "ckpt verify")
    parser.add_argument("--input_folder", type=Path, required=True)
    parser.add_argument("--output_folder", type=Path, required=True)
    for name in ("--num_extract_workers", "--num_merge_workers"):
        parser.add_argument(name, help="there is nothing to extract or merge")
    for name in ("--keep_temp_folder", "--no_strict", "--inject_missing_state"):
        parser.add_argument(name, action="store_true")
    given = parser.parse_args(arguments)
    out = given.output_folder.resolve()
    if not given.input_folder.is_dir():
        raise SystemExit(f"ds_to_universal: there is no folder {given.input_folder}: give a checkpoint of one tag")
    if out.exists():
        raise SystemExit(f"ds_to_universal: {out} exists: remove it, or give another --output_folder")
    shutil.copytree(given.input_folder, out, copy_function=_link_or_copy)
    (out.parent / "latest_universal").write_text(out.name)
    return ["ckpt", "verify", str(out)]


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def _openai_server(arguments: Sequence[str]) -> list[str]:
    parser = _parser("mii.entrypoints.openai_api_server", "serve")
    add = parser.add_argument
    add("--model", required=True)
    add("--deployment-name", default="deepspeed-mii")
    add("--host", help="another than this host's own needs --api-keys (default: 0.0.0.0 with them)")
    add("--port", default="8000")
    add("--max-length", "--max_length", dest="max_model_len")
    add("--tensor-parallel", dest="tensor_parallel_size")
    add("--replica-num")
    add("--chat-template")
    add("--api-keys", type=lambda text: text.split(","), default=[])
    add("--ssl", action="store_true", help="with the files that SSL_KEYFILE and SSL_CERTFILE name")
    given, rest = parser.parse_known_args(arguments)
    if rest:
        parser.error(f"{rest[0]} is not offered by Thalweg: `thalweg serve --help` lists what there is")
    options = {**vars(given), **dict.fromkeys(("model", "api_keys", "ssl"))}
    if given.api_keys and given.host is None:
        options["host"] = "0.0.0.0"
    if given.ssl:
        options |= {"ssl_keyfile": os.environ["SSL_KEYFILE"], "ssl_certfile": os.environ["SSL_CERTFILE"]}
    words = ["serve", given.model]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", value] if value is not None else []
    return [*words, *(word for key in given.api_keys for word in ("--api-key", key))]


def _parser(program: str, command: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(program, description=f"Thalweg's: runs `thalweg {command}`.")


_PROGRAMS: dict[str, Callable[[Sequence[str]], list[str]]] = {
    "deepspeed": _deepspeed,
    "deepspeed.launcher.runner": _deepspeed,
    "ds_report": _ds_report,
    "deepspeed.env_report": _ds_report,
    "zero_to_fp32.py": _zero_to_fp32,
    "deepspeed.utils.zero_to_fp32": _zero_to_fp32,
    "ds_to_universal": _ds_to_universal,
    "deepspeed.checkpoint.ds_to_universal": _ds_to_universal,
    "mii.entrypoints.api_server": _openai_server,
    "mii.entrypoints.openai_api_server": _openai_server,
}


if __name__ == "__main__":
    raise SystemExit(run((__spec__.name if __spec__ else "").removesuffix(".__main__"), sys.argv[1:]))
