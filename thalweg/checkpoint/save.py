"""Saving: logical tensors in, one committed directory out.

The picture.  Every rank describes which boxes of which logical tensors it holds; the
descriptions meet, and each rank derives the same plan from them: every distinct box is
cut into pieces of at most ``MAX_CHUNK_BYTES``, and each piece has one writer among the
ranks that hold it, chosen so that the ranks write about equally much.  Replicas and
plain tensors are therefore written once, and sharded ones where they lie: no rank ever
gathers anything.

The phases, each an ``all_or_raise`` (so one rank's failure is every rank's error): plan;
temporary directory; shards written, hashed and fsynced; digests met, manifest
written and published by rank 0 (``directory.py`` has the order).  Until the last phase
nothing has a public name.  After it, tidying up may fail without failing the save.

With a ``BackgroundSave`` each rank copies the pieces that it writes once the plan is made, and
returns; all that follows is done by a thread, in a process group of its own.
"""

import datetime
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import thalweg
from thalweg.checkpoint import directory
from thalweg.checkpoint.background_save import BackgroundSave, join_saves
from thalweg.checkpoint.errors import CheckpointError, CheckpointMismatchError, UnserializableStateError
from thalweg.checkpoint.filesystem import FileSystem
from thalweg.checkpoint.format.chunks import TensorChunk, covers_exactly, local_chunks, local_tensor, split_chunk
from thalweg.checkpoint.format.codec import encode_tree
from thalweg.checkpoint.format.dtypes import DTYPE_NAMES, DTYPES
from thalweg.checkpoint.format.manifest import ChunkRecord, FileRecord, Manifest, ManifestHead, TensorRecord
from thalweg.checkpoint.format.shards import TensorEntry, noop_release, sort_for_alignment, write_shard
from thalweg.checkpoint.rank_group import RankGroup
from thalweg.utils.log import get_logger

MAX_CHUNK_BYTES = 32 << 20  # a load that needs one row of a piece reads and hashes all of it, so not too large

