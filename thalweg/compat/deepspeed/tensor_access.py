"""Whole tensors of a sharded model: what ``safe_get_full_*`` and their kin mean for a DTensor."""

from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

from torch import Tensor

from thalweg.compat.deepspeed.live_engines import live_engines
from thalweg.compat.deepspeed.moe import ExpertRow
from thalweg.zero.fsdp2.private_api import get_fsdp_groups
from thalweg.zero.full_state_dict import write_to_shard
from thalweg.zero.whole_parameter import WholeParameter, get_shard
from thalweg.zero.whole_tensors import gather_master, gather_whole, set_master, to_local


def _of_experts(access: Callable[..., Any], get: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """``access`` to a parameter's whole tensor, also to one expert's: by ``get``, all that the layer's stack has."""

    @wraps(access)
    def access_row(param: Tensor, *args: Any, **options: Any) -> Any:
        if not isinstance(param, ExpertRow):
            return access(param, *args, **options)
        if get is None:
            whole = access(param.stack, *args, **options)
            return None if whole is None else whole[param.expert].clone()
        value, *key = args
        _check_shape(param, value)
        if (whole := get(param.stack, *key, **options)) is not None:
            whole[param.expert] = value
        return access(param.stack, value if whole is None else whole, *key, **options)

    return access_row


@_of_experts
def safe_get_full_fp32_param(param: Tensor) -> Tensor:
    """The whole master weight; collective."""
    return gather_master(param).float()


@partial(_of_experts, get=safe_get_full_fp32_param)
def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Write the whole master weight; collective, the same value on every rank."""
    _check_shape(param, value)
    set_master(param, value)


@_of_experts
def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The whole reduced gradient between the window's last backward pass and its step; collective.

    Before it is reduced, within ``no_sync()`` and in a window at stages 0 and 1, this rank's own.
    """
    return _find_unreduced_grad(param) if param.grad is None else gather_whole(param.grad).float()


def _find_unreduced_grad(param: Tensor) -> Tensor | None:
    param = get_shard(param)
    for engine in live_engines():
        for group in get_fsdp_groups(engine.module):
            for candidate in group.params:
                if candidate.sharded_param is param and candidate.unsharded_grad is not None:
                    return candidate.unsharded_grad.float() / (engine.optimizer.cur_scale if engine.optimizer else 1.0)
    return None


@partial(_of_experts, get=safe_get_full_grad)
def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Write the whole gradient; collective.

    Raises:
        ValueError: there is none to write to.
    """
    _scatter_into(_require_grad(param), value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[Tensor], update_func: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Make each whole gradient ``update_func(gradient, parameter)``, those without one left out; collective."""
    for param in param_list:
        if param.grad is not None:
            safe_set_full_grad(param, update_func(gather_whole(param.grad).float(), param))


@_of_experts
def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """The whole state ``optim_state_key`` of a parameter ("exp_avg", "exp_avg_sq"); None before the first step."""
    state = _find_state(param, optim_state_key)
    return None if state is None else gather_whole(state).float()


@partial(_of_experts, get=safe_get_full_optimizer_state)
def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Write the whole state ``optim_state_key``; collective."""
    _scatter_into(_require(_find_state(param, optim_state_key), optim_state_key), value)


def safe_get_local_fp32_param(param: Tensor) -> Tensor:
    """This rank's part of the master weight, a copy."""
    return to_local(get_shard(param).detach()).float().clone()


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """This rank's part of the reduced gradient, a copy."""
    grad = get_shard(param).grad
    return None if grad is None else to_local(grad).float().clone()


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """This rank's part of the state ``optim_state_key``, a copy."""
    state = _find_state(param, optim_state_key)
    return None if state is None else to_local(state).float().clone()


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Write this rank's part of the master weight.

    Raises:
        ValueError: below stage 3, where the model's forward pass has whole weights.
    """
    if isinstance(param, WholeParameter):
        raise ValueError("below stage 3 the model's parameters are whole: write with safe_set_full_fp32_param")
    to_local(get_shard(param).detach()).copy_(value)


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Write this rank's part of the reduced gradient."""
    to_local(_require_grad(get_shard(param))).copy_(value)


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Write this rank's part of the state ``optim_state_key``."""
    to_local(_require(_find_state(param, optim_state_key), optim_state_key)).copy_(value)


def _require_grad(param: Tensor) -> Tensor:
    if param.grad is None:
        raise ValueError("this parameter has no gradient: set it between the backward pass and the step")
    return param.grad


def _scatter_into(target: Tensor, value: Tensor) -> None:
    _check_shape(target, value)
    write_to_shard(target, value)


def _check_shape(target: Tensor, value: Tensor) -> None:
    if value.shape != target.shape:
        raise ValueError(f"the value has the shape {tuple(value.shape)}, the parameter {tuple(target.shape)}")


def _find_state(param: Tensor, key: str) -> Tensor | None:
    """A state of a parameter in the engine whose optimizer has it."""
    param = get_shard(param)
    states = (engine.optimizer.state for engine in live_engines() if engine.optimizer is not None)
    return next((state[param].get(key) for state in states if param in state), None)


def _require(state: Tensor | None, key: str) -> Tensor:
    if state is None:
        raise ValueError(f"there is no state {key!r} of this parameter: it comes into being at the first step")
    return state
