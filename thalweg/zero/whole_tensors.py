"""Copies of trees of tensors, each gathered whole, that a program may save or keep; a model's state, in and out."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thalweg.zero.full_state_dict import all_gather_full, distribute_if_sharded, write_to_shard
from thalweg.zero.whole_parameter import WholeParameter, get_shard


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """The module's state dict in the masters' dtypes with every shard gathered, on the CPU, owned by the caller;
    collective."""
    return {
        name: gather_master(value).cpu() if isinstance(value, Tensor) else value
        for name, value in module.state_dict(keep_vars=True).items()
    }


def load_full_state_dict(module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
    """Load full tensors (or shards of the live layout) into a sharded module; collective."""
    live_state = module.state_dict(keep_vars=True)
    shown = {name: distribute_if_sharded(value, live_state.get(name)) for name, value in state_dict.items()}
    result = module.load_state_dict(shown, strict=strict)
    for name, param in live_state.items():
        if isinstance(param, WholeParameter) and isinstance(state_dict.get(name), Tensor):
            set_master(param, state_dict[name])
    return result


def gather_master(param: Tensor) -> Tensor:
    """A whole copy of what training has of a parameter, with what the program has written to it since; collective."""
    full = gather_whole(get_shard(param).detach())
    if isinstance(param, WholeParameter) and param.is_written:
        full.copy_(param.detach())
    return full


@torch.no_grad()
def set_master(param: Tensor, value: Tensor) -> None:
    """Write the full ``value`` to what training has of a parameter, in its dtype, and show it; the same on every
    rank."""
    write_to_shard(get_shard(param), value)
    if isinstance(param, WholeParameter):
        param.detach().copy_(value)
        param.mark_adopted()


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of a tree with whole tensors of their own storage on ``device``; collective if any is sharded.

    Tensors that share memory share it in the copy, so that tied weights stay tied.
    """
    return _clone_tree(item, torch.device(device), {})


def gather_state_dict(
    state_dict: Mapping[str, Any], *, dtype: torch.dtype | None = None, keep: bool = True
) -> dict[str, Any] | None:
    """Whole tensors on the CPU, floating ones as ``dtype``; None on ranks that do not ``keep`` them; collective."""
    copies: dict[Any, Tensor] = {}
    result = {}
    for name, value in state_dict.items():
        full = _clone_tree(value, torch.device("cpu"), copies, keep=keep, dtype=dtype)
        if keep:
            result[name] = full
    return result if keep else None


def _clone_tree(
    item: Any, device: torch.device, copies: dict[Any, Tensor], *, keep: bool = True, dtype: torch.dtype | None = None
) -> Any:
    if isinstance(item, Tensor):
        # Every rank gathers every tensor: which of them share memory is not seen alike where a shard is empty.
        local, full = to_local(item), gather_whole(item.detach())
        if not keep:
            return None
        key = (local.data_ptr(), item.shape, item.dtype) if local.numel() else id(item)
        if key not in copies:
            copies[key] = full.to(device, dtype if dtype and full.is_floating_point() else full.dtype, copy=True)
        return copies[key]
    if isinstance(item, Mapping):
        cloned = {key: _clone_tree(value, device, copies, keep=keep, dtype=dtype) for key, value in item.items()}
        return type(item)(cloned) if isinstance(item, dict) else cloned  # type: ignore[call-arg]
    if isinstance(item, list | tuple):
        values = [_clone_tree(value, device, copies, keep=keep, dtype=dtype) for value in item]
        return values if isinstance(item, list) else tuple(values)
    return item


def to_local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory; a plain one as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_whole(tensor: Tensor) -> Tensor:
    """A whole copy of a tensor; collective if it is sharded."""
    return all_gather_full(tensor) if isinstance(tensor, DTensor) else tensor.clone()
