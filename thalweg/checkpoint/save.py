"""Saving: logical tensors in, one committed directory out.

The picture.  Every rank describes which boxes of which logical tensors it holds; the
descriptions meet, and each rank derives the same plan from them: every distinct box is
cut into pieces of at most ``PIECE_BYTES``, and each piece has one writer among the
ranks that hold it, chosen so that the ranks write about equally much.  Replicas and
plain tensors are therefore written once, and sharded ones where they lie: no rank ever
gathers anything.

The phases, each a ``Ranks.together`` (so one rank's failure is every rank's error):
plan and temporary directory; shards written, hashed and fsynced; digests met, manifest
written and published by rank 0 (``publish.py`` has the order).  Until the last phase
nothing has a public name.  After it, tidying up may fail without failing the save.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import thalweg
from thalweg.checkpoint import publish
from thalweg.checkpoint.dtypes import DTYPES, NAMES
from thalweg.checkpoint.errors import CheckpointError, MismatchedCheckpoint, UnstorableState
from thalweg.checkpoint.io import FileSystem
from thalweg.checkpoint.layout import Box, local_pieces, local_tensor, split, tiles
from thalweg.checkpoint.manifest import FileRecord, Head, Manifest, Piece, TensorRecord
from thalweg.checkpoint.ranks import Ranks
from thalweg.checkpoint.shards import ShardWriter, Slot, aligned
from thalweg.checkpoint.tree import encode
from thalweg.utils.log import get_logger

PIECE_BYTES = 32 << 20  # a load that needs one row of a piece reads and hashes all of it, so not too large

_log = get_logger(__name__)


def keep_pages(tensor: torch.Tensor) -> None:
    """Nothing: what the memory behind a tensor needs after it was read, unless somebody knows better."""


@dataclass(frozen=True)
class Snapshot:
    """What one rank contributes to a checkpoint; tensors are referred to, not copied.

    tensors: logical name -> DTensor (any mesh, Shard and Replicate) or plain tensor, which
    is taken to be equal on every rank that has the name.  aliases: further name -> name in
    ``tensors`` (tied weights).  state: a tree that is equal on all ranks (rank 0's is kept);
    per_rank: this rank's own tree (``tree.py`` says what trees may hold).  unsynced: names of
    plain tensors in which ranks may differ; the first holder's values are kept.  release: is
    given each tensor, or part of one, once it has been written (to let go of its pages, say).
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    per_rank: Mapping[str, Any] = field(default_factory=dict)
    unsynced: frozenset[str] = frozenset()
    release: Callable[[torch.Tensor], None] = keep_pages


@dataclass(frozen=True)
class _Planned:
    """A piece to be written: a box of a tensor, its writer, and its place."""

    name: str
    box: Box
    writer: int
    file: str
    key: str


@dataclass(frozen=True)
class _Local:
    """A snapshot encoded: every tensor this rank can write, and the two trees as JSON."""

    tensors: dict[str, torch.Tensor]
    state: Any
    per_rank: Any


def save(
    directory: str | Path,
    tag: str,
    snapshot: Snapshot,
    *,
    step: int,
    group: Any = None,
    io: FileSystem | None = None,
    keep: int | None = None,
    epoch: int = 0,
    latest: bool = True,
) -> Path:
    """Write and commit ``snapshot`` as ``directory/tag``; collective over ``group``; returns that path.

    An existing tag is replaced, and remains loadable until the new one is committed.  With
    ``keep`` the older checkpoints beyond that many are removed after the commit.  ``epoch``
    counts incarnations of the job: a save below the newest committed epoch is refused.
    ``latest``: whether the pointer comes to name it, so that a load without a tag takes it.
    Raises ``CheckpointError``, the same on all ranks; what was committed before is intact.
    """
    io = io or FileSystem()
    directory = Path(directory)
    ranks = Ranks.of(group)
    tag = str(tag)
    local: list[_Local] = []
    temporary: list[Path] = []

    def prepare() -> dict[str, Any]:
        publish.check_tag(tag)
        _check_keep(keep)
        local.append(_encode(snapshot, ranks.rank))
        described: dict[str, Any] = {
            "tag": tag,
            "tensors": list(_describe(local[0].tensors)),
            "aliases": dict(snapshot.aliases),
            "unsynced": sorted(snapshot.unsynced),
            "state": local[0].per_rank,
        }
        if ranks.rank == 0:
            made, described["sequence"] = publish.begin(io, directory, tag, epoch)
            temporary.append(made)
            described["temporary"] = made.name
        return described

    what = f"saving checkpoint {tag!r} to {directory}"
    try:
        described = ranks.together(what, prepare)
        path = directory / described[0]["temporary"]
        plan, records = _plan(described)
        written = ranks.together(
            what, lambda: _write(io, path, plan, local[0].tensors, ranks, snapshot.release)
        )

        def commit() -> str:
            if ranks.rank != 0:
                return ""
            head = _head(tag, step, epoch, ranks.world, described[0]["sequence"])
            manifest = _manifest(head, local[0].state, described, plan, records, written)
            return str(publish.publish(io, directory, path, manifest, latest=latest))

        public = Path(ranks.together(what, commit)[0])
    except CheckpointError:
        if temporary:
            publish.abandon(io, temporary[0])
        raise
    settled = ranks.together(what, lambda: _tidy(io, directory, tag, keep, public) if ranks.rank == 0 else "")
    return Path(settled[0])


def _check_keep(keep: int | None) -> None:
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise MismatchedCheckpoint(f"keep is {keep!r}: use None to keep all, or a number from 1 on")


def _tidy(io: FileSystem, directory: Path, tag: str, keep: int | None, public: Path) -> str:
    try:
        public = publish.settle(io, directory, tag)
        if keep is not None:
            publish.keep_newest(io, directory, keep, public)
    except (
        OSError,
        CheckpointError,
    ) as error:  # the commit stands; what is left over goes with the next save
        _log.warning("checkpoint %r is committed, but older ones could not be removed: %s", tag, error)
    return str(public)


def _encode(snapshot: Snapshot, rank: int) -> _Local:
    tensors = dict(snapshot.tensors)
    for name, tensor in tensors.items():
        if not name or name == "__metadata__":
            raise UnstorableState(f"{name!r} cannot name a tensor")
        if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.dtype not in NAMES:
            raise UnstorableState(
                f"tensor {name} ({tensor.dtype}, {tensor.layout}, on {tensor.device}) has no form on disk"
            )
    for alias, target in snapshot.aliases.items():
        if target not in tensors or alias in tensors:
            raise UnstorableState(f"the alias {alias} of {target} must be a new name of a stored tensor")
    state, from_state = encode(dict(snapshot.state), "state")
    per_rank, from_rank = encode(dict(snapshot.per_rank), f"rank{rank}")
    if rank != 0:  # rank 0's state is kept, so its plain tensors are; of DTensors every rank has a part
        from_state = {name: t for name, t in from_state.items() if isinstance(t, DTensor)}
    for name in from_state.keys() | from_rank.keys():
        if name in tensors:
            raise UnstorableState(f"{name} names both a tensor and a value in the state")
    return _Local({**tensors, **from_state, **from_rank}, state, per_rank)


def _describe(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[Any]]:
    for name, tensor in tensors.items():
        boxes = [[list(p.box.offset), list(p.box.size)] for p in local_pieces(name, tensor)]
        yield [name, NAMES[tensor.dtype], list(tensor.shape), boxes]


def _plan(described: list[dict[str, Any]]) -> tuple[list[_Planned], dict[str, TensorRecord]]:
    """Who writes what, from what each rank holds; the same on every rank, without further exchange.

    Returns the pieces, and a record without pieces for each tensor.  Raises
    ``CheckpointError`` where ranks contradict each other or leave a hole.
    """
    tags = sorted({description["tag"] for description in described})
    if len(tags) > 1:
        raise CheckpointError(f"the ranks name different tags, {', '.join(tags)}; give all of them the same")
    records: dict[str, TensorRecord] = {}
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, description in enumerate(described):
        for name, dtype, shape, boxes in description["tensors"]:
            record = TensorRecord(dtype=dtype, shape=tuple(shape), pieces=())
            if records.setdefault(name, record) != record:
                known = records[name]
                raise CheckpointError(
                    f"tensor {name} is {dtype} {list(shape)} on rank {rank} but {known.dtype} "
                    f"{list(known.shape)} on a rank before it; all ranks must save the same logical tensors"
                )
            for offset, size in boxes:
                holders.setdefault(name, {}).setdefault(Box(tuple(offset), tuple(size)), []).append(rank)
    for name in {name for description in described for name in description["unsynced"]}:
        for box, owners in holders.get(name, {}).items():
            holders[name][box] = owners[:1]
    for name, record in records.items():
        if not tiles(list(holders.get(name, {})), record.shape):
            raise CheckpointError(
                f"the ranks' pieces of tensor {name} do not cover its shape {list(record.shape)} exactly "
                "once; is a rank missing from the process group of the save?"
            )
    return _assign(records, holders, len(described)), records


def _assign(
    records: dict[str, TensorRecord], holders: dict[str, dict[Box, list[int]]], world: int
) -> list[_Planned]:
    load = [0] * world
    chosen: list[tuple[str, Box, int]] = []
    shared: list[tuple[int, str, Box, list[int]]] = []
    for name, boxes in holders.items():
        itemsize = DTYPES[records[name].dtype].itemsize
        for box, owners in boxes.items():
            for piece in split(box, itemsize, PIECE_BYTES):
                nbytes = piece.numel * itemsize
                if len(owners) == 1:
                    load[owners[0]] += nbytes
                    chosen.append((name, piece, owners[0]))
                else:
                    shared.append((nbytes, name, piece, owners))
    for nbytes, name, piece, owners in sorted(shared, key=lambda s: (-s[0], s[1], s[2])):
        writer = min(owners, key=lambda rank: (load[rank], rank))
        load[writer] += nbytes
        chosen.append((name, piece, writer))
    return list(_place(sorted(chosen), records, world))


def _place(
    chosen: list[tuple[str, Box, int]], records: dict[str, TensorRecord], world: int
) -> Iterator[_Planned]:
    taken: set[tuple[str, str]] = set()
    for name, box, writer in chosen:
        first = name.partition("/")[0]
        kind = first if first in ("model", "optim") else "state"
        file = f"shard-{writer:05d}-of-{world:05d}.{kind}.safetensors"
        key = name if box.size == records[name].shape else f"{name}@{','.join(map(str, box.offset))}"
        while (file, key) in taken:
            key += "'"
        taken.add((file, key))
        yield _Planned(name, box, writer, file, key)


def _write(
    io: FileSystem,
    path: Path,
    plan: list[_Planned],
    tensors: Mapping[str, torch.Tensor],
    ranks: Ranks,
    release: Callable[[torch.Tensor], None],
) -> dict[str, Any]:
    """Write this rank's shards; returns their records and digests as JSON."""
    if ranks.rank != 0 and not io.exists(path):
        raise CheckpointError(
            f"{path} was made by rank 0 but is not seen from here; the checkpoint directory must be on a "
            "file system that all hosts share"
        )
    files: dict[str, dict[str, _Planned]] = {}
    for piece in plan:
        if piece.writer == ranks.rank:
            files.setdefault(piece.file, {})[piece.key] = piece
    outcome = {}
    for file, pieces in files.items():
        slots = aligned(Slot(p.key, NAMES[tensors[p.name].dtype], p.box.size) for p in pieces.values())
        with closing(ShardWriter(io, path / file, slots)) as writer:
            for slot in slots:
                values = _values(pieces[slot.key], tensors[pieces[slot.key].name])
                writer.put(slot.key, values)
                release(values)
            written = writer.finish()
        outcome[file] = {"record": written.record.model_dump(), "digests": written.digests}
    return outcome


def _values(piece: _Planned, tensor: torch.Tensor) -> torch.Tensor:
    for held in local_pieces(piece.name, tensor):
        if held.box.intersect(piece.box) == piece.box:
            origin = tuple(g - own for g, own in zip(held.box.offset, held.local_offset, strict=True))
            return local_tensor(tensor)[piece.box.slices(origin)]
    raise AssertionError(f"{piece.name} has no {piece.box} here")


def _head(tag: str, step: int, epoch: int, world: int, sequence: int) -> Head:
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Head(
        tag=tag,
        step=int(step),
        epoch=epoch,
        world=world,
        sequence=sequence,
        created=created,
        writer=f"thalweg {thalweg.__version__}",
    )


def _manifest(
    head: Head,
    state: Any,
    described: list[dict[str, Any]],
    plan: list[_Planned],
    records: dict[str, TensorRecord],
    written: list[dict[str, Any]],
) -> Manifest:
    """Put the ranks' digests together; a piece without one would be a bug, and is an error."""
    files = {file: outcome for by_rank in written for file, outcome in by_rank.items()}
    pieces: dict[str, list[Piece]] = {name: [] for name in records}
    for item in plan:
        digest = files[item.file]["digests"][item.key]
        pieces[item.name].append(
            Piece(file=item.file, key=item.key, offset=item.box.offset, size=item.box.size, sha256=digest)
        )
    return Manifest(
        head=head,
        files={file: FileRecord(**files[file]["record"]) for file in sorted(files)},
        tensors={
            name: TensorRecord(dtype=record.dtype, shape=record.shape, pieces=tuple(pieces[name]))
            for name, record in records.items()
        },
        aliases={alias: name for part in described for alias, name in part["aliases"].items()},
        state=state,
        ranks=[description["state"] for description in described],
    )
