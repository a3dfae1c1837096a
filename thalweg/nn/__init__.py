"""Model parts: the reference GPT and the layers that PyTorch lacks."""

from __future__ import annotations

from thalweg.nn.tiled_loss import tiled_cross_entropy
from thalweg.nn.tiled_mlp import TiledMLP, tiled

__all__ = ["TiledMLP", "tiled", "tiled_cross_entropy"]
