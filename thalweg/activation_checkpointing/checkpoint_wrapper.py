"""The units that recompute: policy, per-operator choice, and the class that a checkpointed unit gets."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from thalweg.activation_checkpointing.offload import ActivationOffloader
from thalweg.activation_checkpointing.offloaded_forward import OffloadState, checkpoint_offloaded
from thalweg.ops.dynamic_subclass import DynamicSubclass, cached_subclass
from thalweg.ops.linear.functional import get_matmul_ops

_CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past")


@dataclass(frozen=True)
class ActivationCheckpointPolicy:
    """What is recomputed.

    ``policy``: ``"none"``; ``"full"``, every unit keeps its inputs alone; ``"selective"``.
    ``every``: selective only, checkpoint units 0, k, 2k, ... and leave the others plain.  Where every unit is
    checkpointed, the results of matrix products, and of attention without dropout, are kept.
    """

    policy: str = "none"
    every: int = 1


@cache
def _saved_ops() -> dict[Any, list[str]]:
    """The operators whose results are kept, matrix products and attention, of this torch, and their arguments."""
    aten = torch.ops.aten
    products = ("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_grouped_mm", "convolution")
    attention = (
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_attention_math", "_scaled_dot_product_fused_attention_overrideable",
    )  # fmt: skip
    packets = [getattr(aten, name, None) for name in products + attention]
    packets.append(getattr(torch.ops.higher_order, "flex_attention", None))
    operators = {getattr(p, "default", p) for p in packets if p is not None} | get_matmul_ops()
    # FlexAttention has no schema, and no dropout.
    return {one: [a.name for a in one._schema.arguments] if hasattr(one, "_schema") else [] for one in operators}


def _selective_context_fn() -> tuple[AbstractContextManager, AbstractContextManager]:
    saved_ops = _saved_ops()

    def decide(_context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator not in saved_ops:
            return CheckpointPolicy.PREFER_RECOMPUTE
        # A result that is kept draws no random numbers again: all that the unit draws after it would be others.
        drops = dict(zip(saved_ops[operator], args, strict=False), **kwargs).get("dropout_p", 0.0)
        return CheckpointPolicy.PREFER_RECOMPUTE if drops else CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(decide)


class _CheckpointedModule(DynamicSubclass):
    _thalweg_remat: ActivationCheckpointPolicy
    _thalweg_storage: OffloadState | None = None  # the instance's own, where inputs are put away

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plain = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        is_trained = torch.is_grad_enabled() and self.training  # pyright: ignore[reportAttributeAccessIssue]
        if not is_trained or getattr(self, "gradient_checkpointing", False):
            return plain(*args, **kwargs)
        if not getattr(self, "_can_checkpoint_with_cache", False):
            args, kwargs = _without_cache(args, kwargs)
        # torch.compile does not understand the default spelled out.
        remat = self._thalweg_remat
        saves_products = remat.policy == "selective" and remat.every == 1
        contexts: dict[str, Any] = {"context_fn": _selective_context_fn} if saves_products else {}
        storage = self._thalweg_storage
        if storage is not None and not storage.is_active:
            return checkpoint_offloaded(storage, plain, args, kwargs, **contexts)
        unit = partial(plain, **kwargs)  # so that no keyword of the unit meets one of checkpoint
        return checkpoint(unit, *args, use_reentrant=False, preserve_rng_state=True, **contexts)


def _without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # A key-value cache is written by the forward: written twice, it would hold every token twice.
    library = sys.modules.get("transformers.cache_utils")
    if library is None:
        return args, kwargs
    args = tuple(None if isinstance(arg, library.Cache) else arg for arg in args)
    caches = {key for key, value in kwargs.items() if key in _CACHE_ARGUMENTS or isinstance(value, library.Cache)}
    no_cache = {"use_cache": False} if kwargs.get("use_cache") else {}
    return args, kwargs | dict.fromkeys(caches) | no_cache


def apply_activation_checkpointing(
    model: nn.Module,
    units: Sequence[nn.Module],
    policy: ActivationCheckpointPolicy,
    offloader: ActivationOffloader | None = None,
) -> None:
    """Let ``units`` (modules of ``model``, in forward order) recompute their activations by ``policy``.

    ``offloader``: where the inputs that they keep wait for the backward pass; None leaves them in place.
    Comes before sharding and compiling.  Raises ValueError for a unit that is not in the
    model, is sharded already, or whose class cannot be replaced (a scripted module).
    """
    if policy.policy == "none":
        return
    members = set(model.modules())
    selected = list(units)[:: policy.every]
    for unit in selected:
        name = type(unit).__name__
        if unit not in members:
            raise ValueError(f"a {name} among the units is not a module of the model")
        if isinstance(unit, FSDPModule):
            raise ValueError(f"{name} is sharded already; apply activation checkpointing before fully_shard")
        if isinstance(unit, torch.jit.ScriptModule):
            raise ValueError(f"{name} is a scripted module; checkpoint the Python module it was made from")
        if "forward" in unit.__dict__:
            raise ValueError(f"{name} has a replaced forward; apply activation checkpointing before replacing it")
    offload_state = None if offloader is None else OffloadState(offloader)
    for unit in selected:
        if not isinstance(unit, _CheckpointedModule):
            unit.__class__ = cached_subclass(type(unit), _CheckpointedModule, _thalweg_remat=policy)
        if offload_state is not None:
            unit.__dict__["_thalweg_storage"] = offload_state
