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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from thalweg.checkpoint import publish
from thalweg.checkpoint.dtypes import DTYPES, NAMES
from thalweg.checkpoint.errors import (
    DamagedCheckpoint,
    MismatchedCheckpoint,
    MissingCheckpoint,
)
from thalweg.checkpoint.io import FileSystem
from thalweg.checkpoint.layout import Box, local_pieces, local_tensor, whole
from thalweg.checkpoint.manifest import Head, Manifest, Piece
from thalweg.checkpoint.ranks import Ranks
from thalweg.checkpoint.shards import ShardReader
from thalweg.checkpoint.stream import SMALL
from thalweg.checkpoint.tree import decode
from thalweg.utils.log import get_logger

_READERS = min(4, os.cpu_count() or 1)  # threads that read and hash; both release the GIL
_log = get_logger(__name__)


@dataclass(frozen=True)
class Damage:
    """One thing wrong with a checkpoint: the file, the tensor (None: the file itself), and why."""

    file: str
    tensor: str | None
    reason: str


@dataclass(frozen=True)
class _Want:
    """One piece that this rank needs, and the places in live tensors that it fills."""

    name: str
    piece: Piece
    targets: list[tuple[Box, Box, torch.Tensor]] = field(default_factory=list)
    """(what of the piece, the live local tensor's own box in global indices, that tensor)"""


