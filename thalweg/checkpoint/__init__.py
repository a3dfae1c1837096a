"""Checkpoints: logical tensors, safetensors shards, a JSON manifest, published by rename.

``save_snapshot`` and ``open_verified`` are collective and know nothing of training;
``build_snapshot`` and ``restore_module`` translate between a module with its optimiser and
the logical tensors; ``export_hf`` writes the Hugging Face layout.
"""

from thalweg.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnserializableStateError,
)
from thalweg.checkpoint.filesystem import FileSystem
from thalweg.checkpoint.load import open_verified
from thalweg.checkpoint.model_state import build_snapshot, model_tensors, restore_module
from thalweg.checkpoint.reader import Checkpoint, Corruption
from thalweg.checkpoint.save import Snapshot, save_snapshot

__all__ = [
    "Checkpoint", "CheckpointError", "CheckpointMismatchError", "CheckpointNotFoundError", "CorruptCheckpointError",
    "Corruption", "FileSystem", "Snapshot", "UnserializableStateError", "build_snapshot", "model_tensors",
    "open_verified", "restore_module", "save_snapshot",
]  # fmt: skip
