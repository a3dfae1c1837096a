"""The Hugging Face layout: ``model.safetensors`` (or numbered shards and an index) and ``config.json``.

``export_hf`` reads it out of a checkpoint, ``save_16bit`` out of a live module; both
hold one tensor at a time.  A tied weight is written once, under the name that the model
lists first; ``from_pretrained`` ties the others again from the config.  Files are
written under hidden names and renamed, the index and the config last, so a reader never
meets half an export.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thalweg.checkpoint.directory import make_directories
from thalweg.checkpoint.errors import CheckpointMismatchError
from thalweg.checkpoint.filesystem import FileSystem, write_file
from thalweg.checkpoint.format.dtypes import DTYPE_NAMES, DTYPES
from thalweg.checkpoint.format.shards import TensorEntry, sort_for_alignment, write_shard
from thalweg.checkpoint.model_state import get_hf_config, is_frozen, model_tensors
from thalweg.checkpoint.pipeline_state import iter_full_tensors, to_canonical_names
from thalweg.checkpoint.rank_group import RankGroup
from thalweg.checkpoint.reader import Checkpoint
from thalweg.parallel.pipeline.tied_weights import IDENTITY_NAMING, ParamNaming
from thalweg.utils.buckets import iter_buckets
from thalweg.utils.log import get_logger

_SINGLE_FILE_NAME = "model.safetensors"
_INDEX_FILE_NAME = "model.safetensors.index.json"
_LORA_FACTOR = re.compile(r"\.lora_(?:embedding_)?A(?:\.|$)")
_PEFT_CURE = (
    "engine.module.save_pretrained(DIR) writes the adapter, and "
    "PeftModel.from_pretrained(BASE, DIR).merge_and_unload() makes a whole model of both"
)
_log = get_logger(__name__)


@dataclass(frozen=True)
class _ExportTensor(TensorEntry):
    """A tensor to be exported: its name and size as written, and how to get its values."""

    fetch: Callable[[], torch.Tensor]


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
    (``CorruptCheckpointError``); existing exports in ``out_dir`` are replaced.  LoRA's factors without the layers
    that they belong to are a ``CheckpointMismatchError``; with them the export has no ``config.json``, as
    ``from_pretrained`` would not read PEFT's names.
    """
    weights = []
    for name in checkpoint.tensor_names("model/"):
        record = checkpoint.manifest.tensors[name]
        target = _target_dtype(DTYPES[record.dtype], dtype)
        weights.append(_ExportTensor(name.removeprefix("model/"), target, record.shape, partial(checkpoint.read, name)))
    if not weights:
        raise CheckpointMismatchError(f"{checkpoint.path} has no tensors below 'model/' to export")
    names = [weight.key for weight in weights]
    if problem := _adapter_problem(names):
        if not _has_lora_bases(names):
            raise CheckpointMismatchError(f"{checkpoint.path} cannot be exported: {problem}")
        _log.warning("%s: %s", out_dir, problem)
        config = None
    elif config is None:
        state = checkpoint.state
        config = state.get("hf_config") or state.get("thalweg", {}).get("hf_config")
    export = _HfExport(io or FileSystem(), Path(out_dir), _split_into_files(weights, max_shard_bytes))
    export.prepare_directory()
    with export.no_leftovers():
        export.write(export.fetch_all())
        export.publish(config)
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

    ``include_frozen=False`` leaves out parameters that need no gradient.  The weights of a PEFT model with LoRA are
    written under its names, with a warning and without ``config.json``.  Sharded parameters are gathered one at a
    time; rank 0 writes.  A failure there is the same ``CheckpointError`` on all ranks, after the gathers that the
    peers take part in.
    """
    ranks = RankGroup.from_group(group)
    directory = Path(directory)
    tensors, _ = to_canonical_names(*model_tensors(module), naming)
    if not include_frozen:
        tensors = {name: tensor for name, tensor in tensors.items() if not is_frozen(tensor)}
    full = iter_full_tensors(tensors, naming)
    weights = [_ExportTensor(name, _target_dtype(kind, dtype), shape, fetch) for name, kind, shape, fetch in full]
    export = _HfExport(io or FileSystem(), directory, _split_into_files(weights, max_shard_bytes))
    operation, is_writer = f"saving weights to {directory}", ranks.rank == 0
    problem = _adapter_problem([weight.key for weight in weights])
    if problem and is_writer:
        _log.warning("%s: %s", directory, problem)
    ranks.first_or_raise(operation, export.prepare_directory)
    values, failure = export.fetch_all(), None
    if is_writer:
        try:
            export.write(values)
        except Exception as error:  # the peers are still gathering: tell them at the end
            failure = error
    for _ in values:
        pass

    def finish() -> None:
        with export.no_leftovers():
            if failure is not None:
                raise failure
            if is_writer:
                export.publish(None if problem else get_hf_config(module))

    ranks.all_or_raise(operation, finish)
    return directory


def _adapter_problem(names: Collection[str]) -> str:
    """What is wrong with weights of these names as a model of Hugging Face's, where LoRA's factors are among them."""
    if not any(_LORA_FACTOR.search(name) for name in names):
        return ""
    if not _has_lora_bases(names):
        return (
            "these are LoRA's factors without the layers that they belong to (frozen parameters were left out), and no "
            f"model by themselves: {_PEFT_CURE}"
        )
    return (
        "these are a PEFT model's weights under PEFT's names, LoRA's factors beside the layers that they belong to, "
        f"which from_pretrained does not read: {_PEFT_CURE}"
    )


def _has_lora_bases(names: Collection[str]) -> bool:
    """Whether the layer of each of LoRA's factors is there too."""
    layers = {name[: match.start()] for name in names if (match := _LORA_FACTOR.search(name))}
    return layers <= {name.partition(".base_layer.")[0].removesuffix(".weight") for name in names}


