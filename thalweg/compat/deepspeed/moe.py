"""``deepspeed.moe.layer.MoE``: a layer's experts one by one, under DeepSpeed's names.

Thalweg's layer has its experts in one stack, of which an expert is a row.  What a program says of
``moe.deepspeed_moe.experts.deepspeed_experts[0]`` it says of this rank's first expert: the parameters there are made
anew at each look, over the memory that the layer computes with, and their ``grad`` is of the stack's.

Before ``initialize()`` the layer's state dict has DeepSpeed's names; one with Thalweg's loads, too.
"""

import copy
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thalweg.deferred_init.tensor_swap import deepcopy_plain
from thalweg.nn.moe.experts import ExpertParameter
from thalweg.nn.moe.layer import MoE, Routing
from thalweg.zero.whole_tensors import gather_whole, to_local

_EXPERTS = "deepspeed_moe.experts.deepspeed_experts."


class ExpertRow(ExpertParameter):
    """An expert's parameter, over the memory of the stack.

    What is written to it counts, but where ranks divide the stack's values (``ep_size`` at ZeRO stages 1 to 3 where
    several ranks have the same experts; stage 3 without): there ``safe_set_full_fp32_param`` writes, as in DeepSpeed.
    """

    stack: nn.Parameter  # the layer's
    expert: int  # its row
    owned: range  # the rows that this rank has

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The plain tensor; unlike torch's it counts what is written."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.detach().copy_(value)

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """This expert's part of the stack's gradient; a copy where ranks divide that, and collective then."""
        grad: Any = self.stack.grad
        if grad is None or (own := to_local(grad)).shape != (len(self.owned), *self.shape):
            return None if grad is None else gather_whole(grad)[self.expert]
        return own[self.expert - self.owned.start]

    def requires_grad_(self, requires_grad: bool = True) -> NoReturn:  # type: ignore[override]
        """Refused.

        Raises:
            ValueError: always.
        """
        raise ValueError("a layer's experts are trained, or not, together: use moe.experts.requires_grad_()")

    requires_grad = property(lambda row: row.stack.requires_grad, requires_grad_)  # type: ignore[assignment]
    __deepcopy__ = deepcopy_plain


class DeepSpeedMoE(MoE):
    """Thalweg's layer as DeepSpeed's programs see it.

    With ``ep_size`` each rank builds its own experts alone, and their values count, not those of the first rank.
    """

    @property
    def num_local_experts(self) -> int:
        """Experts that this rank has."""
        return len(self._owned_experts())

    def _owned_experts(self) -> range:
        if self._dispatcher is None:
            return range(self.num_experts // self.ep_size)
        sizes, rank = self._dispatcher.experts_per_rank, self._dispatcher.ep_group.rank
        return range(sum(sizes[:rank]), sum(sizes[: rank + 1]))

    @property
    def deepspeed_moe(self) -> nn.Module:
        """The gate, ``gate.wg``, and this rank's experts, ``experts.deepspeed_experts``: to read and to write.

        Collective where ranks divide the stack's values.
        """
        owned = self._owned_experts()
        experts = nn.ModuleList(copy.deepcopy(self.experts._template[0]).train(self.training) for _ in owned)
        for stack, *shown in zip(self.experts.stack.modules(), *(expert.modules() for expert in experts), strict=True):
            for key, parameter in stack._parameters.items():
                if parameter is not None:
                    for expert, module, value in zip(owned, shown, self._own_values(parameter), strict=True):
                        row = module._parameters[key] = ExpertRow(value, parameter.requires_grad)
                        row.stack, row.expert, row.owned = parameter, expert, owned
            for module in shown:
                module._buffers = stack._buffers
        parts = {"gate": nn.ModuleDict({"wg": self.gate}), "experts": nn.ModuleDict({"deepspeed_experts": experts})}
        return nn.ModuleDict(parts)

    def _own_values(self, stack: nn.Parameter) -> Tensor:
        """The rows of this rank's experts, over the memory of the stack where that has them whole."""
        dispatcher = self._dispatcher
        if dispatcher is None:
            return gather_whole(stack.detach()) if isinstance(stack, DTensor) else stack.detach()
        dispatcher.expert_params.refresh_rows()
        return dispatcher.local_weight(stack, stack.dtype).detach()

    def _run_experts(self, x: Tensor, routing: Routing) -> Tensor:
        if self._dispatcher is None and self.ep_size > 1:
            raise ValueError(f"MoE(ep_size={self.ep_size}) runs after initialize(): a rank has its own experts alone")
        return super()._run_experts(x, routing)

    def state_dict(self, *args: Any, prefix: str = "", **options: Any) -> Any:
        """The state dict: this rank's experts under DeepSpeed's names, but in training."""
        state = super().state_dict(*args, prefix=prefix, **options)
        if all(type(stack) in (ExpertParameter, nn.Parameter) for stack in self.experts.parameters()):
            for name in [name for name in state if name.startswith((f"{prefix}gate.", f"{prefix}experts."))]:
                del state[name]
            _rename(state, f"{prefix}residual.", f"{prefix}mlp.")
            self.deepspeed_moe.state_dict(prefix=f"{prefix}deepspeed_moe.", **options | {"destination": state})
        return state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        _rename(state_dict, f"{prefix}deepspeed_moe.gate.wg.", f"{prefix}gate.")
        _rename(state_dict, f"{prefix}mlp.", f"{prefix}residual.")
        stacks = dict(self.experts.stack.named_parameters())
        for key in [*stacks, *dict(self.experts.stack.named_buffers())]:
            names = [f"{prefix}{_EXPERTS}{index}.{key}" for index in range(self.num_local_experts)]
            if all(name in state_dict for name in names):
                rows = [state_dict.pop(name) for name in names]
                state_dict[f"{prefix}experts.stack.{key}"] = torch.stack(rows) if key in stacks else rows[0]
        super()._load_from_state_dict(state_dict, prefix, *args)


def _rename(state_dict: Any, prefix: str, new_prefix: str) -> None:
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[new_prefix + name.removeprefix(prefix)] = state_dict.pop(name)
