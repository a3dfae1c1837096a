"""The Hugging Face layout: ``model.safetensors`` (or numbered shards and an index) and ``config.json``.

``export_hf`` reads it out of a checkpoint, ``save_16bit`` out of a live module; both
hold one tensor at a time.  A tied weight is written once, under the name that the model
lists first; ``from_pretrained`` ties the others again from the config.  Files are
written under hidden names and renamed, the index and the config last, so a reader never
meets half an export.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thalweg.checkpoint.directory import make_directories
from thalweg.checkpoint.errors import CheckpointMismatchError
from thalweg.checkpoint.filesystem import FileSystem, write_file
from thalweg.checkpoint.format.dtypes import DTYPE_NAMES, DTYPES
from thalweg.checkpoint.format.shards import ShardWriter, TensorEntry
from thalweg.checkpoint.model_state import get_hf_config, is_frozen, model_tensors
from thalweg.checkpoint.pipeline_state import iter_full_tensors, to_canonical_names
from thalweg.checkpoint.rank_group import RankGroup
from thalweg.checkpoint.reader import Checkpoint
from thalweg.parallel.pipeline.tied_weights import IDENTITY_NAMING, ParamNaming

_SINGLE_FILE_NAME = "model.safetensors"
_INDEX_FILE_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class _ExportTensor:
    """A tensor to be exported: its name and size as written, and how to get its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def export_hf(
    checkpoint: Checkpoint,
    out_dir: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: float = 5e9,
    config: Mapping[str, Any] | None = None,
    io: FileSystem | None = None,
) -> Path:
    """Write a checkpoint's weights in Hugging Face layout to ``out_dir``; returns it.  Not collective.

    ``dtype`` casts floating tensors.  ``config``: the content of ``config.json``; by default
    the one that the checkpoint carries, if any.  Every byte read is checked
    (``CorruptCheckpointError``); existing exports in ``out_dir`` are replaced.
    """
    weights = []
    for name in checkpoint.tensor_names("model/"):
        record = checkpoint.manifest.tensors[name]
        stored = DTYPES[record.dtype]
        weights.append(
            _ExportTensor(
                name.removeprefix("model/"),
                _target_dtype(stored, dtype),
                record.shape,
                lambda name=name: checkpoint.read(name),
            )
        )
    if not weights:
        raise CheckpointMismatchError(f"{checkpoint.path} has no tensors below 'model/' to export")
    if config is None:
        state = checkpoint.state
        config = state.get("hf_config") or state.get("thalweg", {}).get("hf_config")
    with closing(_HfExportWriter(io or FileSystem(), Path(out_dir), weights, max_shard_bytes)) as writer:
        writer.prepare_directory()
        for weight in writer.weights:
            writer.write(weight, weight.fetch())
        writer.finish(_config_with_dtype(config, weights))
    return Path(out_dir)


def save_16bit(
    module: nn.Module,
    directory: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    group: Any = None,
    *,
    max_shard_bytes: float = 5e9,
    io: FileSystem | None = None,
    naming: ParamNaming = IDENTITY_NAMING,
    include_frozen: bool = True,
) -> Path:
    """Write a live module's weights in Hugging Face layout, floating ones as ``dtype``; collective.

    ``include_frozen=False`` leaves out parameters that need no gradient.  Sharded parameters are gathered one at a
    time; rank 0 writes.  A failure there is the same ``CheckpointError`` on all ranks, after the gathers that the
    peers take part in.
    """
    ranks = RankGroup.from_group(group)
    directory = Path(directory)
    tensors, _ = to_canonical_names(*model_tensors(module), naming)
    if not include_frozen:
        tensors = {name: tensor for name, tensor in tensors.items() if not is_frozen(tensor)}
    weights = [
        _ExportTensor(name, _target_dtype(stored, dtype), shape, fetch)
        for name, stored, shape, fetch in iter_full_tensors(tensors, naming)
    ]
    writer = _HfExportWriter(io or FileSystem(), directory, weights, max_shard_bytes)
    with closing(writer):
        _gather_and_write(writer, ranks, module, f"saving weights to {directory}")
    return directory


def _gather_and_write(writer: _HfExportWriter, ranks: RankGroup, module: nn.Module, operation: str) -> None:
    is_writer = ranks.rank == 0
    ranks.all_or_raise(operation, lambda: writer.prepare_directory() if is_writer else None)
    failure: list[Exception] = []
    for weight in writer.weights:
        full = weight.fetch()
        if is_writer and not failure:
            try:
                writer.write(weight, full)
            except Exception as error:  # the peers are still gathering: tell them at the end
                failure.append(error)

    def finish() -> None:
        with closing(writer):  # no left-overs by the time the peers hear of a failure
            if failure:
                raise failure[0]
            if is_writer:
                writer.finish(_config_with_dtype(get_hf_config(module), writer.weights))

    ranks.all_or_raise(operation, finish)


