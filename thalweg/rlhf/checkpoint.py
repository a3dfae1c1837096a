"""All engines of a run commit as one.

::

    DIR/<engine>/step<N>/     a checkpoint of each engine, in the one format
    DIR/manifest.json         names step N and each engine's checkpoint of it; written last, by rename

A run that goes on reads the manifest and nothing else: engines that had saved a later step when the run died are not
asked for it, so actor and critic never come from different steps.  Checkpoints of other steps are removed after the
manifest has been replaced, and not before.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thalweg.checkpoint.directory import remove_stale
from thalweg.checkpoint.filesystem import FileSystem, list_if_there, remove_tree, replace_file
from thalweg.engine import Engine

_MANIFEST = "manifest.json"


def commit(directory: str | Path, step: int, engines: Mapping[str, Engine], state: Mapping[str, Any]) -> None:
    """Save every engine and, when all are durable, the manifest; collective.  ``state``: JSON, the loop's own."""
    directory, tag = Path(directory), f"step{step}"
    for name, engine in engines.items():
        engine.save_checkpoint(directory / name, tag=tag, save_latest=False)
    for engine in engines.values():
        engine.wait_for_checkpoint()
    group = next(iter(engines.values())).meshes.world_group  # ranks that generate alone have none
    dist.barrier(group)  # an engine's save returns on a rank when its own part is there
    if dist.get_rank() == 0:
        io = FileSystem()
        manifest = {"step": step, "engines": dict.fromkeys(engines, tag), "state": dict(state)}
        replace_file(io, directory / _MANIFEST, json.dumps(manifest, indent=1).encode())
        remove_stale(io, directory)  # of a run that died in the line above
        for name in engines:
            for other in set(list_if_there(io, directory / name)) - {tag}:
                if re.fullmatch(r"step\d+(~\d+)?", other):  # an export, and what else lies there, is not ours
                    remove_tree(io, directory / name / other)
    dist.barrier(group)


def resume(directory: str | Path, engines: Mapping[str, Engine]) -> tuple[int, dict[str, Any]]:
    """Load every engine's checkpoint of the committed step; returns the step and the loop's state, (0, {}) where
    nothing was committed; collective.

    Raises ValueError where the manifest is of other engines.
    """
    path = Path(directory) / _MANIFEST
    if not path.is_file():
        return 0, {}
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if set(manifest["engines"]) != set(engines):
        raise ValueError(
            f"{path} is of {', '.join(manifest['engines'])}, and this run has {', '.join(engines)}: use another"
            " output_dir"
        )
    for name, engine in engines.items():
        engine.load_checkpoint(path.parent / name, tag=manifest["engines"][name])
    return manifest["step"], manifest["state"]
