"""``thalweg.moe.layer.MoE``."""

from thalweg.nn.moe.layer import MoE

__all__ = ["MoE"]