_log = get_logger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """What one rank contributes to a checkpoint; tensors are referred to, not copied.

    tensors: logical name -> DTensor (any mesh, Shard and Replicate) or plain tensor, which
    is taken to be equal on every rank that has the name.  aliases: further name -> name in
    ``tensors`` (tied weights).  state: a tree that is equal on all ranks (rank 0's is kept);
    per_rank: this rank's own tree (``format/codec.py`` says what trees may hold).  rank_local: names of
    plain tensors in which ranks may differ; the first holder's values are kept.  release: is
    given each tensor, or part of one, once it has been written (to let go of its pages, say).
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    per_rank: Mapping[str, Any] = field(default_factory=dict)
    rank_local: frozenset[str] = frozenset()
    release: Callable[[torch.Tensor], None] = noop_release


@dataclass(frozen=True)
class _WriteItem:
    """A piece to be written: a box of a tensor, its writer, and its place."""

    name: str
    chunk: TensorChunk
    writer: int
    file: str
    key: str


def save_snapshot(
    checkpoint_dir: str | Path,
    tag: str,
    snapshot: Snapshot,
    *,
    step: int,
    group: Any = None,
    io: FileSystem | None = None,
    keep_latest_k: int | None = None,
    save_latest: bool = True,
    background: BackgroundSave | None = None,
) -> Path:
    """Write and commit ``snapshot`` as ``checkpoint_dir/tag``; collective over ``group``; returns that path.

    An existing tag is replaced, and remains loadable until the new one is committed.  With
    ``keep_latest_k`` the older checkpoints beyond that many are removed after the commit.
    ``save_latest``: whether the pointer comes to name it, so that a load without a tag takes it.
    ``background``: return when the state is copied, and leave the writing, and its errors, to a thread of it.
    A save of this process that is under way is waited for first.
    Raises ``CheckpointError``, the same on all ranks; what was committed before is intact.
    """
    join_saves()
    io = io or FileSystem()
    checkpoint_dir = Path(checkpoint_dir)
    ranks = RankGroup.from_group(group)
    tag = str(tag)
    encoded: list[tuple[dict[str, torch.Tensor], Any]] = []

    def describe() -> dict[str, Any]:
        directory.check_tag(tag)
        if keep_latest_k is not None and (type(keep_latest_k) is not int or keep_latest_k < 1):
            raise CheckpointMismatchError(f"keep is {keep_latest_k!r}: use None to keep all, or a number from 1 on")
        tensors, state, per_rank = _encode_snapshot(snapshot, ranks.rank)
        encoded.append((tensors, state))
        if ranks.rank == 0:
            directory.make_directories(io, checkpoint_dir)
        return {
            "tag": tag,
            "tensors": list(_describe_tensors(tensors)),
            "aliases": dict(snapshot.aliases),
            "unsynced": sorted(snapshot.rank_local),
            "state": per_rank,
        }

    operation = f"saving checkpoint {tag!r} to {checkpoint_dir}"
    inventories = ranks.all_or_raise(operation, describe)
    plan, records = _plan_writes(inventories)
    tensors, state = encoded.pop()
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for item in plan:
        if item.writer == ranks.rank:
            shards.setdefault(item.file, {})[item.key] = _read_local_chunk(item, tensors[item.name])

    release = snapshot.release  # the thread is to hold the copies alone

    def write(ranks: RankGroup) -> Path:
        temporary: list[Path] = []

        def start() -> list[Any]:
            temporary_dir, sequence = directory.start_save(io, checkpoint_dir, tag)
            temporary.append(temporary_dir)
            return [temporary_dir.name, sequence]

        def write_shards() -> dict[str, Any]:
            """Write this rank's shards, letting go of each piece; returns their records and digests as JSON."""
            if ranks.rank != 0 and not io.exists(path):
                raise CheckpointError(
                    f"{path} was made by rank 0 but is not seen from here; the checkpoint directory must be on a "
                    "file system that all hosts share"
                )
            results = {}
            for file, pieces in shards.items():
                entries = sort_for_alignment(
                    TensorEntry(key, DTYPE_NAMES[values.dtype], tuple(values.shape)) for key, values in pieces.items()
                )
                values = (pieces.pop(entry.key) for entry in entries)
                record, digests = write_shard(io, path / file, entries, values, release)
                results[file] = {"record": record.model_dump(), "digests": digests}
            return results

        def commit() -> str:
            """Put the ranks' digests together; a piece without one would be a bug, and is an error."""
            files = {file: outcome for by_rank in written for file, outcome in by_rank.items()}
            pieces: dict[str, list[ChunkRecord]] = {name: [] for name in records}
            for item in plan:
                digest, box = files[item.file]["digests"][item.key], item.chunk
                pieces[item.name].append(
                    ChunkRecord(file=item.file, key=item.key, offset=box.offset, size=box.size, sha256=digest)
                )
            head = ManifestHead(
                tag=tag,
                step=int(step),
                world=ranks.world_size,
                sequence=sequence,
                created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                writer=f"thalweg {thalweg.__version__}",
            )
            manifest = Manifest(
                head=head,
                files={file: FileRecord(**files[file]["record"]) for file in sorted(files)},
                tensors={
                    name: TensorRecord(dtype=record.dtype, shape=record.shape, pieces=tuple(pieces[name]))
                    for name, record in records.items()
                },
                aliases={alias: name for part in inventories for alias, name in part["aliases"].items()},
                state=state,
                ranks=[description["state"] for description in inventories],
            )
            return str(directory.commit(io, checkpoint_dir, path, manifest, save_latest=save_latest))

        def finalize() -> str:
            final_path = public
            try:
                final_path = directory.finalize_tag(io, checkpoint_dir, tag)
                if keep_latest_k is not None:
                    directory.remove_old_checkpoints(io, checkpoint_dir, keep_latest_k, final_path)
            except (OSError, CheckpointError) as error:  # the commit stands; what is left over goes with the next save
                _log.warning("checkpoint %r is committed, but older ones could not be removed: %s", tag, error)
            return str(final_path)

        try:
            name, sequence = ranks.first_or_raise(operation, start)
            path = checkpoint_dir / name
            written = ranks.all_or_raise(operation, write_shards)
            public = Path(ranks.first_or_raise(operation, commit))
        except Exception:
            if temporary:
                directory.discard_save(io, temporary[0])
            raise
        return Path(ranks.first_or_raise(operation, finalize))

    if background is None:
        return write(ranks)
    ranks.all_or_raise(operation, lambda: background.copy_to_host(shards))
    background.start(write, ranks)
    return checkpoint_dir / tag


def _encode_snapshot(snapshot: Snapshot, rank: int) -> tuple[dict[str, torch.Tensor], Any, Any]:
    """Every tensor that this rank can write, and the two trees as JSON."""
    tensors = dict(snapshot.tensors)
    for name, tensor in tensors.items():
        if not name or name == "__metadata__":
            raise UnserializableStateError(f"{name!r} cannot name a tensor")
        if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in DTYPE_NAMES:
            raise UnserializableStateError(
                f"tensor {name} ({tensor.dtype}, {tensor.layout}, on {tensor.device}) has no form on disk"
            )
    for alias, target in snapshot.aliases.items():
        if target not in tensors or alias in tensors:
            raise UnserializableStateError(f"the alias {alias} of {target} must be a new name of a stored tensor")
    state, from_state = encode_tree(dict(snapshot.state), "state")
    per_rank, from_rank = encode_tree(dict(snapshot.per_rank), f"rank{rank}")
    if rank != 0:  # rank 0's state is kept, so its plain tensors are; of DTensors every rank has a part
        from_state = {name: t for name, t in from_state.items() if isinstance(t, DTensor)}
    for name in from_state.keys() | from_rank.keys():
        if name in tensors:
            raise UnserializableStateError(f"{name} names both a tensor and a value in the state")
    return {**tensors, **from_state, **from_rank}, state, per_rank


