"""A job that is started anew, as its checkpoint directory sees it.

``DIR/.starts.json`` says which start of which job has the directory: the last that loaded or saved there.  An older
one, whose ranks may live on at a host that was cut off, commits nothing more.  From one checkpoint of its own a job
starts anew three times after a crash; if none of these has saved one of a later step by then, it has three with the
one before, and ends.

Only a job of ``thalweg run`` has all this, and rank 0 sees to it.  A host that is lost is no crash.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationError

from thalweg.checkpoint.errors import CheckpointError, RestartLoopError
from thalweg.checkpoint.filesystem import FileSystem, read_file, replace_file
from thalweg.utils.log import get_logger

JOB_ID, RESTARTS, CRASHES = "THALWEG_JOB_ID", "THALWEG_RESTART_COUNT", "THALWEG_CRASH_COUNT"
MAX_TRIES = 3  # with one checkpoint
STARTS = ".starts.json"
_log = get_logger(__name__)


class _Claim(BaseModel):
    """Start ``start`` of ``job`` has the directory, which has ``saved`` there or not.

    ``step``: the latest of its checkpoints when it last loaded one; ``base``: crashes before that one was tried.
    """

    job: str
    start: int
    saved: bool = False
    step: int = -1
    base: int = 0


def check_start(io: FileSystem, directory: Path) -> None:
    """Raise ``CheckpointError`` if a later start of this job has the directory."""
    claim = _read(io, directory) if JOB_ID in os.environ else None
    if claim is not None and claim.job == os.environ[JOB_ID] and claim.start > _count(RESTARTS):
        raise CheckpointError(
            f"start {_count(RESTARTS)} of this job was given up: start {claim.start} has {directory}, and nothing "
            "else is saved there"
        )


def claim_for_load(io: FileSystem, directory: Path, step: int) -> int:
    """Take the directory for this start; returns how many starts after a crash, with this one, have tried to get beyond
    ``step``, the latest of its checkpoints; 0 where the job has saved nothing."""
    if JOB_ID not in os.environ or not io.exists(directory):
        return 0
    with io.lock(directory):  # an older start that has just looked would write over this one's claim
        claim = take_directory(io, directory, step=step)
    return _count(CRASHES) - claim.base if claim is not None and claim.saved else 0


def skip_tried(names: Sequence[str], num_tries: int) -> Sequence[str]:
    """Of checkpoints, newest first, those that a start may take which is the ``num_tries``-th.

    Raises:
        RestartLoopError: none is left.
    """
    num_skipped = max(0, num_tries - 1) // MAX_TRIES
    if num_skipped >= min(2, len(names)) > 0:
        raise RestartLoopError(
            f"{MAX_TRIES} starts each from {' and from '.join(names[:2])} have crashed before one of a later step was "
            "saved: the job is not started anew"
        )
    return names[num_skipped:]


def _read(io: FileSystem, directory: Path) -> _Claim | None:
    try:
        return _Claim.model_validate_json(read_file(io, directory / STARTS))
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None


def _count(name: str) -> int:
    return int(os.environ.get(name, 0))


def take_directory(io: FileSystem, directory: Path, saved: bool = False, step: int | None = None) -> _Claim | None:
    """Take the directory, whose lock the caller holds, for this start, which saves there (``saved``) or tries ``step``;
    None outside a job of ``thalweg run``."""
    if (job := os.environ.get(JOB_ID)) is None:
        return None
    check_start(io, directory)
    old = _read(io, directory)
    claim = old if old is not None and old.job == job else _Claim(job=job, start=0)
    changes = {"start": _count(RESTARTS), "saved": saved or claim.saved}
    if step is not None and step > claim.step:
        changes |= {"step": step, "base": max(0, _count(CRASHES) - 1)}
    claim = claim.model_copy(update=changes)
    if claim != old:
        try:
            replace_file(io, directory / STARTS, claim.model_dump_json().encode())
        except OSError as error:  # a folder to read from, perhaps
            _log.info("%s does not keep which start of the job has it: %s", directory, error)
    return claim
