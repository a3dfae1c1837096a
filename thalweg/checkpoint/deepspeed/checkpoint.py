"""A foreign folder as a ``Checkpoint``: whoever reads ours reads it.

The manifest is made from what the folder holds, each logical tensor cut into boxes at the ends of its fragments; a
box is read out of the file that its fragment lies in.  So a load takes the way of every load: matched against the
model first, each rank its own boxes, all ranks or none.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch

from thalweg.checkpoint.deepspeed.checkpoint_folder import DeepSpeedFolder, is_deepspeed_folder
from thalweg.checkpoint.deepspeed.flat_tensors import LogicalTensor, flat_range_chunks, flat_start
from thalweg.checkpoint.directory import LATEST, MANIFEST, list_checkpoints, read_latest
from thalweg.checkpoint.filesystem import FileSystem, list_if_there
from thalweg.checkpoint.format.chunks import split_chunk
from thalweg.checkpoint.format.dtypes import DTYPE_NAMES
from thalweg.checkpoint.format.manifest import ChunkRecord, FileRecord, Manifest, ManifestHead, TensorRecord
from thalweg.checkpoint.reader import Checkpoint, Corruption
from thalweg.checkpoint.save import MAX_CHUNK_BYTES
from thalweg.utils.log import get_logger
from thalweg.utils.trees import map_tensors

_NO_DIGEST = "0" * 64  # DeepSpeed's files have a CRC-32 for each entry, none for each tensor

_log = get_logger(__name__)


class ForeignCheckpoint(Checkpoint):
    """A folder of DeepSpeed's; ``state`` is the tree that ``restore_module`` and ``TrainingState`` know."""

    def __init__(self, path: Path, folder: DeepSpeedFolder, io: FileSystem) -> None:
        super().__init__(path, _make_manifest(path, folder), io)
        self._folder = folder

    @classmethod
    def from_path(cls, path: Path, *, io: FileSystem | None = None) -> Self:
        """Open the one directory ``path``, or raise ``CorruptCheckpointError``."""
        io = io or FileSystem()
        return cls(path, DeepSpeedFolder(io, path), io)

    @property
    def state(self) -> Any:
        """The state tree; its tensors are read now."""
        return map_tensors(self._folder.state, lambda tensor: tensor.detach().clone())

    def find_corruption(self, *, rank: int = 0, world_size: int = 1) -> list[Corruption]:
        """All entries whose CRC-32 differs, found by reading every byte."""
        names = sorted(self._folder.files)[rank::world_size]
        reasons = self._map_concurrently(names, lambda name: self._folder.files[name].find_damage())
        return [Corruption(name, None, reason) for name, reason in zip(names, reasons, strict=True) if reason]

    def _read_chunk(self, name: str, chunk: ChunkRecord, *, keep: bool = True) -> torch.Tensor:
        tensor = self._folder.tensors[name]
        start = flat_start(chunk.chunk, tensor.shape)
        fragment = tensor.fragments[int(chunk.key)]
        return fragment.read(start, start + chunk.chunk.numel).view(chunk.size)


def _make_manifest(path: Path, folder: DeepSpeedFolder) -> Manifest:
    head = ManifestHead(
        tag=path.name, step=folder.step, world=folder.world_size, sequence=0, created="", writer=folder.writer
    )
    files = {
        name: FileRecord(size=file.size, header_bytes=0, header_sha256=_NO_DIGEST)
        for name, file in folder.files.items()
    }
    tensors = {
        name: TensorRecord(dtype=DTYPE_NAMES[tensor.dtype], shape=tensor.shape, pieces=tuple(_pieces(tensor)))
        for name, tensor in folder.tensors.items()
    }
    # Not validated: a universal folder's files lie in folders of their own, which our own names never do.
    return Manifest.model_construct(
        head=head, files=files, tensors=tensors, aliases=folder.aliases, state=None, ranks=[]
    )


def _pieces(tensor: LogicalTensor) -> Iterator[ChunkRecord]:
    for index, fragment in enumerate(tensor.fragments):
        for box in flat_range_chunks(tensor.shape, fragment.start, fragment.stop):
            for chunk in split_chunk(box, tensor.dtype.itemsize, MAX_CHUNK_BYTES):
                yield ChunkRecord(
                    file="foreign", key=str(index), offset=chunk.offset, size=chunk.size, sha256=_NO_DIGEST
                )


def find_foreign(io: FileSystem, checkpoint_dir: Path, tag: str | None = None) -> Path | None:
    """The foreign folder that a load of ``checkpoint_dir`` is to take, or None where that is one of ours, or none.

    ``checkpoint_dir`` may itself be the folder of one checkpoint.  Without a tag the pointer decides; where there is
    none, and no checkpoint of ours, the one of the most steps.
    """
    name = None if tag == LATEST else tag
    if name is None and is_deepspeed_folder(io, checkpoint_dir) and not io.exists(checkpoint_dir / MANIFEST):
        return checkpoint_dir
    name = read_latest(io, checkpoint_dir) if name is None else name
    if name is not None:
        path = checkpoint_dir / name
        return path if not io.exists(path / MANIFEST) and is_deepspeed_folder(io, path) else None
    if list_checkpoints(io, checkpoint_dir, ignore_read_errors=True):
        return None
    folders = [n for n in list_if_there(io, checkpoint_dir) if is_deepspeed_folder(io, checkpoint_dir / n)]
    if not folders:
        return None
    newest = max(folders, key=lambda name: ([int(digits) for digits in re.findall(r"\d+", name)], name))
    _log.warning("%s has no %r file; of DeepSpeed's checkpoints there, %s is taken", checkpoint_dir, LATEST, newest)
    return checkpoint_dir / newest