def _describe_tensors(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[Any]]:
    for name, tensor in tensors.items():
        chunks = [[list(chunk.offset), list(chunk.size)] for chunk, _ in local_chunks(name, tensor)]
        yield [name, DTYPE_NAMES[tensor.dtype], list(tensor.shape), chunks]


def _plan_writes(inventories: list[dict[str, Any]]) -> tuple[list[_WriteItem], dict[str, TensorRecord]]:
    """Who writes what, from what each rank holds; the same on every rank, without further exchange.

    Returns the pieces, and a record without pieces for each tensor.  Raises
    ``CheckpointError`` where ranks contradict each other or leave a hole.
    """
    tags = sorted({inventory["tag"] for inventory in inventories})
    if len(tags) > 1:
        raise CheckpointError(f"the ranks name different tags, {', '.join(tags)}; give all of them the same")
    records: dict[str, TensorRecord] = {}
    holders: dict[str, dict[TensorChunk, list[int]]] = {}
    for rank, description in enumerate(inventories):
        for name, dtype, shape, boxes in description["tensors"]:
            record = TensorRecord(dtype=dtype, shape=tuple(shape), pieces=())
            if records.setdefault(name, record) != record:
                first_record = records[name]
                raise CheckpointError(
                    f"tensor {name} is {dtype} {list(shape)} on rank {rank} but {first_record.dtype} "
                    f"{list(first_record.shape)} on a rank before it; all ranks must save the same logical tensors"
                )
            for offset, size in boxes:
                holders.setdefault(name, {}).setdefault(TensorChunk(tuple(offset), tuple(size)), []).append(rank)
    for name in {name for description in inventories for name in description["unsynced"]}:
        for box, owners in holders.get(name, {}).items():
            holders[name][box] = owners[:1]
    for name, record in records.items():
        if not covers_exactly(list(holders.get(name, {})), record.shape):
            raise CheckpointError(
                f"the ranks' pieces of tensor {name} do not cover its shape {list(record.shape)} exactly "
                "once; is a rank missing from the process group of the save?"
            )
    return _assign_writers(records, holders, len(inventories)), records


def _assign_writers(
    records: dict[str, TensorRecord], holders: dict[str, dict[TensorChunk, list[int]]], world_size: int
) -> list[_WriteItem]:
    bytes_per_rank = [0] * world_size
    assigned: list[tuple[str, TensorChunk, int]] = []
    replicated: list[tuple[int, str, TensorChunk, list[int]]] = []
    for name, boxes in holders.items():
        itemsize = DTYPES[records[name].dtype].itemsize
        for box, owners in boxes.items():
            for piece in split_chunk(box, itemsize, MAX_CHUNK_BYTES):
                nbytes = piece.numel * itemsize
                if len(owners) == 1:
                    bytes_per_rank[owners[0]] += nbytes
                    assigned.append((name, piece, owners[0]))
                else:
                    replicated.append((nbytes, name, piece, owners))
    for nbytes, name, piece, owners in sorted(replicated, key=lambda s: (-s[0], s[1], s[2])):
        writer = min(owners, key=lambda rank: (bytes_per_rank[rank], rank))
        bytes_per_rank[writer] += nbytes
        assigned.append((name, piece, writer))
    used_keys: set[tuple[str, str]] = set()
    items = []
    for name, box, writer in sorted(assigned):
        first = name.partition("/")[0]
        kind = first if first in ("model", "optim") else "state"
        file = f"shard-{writer:05d}-of-{world_size:05d}.{kind}.safetensors"
        key = name if box.size == records[name].shape else f"{name}@{','.join(map(str, box.offset))}"
        while (file, key) in used_keys:
            key += "'"
        used_keys.add((file, key))
        items.append(_WriteItem(name, box, writer, file, key))
    return items


def _read_local_chunk(item: _WriteItem, tensor: torch.Tensor) -> torch.Tensor:
    for chunk, origin in local_chunks(item.name, tensor):
        if chunk.intersect(item.chunk) == item.chunk:
            return local_tensor(tensor)[item.chunk.slices(origin)]
    raise AssertionError(f"{item.name} has no {item.chunk} here")
