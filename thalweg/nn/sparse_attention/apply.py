"""A config's ``sparse_attention`` block, applied to a model that knows nothing of it.

Attention is found as sequence parallelism finds it (:mod:`thalweg.parallel.sequence.sequence_parallel`): in Hugging
Face's attention interface, by an implementation of its own that is set on this model's config, and as
``F.scaled_dot_product_attention``, seen by a function mode while this model's blocks run.  A model in which neither
occurs is an error after its first forward pass: nothing is left dense in silence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from thalweg.config.schema.training import SparseAttention
from thalweg.nn.sparse_attention.sparse_self_attention import get_attention
from thalweg.nn.sparse_attention.sparsity_config import build_sparsity_config
from thalweg.ops.attention.block_sparse import MaskMod
from thalweg.parallel.sequence.sequence_parallel import is_trivial_mask
from thalweg.parallel.tensor.layers import replace_forward

_interface_ids = itertools.count()


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
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    hub_configs = [config for config in configs.values() if hasattr(config, "_attn_implementation")]
    if hub_configs:
        name = _register_attention_interface(attention)
        for config in hub_configs:
            config._attn_implementation = name
    else:
        for block in list(blocks) or [model]:
            replace_forward(block, _intercepting_forward(type(block).forward, attention))
    replace_forward(model, _checking_forward(type(model).forward, attention))


class _SparseModelAttention:
    """The attention of one model: finds the layout for the heads and the length at hand."""

    def __init__(self, section: SparseAttention, model_name: str) -> None:
        self._section, self._model_name = section, model_name
        self.was_used = False

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool,
        mask_mod: MaskMod | None = None,
        bias: MaskMod | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        """q (B, H, T, D), k and v (B, H / repeat, T, D) -> as q; fewer queries than keys are the last ones."""
        if dropout > 0:
            raise ValueError(
                f"sparse_attention cannot drop attention weights (probability {dropout}): set the attention dropout of "
                f"{self._model_name} to 0 (attention_probs_dropout_prob, attn_pdrop, attention_dropout); dropout "
                "elsewhere is fine"
            )
        self.was_used = True
        attention = get_attention(build_sparsity_config(self._section, query.shape[1]), key.shape[2])
        attend = attention if query.shape[2] == key.shape[2] else attention.attend_last
        return attend(query, key, value, causal=causal, mask_mod=mask_mod, bias=bias, scale=scale)

    def check_was_used(self) -> None:
        """Raises: ValueError: no attention has passed by."""
        if not self.was_used:
            raise ValueError(
                f"sparse_attention replaced nothing in {self._model_name}: it attends neither by "
                "F.scaled_dot_product_attention nor by Hugging Face's attention interface. Let it use one of them, or "
                "thalweg.nn.sparse_attention.SparseSelfAttention itself, or remove the block"
            )


def _checking_forward(inner: Callable[..., Any], attention: _SparseModelAttention) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = inner(self, *args, **kwargs)
        attention.check_was_used()
        return output

    return forward


# Models that call F.scaled_dot_product_attention


class _SparseSdpaMode(TorchFunctionMode):
    def __init__(self, attention: _SparseModelAttention) -> None:
        super().__init__()
        self._attention = attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        mask, options = named.get("attn_mask"), {}
        if mask is not None:
            options["mask_mod" if mask.dtype == torch.bool else "bias"] = _read_whole(mask)
        return self._attention.attend(
            *(named[name] for name in names[:3]),
            causal=named.get("is_causal", False),
            dropout=named.get("dropout_p", 0.0),
            scale=named.get("scale"),
            **options,
        )


def _read_whole(mask: Tensor) -> MaskMod:
    """A mask or bias that the model has made for the whole sequence, read by index."""
    whole = mask[(None,) * (4 - mask.dim())]

    def read(*places: Tensor) -> Tensor:
        return whole[tuple(at.clamp(max=size - 1) for at, size in zip(places, whole.shape, strict=True))]

    return read


def _intercepting_forward(inner: Callable[..., Any], attention: _SparseModelAttention) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _SparseSdpaMode(attention):
            return inner(self, *args, **kwargs)

    return forward


# Hugging Face's attention interface


def _register_attention_interface(attention: _SparseModelAttention) -> str:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import and_masks, padding_mask_function

    name = f"thalweg_sparse_{next(_interface_ids)}"

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        for option in ("softcap", "position_bias", "s_aux"):
            if kwargs.get(option) is not None:
                raise ValueError(f"sparse_attention does not work with attention's {option!r}: remove the block")
        causal = kwargs.get("is_causal")
        options: dict[str, Any] = {"mask_mod": attention_mask}
        if isinstance(attention_mask, Tensor):
            options = {"mask_mod" if attention_mask.dtype == torch.bool else "bias": _read_whole(attention_mask)}
        y = attention.attend(
            query,
            key,
            value,
            causal=getattr(module, "is_causal", True) if causal is None else causal,
            dropout=kwargs.get("dropout", 0.0),
            scale=kwargs.get("scaling"),
            **options,
        )
        return y.transpose(1, 2).contiguous(), None

    def make_mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        *,
        mask_function: Any,
        attention_mask: Tensor | None = None,
        use_vmap: bool = False,
        **kwargs: Any,
    ) -> MaskMod | None:
        if use_vmap:
            raise ValueError("sparse_attention does not work with the masks that this model makes: remove the block")
        if attention_mask is not None and not bool(attention_mask.all()):
            return and_masks(mask_function, padding_mask_function(attention_mask))
        return None if is_trivial_mask(kv_length, **kwargs) else mask_function

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, make_mask)
    return name
