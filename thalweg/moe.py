"""``thalweg.moe.MoE``: the name that DeepSpeed's users know."""

from thalweg.nn.moe import MoE

__all__ = ["MoE"]