def _target_dtype(stored: torch.dtype, requested: torch.dtype | None) -> torch.dtype:
    return requested if requested is not None and stored.is_floating_point else stored


def _config_with_dtype(config: Mapping[str, Any] | None, weights: list[_ExportTensor]) -> dict[str, Any] | None:
    if config is None:
        return None
    floating = next((w.dtype for w in weights if w.dtype.is_floating_point), None)
    dtype_entry = {} if floating is None else {"dtype": DTYPE_NAMES[floating]}
    return {**{k: v for k, v in config.items() if k != "torch_dtype"}, **dtype_entry}


class _HfExportWriter:
    """Writes weights one by one, in the order of ``weights``, into one file or several."""

    def __init__(self, io: FileSystem, directory: Path, weights: list[_ExportTensor], max_shard_bytes: float) -> None:
        if max_shard_bytes <= 0:
            raise ValueError(f"max_shard_bytes is {max_shard_bytes}; it must be positive")
        self.io, self.directory = io, directory
        self.files = list(_split_into_files(weights, max_shard_bytes))
        self.weights = [weight for members in self.files for weight in members]
        self.file_names = (
            [_SINGLE_FILE_NAME]
            if len(self.files) == 1
            else [f"model-{i + 1:05d}-of-{len(self.files):05d}.safetensors" for i in range(len(self.files))]
        )
        self._shard_writer: ShardWriter | None = None
        self._remaining: list[_ExportTensor] = []
        self._num_started = 0

    def close(self) -> None:
        """Close the file being written, if any, and remove what was not given its name."""
        if self._shard_writer is not None:
            self._shard_writer.close()
        if self._num_started:
            self._remove_temp_files()

    def _remove_temp_files(self) -> None:
        for name in self.io.listdir(self.directory):
            if name.startswith(".exporting-"):
                self.io.remove(self.directory / name)

    def prepare_directory(self) -> None:
        """Make the directory and clear what an export that died has left there."""
        make_directories(self.io, self.directory)
        self._remove_temp_files()

    def write(self, weight: _ExportTensor, value: torch.Tensor) -> None:
        """Append the next weight."""
        if not self._remaining:
            self._remaining = list(self.files[self._num_started])
            entries = [TensorEntry(w.name, DTYPE_NAMES[w.dtype], w.shape) for w in self._remaining]
            self._shard_writer = ShardWriter(self.io, self._temp_path(self.file_names[self._num_started]), entries)
            self._num_started += 1
        assert self._shard_writer is not None and self._remaining.pop(0) is weight
        self._shard_writer.write(weight.name, value.to(weight.dtype))
        if not self._remaining:
            self._shard_writer.finish()
            self._shard_writer.close()

    def finish(self, config: Mapping[str, Any] | None) -> None:
        """Give all files their names, and remove those of an earlier export that do not belong any more."""
        extra: dict[str, bytes] = {}
        if len(self.files) > 1:
            weight_map = {
                w.name: name for name, members in zip(self.file_names, self.files, strict=True) for w in members
            }
            total = sum(weight.nbytes for weight in self.weights)
            extra[_INDEX_FILE_NAME] = _to_json_bytes({"metadata": {"total_size": total}, "weight_map": weight_map})
        if config is not None:
            extra["config.json"] = _to_json_bytes(config)
        for name, data in extra.items():
            write_file(self.io, self._temp_path(name), data)
        for name in self.file_names:
            self.io.rename(self._temp_path(name), self.directory / name)
        for name in self.io.listdir(self.directory):
            weights = name.startswith("model") and name.endswith(".safetensors") and name not in self.file_names
            if weights or (name == _INDEX_FILE_NAME and name not in extra):
                self.io.remove(self.directory / name)
        for name in extra:
            self.io.rename(self._temp_path(name), self.directory / name)
        self.io.fsync_dir(self.directory)

    def _temp_path(self, name: str) -> Path:
        return self.directory / f".exporting-{name}"


def _split_into_files(weights: list[_ExportTensor], max_shard_bytes: float) -> Iterator[list[_ExportTensor]]:
    """Weights in files of at most ``max_shard_bytes`` bytes (one weight may exceed it), each in an aligned order."""
    files: list[list[_ExportTensor]] = [[]]
    size = 0
    for weight in weights:
        if files[-1] and size + weight.nbytes > max_shard_bytes:
            files.append([])
            size = 0
        files[-1].append(weight)
        size += weight.nbytes
    for members in files:
        yield sorted(members, key=lambda w: (-w.dtype.itemsize, w.name))


def _to_json_bytes(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