class Checkpoint:
    """A committed checkpoint, opened for reading.  Cheap: only the manifest has been read."""

    def __init__(self, path: Path, manifest: Manifest, io: FileSystem) -> None:
        self.path, self.manifest, self._io = path, manifest, io
        self._readers = {
            name: ShardReader(io, path / name, record) for name, record in manifest.files.items()
        }
        self._sound = False

    @classmethod
    def open(
        cls, directory: str | Path, tag: str | None = None, *, io: FileSystem | None = None
    ) -> Checkpoint:
        """Open ``directory/tag``; without a tag (or with "latest") the newest whose manifest is intact.

        ``directory`` may also be that of one checkpoint.
        Raises ``MissingCheckpoint`` where there is none and ``DamagedCheckpoint`` for a
        tag whose manifest does not match its checksum.  Not collective.
        """
        io, directory = io or FileSystem(), Path(directory)
        if tag is not None and tag != publish.LATEST:
            return cls.at(publish.resolve(io, directory, tag).path, io=io)
        if tag is None and io.exists(directory / publish.MANIFEST):
            return cls.at(directory, io=io)
        problems = []
        for found in publish.candidates(io, directory):
            try:
                return cls.at(found.path, io=io)
            except DamagedCheckpoint as error:
                problems.append(str(error))
                _log.warning("skipping a damaged checkpoint: %s", error)
        if problems:
            raise DamagedCheckpoint(f"every checkpoint in {directory} is damaged: {'; '.join(problems)}")
        raise MissingCheckpoint(
            f"there is no checkpoint in {directory}; give the directory that was saved to"
        )

    @classmethod
    def at(cls, path: Path, *, io: FileSystem | None = None) -> Checkpoint:
        """Open the one directory ``path``, or raise ``DamagedCheckpoint``."""
        io = io or FileSystem()
        return cls(path, publish.read_manifest(io, path), io)

    @property
    def head(self) -> Head:
        """Tag, step, epoch, world size and commit number."""
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
    def world(self) -> int:
        """The number of ranks that saved it."""
        return self.head.world

    def names(self, prefix: str = "") -> list[str]:
        """Names of the stored tensors, sorted; aliases are in ``manifest.aliases``."""
        return sorted(name for name in self.manifest.tensors if name.startswith(prefix))

    @property
    def state(self) -> Any:
        """The state tree, equal to what was saved; its tensors are read and checked now."""
        return decode(self.manifest.state, self.read)

    def per_rank(self, rank: int) -> Any:
        """The tree that ``rank`` of the saving job stored, or None if that job had no such rank."""
        return decode(self.manifest.ranks[rank], self.read) if 0 <= rank < len(self.manifest.ranks) else None

    def read(
        self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """A tensor, or the box of it at ``offsets`` of ``sizes``, on the CPU; reads only the pieces it needs.

        Raises ``MismatchedCheckpoint`` for an unknown name or a box outside the shape,
        ``DamagedCheckpoint`` if a byte has changed.
        """
        name = self._known(name)
        record = self.manifest.tensors[name]
        full = whole(record.shape)
        box = Box(
            full.offset if offsets is None else tuple(offsets), full.size if sizes is None else tuple(sizes)
        )
        inside = len(box.offset) == len(box.size) == len(full.size) and all(
            a >= 0 and n >= 0 and a + n <= m for a, n, m in zip(box.offset, box.size, full.size, strict=True)
        )
        if not inside:
            raise MismatchedCheckpoint(f"{name} has shape {list(full.size)}; {box} lies outside it")
        pieces = [(piece, overlap) for piece in record.pieces if (overlap := piece.box.intersect(box))]
        if len(pieces) == 1 and pieces[0][0].box == box:
            return self._reader(pieces[0][0]).read(name, pieces[0][0], record.dtype)
        out = torch.empty(box.size, dtype=DTYPES[record.dtype])
        for piece, overlap in pieces:
            values = self._reader(piece).read(name, piece, record.dtype)
            out[overlap.slices(box.offset)] = values[overlap.slices(piece.offset)]
        return out

    def close(self) -> None:
        """Nothing is held between reads; so that a checkpoint can be used in a ``with`` statement."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def damage(self, *, share: int = 0, shares: int = 1, prefix: str = "") -> list[Damage]:
        """All that is wrong, found by reading every byte (or those of names that begin with ``prefix``).

        With ``shares`` only part ``share`` of that many equal ones is read.
        """
        found: list[Damage] = []
        broken: set[str] = set()
        wanted = [(name, p) for name in self.names(prefix) for p in self.manifest.tensors[name].pieces]
        files = {p.file for _, p in wanted} if prefix else set(self._readers)
        for file in sorted(files):
            try:
                self._readers[file].check()
            except DamagedCheckpoint as error:
                broken.add(file)
                found.append(Damage(file, None, str(error)))
        found += [
            Damage(p.file, name, f"{self.path / p.file}: tensor {name} lies in this damaged file")
            for name, p in wanted
            if p.file in broken
        ]

        def verify(item: tuple[str, Piece]) -> Damage | None:
            name, piece = item
            try:
                self._reader(piece).verify(name, piece, self.manifest.tensors[name].dtype)
            except DamagedCheckpoint as error:
                return Damage(piece.file, name, str(error))
            return None

        readable = [item for item in wanted if item[1].file not in broken][share::shares]
        return found + [damage for damage in self._each(readable, verify) if damage]

    def verify(self, *, group: Any = None, prefix: str = "") -> None:
        """Collective: raise the same ``DamagedCheckpoint`` on all ranks unless every byte is as committed."""
        ranks = Ranks.of(group)

        def part() -> None:
            found = self.damage(share=ranks.rank, shares=ranks.world, prefix=prefix)
            if found:
                more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
                raise DamagedCheckpoint(f"{found[0].reason}{more}")

        ranks.together(f"verifying checkpoint {self.path}", part)
        self._sound = self._sound or not prefix

    def read_into(
        self,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        *,
        strict: bool = True,
        group: Any = None,
        also: Iterable[str] = (),
        release: Callable[[torch.Tensor], None] | None = None,
    ) -> list[str]:
        """Fill live tensors (DTensor or plain) from the checkpoint, each rank the parts it holds; collective.

        ``strict``: a requested name that is not stored is an error, and so is a stored one
        that no rank requested, among the top-level names (``model``, ``optim``) of the
        request; ``also`` names further ones that count as requested.  Otherwise such names
        are skipped and returned.  Floating dtypes may differ (values are cast, with a
        warning).  No live tensor changes before every rank has checked all that it needs.
        ``release`` is given each part of a live tensor once it is filled.
        """
        ranks = Ranks.of(group)
        what = f"loading checkpoint {self.path}"
        given: Any = tensors.items() if isinstance(tensors, Mapping) else tensors
        pairs: list[tuple[str, torch.Tensor]] = list(given)
        matched = ranks.together(what, lambda: self._match(pairs, strict))
        ranks.together(what, lambda: self._all_used(pairs, matched, also) if strict else None)
        missing = set(matched[ranks.rank]["missing"])
        if ranks.rank == 0 and matched[0]["cast"]:
            _log.warning("%s: cast to another dtype: %s", self.path, listed(matched[0]["cast"]))
        wants: list[_Want] = []

        def check() -> None:
            wants.extend(self._plan([(name, t) for name, t in pairs if name not in missing]))
            if not self._sound:
                self._each(
                    wants, lambda w: self._reader(w.piece).verify(w.name, w.piece, self._dtype(w.name))
                )

        ranks.together(what, check)
        ranks.together(what, lambda: self._each(wants, lambda w: self._copy(w, release)))
        return sorted(missing)

    def _match(self, tensors: list[tuple[str, torch.Tensor]], strict: bool) -> dict[str, list[str]]:
        """Check the request against the manifest; returns the stored names asked for and those not stored."""
        used, missing, cast, problems = [], [], [], []
        for name, tensor in tensors:
            stored = self.manifest.tensors.get(self.manifest.canonical(name))
            if stored is None:
                missing.append(name)
                continue
            used.append(self.manifest.canonical(name))
            if tensor.device.type == "meta":
                problems.append(f"{name} is on the meta device; materialise the module first (to_empty)")
            elif tuple(tensor.shape) != stored.shape:
                problems.append(f"{name} has shape {list(tensor.shape)} here and {list(stored.shape)} there")
            elif DTYPES[stored.dtype] != tensor.dtype:
                if not (DTYPES[stored.dtype].is_floating_point and tensor.dtype.is_floating_point):
                    problems.append(
                        f"{name} is {NAMES.get(tensor.dtype, tensor.dtype)} here and {stored.dtype} there"
                    )
                cast.append(name)
        if missing and strict:
            problems.append(
                "not in the checkpoint: " + listed([self._with_nearest(name) for name in missing])
            )
        if problems:
            raise MismatchedCheckpoint(
                f"{listed(problems, 6)}; load with strict=False to skip what is not there"
            )
        return {"used": sorted(set(used)), "missing": missing, "cast": cast}

    def _all_used(
        self,
        tensors: list[tuple[str, torch.Tensor]],
        matched: list[dict[str, list[str]]],
        also: Iterable[str],
    ) -> None:
        used = {name for part in matched for name in part["used"]} | {
            self.manifest.canonical(name) for name in also
        }
        spaces = {name.partition("/")[0] for name in used}
        unused = [
            name for name in self.manifest.tensors if name.partition("/")[0] in spaces and name not in used
        ]
        if unused:
            wanted = [name for name, _ in tensors]
            text = listed([_nearest(name, wanted) for name in unused])
            raise MismatchedCheckpoint(
                f"the checkpoint holds what was not asked for: {text}; load with strict=False to leave it out"
            )

    def _plan(self, tensors: list[tuple[str, torch.Tensor]]) -> list[_Want]:
        wants: dict[tuple[str, int], _Want] = {}
        for name, tensor in tensors:
            stored = self.manifest.canonical(name)
            local = local_tensor(tensor)
            for held in local_pieces(name, tensor):
                origin = tuple(g - own for g, own in zip(held.box.offset, held.local_offset, strict=True))
                for index, piece in enumerate(self.manifest.tensors[stored].pieces):
                    overlap = piece.box.intersect(held.box)
                    if overlap is not None:
                        want = wants.setdefault((stored, index), _Want(stored, piece))
                        want.targets.append((overlap, Box(origin, tuple(local.shape)), local))
        return list(wants.values())

    def _copy(self, want: _Want, release: Callable[[torch.Tensor], None] | None) -> None:
        values = self._reader(want.piece).read(want.name, want.piece, self._dtype(want.name))
        with torch.no_grad():
            for overlap, origin, local in want.targets:
                part = local[overlap.slices(origin.offset)]
                part.copy_(values[overlap.slices(want.piece.offset)])
                if release is not None:
                    release(part)

    def _each(self, items: Sequence[Any], action: Callable[[Any], Any]) -> list[Any]:
        """``action`` on each item, on several threads where there is enough to read for that to pay."""
        if sum(record.size for record in self.manifest.files.values()) < SMALL:
            return [action(item) for item in items]
        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(action, items))

    def _reader(self, piece: Piece) -> ShardReader:
        return self._readers[piece.file]

    def _dtype(self, name: str) -> str:
        return self.manifest.tensors[name].dtype

    def _known(self, name: str) -> str:
        stored = self.manifest.canonical(name)
        if stored not in self.manifest.tensors:
            raise MismatchedCheckpoint(f"not in the checkpoint: {self._with_nearest(name)}")
        return stored

    def _with_nearest(self, name: str) -> str:
        return _nearest(name, [*self.manifest.tensors, *self.manifest.aliases])


def _nearest(name: str, others: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(others), n=2, cutoff=0.6)
    return f"{name} (nearest: {', '.join(close)})" if close else name


def listed(items: Sequence[str], limit: int = 8) -> str:
    """The first ``limit`` items as text, and how many more there are."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + more
