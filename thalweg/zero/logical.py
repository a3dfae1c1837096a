"""Full tensors under the plain model's names, whatever the layout; collective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """The module's state dict with every shard gathered, on the CPU, owned by the caller."""
    return {name: _full(value) for name, value in module.state_dict().items()}


def load_full_state_dict(module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
    """Load full tensors (or shards of the live layout) into a sharded module."""
    live = module.state_dict()
    laid_out = {name: like(value, live.get(name)) for name, value in state_dict.items()}
    return module.load_state_dict(laid_out, strict=strict)


def like(value: Any, live: Any) -> Any:
    """``value`` laid out as ``live`` is, if that is a DTensor of the same shape; else as it is."""
    plain = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.ndim > 0
    if not plain or not isinstance(live, DTensor) or value.shape != live.shape:
        return value
    return distribute_tensor(value.to(live.device), live.device_mesh, live.placements)


def _full(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
