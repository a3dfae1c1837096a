"""A stack of experts: copies of any module as one set of parameters with a row for each.

The module's own forward runs once for all rows, on stand-ins of its parameters: where a linear
layer asks for its product, the rows of each expert meet that expert's matrix (one grouped product).
So an expert needs no form that is known here.  A module that uses a parameter otherwise, or whose
rows depend on each other, is noticed on its first rows and runs expert by expert.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from thalweg.ops.grouped_mm import RowGroups, grouped_linear
from thalweg.parallel.expert.expert_parallel import local_rows
from thalweg.utils.trees import iter_tensors

_NUM_SAMPLE_ROWS = 3  # rows of an expert that are compared


class ExpertParameter(nn.Parameter):
    """A stack of experts' weights: what :func:`thalweg.moe.is_moe_param` knows them by."""


class Experts(nn.Module):
    """``num_experts`` copies of ``expert`` as one stack; rows sorted by expert -> rows."""

    def __init__(self, expert: nn.Module, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.stack = copy.deepcopy(expert)
        self._template = [copy.deepcopy(expert)]  # in a list: no submodule
        for module, template_module in zip(self.stack.modules(), self._template[0].modules(), strict=True):
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    stacked = parameter.detach().expand(num_experts, *parameter.shape).clone()
                    module._parameters[key] = ExpertParameter(stacked, parameter.requires_grad)
                    template_module._parameters[key] = nn.Parameter(parameter.detach().to("meta"), False)
        self._use_grouped: bool | None = None  # whether one run for all experts is right; None: not tried yet

    def forward(
        self, rows: Tensor, groups: RowGroups, get_local_weight: Callable[[Tensor, torch.dtype], Tensor] = local_rows
    ) -> Tensor:
        """``rows`` (M, D) sorted by own expert -> (M, D); ``get_local_weight`` says what stands for a parameter."""
        weights = {name: get_local_weight(parameter, rows.dtype) for name, parameter in self.stack.named_parameters()}
        self._template[0].train(self.training)
        if self._use_grouped is None and len(rows) and not rows.is_meta:
            self._use_grouped = self._grouped_matches_looped(rows, groups, weights)
        run = self._forward_grouped if self._use_grouped else self._forward_looped
        return run(rows, groups, weights)

    def _forward_grouped(self, rows: Tensor, groups: RowGroups, weights: dict[str, Tensor]) -> Tensor:
        template = self._template[0]
        stand_ins = {id(parameter): weights[name] for name, parameter in template.named_parameters()}
        with _GroupedLinearMode(stand_ins, groups):
            return template(rows)

    def _forward_looped(self, rows: Tensor, groups: RowGroups, weights: dict[str, Tensor]) -> Tensor:
        results = []
        for index, expert_rows in enumerate(rows.split(groups.counts_list)):
            single = {name: parameter[index] for name, parameter in weights.items()}
            results.append(functional_call(self._template[0], single, (expert_rows,)))
        return torch.cat(results)

    @torch.no_grad()
    def _grouped_matches_looped(self, rows: Tensor, groups: RowGroups, weights: dict[str, Tensor]) -> bool:
        """Whether both ways agree on a few rows of each expert."""
        sizes = [min(_NUM_SAMPLE_ROWS, size) for size in groups.counts_list]
        rows_by_expert = rows.split(groups.counts_list)
        sample_rows = torch.cat([part[:size] for part, size in zip(rows_by_expert, sizes, strict=True)])
        counts = torch.tensor(sizes, device=rows.device)
        sample_groups = RowGroups(counts, torch.arange(len(sizes), device=rows.device).repeat_interleave(counts))
        self._template[0].eval()
        try:
            actual = self._forward_grouped(sample_rows, sample_groups, weights)
        except _UnknownUseError:
            return False
        finally:
            expected = self._forward_looped(sample_rows, sample_groups, weights)
            self._template[0].train(self.training)
        tolerance = 1e-4 if rows.dtype in (torch.float32, torch.float64) else 5e-2
        scale = expected.abs().max().clamp(min=1e-6)
        return actual.shape == expected.shape and bool((actual - expected).abs().max() <= tolerance * scale)


class _UnknownUseError(Exception):
    """A parameter is used in a way that has no grouped form."""


class _GroupedLinearMode(TorchFunctionMode):
    """Answers for stand-ins: a linear layer's product is that of each row's own expert."""

    def __init__(self, stand_ins: dict[int, Tensor], groups: RowGroups) -> None:
        super().__init__()
        self.stand_ins, self.groups = stand_ins, groups

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            linear_args: list[Any] = [*args, *kwargs.values(), None]
            x, weight, bias = linear_args[:3]
            if id(weight) in self.stand_ins and x.shape[:-1] == self.groups.group_ids.shape:
                expert_bias = None if bias is None else self.stand_ins[id(bias)]
                return grouped_linear(x, self.stand_ins[id(weight)], self.groups, expert_bias)
        if any(id(tensor) in self.stand_ins for tensor in iter_tensors((args, kwargs))):
            raise _UnknownUseError
        return func(*args, **kwargs)
