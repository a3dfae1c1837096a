"""Checkpoints: logical tensors, safetensors shards, a JSON manifest, published by rename.

``save`` and ``load`` are collective and know nothing of training; ``collect`` and
``restore`` translate between a module with its optimiser and the logical tensors;
``hf`` writes the Hugging Face layout.
"""

from __future__ import annotations

from thalweg.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpoint,
    MismatchedCheckpoint,
    MissingCheckpoint,
    UnstorableState,
)
from thalweg.checkpoint.io import FileSystem, Probe
from thalweg.checkpoint.load import load
from thalweg.checkpoint.reader import Checkpoint, Damage
from thalweg.checkpoint.rng import capture_rng, restore_rng
from thalweg.checkpoint.save import Snapshot, save
from thalweg.checkpoint.state import collect, model_tensors, restore

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Damage",
    "DamagedCheckpoint",
    "FileSystem",
    "MismatchedCheckpoint",
    "MissingCheckpoint",
    "Probe",
    "Snapshot",
    "UnstorableState",
    "capture_rng",
    "collect",
    "load",
    "model_tensors",
    "restore",
    "restore_rng",
    "save",
]
