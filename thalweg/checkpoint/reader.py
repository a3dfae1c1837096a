"""An opened checkpoint: any layout from any other, all ranks or none, nothing unchecked.

``read_into`` fills live tensors in three steps, each agreed upon by all ranks: match the
requested names and shapes against the manifest; read and check every piece this rank
needs (bounded memory, nothing kept, nothing live touched); read again and copy.  The
second reading is checked as well and comes mostly from the page cache.  A damaged byte
therefore stops every rank with the same error before any live tensor has changed.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thalweg.checkpoint import directory
from thalweg.checkpoint.errors import CheckpointMismatchError, CorruptCheckpointError
from thalweg.checkpoint.filesystem import FileSystem
from thalweg.checkpoint.format.chunks import TensorChunk, local_chunks, local_tensor
from thalweg.checkpoint.format.codec import decode_tree
from thalweg.checkpoint.format.direct_writer import SMALL_FILE_BYTES
from thalweg.checkpoint.format.dtypes import DTYPE_NAMES, DTYPES
from thalweg.checkpoint.format.manifest import ChunkRecord, Manifest, ManifestHead
from thalweg.checkpoint.format.shards import ShardReader, noop_release
from thalweg.checkpoint.rank_group import RankGroup
from thalweg.device import copy_to_device
from thalweg.utils.log import get_logger

_NUM_READ_THREADS = min(4, os.cpu_count() or 1)  # threads that read and hash; both release the GIL
_log = get_logger(__name__)


@dataclass(frozen=True)
class Corruption:
    """One thing wrong with a checkpoint: the file, the tensor (None: the file itself), and why."""

    file: str
    tensor: str | None
    reason: str


# What of a piece fills which place: (the common box, the origin of a live local tensor, that tensor).
_Target = tuple[TensorChunk, tuple[int, ...], torch.Tensor]


class Checkpoint:
    """A committed checkpoint, opened for reading.  Cheap: only the manifest has been read."""

    def __init__(self, path: Path, manifest: Manifest, io: FileSystem) -> None:
        self.path, self.manifest, self._io = path, manifest, io
        self._shard_readers = {name: ShardReader(io, path / name, record) for name, record in manifest.files.items()}
        self._verified = False

    @classmethod
    def open(cls, checkpoint_dir: str | Path, tag: str | None = None, *, io: FileSystem | None = None) -> Checkpoint:
        """Open ``checkpoint_dir/tag``; without a tag (or with "latest") the newest whose manifest is intact.

        ``checkpoint_dir`` may also be that of one checkpoint.
        Raises ``CheckpointNotFoundError`` where there is none and ``CorruptCheckpointError`` for a
        tag whose manifest does not match its checksum.  Not collective.
        """
        io, checkpoint_dir, problems = io or FileSystem(), Path(checkpoint_dir), []
        for path in directory.find_paths(io, checkpoint_dir, tag):
            try:
                return cls.from_path(path, io=io)
            except CorruptCheckpointError as error:
                if tag not in (None, directory.LATEST) or path == checkpoint_dir:
                    raise
                problems.append(str(error))
                _log.warning("skipping a damaged checkpoint: %s", error)
        raise CorruptCheckpointError(f"every checkpoint in {checkpoint_dir} is damaged: {'; '.join(problems)}")

    @classmethod
    def from_path(cls, path: Path, *, io: FileSystem | None = None) -> Checkpoint:
        """Open the one directory ``path``, or raise ``CorruptCheckpointError``."""
        io = io or FileSystem()
        return cls(path, directory.read_manifest(io, path), io)

    @property
    def head(self) -> ManifestHead:
        """Tag, step, world size and commit number."""
        return self.manifest.head

    @property
    def tag(self) -> str:
        """The tag it was saved under."""
        return self.head.tag

    @property
    def step(self) -> int:
        """The optimiser step it was saved at."""
        return self.head.step

    @property
    def world_size(self) -> int:
        """The number of ranks that saved it."""
        return self.head.world

    def tensor_names(self, prefix: str = "") -> list[str]:
        """Names of the stored tensors, sorted; aliases are in ``manifest.aliases``."""
        return sorted(name for name in self.manifest.tensors if name.startswith(prefix))

    @property
    def state(self) -> Any:
        """The state tree, equal to what was saved; its tensors are read and checked now."""
        return decode_tree(self.manifest.state, self.read)

    def per_rank(self, rank: int) -> Any:
        """The tree that ``rank`` of the saving job stored, or None if that job had no such rank."""
        return decode_tree(self.manifest.ranks[rank], self.read) if 0 <= rank < len(self.manifest.ranks) else None

    def read(self, name: str) -> torch.Tensor:
        """A tensor on the CPU.

        Raises ``CheckpointMismatchError`` for an unknown name, ``CorruptCheckpointError`` if a byte has changed.
        """
        asked, name = name, self.manifest.resolve_alias(name)
        if name not in self.manifest.tensors:
            raise CheckpointMismatchError(f"not in the checkpoint: {self._suggest_names(asked)}")
        record = self.manifest.tensors[name]
        if len(record.pieces) == 1:
            return self._read_chunk(name, record.pieces[0])
        out = torch.empty(record.shape, dtype=DTYPES[record.dtype])
        for piece in record.pieces:
            out[piece.chunk.slices((0,) * len(record.shape))] = self._read_chunk(name, piece)
        return out

    def close(self) -> None:
        """Nothing is held between reads; so that a checkpoint can be used in a ``with`` statement."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def find_corruption(self, *, rank: int = 0, world_size: int = 1) -> list[Corruption]:
        """All that is wrong, found by reading every byte.

        With ``world_size`` only part ``rank`` of that many equal ones is read.
        """
        corruptions: list[Corruption] = []
        chunks = [(name, p) for name in self.tensor_names() for p in self.manifest.tensors[name].pieces]
        for file, reader in sorted(self._shard_readers.items()):
            try:
                reader.check_header()
            except CorruptCheckpointError as error:
                corruptions.append(Corruption(file, None, str(error)))
        broken_files = {one.file for one in corruptions}
        corruptions += [
            Corruption(p.file, name, f"{self.path / p.file}: tensor {name} lies in this damaged file")
            for name, p in chunks
            if p.file in broken_files
        ]

        def verify_item(item: tuple[str, ChunkRecord]) -> Corruption | None:
            name, piece = item
            try:
                self._read_chunk(name, piece, keep=False)
            except CorruptCheckpointError as error:
                return Corruption(piece.file, name, str(error))
            return None

        readable = [item for item in chunks if item[1].file not in broken_files][rank::world_size]
        return corruptions + [damage for damage in self._map_concurrently(readable, verify_item) if damage]

    def verify(self, *, group: Any = None) -> None:
        """Collective: raise the same ``CorruptCheckpointError`` on all ranks unless every byte is as committed."""
        ranks = RankGroup.from_group(group)

        def verify_local() -> None:
            corruptions = self.find_corruption(rank=ranks.rank, world_size=ranks.world_size)
            if corruptions:
                more = f" (and {len(corruptions) - 1} more)" if len(corruptions) > 1 else ""
                raise CorruptCheckpointError(f"{corruptions[0].reason}{more}")

        ranks.all_or_raise(f"verifying checkpoint {self.path}", verify_local)
        self._verified = True

    def read_into(
        self,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        *,
        strict: bool = True,
        group: Any = None,
        extra_names: Iterable[str] = (),
        release: Callable[[torch.Tensor], None] = noop_release,
    ) -> list[str]:
        """Fill live tensors (DTensor or plain) from the checkpoint, each rank the parts it holds; collective.

        ``strict``: a requested name that is not stored is an error, and so is a stored one
        that no rank requested, among the top-level names (``model``, ``optim``) of the
        request; ``extra_names`` names further ones that count as requested.  Otherwise such names
        are skipped and returned.  Floating dtypes may differ (values are cast, with a
        warning).  No live tensor changes before every rank has checked all that it needs.
        ``release`` is given each part of a live tensor once it is filled.
        """
        ranks = RankGroup.from_group(group)
        operation = f"loading checkpoint {self.path}"
        items: Any = tensors.items() if isinstance(tensors, Mapping) else tensors
        pairs: list[tuple[str, torch.Tensor]] = list(items)
        matched = ranks.all_or_raise(operation, lambda: self._match_request(pairs, strict))

        def check_all_requested() -> None:
            used = {name for part in matched for name in part["used"]}
            used |= {self.manifest.resolve_alias(name) for name in extra_names}
            top_level_names = {name.partition("/")[0] for name in used}
            unused = [
                name for name in self.manifest.tensors if name.partition("/")[0] in top_level_names and name not in used
            ]
            if unused and strict:
                requested = [name for name, _ in pairs]
                text = format_list([_with_close_matches(name, requested) for name in unused])
                raise CheckpointMismatchError(
                    f"unexpected checkpoint keys: {text}; load with strict=False to ignore them"
                )

        ranks.all_or_raise(operation, check_all_requested)
        missing = set(matched[ranks.rank]["missing"])
        if ranks.rank == 0 and matched[0]["cast"]:
            _log.warning("%s: cast to another dtype: %s", self.path, format_list(matched[0]["cast"]))
        # The pieces that this rank needs, each with the places in live tensors that it fills.
        targets: dict[tuple[str, ChunkRecord], list[_Target]] = {}

        def check() -> None:
            for name, tensor in pairs:
                stored, local = self.manifest.resolve_alias(name), local_tensor(tensor)
                for chunk, origin in local_chunks(name, tensor) if name not in missing else ():
                    for piece in self.manifest.tensors[stored].pieces:
                        if overlap := piece.chunk.intersect(chunk):
                            targets.setdefault((stored, piece), []).append((overlap, origin, local))
            if not self._verified:
                self._map_concurrently(targets, lambda piece: self._read_chunk(*piece, keep=False))

        def load(piece: tuple[str, ChunkRecord]) -> None:
            values = self._read_chunk(*piece)
            with torch.no_grad():
                for overlap, origin, local in targets[piece]:
                    target = local[overlap.slices(origin)]
                    target.copy_(copy_to_device(values[overlap.slices(piece[1].offset)], target.device))
                    release(target)

        ranks.all_or_raise(operation, check)
        ranks.all_or_raise(operation, lambda: self._map_concurrently(targets, load))
        return sorted(missing)

    def _match_request(self, tensors: list[tuple[str, torch.Tensor]], strict: bool) -> dict[str, list[str]]:
        """Check the request against the manifest; returns the stored names asked for and those not stored."""
        used, missing, cast, problems = [], [], [], []
        for name, tensor in tensors:
            stored = self.manifest.tensors.get(self.manifest.resolve_alias(name))
            if stored is None:
                missing.append(name)
                continue
            used.append(self.manifest.resolve_alias(name))
            if tensor.is_meta:
                problems.append(f"{name} is on the meta device; materialise the module first (to_empty)")
            elif tuple(tensor.shape) != stored.shape:
                problems.append(f"{name} has shape {list(tensor.shape)} here and {list(stored.shape)} there")
            elif DTYPES[stored.dtype] != tensor.dtype:
                if not (DTYPES[stored.dtype].is_floating_point and tensor.dtype.is_floating_point):
                    own = DTYPE_NAMES.get(tensor.dtype, tensor.dtype)
                    problems.append(f"{name} is {own} here and {stored.dtype} there")
                cast.append(name)
        if missing and strict:
            problems.append("not in the checkpoint: " + format_list([self._suggest_names(name) for name in missing]))
        if problems:
            cure = "load with strict=False (an engine: load_module_strict=False) to skip what is not there"
            raise CheckpointMismatchError(f"{format_list(problems, 6)}; {cure}")
        return {"used": sorted(set(used)), "missing": missing, "cast": cast}

    def _map_concurrently(self, items: Collection[Any], action: Callable[[Any], Any]) -> list[Any]:
        """``action`` on each item, on several threads where there is enough to read for that to pay."""
        if sum(record.size for record in self.manifest.files.values()) < SMALL_FILE_BYTES:
            return [action(item) for item in items]
        with ThreadPoolExecutor(_NUM_READ_THREADS) as pool:
            return list(pool.map(action, items))

    def _read_chunk(self, name: str, chunk: ChunkRecord, *, keep: bool = True) -> torch.Tensor:
        return self._shard_readers[chunk.file].read_chunk(name, chunk, self.manifest.tensors[name].dtype, keep=keep)

    def _suggest_names(self, name: str) -> str:
        return _with_close_matches(name, [*self.manifest.tensors, *self.manifest.aliases])


def _with_close_matches(name: str, others: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(others), n=2, cutoff=0.6)
    return f"{name} (nearest: {', '.join(close)})" if close else name


def format_list(items: Sequence[str], limit: int = 8) -> str:
    """The first ``limit`` items as text, and how many more there are."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + more
