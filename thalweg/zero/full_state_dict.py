"""Between full tensors and the parts that ranks have of them."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor


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
    """The DTensor of ``like``'s mesh and logical shape (or of ``shape``) of which ``local`` is this rank's part.

    Over ``local``'s own memory: ``DTensor.from_local`` would copy what rests on the host to the mesh's device.
    """
    full = like if shape is None else torch.empty(tuple(shape), device="meta")
    spec = like._spec
    assert spec.tensor_meta is not None
    meta = spec.tensor_meta._replace(shape=full.shape, stride=full.stride(), dtype=local.dtype)
    new_spec = type(spec)(spec.mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, new_spec, requires_grad=local.requires_grad)  # pyright: ignore[reportCallIssue]


def on_mesh_device(tensor: DTensor) -> DTensor:
    """``tensor`` on its mesh's device, where its collectives are: a copy of what rests on the host."""
    local, device = tensor.to_local(), tensor.device_mesh.device_type
    return tensor if local.device.type == device else make_dtensor(local.to(device), tensor.placements, tensor)


def all_gather_full(param: DTensor) -> Tensor:
    """``param`` whole, in memory of its own; collective."""
    local = param.to_local()
    with torch.inference_mode(False), torch.no_grad():  # before torch 2.12 a DTensor cannot be gathered in inference
        full = on_mesh_device(param).full_tensor().detach()
    if full.untyped_storage().data_ptr() == local.untyped_storage().data_ptr():
        full = full.clone()  # one rank, or replicated: writes must not reach the shard
    return full


@torch.no_grad()
def all_gather_into(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy parameters whole into tensors of their shapes, in these tensors' dtypes, all at the same time; collective.

    Rows that all ranks have as many of are received where they are to be.
    """
    pending = []
    for param, out in pairs:
        if not isinstance(param, DTensor):
            out.copy_(param)
            continue
        mesh, local = param.device_mesh, param.to_local()
        axes = [axis for axis, placement in enumerate(param.placements) if not placement.is_replicate()]
        if (
            len(axes) != 1
            or type(param.placements[axes[0]]) is not Shard
            or len(out) != len(local) * mesh.size(axes[0])
        ):
            out.copy_(all_gather_full(param))
            continue
        local = local.to(out.device, out.dtype).contiguous()
        flat = [x.view(-1).view(torch.uint8) for x in (out, local)]
        pending.append(dist.all_gather_into_tensor(*flat, group=mesh.get_group(axes[0]), async_op=True))
    for work in pending:
        work.wait()


@torch.no_grad()
def write_to_shard(param: Tensor, value: Tensor) -> None:
    """Copy this rank's part of ``value`` (the full tensor) into the shard that ``param`` holds."""
    if not isinstance(param, DTensor):
        param.copy_(value)  # pending: recorded as a constant
        return
    local = param.to_local()
    value = value.to(param.device_mesh.device_type)
    local.copy_(distribute_like(value, param, src_rank=None).to_local())