def _target_dtype(stored: torch.dtype, requested: torch.dtype | None) -> str:
    return DTYPE_NAMES[requested if requested is not None and stored.is_floating_point else stored]


@dataclass(frozen=True)
class _HfExport:
    """Weights on their way into the ``files`` of ``directory``, each an ordered list by its name."""

    io: FileSystem
    directory: Path
    files: dict[str, list[_ExportTensor]]

    def fetch_all(self) -> Iterator[torch.Tensor]:
        """The values of all weights, in the order of the files."""
        return (weight.fetch() for members in self.files.values() for weight in members)

    def prepare_directory(self) -> None:
        """Make the directory and clear what an export that died has left there."""
        make_directories(self.io, self.directory)
        self._remove_temp_files()

    @contextmanager
    def no_leftovers(self) -> Iterator[None]:
        """Remove what a failure has kept from getting its name."""
        try:
            yield
        except BaseException:
            self._remove_temp_files()
            raise

    def write(self, values: Iterator[torch.Tensor]) -> None:
        """Write the files under hidden names, one weight after the other."""
        for name, members in self.files.items():
            cast = (next(values).to(DTYPES[weight.dtype]) for weight in members)
            write_shard(self.io, self._temp_path(name), members, cast)

    def publish(self, config: Mapping[str, Any] | None) -> None:
        """Give all files their names, and remove those of an earlier export that do not belong any more."""
        extra: dict[str, bytes] = {}
        weights = [weight for members in self.files.values() for weight in members]
        if len(self.files) > 1:
            weight_map = {weight.key: name for name, members in self.files.items() for weight in members}
            total = sum(weight.nbytes for weight in weights)
            extra[_INDEX_FILE_NAME] = _to_json_bytes({"metadata": {"total_size": total}, "weight_map": weight_map})
        if config is not None:
            config = {key: value for key, value in config.items() if key != "torch_dtype"}
            if floating := sorted((w.key, w.dtype) for w in weights if DTYPES[w.dtype].is_floating_point):
                config["dtype"] = floating[0][1]
            extra["config.json"] = _to_json_bytes(config)
        for name, data in extra.items():
            write_file(self.io, self._temp_path(name), data)
        if len(self.files) > 1 and self.io.exists(self.directory / _INDEX_FILE_NAME):
            self.io.remove(self.directory / _INDEX_FILE_NAME)  # or whoever reads now may find shards of both exports
            self.io.fsync_dir(self.directory)
        for name in self.files:
            self.io.rename(self._temp_path(name), self.directory / name)
        for name in self.io.listdir(self.directory):
            stale = re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", name) and name not in self.files
            if stale or (name == _INDEX_FILE_NAME and name not in extra):
                self.io.remove(self.directory / name)
        for name in extra:
            self.io.rename(self._temp_path(name), self.directory / name)
        self.io.fsync_dir(self.directory)

    def _remove_temp_files(self) -> None:
        for name in self.io.listdir(self.directory):
            if name.startswith(".exporting-"):
                self.io.remove(self.directory / name)

    def _temp_path(self, name: str) -> Path:
        return self.directory / f".exporting-{name}"


def _split_into_files(weights: list[_ExportTensor], max_shard_bytes: float) -> dict[str, list[_ExportTensor]]:
    """Weights in files of at most ``max_shard_bytes`` bytes (one weight may exceed it), each in an aligned order."""
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; it must be positive")
    files = list(iter_buckets(weights, lambda weight: weight.nbytes, max_shard_bytes)) or [[]]
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    names = names if len(files) > 1 else [_SINGLE_FILE_NAME]
    return {name: sort_for_alignment(file) for name, file in zip(names, files, strict=True)}


def _to_json_bytes(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
