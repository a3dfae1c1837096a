"""Values on their way into shards: rank 0's, one full tensor at a time, which is freed at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thalweg.zero.homes import Store
from thalweg.zero.init import has_pending, materialize
from thalweg.zero.policy import Precision
from thalweg.zero.spread import is_spread

Places = dict[str, list[tuple[nn.Module, str]]]


def places_of(model: nn.Module) -> Places:
    """Every module attribute of each parameter, tied ones included, by its first name."""
    names: dict[int, str] = {id(parameter): name for name, parameter in model.named_parameters()}
    places: Places = {name: [] for name in names.values()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places[names[id(parameter)]].append((module, key))
    return places


def _put(places: list[tuple[nn.Module, str]], value: Tensor, requires_grad: bool) -> None:
    parameter = nn.Parameter(value, requires_grad=requires_grad)
    for module, key in places:
        module._parameters[key] = parameter


def fill(
    model: nn.Module,
    places: Places,
    stores: dict[str, Store],
    mesh: DeviceMesh,
    precision: Precision,
    device: torch.device,
) -> None:
    """Bring rank 0's values into shards, loose parameters and buffers; free the full tensors."""
    agree = _agreement(mesh, device)
    held: dict[str, Tensor] = {}

    def sink(name: str, meta: Tensor, full: Tensor) -> None:
        if name in stores:
            stores[name].fill(agree(full))
        else:
            held[name] = agree(full).clone()

    if has_pending(model):
        materialize(model, sink, device=str(device))
    for name, where in places.items():
        parameter = where[0][0]._parameters[where[0][1]]
        assert parameter is not None
        shape, dtype, trains = parameter.shape, parameter.dtype, parameter.requires_grad
        if is_spread(parameter):
            _put(where, parameter.detach().to(precision.master_of(dtype, trains)), trains)
            continue
        if name in stores:
            if not parameter.is_meta:
                stores[name].fill(agree(parameter))
            del parameter  # the last reference, unless the user holds one
            _put(where, torch.empty(shape, dtype=dtype, device="meta"), trains)
        else:
            value = held[name] if parameter.is_meta else agree(parameter)
            _put(where, value.to(precision.master_of(dtype, trains), copy=True), trains)
    for module_name, module in model.named_modules():
        for key, buffer in list(module._buffers.items()):
            if buffer is not None:
                name = f"{module_name}.{key}" if module_name else key
                value = held[name] if buffer.is_meta else agree(buffer)
                cast = precision.buffer if value.is_floating_point() else None
                module._buffers[key] = value.to(cast or value.dtype)


def _agreement(mesh: DeviceMesh, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function that returns rank 0's value of a tensor on every rank."""
    group = mesh.get_group()
    root = dist.get_global_rank(group, 0)

    def agree(full: Tensor) -> Tensor:
        full = full.detach().to(device)
        if mesh.size() > 1:
            full = full.clone(memory_format=torch.contiguous_format)
            dist.broadcast(full.view(-1).view(torch.uint8), src=root, group=group)  # gloo knows few dtypes
        return full

    return agree
