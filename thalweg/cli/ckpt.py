"""Inspect, verify or export a checkpoint.

examples:
  thalweg ckpt inspect runs/a                      # the newest checkpoint below runs/a
  thalweg ckpt inspect runs/a/global_step100       # that one
  thalweg ckpt verify runs/a --tag global_step100
  thalweg ckpt export runs/a exported --dtype bf16
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from thalweg.utils.formatting import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    inspect = actions.add_parser("inspect", help="tag, step, world size, tensors and bytes")
    verify = actions.add_parser("verify", help="read every byte and name each damaged file and tensor")
    export = actions.add_parser("export", help="write the weights in Hugging Face layout")
    for action in (inspect, verify, export):
        action.add_argument("directory", metavar="DIR", type=Path, help="saved to, or of one tag")
        action.add_argument("--tag", help="the checkpoint in DIR (default: the newest)")
        action.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    export.add_argument("out", metavar="OUT", type=Path, nargs="?", help="where to write (default: DIR/hf)")
    export.add_argument("--out", "--output", dest="out_option", metavar="OUT", type=Path, help="the same")
    export.add_argument("--dtype", help="cast floating tensors: fp32, bf16 or fp16 (default: as stored)")
    export.add_argument("--max-shard-bytes", type=float, default=5e9, help="size of a file (default: 5e9)")


def run(args: argparse.Namespace) -> int:
    """Run one action; 0 for success, 1 for damage found."""
    if not args.directory.exists():
        raise FileNotFoundError(f"{args.directory} does not exist; give the directory that was saved to")
    from thalweg.checkpoint.load import open_checkpoint

    if args.action == "verify":
        report, lines = _verify(args.directory, args.tag)
    else:
        with open_checkpoint(args.directory, args.tag) as saved:
            report, lines = _inspect(saved, args.tensors) if args.action == "inspect" else _export(saved, args)
    print(json.dumps(report) if args.json else "\n".join(lines))
    return 0 if report.get("sound", True) else 1


def _inspect(checkpoint: Any, tensors: bool) -> tuple[dict[str, Any], list[str]]:
    manifest = checkpoint.manifest
    kinds: dict[str, dict[str, int]] = {}
    for name, record in manifest.tensors.items():
        prefix = name.partition("/")[0]
        kind_name = prefix if prefix in ("model", "optim") else "state"
        kind = kinds.setdefault(kind_name, {"tensors": 0, "elements": 0, "bytes": 0})
        kind["tensors"] += 1
        kind["elements"] += math.prod(record.shape)
        kind["bytes"] += record.nbytes
    report = {
        "path": str(checkpoint.path),
        **manifest.head.model_dump(),
        "files": {name: record.size for name, record in manifest.files.items()},
        "bytes": sum(record.size for record in manifest.files.values()),
        "aliases": manifest.aliases,
        "kinds": kinds,
        "tensors": {
            name: {"dtype": record.dtype, "shape": list(record.shape), "bytes": record.nbytes}
            for name, record in manifest.tensors.items()
        },
    }
    head = manifest.head
    lines = [
        f"{checkpoint.path}",
        f"  tag {head.tag}, step {head.step}, world {head.world}, {head.created}, {head.writer}",
        f"  {len(manifest.tensors)} tensors in {len(manifest.files)} files, {format_bytes(report['bytes'])}",
        *(
            f"  {kind:<6} {c['tensors']:>6} tensors {c['elements']:>14,} elements {format_bytes(c['bytes']):>12}"
            for kind, c in kinds.items()
        ),
        *(f"  {alias} is {target}" for alias, target in manifest.aliases.items()),
    ]
    if tensors:
        lines += [f"  {name}  {r.dtype} {list(r.shape)}" for name, r in manifest.tensors.items()]
    return report, lines


def _verify(directory: Path, tag: str | None) -> tuple[dict[str, Any], list[str]]:
    from thalweg.checkpoint import Checkpoint, CorruptCheckpointError, FileSystem
    from thalweg.checkpoint.deepspeed.checkpoint import ForeignCheckpoint, find_foreign
    from thalweg.checkpoint.directory import find_paths

    foreign = find_foreign(FileSystem(), directory, tag)
    opener = Checkpoint if foreign is None else ForeignCheckpoint
    try:
        # Never another one in place of a damaged one.
        with opener.from_path(foreign or find_paths(FileSystem(), directory, tag)[0]) as checkpoint:
            damage = checkpoint.find_corruption()
            path, tensors = str(checkpoint.path), len(checkpoint.manifest.tensors)
            size = sum(record.size for record in checkpoint.manifest.files.values())
    except CorruptCheckpointError as error:
        damaged = [{"file": None if foreign else "manifest.json", "tensor": None, "reason": str(error)}]
        return {"path": str(directory), "sound": False, "damaged": damaged}, [f"damaged: {error}"]
    report = {
        "path": path,
        "sound": not damage,
        "tensors": tensors,
        "bytes": size,
        "damaged": [{"file": d.file, "tensor": d.tensor, "reason": d.reason} for d in damage],
    }
    lines = [f"damaged: {d.reason}" for d in damage]
    lines.append(f"{path}: {'damaged' if damage else 'sound'}, {tensors} tensors, {format_bytes(size)} read")
    return report, lines


def _export(checkpoint: Any, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from thalweg.checkpoint.export_hf import export_hf
    from thalweg.utils.dtypes import parse_dtype

    dtype = parse_dtype(args.dtype) if args.dtype else None
    out = args.out_option or args.out or args.directory / "hf"
    export_hf(checkpoint, out, dtype=dtype, max_shard_bytes=args.max_shard_bytes)
    files = {path.name: path.stat().st_size for path in sorted(out.iterdir()) if path.is_file()}
    lines = [f"{checkpoint.path} -> {out}", *(f"  {name}  {format_bytes(size)}" for name, size in files.items())]
    return {"path": str(checkpoint.path), "out": str(out), "files": files}, lines
