"""Sparse self-attention as a module, as DeepSpeed's users build it into their models."""

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from thalweg.nn.sparse_attention.sparsity_config import FixedSparsityConfig, SparsityConfig
from thalweg.ops.attention.block_sparse import BlockSparseAttention, MaskMod

MaskMode = Literal["add", "mul"]


@lru_cache(maxsize=16)  # lengths differ from batch to batch
@_disable_current_modes()  # or a plan's fake tensors would stay
def get_attention(config: SparsityConfig, length: int) -> BlockSparseAttention:
    """The attention of ``config`` over ``length`` tokens; the last block may be cut short."""
    return BlockSparseAttention(config.make_layout(length + -length % config.block), config.block, length)


class SparseSelfAttention(nn.Module):
    """Softmax attention over the blocks that a :class:`SparsityConfig` keeps; has no parameters.

    ``key_padding_mask_mode``, ``attn_mask_mode``: a mask is added to the scores ("add"), or hides
    where it is 0 ("mul").
    ``max_seq_length`` is accepted for programs of DeepSpeed's; layouts are made for the lengths that come.
    """

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: MaskMode = "add",
        attn_mask_mode: MaskMode = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        self.sparsity_config = sparsity_config or FixedSparsityConfig(num_heads=4)
        self.key_padding_mask_mode: MaskMode = key_padding_mask_mode
        self.attn_mask_mode: MaskMode = attn_mask_mode

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """query, key, value (B, H, T, D) -> (B, H, T, D); key may be transposed, (B, H, D, T).

        ``rpe`` (T, T) or broadcasting to (B, H, T, T) is added to the scores, without a gradient;
        ``key_padding_mask`` (B, T); ``attn_mask`` (T, T).

        Raises:
            ValueError: shapes of something else than self-attention, or other heads than the pattern's.
        """
        if key.shape != query.shape and key.mT.shape == query.shape:
            key = key.mT
        if query.shape != key.shape or key.shape != value.shape or query.shape[1] != self.sparsity_config.num_heads:
            shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
            raise ValueError(
                f"sparse attention of {self.sparsity_config.num_heads} heads got q, k, v of {shapes}: all three "
                "must be (batch, heads, length, width)"
            )
        additions = [] if rpe is None else [rpe]
        if key_padding_mask is not None:
            padding = key_padding_mask.reshape(len(query), 1, 1, -1)
            additions.append(_to_addition(padding, self.key_padding_mask_mode, query.dtype))
        if attn_mask is not None:
            additions.append(_to_addition(attn_mask, self.attn_mask_mode, query.dtype))
        readers = [read_whole(x.detach()) for x in additions]

        def bias(*places: Tensor) -> Tensor:
            return sum(read(*places) for read in readers)  # type: ignore[return-value]

        attention = get_attention(self.sparsity_config, query.shape[2])
        return attention(query, key, value, bias=bias if readers else None)


def read_whole(mask: Tensor) -> MaskMod:
    """A mask or bias made for the whole sequence, read by index."""
    whole = mask[(None,) * (4 - mask.dim())]

    def read(*places: Tensor) -> Tensor:
        return whole[tuple(at.clamp(max=size - 1) for at, size in zip(places, whole.shape, strict=True))]

    return read


def _to_addition(mask: Tensor, mode: MaskMode, dtype: torch.dtype) -> Tensor:
    if mode == "mul":
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask == 0, -torch.inf)
    return mask.to(dtype)
