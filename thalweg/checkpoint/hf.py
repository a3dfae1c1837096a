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

from thalweg.checkpoint.dtypes import DTYPES, NAMES
from thalweg.checkpoint.errors import MismatchedCheckpoint
from thalweg.checkpoint.io import FileSystem, write_file
from thalweg.checkpoint.publish import make_directory
from thalweg.checkpoint.ranks import Ranks
from thalweg.checkpoint.reader import Checkpoint
from thalweg.checkpoint.shards import ShardWriter, Slot
from thalweg.checkpoint.stages import everywhere, under_stored_names
from thalweg.checkpoint.state import hf_config, model_tensors
from thalweg.parallel.pipeline.names import WHOLE, Naming

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class _Weight:
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
    (``DamagedCheckpoint``); existing exports in ``out_dir`` are replaced.
    """
    weights = []
    for name in checkpoint.names("model/"):
        record = checkpoint.manifest.tensors[name]
        stored = DTYPES[record.dtype]
        weights.append(
            _Weight(
                name.removeprefix("model/"),
                _target_dtype(stored, dtype),
                record.shape,
                lambda name=name: checkpoint.read(name),
            )
        )
    if not weights:
        raise MismatchedCheckpoint(f"{checkpoint.path} has no tensors below 'model/' to export")
    if config is None:
        state = checkpoint.state
        config = state.get("hf_config") or state.get("thalweg", {}).get("hf_config")
    with closing(_LayoutWriter(io or FileSystem(), Path(out_dir), weights, max_shard_bytes)) as writer:
        writer.open()
        for weight in writer.order:
            writer.put(weight, weight.fetch())
        writer.finish(_with_dtype(config, weights))
    return Path(out_dir)


def save_16bit(
    module: nn.Module,
    directory: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    group: Any = None,
    *,
    max_shard_bytes: float = 5e9,
    io: FileSystem | None = None,
    naming: Naming = WHOLE,
) -> Path:
    """Write a live module's weights in Hugging Face layout, floating ones as ``dtype``; collective.

    Sharded parameters are gathered one at a time; rank 0 writes.  A failure there is the
    same ``CheckpointError`` on all ranks, after the gathers that the peers take part in.
    """
    ranks = Ranks.of(group)
    directory = Path(directory)
    tensors, _ = under_stored_names(*model_tensors(module), naming)
    weights = [
        _Weight(name, _target_dtype(stored, dtype), shape, fetch)
        for name, stored, shape, fetch in everywhere(tensors, naming)
    ]
    writer = _LayoutWriter(io or FileSystem(), directory, weights, max_shard_bytes)
    with closing(writer):
        _gather_and_write(writer, ranks, module, f"saving weights to {directory}")
    return directory


def _gather_and_write(writer: _LayoutWriter, ranks: Ranks, module: nn.Module, what: str) -> None:
    writing = ranks.rank == 0
    ranks.together(what, lambda: writer.open() if writing else None)
    failure: list[Exception] = []
    for weight in writer.order:
        whole = weight.fetch()
        if writing and not failure:
            try:
                writer.put(weight, whole)
            except Exception as error:  # the peers are still gathering: tell them at the end
                failure.append(error)

    def finish() -> None:
        with closing(writer):  # no left-overs by the time the peers hear of a failure
            if failure:
                raise failure[0]
            if writing:
                writer.finish(_with_dtype(hf_config(module), writer.order))

    ranks.together(what, finish)


def _target_dtype(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and stored.is_floating_point else stored


def _with_dtype(config: Mapping[str, Any] | None, weights: list[_Weight]) -> dict[str, Any] | None:
    if config is None:
        return None
    floating = next((w.dtype for w in weights if w.dtype.is_floating_point), None)
    named = {} if floating is None else {"dtype": NAMES[floating]}
    return {**{k: v for k, v in config.items() if k != "torch_dtype"}, **named}


class _LayoutWriter:
    """Writes weights one by one, in ``order``, into one file or several."""

    def __init__(self, io: FileSystem, directory: Path, weights: list[_Weight], limit: float) -> None:
        if limit <= 0:
            raise ValueError(f"max_shard_bytes is {limit}; it must be positive")
        self.io, self.directory = io, directory
        self.files = list(_packed(weights, limit))
        self.order = [weight for members in self.files for weight in members]
        self.names = (
            [_SINGLE]
            if len(self.files) == 1
            else [f"model-{i + 1:05d}-of-{len(self.files):05d}.safetensors" for i in range(len(self.files))]
        )
        self._current: ShardWriter | None = None
        self._left: list[_Weight] = []
        self._started = 0

    def close(self) -> None:
        """Close the file being written, if any, and remove what was not given its name."""
        if self._current is not None:
            self._current.close()
        if self._started:
            self._clear()

    def _clear(self) -> None:
        for name in self.io.listdir(self.directory):
            if name.startswith(".exporting-"):
                self.io.remove(self.directory / name)

    def open(self) -> None:
        """Make the directory and clear what an export that died has left there."""
        make_directory(self.io, self.directory)
        self._clear()

    def put(self, weight: _Weight, value: torch.Tensor) -> None:
        """Append the next weight."""
        if not self._left:
            self._left = list(self.files[self._started])
            slots = [Slot(w.name, NAMES[w.dtype], w.shape) for w in self._left]
            self._current = ShardWriter(self.io, self._hidden(self.names[self._started]), slots)
            self._started += 1
        assert self._current is not None and self._left.pop(0) is weight
        self._current.put(weight.name, value.to(weight.dtype))
        if not self._left:
            self._current.finish()
            self._current.close()

    def finish(self, config: Mapping[str, Any] | None) -> None:
        """Give all files their names, and remove those of an earlier export that do not belong any more."""
        extra: dict[str, bytes] = {}
        if len(self.files) > 1:
            weight_map = {
                w.name: name for name, members in zip(self.names, self.files, strict=True) for w in members
            }
            total = sum(weight.nbytes for weight in self.order)
            extra[_INDEX] = _json({"metadata": {"total_size": total}, "weight_map": weight_map})
        if config is not None:
            extra["config.json"] = _json(config)
        for name, data in extra.items():
            write_file(self.io, self._hidden(name), data)
        for name in self.names:
            self.io.rename(self._hidden(name), self.directory / name)
        for name in self.io.listdir(self.directory):
            weights = name.startswith("model") and name.endswith(".safetensors") and name not in self.names
            if weights or (name == _INDEX and name not in extra):
                self.io.remove(self.directory / name)
        for name in extra:
            self.io.rename(self._hidden(name), self.directory / name)
        self.io.fsync_dir(self.directory)

    def _hidden(self, name: str) -> Path:
        return self.directory / f".exporting-{name}"


def _packed(weights: list[_Weight], limit: float) -> Iterator[list[_Weight]]:
    """Weights in files of at most ``limit`` bytes (one weight may exceed it), each in an aligned order."""
    files: list[list[_Weight]] = [[]]
    size = 0
    for weight in weights:
        if files[-1] and size + weight.nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(weight)
        size += weight.nbytes
    for members in files:
        yield sorted(members, key=lambda w: (-w.dtype.itemsize, w.name))


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
