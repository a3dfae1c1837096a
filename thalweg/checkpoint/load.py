"""Which checkpoint to load: the one asked for, or the newest good one, never silently none.

``open_verified`` checks the whole checkpoint before it returns it, each rank its share, and
falls back past damaged ones with a warning.  A directory that holds checkpoints never
leads to a silent start at step 0.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from thalweg.checkpoint import directory, job_starts
from thalweg.checkpoint.deepspeed.checkpoint import ForeignCheckpoint, find_foreign
from thalweg.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from thalweg.checkpoint.filesystem import FileSystem
from thalweg.checkpoint.rank_group import RankGroup
from thalweg.checkpoint.reader import Checkpoint, format_list
from thalweg.utils.log import get_logger

_log = get_logger(__name__)


def open_verified(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    *,
    resume: Literal["auto", "must", "never"] = "auto",
    group: Any = None,
) -> Checkpoint | None:
    """Choose and fully verify the checkpoint to load from; collective, the same answer on all ranks.

    With a ``tag`` that one, or an error.  Without: the one that ``latest`` names, then the
    newest, past damaged ones with a warning each.  ``resume``: "never" returns None; "auto"
    returns None only where the directory holds no checkpoint at all; "must" raises
    ``CheckpointNotFoundError`` there.  A checkpoint of DeepSpeed's is opened as one of ours.
    Raises ``CorruptCheckpointError`` if nothing good is left.
    """
    if resume == "never":
        return None
    io, checkpoint_dir, ranks = FileSystem(), Path(checkpoint_dir), RankGroup.from_group(group)
    has_tag = tag is not None and tag != directory.LATEST

    def choose() -> dict[str, Any]:
        asked, names, foreign = None if tag is None else str(tag), [], None
        if ranks.rank == 0:
            if (foreign := find_foreign(io, checkpoint_dir, asked)) is not None:
                names = [os.path.relpath(foreign, checkpoint_dir)]
            elif has_tag:
                names = [directory.resolve_tag(io, checkpoint_dir, str(tag)).path.name]
            elif io.exists(checkpoint_dir / directory.MANIFEST):
                names = ["."]  # the folder of one checkpoint, as a save returns it
            else:
                found = directory.list_load_candidates(io, checkpoint_dir)
                step = max((entry.head.step for entry in found if entry.head), default=-1)
                num_tries = job_starts.claim_for_load(io, checkpoint_dir, step)
                names = job_starts.skip_tried([entry.path.name for entry in found], num_tries)
                if len(names) < len(found):
                    _log.warning("taking %s: starts from newer checkpoints have crashed", names[0])
        return {"tag": asked, "names": list(names), "foreign": foreign is not None}

    chosen = ranks.all_or_raise(f"looking for a checkpoint in {checkpoint_dir}", choose)
    tags = sorted({str(choice["tag"]) for choice in chosen})
    if len(tags) > 1:
        raise CheckpointMismatchError(f"the ranks ask for different tags: {', '.join(tags)}")
    names = chosen[0]["names"]
    opener = ForeignCheckpoint if chosen[0]["foreign"] else Checkpoint
    problems = []
    for name in names:
        try:
            return _open_and_verify(opener, checkpoint_dir / name, ranks, io)
        except CorruptCheckpointError as error:
            if has_tag:
                raise
            problems.append(str(error))
            if ranks.rank == 0:
                _log.warning("falling back past a damaged checkpoint: %s", error)
    if problems:
        raise CorruptCheckpointError(
            f"every checkpoint in {checkpoint_dir} is damaged, and training does not start over silently: "
            f"{format_list(problems)}; restore one, or start anew with resume='never'"
        )
    if resume == "must":
        raise CheckpointNotFoundError(
            f"there is no checkpoint in {checkpoint_dir}, and resume='must' does not start without one"
        )
    _log.info("no checkpoint in %s; starting from the beginning", checkpoint_dir)
    return None


def _open_and_verify(opener: type[Checkpoint], path: Path, ranks: RankGroup, io: FileSystem) -> Checkpoint:
    opened: list[Checkpoint] = []

    def open_local() -> str:
        opened.append(opener.from_path(path, io=io))
        return opened[0].manifest.model_dump_json(include={"head"})

    heads = ranks.all_or_raise(f"opening checkpoint {path}", open_local)
    if len(set(heads)) > 1:
        raise CheckpointError(f"the ranks see different checkpoints at {path}; it must be a shared directory")
    opened[0].verify(group=ranks.group)
    return opened[0]


def open_checkpoint(checkpoint_dir: str | Path, tag: str | None = None) -> Checkpoint:
    """The checkpoint of ``Checkpoint.open``, or the one of DeepSpeed's that is there; not collective."""
    foreign = find_foreign(FileSystem(), Path(checkpoint_dir), tag)
    return Checkpoint.open(checkpoint_dir, tag) if foreign is None else ForeignCheckpoint.from_path(foreign)
