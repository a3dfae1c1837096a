"""``deepspeed.moe.layer.MoE``: a layer's experts one by one, under DeepSpeed's names.

Thalweg's layer has its experts in one stack, of which an expert is a row.  What a program says of
``moe.deepspeed_moe.experts.deepspeed_experts[0]`` it says of this rank's first expert: the parameters there are made
anew at each look, over the memory of the stack, and ``grad`` is the stack's.  In training, where copies of experts divide
their values (ZeRO stages 1 and 2 with fewer ranks in ``ep_size`` than there are), they are DTensors over the copies.

Until ``initialize()`` the layer's state dict has DeepSpeed's names, and always it loads under both.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from thalweg.deferred_init.tensor_swap import deepcopy_plain, reduce_plain
from thalweg.nn.moe.experts import ExpertParameter
from thalweg.nn.moe.layer import MoE, Routing
from thalweg.zero.whole_tensors import gather_whole

_STACK, _EXPERTS = "experts.stack.", "deepspeed_moe.experts.deepspeed_experts."
_NAMES = {"gate.": "deepspeed_moe.gate.wg.", "residual.": "mlp."}


class _ExpertRow:
    """What the parameter of one expert shows, for a tensor class to inherit."""

    __slots__ = ()
    stack: nn.Parameter  # the layer's
    index: int  # the row in this rank's part of it
    expert: int  # the row in the whole of it

    @property
    def data(self) -> Tensor:
        """The tensor, whose writes count as writes to the stack."""
        tensor: Any = self
        return tensor.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.data.copy_(value)

    @property
    def grad(self) -> Tensor | None:
        """This expert's part of the stack's gradient; a copy where ranks divide that, which is collective then."""
        grad = self.stack.grad
        if isinstance(grad, DTensor) and "ep" not in (grad.device_mesh.mesh_dim_names or ()):
            return gather_whole(grad)[self.index]
        return None if grad is None else _take_row(grad, self.index)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return deepcopy_plain(self, memo)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_plain(self, protocol)  # type: ignore[arg-type]


class ExpertRow(_ExpertRow, ExpertParameter):
    """An expert's parameter that this rank has whole."""


class ShardedExpertRow(_ExpertRow, DTensor):
    """An expert's parameter that its copies divide."""


def _make_row(stack: nn.Parameter, index: int, first_expert: int) -> Any:
    """The parameter of this rank's expert ``index``."""
    data = _take_row(stack.detach(), index)
    row: Any = nn.Parameter(data, stack.requires_grad)
    object.__setattr__(row, "__class__", ShardedExpertRow if isinstance(data, DTensor) else ExpertRow)
    row.stack, row.index, row.expert = stack, index, first_expert + index
    return row


def _take_row(stack: Tensor, index: int) -> Tensor:
    """The row ``index`` of what this rank has of a stack (or of its gradient), over its memory."""
    if not isinstance(stack, DTensor):
        return stack[index]
    mesh, local = stack.device_mesh, stack.to_local()
    axes = dict(zip(mesh.mesh_dim_names or (), stack.placements, strict=False))
    divided = {axis for axis, placement in axes.items() if placement.is_shard()}
    if "ep" not in axes or "tp" in divided:
        raise ValueError(
            "these experts are sharded among ranks by tensor parallelism or ZeRO stage 3, and no rank has one of them "
            "whole: look at them within deepspeed.zero.GatheredParameters(list(moe.experts.parameters()))"
        )
    if "copies" not in divided:
        return local[index]
    dim, shape = axes["copies"].dim - 1, stack.shape[1:]  # type: ignore[attr-defined]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local[index], mesh["copies"], [Shard(dim)], run_check=False, shape=shape, stride=stride)


class DeepSpeedMoE(MoE):
    """Thalweg's layer as DeepSpeed's programs see it.

    With ``ep_size`` each rank builds its own experts alone, whose values count, and none of the others'.
    """

    def _num_built_experts(self) -> int:
        return self.num_local_experts

    @property
    def num_local_experts(self) -> int:
        """Experts that this rank has."""
        dispatcher = self._dispatcher
        return (
            self.num_experts // self.ep_size
            if dispatcher is None
            else dispatcher.experts_per_rank[dispatcher.ep_group.rank]
        )

    @property
    def deepspeed_moe(self) -> nn.Module:
        """The gate, ``gate.wg``, and this rank's experts, ``experts.deepspeed_experts``: to read and to write."""
        dispatcher = self._dispatcher
        first = 0 if dispatcher is None else sum(dispatcher.experts_per_rank[: dispatcher.ep_group.rank])
        experts = nn.ModuleList(self._show_expert(index, first) for index in range(self.num_local_experts))
        parts = {"gate": nn.ModuleDict({"wg": self.gate}), "experts": nn.ModuleDict({"deepspeed_experts": experts})}
        return nn.ModuleDict(parts)

    def _show_expert(self, index: int, first: int) -> nn.Module:
        shown = copy.deepcopy(self.experts._template[0]).train(self.training)
        for own, module in zip(shown.modules(), self.experts.stack.modules(), strict=True):
            own._buffers = module._buffers
            for key, stack in module._parameters.items():
                own._parameters[key] = None if stack is None else _make_row(stack, index, first)
        return shown

    def _run_experts(self, x: Tensor, routing: Routing) -> Tensor:
        if self._dispatcher is None and self.ep_size > 1:
            raise ValueError(
                f"MoE(ep_size={self.ep_size}) has this rank's experts alone: call deepspeed.initialize() before it runs"
            )
        return super()._run_experts(x, routing)

    def state_dict(self, *args: Any, prefix: str = "", **options: Any) -> Any:
        """The state dict: under DeepSpeed's names, expert by expert, but in training (see the engine's)."""
        state = super().state_dict(*args, prefix=prefix, **options)
        stacks = dict(self.experts.stack.named_parameters())
        if any(type(stack) not in (ExpertParameter, nn.Parameter) for stack in stacks.values()):
            return state
        for name in [name for name in state if name.startswith(prefix)]:
            own, value = name.removeprefix(prefix), state.pop(name)
            if (key := own.removeprefix(_STACK)) != own:
                rows = value if key in stacks else [value] * self.num_local_experts
                state |= {f"{prefix}{_EXPERTS}{index}.{key}": row for index, row in enumerate(rows)}
            else:
                state[prefix + _rename(own, _NAMES)] = value
        return state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        theirs = {name: own for own, name in _NAMES.items()}
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[prefix + _rename(name.removeprefix(prefix), theirs)] = state_dict.pop(name)
        stacks = dict(self.experts.stack.named_parameters())
        for key in [*stacks, *dict(self.experts.stack.named_buffers())]:
            names = [f"{prefix}{_EXPERTS}{index}.{key}" for index in range(self.num_local_experts)]
            if all(name in state_dict for name in names):
                rows = [state_dict.pop(name) for name in names]
                state_dict[f"{prefix}{_STACK}{key}"] = torch.stack(rows) if key in stacks else rows[0]
        super()._load_from_state_dict(state_dict, prefix, *args)


def _rename(name: str, names: dict[str, str]) -> str:
    """``name`` with another beginning, if it begins as one of ``names``."""
    return re.sub("^(?:%s)" % "|".join(map(re.escape, names)), lambda begin: names[begin.group()], name)
