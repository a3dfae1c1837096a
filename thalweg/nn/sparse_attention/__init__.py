"""Attention over blocks: the patterns, the module, and how a config's block replaces a model's attention."""

from thalweg.nn.sparse_attention.sparse_self_attention import SparseSelfAttention
from thalweg.nn.sparse_attention.sparsity_config import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

__all__ = [
    "BSLongformerSparsityConfig", "BigBirdSparsityConfig", "DenseSparsityConfig", "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig", "SparseSelfAttention", "SparsityConfig", "VariableSparsityConfig",
]  # fmt: skip
