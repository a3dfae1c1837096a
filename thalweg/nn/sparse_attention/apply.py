"""A config's ``sparse_attention`` block, applied to a model that knows nothing of it.

Attention is found as sequence parallelism finds it (:mod:`thalweg.parallel.sequence.sequence_parallel`): in Hugging
Face's attention interface, by an implementation of its own that is set on this model's config, and as
``F.scaled_dot_product_attention``, seen by a function mode while this model's blocks run.  A model in which neither
occurs is an error after its first forward pass: nothing is left dense in silence.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.config.schema.training import SparseAttention
from thalweg.nn.sparse_attention.sparse_self_attention import get_attention, read_whole
from thalweg.nn.sparse_attention.sparsity_config import build_sparsity_config
from thalweg.ops.attention.block_sparse import MaskMod
from thalweg.ops.attention.intercept import (
    find_attention_configs,
    intercepting_forward,
    is_trivial_mask,
    register_attention,
)
from thalweg.parallel.tensor.layers import replace_forward


def apply_sparse_attention(model: nn.Module, section: SparseAttention | None, blocks: Iterable[nn.Module]) -> None:
    """Replace self-attention in ``model`` as ``section`` says; comes before activation checkpointing.

    ``blocks``: its transformer blocks, in which attention happens.

    Raises:
        ValueError: options contradict each other; an encoder-decoder; after the first forward pass, a model without
            attention that could be replaced.
    """
    if section is None or section.mode == "dense":
        return
    build_sparsity_config(section, 1)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"sparse_attention does not work for {type(model).__name__}, an encoder-decoder, whose attention reads "
            "another sequence as well: remove the block"
        )
    attention = _SparseModelAttention(section, type(model).__name__)
    if hub_configs := find_attention_configs([model]):
        refusal = "sparse_attention does not work with attention's {}: remove the block"
        register_attention("sparse", hub_configs, attention.attend, _make_mask, refusal)
    else:
        for block in list(blocks) or [model]:
            replace_forward(block, intercepting_forward(type(block).forward, attention.attend))
    model.register_forward_hook(lambda *_: attention.check_was_used())


class _SparseModelAttention:
    """The attention of one model: finds the layout for the heads and the length at hand."""

    def __init__(self, section: SparseAttention, model_name: str) -> None:
        self._section, self._model_name = section, model_name
        self.was_used = False

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, dropout: float, scale: float | None
    ) -> Tensor:
        """q (B, H, T, D), k and v (B, H / repeat, T, D) -> as q; fewer queries than keys are the last ones.

        ``mask``: a function of places, or a tensor for the whole sequence, of what may be seen or what is added.
        """
        if dropout > 0:
            raise ValueError(
                f"sparse_attention cannot drop attention weights (probability {dropout}): set the attention dropout of "
                f"{self._model_name} to 0 (attention_probs_dropout_prob, attn_pdrop, attention_dropout); dropout "
                "elsewhere is fine"
            )
        self.was_used = True
        attention = get_attention(build_sparsity_config(self._section, q.shape[1]), k.shape[2])
        options = {"mask_mod": mask}
        if isinstance(mask, Tensor):
            options = {"mask_mod" if mask.dtype == torch.bool else "bias": read_whole(mask)}
        return attention(q, k, v, causal=causal, scale=scale, **options)

    def check_was_used(self) -> None:
        """Raises: ValueError: no attention has passed by."""
        if not self.was_used:
            raise ValueError(
                f"sparse_attention replaced nothing in {self._model_name}: it attends neither by "
                "F.scaled_dot_product_attention nor by Hugging Face's attention interface. Let it use one of them, or "
                "thalweg.nn.sparse_attention.SparseSelfAttention itself, or remove the block"
            )


def _make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Any,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> MaskMod | None:
    """A mask of Hugging Face's attention interface, as a function of places."""
    from transformers.masking_utils import and_masks, padding_mask_function

    if use_vmap:
        raise ValueError("sparse_attention does not work with the masks that this model makes: remove the block")
    if attention_mask is not None and not bool(attention_mask.all()):
        return and_masks(mask_function, padding_mask_function(attention_mask))
    return None if is_trivial_mask(kv_length, **kwargs) else mask_function
