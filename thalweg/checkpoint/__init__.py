"""Checkpoints: logical tensors, safetensors shards, a JSON manifest, published by rename.

``save`` and ``load`` are collective and know nothing of training; ``collect`` and
``restore`` translate between a module with its optimiser and the logical tensors;
``hf`` writes the Hugging Face layout.
"""

from __future__ import annotations

from thalweg.checkpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UnserializableStateError,
)
from thalweg.checkpoint.io import FileSystem, FaultInjectingFileSystem
from thalweg.checkpoint.load import open_verified
from thalweg.checkpoint.reader import Checkpoint, Corruption
from thalweg.checkpoint.rng import capture_rng, restore_rng
from thalweg.checkpoint.save import Snapshot, save_snapshot
from thalweg.checkpoint.state import build_snapshot, model_tensors, restore_module

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Corruption",
    "CorruptCheckpointError",
    "FileSystem",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "FaultInjectingFileSystem",
    "Snapshot",
    "UnserializableStateError",
    "capture_rng",
    "build_snapshot",
    "open_verified",
    "model_tensors",
    "restore_module",
    "restore_rng",
    "save_snapshot",
]
