"""How the attention of a model that was written without us is reached.

In two places: Hugging Face's attention interface, by an implementation of its own that is set on the model's configs,
and ``F.scaled_dot_product_attention``, seen by a function mode while the model's blocks run.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_interface_ids = itertools.count()
_SDPA_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
_SDPA_ARGUMENTS = ("query", "key", "value", *_SDPA_DEFAULTS)
# (query, key, value, mask, causal, dropout, scale): q (B, H, T, D) -> as q
Attend = Callable[[Tensor, Tensor, Tensor, Any, bool, float, float | None], Tensor]


class SdpaInterceptor(TorchFunctionMode):
    """While it is entered ``attend`` takes the place of ``F.scaled_dot_product_attention``, unless ``is_paused()``."""

    def __init__(self, attend: Attend, is_paused: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._attend, self._is_paused = attend, is_paused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or self._is_paused():
            return func(*args, **kwargs)
        named = {**_SDPA_DEFAULTS, **dict(zip(_SDPA_ARGUMENTS, args, strict=False)), **kwargs}
        q, k, v, mask, dropout, causal, scale = (named[name] for name in _SDPA_ARGUMENTS)
        return self._attend(q, k, v, mask, causal, dropout, scale)


def intercepting_forward(
    inner: Callable[..., Any], attend: Attend, is_paused: Callable[[], bool] = lambda: False
) -> Callable[..., Any]:
    """A forward in place of ``inner`` that runs it under a :class:`SdpaInterceptor`."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with SdpaInterceptor(attend, is_paused):
            return inner(self, *args, **kwargs)

    return forward


def find_attention_configs(models: Iterable[nn.Module]) -> list[Any]:
    """The configs of modules that choose an implementation of Hugging Face's attention interface."""
    configs = {id(m.config): m.config for model in models for m in model.modules() if hasattr(m, "config")}
    return [config for config in configs.values() if hasattr(config, "_attn_implementation")]


def register_attention(
    prefix: str, configs: Iterable[Any], attend: Attend, make_mask: Callable[..., Any], refusal: str
) -> None:
    """Make models with these configs attend by ``attend``, with the masks of ``make_mask``.

    ``refusal``: the error for options of the interface that are not offered, in which ``{}`` stands for the option.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    def implementation(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        for option in ("softcap", "position_bias", "s_aux"):
            if kwargs.get(option) is not None:
                raise ValueError(refusal.format(repr(option)))
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        y = attend(query, key, value, attention_mask, causal, kwargs.get("dropout", 0.0), kwargs.get("scaling"))
        return y.transpose(1, 2).contiguous(), None

    name = f"thalweg_{prefix}_{next(_interface_ids)}"
    AttentionInterface.register(name, implementation)
    AttentionMaskInterface.register(name, make_mask)
    for config in configs:
        config._attn_implementation = name


def is_trivial_mask(
    length: int,
    *,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> bool:
    """Whether a mask that nothing is hidden by is just causal, or none at all."""
    covers_sequence = local_size is None or length < local_size
    return covers_sequence and (allow_is_causal_skip or allow_is_bidirectional_skip)
