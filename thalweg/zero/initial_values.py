"""Values on their way into shards: rank 0's, one full tensor at a time, which is freed at once."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thalweg.deferred_init.context import has_meta_tensors, materialize_module
from thalweg.zero.expert_params import is_expert_param
from thalweg.zero.policy import Precision
from thalweg.zero.storage.base import ShardStorage

ParamLocations = dict[str, list[tuple[nn.Module, str]]]


def get_param_locations(model: nn.Module) -> ParamLocations:
    """Every module attribute of each parameter, tied ones included, by its first name."""
    names: dict[int, str] = {id(parameter): name for name, parameter in model.named_parameters()}
    locations: ParamLocations = {name: [] for name in names.values()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                locations[names[id(parameter)]].append((module, key))
    return locations


def _set_parameter(locations: list[tuple[nn.Module, str]], value: Tensor, requires_grad: bool) -> None:
    parameter = nn.Parameter(value, requires_grad=requires_grad)
    for module, key in locations:
        module._parameters[key] = parameter


def load_initial_values(
    model: nn.Module,
    locations: ParamLocations,
    storages: dict[str, ShardStorage],
    mesh: DeviceMesh,
    precision: Precision,
    device: torch.device,
) -> None:
    """Bring rank 0's values into shards, loose parameters and buffers; free the full tensors."""
    group = mesh.get_group()
    unsharded_values: dict[str, Tensor] = {}

    def broadcast_from_rank0(full: Tensor) -> Tensor:
        """Rank 0's value on every rank."""
        full = full.detach().to(device)
        if mesh.size() > 1:
            full = full.clone(memory_format=torch.contiguous_format)
            dist.broadcast(full.view(-1).view(torch.uint8), group_src=0, group=group)  # gloo knows few dtypes
        return full

    def sink(name: str, meta: Tensor, full: Tensor) -> None:
        if name in storages:
            storages[name].load_full(broadcast_from_rank0(full))
        else:
            unsharded_values[name] = broadcast_from_rank0(full).clone()

    if has_meta_tensors(model):
        materialize_module(model, sink, device=str(device))
    for name, param_locations in locations.items():
        parameter = param_locations[0][0]._parameters[param_locations[0][1]]
        assert parameter is not None
        shape, dtype, requires_grad = parameter.shape, parameter.dtype, parameter.requires_grad
        master_dtype = precision.get_master_dtype(dtype, requires_grad)
        if is_expert_param(parameter):
            _set_parameter(param_locations, parameter.detach().to(master_dtype), requires_grad)
        elif name in storages:
            if not parameter.is_meta:
                storages[name].load_full(broadcast_from_rank0(parameter))
            del parameter  # the last reference, unless the user holds one
            _set_parameter(param_locations, torch.empty(shape, dtype=dtype, device="meta"), requires_grad)
        else:
            value = unsharded_values[name] if parameter.is_meta else broadcast_from_rank0(parameter)
            _set_parameter(param_locations, value.to(master_dtype, copy=True), requires_grad)
    for module_name, module in model.named_modules():
        for key, buffer in list(module._buffers.items()):
            if buffer is not None:
                name = f"{module_name}.{key}" if module_name else key
                value = unsharded_values[name] if buffer.is_meta else broadcast_from_rank0(buffer)
                cast = precision.buffer_dtype if value.is_floating_point() else None
                module._buffers[key] = value.to(cast or value.dtype)
