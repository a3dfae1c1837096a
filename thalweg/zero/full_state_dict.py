"""Full tensors under the plain model's names, whatever the layout; collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """The module's state dict with every shard gathered, on the CPU, owned by the caller."""
    return {name: _gather_full(value) for name, value in module.state_dict().items()}


def load_full_state_dict(module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
    """Load full tensors (or shards of the live layout) into a sharded module."""
    live_state = module.state_dict()
    sharded_state = {name: distribute_if_sharded(value, live_state.get(name)) for name, value in state_dict.items()}
    return module.load_state_dict(sharded_state, strict=strict)


def distribute_if_sharded(value: Any, reference: Any) -> Any:
    """``value`` laid out as ``reference`` is, if that is a DTensor of the same shape; else as it is."""
    is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.ndim > 0
    if not is_plain or not isinstance(reference, DTensor) or value.shape != reference.shape:
        return value
    return distribute_like(value.to(reference.device), reference)


def distribute_like(value: Tensor, reference: DTensor, src_rank: int | None = 0) -> DTensor:
    """The full ``value`` sharded as ``reference`` is.

    ``src_rank``: the coordinate on each axis whose values count, or None where all have the same.
    """
    mesh = reference.device_mesh
    if all(type(placement) in (Shard, Replicate) for placement in reference.placements):
        return distribute_tensor(value, mesh, reference.placements, src_data_rank=src_rank)
    # distribute_tensor makes a plain Shard of every subclass
    local_value = value if src_rank is None else value.clone()  # the check writes into it
    replicated = DTensor.from_local(local_value, mesh, [Replicate()] * mesh.ndim, run_check=src_rank is not None)
    return replicated.redistribute(placements=reference.placements)


def make_dtensor(
    local: Tensor, placements: Sequence[Placement], like: DTensor, shape: Sequence[int] | None = None
) -> DTensor:
    """The DTensor of ``like``'s mesh and logical shape (or of ``shape``) of which ``local`` is this rank's part."""
    full = like if shape is None else torch.empty(tuple(shape), device="meta")
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def all_gather_full(param: DTensor) -> Tensor:
    """``param`` whole, in memory of its own; collective."""
    mesh, local = param.device_mesh, param.to_local()
    source = param
    if local.device.type != mesh.device_type:  # shards that rest on the host
        source = make_dtensor(local.to(mesh.device_type), param.placements, param)
    full = source.full_tensor().detach()
    if full.untyped_storage().data_ptr() == local.untyped_storage().data_ptr():
        full = full.clone()  # one rank, or replicated: writes must not reach the shard
    return full


@torch.no_grad()
def write_to_shard(param: Tensor, value: Tensor) -> None:
    """Copy this rank's part of ``value`` (the full tensor) into the shard that ``param`` holds."""
    if not isinstance(param, DTensor):
        param.copy_(value)  # pending: recorded as a constant
        return
    local = param.to_local()
    value = value.to(param.device_mesh.device_type)
    local.copy_(distribute_like(value, param, src_rank=None).to_local())


def _gather_full(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
