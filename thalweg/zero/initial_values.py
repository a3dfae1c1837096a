"""Values on their way into shards: rank 0's, a few full tensors at a time, which are freed at once."""

from collections.abc import Iterable, Iterator
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thalweg.deferred_init.context import has_meta_tensors, materialize_module
from thalweg.zero.expert_params import is_expert_param
from thalweg.zero.policy import Precision
from thalweg.zero.storage.base import ShardStorage

ParamLocations = dict[str, list[tuple[nn.Module, str]]]
_MESSAGE_BYTES = 8 << 20  # small tensors cross together: a message costs what a hundred thousand numbers do
_ALIGN = 16  # bytes


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
    unsharded_values: dict[str, Tensor] = {}

    def sink(name: str, meta: Tensor, full: Tensor) -> None:
        (value,) = _from_rank0([full.detach().to(device)], mesh)
        if name in storages:
            storages[name].load_full(value)
        else:
            unsharded_values[name] = value.clone()

    def get_parameter(name: str) -> Tensor:
        module, key = locations[name][0]
        return module._parameters[key]  # type: ignore[return-value]

    if has_meta_tensors(model):
        materialize_module(model, sink, device=str(device))
    sent = [name for name in locations if not get_parameter(name).is_meta and not is_expert_param(get_parameter(name))]
    # Read when they are asked for, and none is held here: the model's may be the last reference.
    values = _from_rank0((get_parameter(name).detach().to(device) for name in sent), mesh)
    for name, param_locations in locations.items():
        parameter = get_parameter(name)
        shape, dtype, requires_grad = parameter.shape, parameter.dtype, parameter.requires_grad
        master_dtype = precision.get_master_dtype(dtype, requires_grad)
        if is_expert_param(parameter):
            _set_parameter(param_locations, parameter.detach().to(master_dtype), requires_grad)
        elif name in storages:
            if not parameter.is_meta:
                storages[name].load_full(next(values))
            del parameter  # the last reference, unless the user holds one
            _set_parameter(param_locations, torch.empty(shape, dtype=dtype, device="meta"), requires_grad)
        else:
            value = unsharded_values[name] if parameter.is_meta else next(values)
            _set_parameter(param_locations, value.to(master_dtype, copy=True), requires_grad)
    named = [(f"{name}.{key}" if name else key, m, key) for name, m in model.named_modules() for key in m._buffers]
    buffers = [(name, module, key, b) for name, module, key in named if (b := module._buffers[key]) is not None]
    values = _from_rank0((b.detach().to(device) for *_, b in buffers if not b.is_meta), mesh)
    for name, module, key, buffer in buffers:
        value = unsharded_values[name] if buffer.is_meta else next(values)
        cast = precision.buffer_dtype if value.is_floating_point() else None
        module._buffers[key] = value.to(cast or value.dtype, copy=mesh.size() > 1)


def _from_rank0(values: Iterable[Tensor], mesh: DeviceMesh) -> Iterator[Tensor]:
    """Rank 0's values on every rank, in their order."""
    return iter(values) if mesh.size() == 1 else _broadcast(values, mesh.get_group())


def _broadcast(values: Iterable[Tensor], group: dist.ProcessGroup) -> Iterator[Tensor]:
    num_bytes = 0

    def message_of(value: Tensor) -> int:
        nonlocal num_bytes
        num_bytes += value.nbytes
        return num_bytes // _MESSAGE_BYTES

    for _, members in groupby(values, message_of):
        own = list(members)
        lengths = [value.nbytes - value.nbytes % -_ALIGN for value in own]
        message = torch.empty(sum(lengths), dtype=torch.uint8, device=own[0].device)  # gloo knows few dtypes
        places = zip(message.split(lengths), own, strict=True)
        received = [place[: value.nbytes].view(value.dtype).view(value.shape) for place, value in places]
        if dist.get_rank(group) == 0:
            for place, value in zip(received, own, strict=True):
                place.copy_(value)
        del own
        dist.broadcast(message, group_src=0, group=group)
        yield from received
