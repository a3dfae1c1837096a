"""Full tensors under the plain model's names, whatever the layout; collective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """The module's state dict with every shard gathered, on the CPU, owned by the caller."""
    return {name: _full(value) for name, value in module.state_dict().items()}


def load_full_state_dict(module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
    """Load full tensors (or shards of the live layout) into a sharded module."""
    live = module.state_dict()
    parts = {name: like(value, live.get(name)) for name, value in state_dict.items()}
    return module.load_state_dict(parts, strict=strict)


def like(value: Any, live: Any) -> Any:
    """``value`` laid out as ``live`` is, if that is a DTensor of the same shape; else as it is."""
    plain = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.ndim > 0
    if not plain or not isinstance(live, DTensor) or value.shape != live.shape:
        return value
    return laid_out(value.to(live.device), live)


def laid_out(value: Tensor, live: DTensor, source: int | None = 0) -> DTensor:
    """The full ``value`` cut as ``live`` is.

    ``source``: the coordinate on each axis whose values count, or None where all have the same.
    """
    mesh = live.device_mesh
    if all(type(placement) in (Shard, Replicate) for placement in live.placements):
        return distribute_tensor(value, mesh, live.placements, src_data_rank=source)
    # distribute_tensor makes a plain Shard of every subclass
    own = value if source is None else value.clone()  # the check writes into it
    whole = DTensor.from_local(own, mesh, [Replicate()] * mesh.ndim, run_check=source is not None)
    return whole.redistribute(placements=live.placements)


def _full(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
