"""A stack of experts: copies of any module as one set of parameters with a row for each.

The module's own forward runs once for all rows, on stand-ins of its parameters: where a linear
layer asks for its product, the rows of each expert meet that expert's matrix (one grouped product).
So an expert needs no form that is known here.  A module that uses a parameter otherwise, or whose
rows depend on each other, is noticed on its first rows and runs expert by expert.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from thalweg.ops.grouped import Groups, grouped_linear
from thalweg.parallel.expert import local_rows

_SAMPLE = 3  # rows of an expert that are compared


class ExpertParameter(nn.Parameter):
    """A stack of experts' weights: what :func:`thalweg.moe.is_moe_param` knows them by."""


class Experts(nn.Module):
    """``num_experts`` copies of ``expert`` as one stack; rows sorted by expert -> rows."""

    def __init__(self, expert: nn.Module, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.stack = copy.deepcopy(expert)
        self._single = [copy.deepcopy(expert)]  # in a list: no submodule
        for module, single in zip(self.stack.modules(), self._single[0].modules(), strict=True):
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    stacked = parameter.detach().expand(num_experts, *parameter.shape).clone()
                    module._parameters[key] = ExpertParameter(stacked, parameter.requires_grad)
                    single._parameters[key] = nn.Parameter(parameter.detach().to("meta"), False)
        self._grouped: bool | None = None  # whether one run for all experts is right; None: not tried yet

    def forward(
        self, rows: Tensor, groups: Groups, own_of: Callable[[Tensor, torch.dtype], Tensor] = local_rows
    ) -> Tensor:
        """``rows`` (M, D) sorted by own expert -> (M, D); ``own_of`` says what stands for a parameter."""
        own = {name: own_of(parameter, rows.dtype) for name, parameter in self.stack.named_parameters()}
        self._single[0].train(self.training)
        if self._grouped is None and len(rows) and not rows.is_meta:
            self._grouped = self._compare(rows, groups, own)
        return self._at_once(rows, groups, own) if self._grouped else self._one_by_one(rows, groups, own)

    def _at_once(self, rows: Tensor, groups: Groups, own: dict[str, Tensor]) -> Tensor:
        single = self._single[0]
        stand_ins = {id(parameter): own[name] for name, parameter in single.named_parameters()}
        with _GroupedProducts(stand_ins, groups):
            return single(rows)

    def _one_by_one(self, rows: Tensor, groups: Groups, own: dict[str, Tensor]) -> Tensor:
        results = []
        for index, part in enumerate(rows.split(groups.sizes)):
            single = {name: parameter[index] for name, parameter in own.items()}
            results.append(functional_call(self._single[0], single, (part,)))
        return torch.cat(results)

    @torch.no_grad()
    def _compare(self, rows: Tensor, groups: Groups, own: dict[str, Tensor]) -> bool:
        """Whether both ways agree on a few rows of each expert."""
        sizes = [min(_SAMPLE, size) for size in groups.sizes]
        parts = rows.split(groups.sizes)
        few = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        counts = torch.tensor(sizes, device=rows.device)
        sample = Groups(counts, torch.arange(len(sizes), device=rows.device).repeat_interleave(counts))
        self._single[0].eval()
        try:
            found = self._at_once(few, sample, own)
        except _UnknownUseError:
            return False
        finally:
            expected = self._one_by_one(few, sample, own)
            self._single[0].train(self.training)
        tolerance = 1e-4 if rows.dtype in (torch.float32, torch.float64) else 5e-2
        scale = expected.abs().max().clamp(min=1e-6)
        return found.shape == expected.shape and bool((found - expected).abs().max() <= tolerance * scale)


class _UnknownUseError(Exception):
    """A parameter is used in a way that has no grouped form."""


class _GroupedProducts(TorchFunctionMode):
    """Answers for stand-ins: a linear layer's product is that of each row's own expert."""

    def __init__(self, stand_ins: dict[int, Tensor], groups: Groups) -> None:
        super().__init__()
        self.stand_ins, self.groups = stand_ins, groups

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            given: list[Any] = [*args, *kwargs.values(), None]
            x, weight, bias = given[:3]
            if id(weight) in self.stand_ins and x.shape[:-1] == self.groups.index.shape:
                own_bias = None if bias is None else self.stand_ins[id(bias)]
                return grouped_linear(x, self.stand_ins[id(weight)], self.groups, own_bias)
        if any(id(value) in self.stand_ins for value in _values((*args, *kwargs.values()))):
            raise _UnknownUseError
        return func(*args, **kwargs)


def _values(args: Any) -> Iterator[Any]:
    for value in args:
        if isinstance(value, tuple | list):
            yield from _values(value)
        else:
            yield value
