"""Model parts: the reference GPT and the layers that PyTorch lacks."""

from thalweg.nn.losses.tiled_cross_entropy import tiled_cross_entropy
from thalweg.nn.tiled_mlp import tiled

__all__ = ["tiled", "tiled_cross_entropy"]
