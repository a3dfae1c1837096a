"""The engine's optimizer under the classes that DeepSpeed's has, and its rank's part of parameters and gradients.

A program asks by ``isinstance`` which kind it has; which one that is follows from the stage and the dtype.  DeepSpeed
concatenates the parameters of a group, Thalweg keeps each apart: where DeepSpeed has one flat tensor for a rank's part
of a group there is one for each of its parameters here, in the same order, over the same memory, so that what is
written to it counts.  What DeepSpeed has flat and whole on every rank (``fp32_groups_gradients_flat``,
``bit16_groups_flat``) is put together when it is read: a copy.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from thalweg.config import Config
from thalweg.optim.loss_scaler import LossScaler
from thalweg.optim.step import EngineOptimizer
from thalweg.zero.whole_parameter import get_shard
from thalweg.zero.whole_tensors import gather_whole, to_local

_params_by_flat = WeakIdKeyDictionary()  # of the flat tensors that programs hold


class _StateByFlat(defaultdict[Any, Any]):
    """An optimizer's state, which a flat part of the masters finds as well: this rank's part of each entry, flat."""

    def __missing__(self, key: Any) -> Any:
        if not isinstance(key, Tensor) or (param := _params_by_flat.get(key)) not in self:
            return super().__missing__(key)
        entries: dict[str, Any] = self[param]
        return {
            name: to_local(value).view(-1) if isinstance(value, Tensor) and value.dim() else value
            for name, value in entries.items()
        }


class LossScaleView:
    """A loss scaler under the names that DeepSpeed's has, as it is when it is asked."""

    scale_factor = 2.0

    def __init__(self, scaler: LossScaler) -> None:
        self._scaler = scaler

    def __getattr__(self, name: str) -> Any:
        state, section = self._scaler.state_dict(), self._scaler.section
        shown = {
            "cur_iter": state["iteration"],
            "last_overflow_iter": state["overflowed"],
            "cur_hysteresis": state["allowance"],
            "delayed_shift": section.hysteresis,
            "consecutive_hysteresis": section.consecutive_hysteresis,
            "scale_window": section.loss_scale_window,
            **dict.fromkeys(("min_scale", "min_loss_scale"), section.min_loss_scale),
            **dict.fromkeys(("cur_scale", "loss_scale"), state["scale"]),
            **dict.fromkeys(("dynamic", "dynamic_loss_scale"), self._scaler.dynamic),
        }
        if name not in shown:
            raise AttributeError(f"a loss scaler has no {name}")
        return shown[name]


class DeepSpeedOptimizer(EngineOptimizer):
    """Any of them."""

    @property
    def loss_scaler(self) -> LossScaleView:
        """The factor on the loss, and what moves it."""
        return LossScaleView(self.scaler)

    loss_scale_config = loss_scaler

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether overflows move the factor."""
        return self.scaler.dynamic


class ZeROOptimizer(DeepSpeedOptimizer):
    """One that shards, or keeps masters beside bf16."""

    nccl_start_alignment_factor = 2  # elements of 16 bits that a rank's part of a flat tensor is a multiple of

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer within; its ``state`` is found by the flat parts of the masters, too."""
        if not isinstance(self.inner.state, _StateByFlat):
            self.inner.state = _StateByFlat(dict, self.inner.state)
        return self.inner

    @property
    def averaged_gradients(self) -> dict[int, list[Tensor]]:
        """For each group this rank's parts of its reduced gradients, flat; of parameters without one, nothing."""
        return {
            number: [to_local(grad).view(-1) for param in group["params"] if (grad := param.grad) is not None]
            for number, group in enumerate(self.param_groups)
        }

    @property
    def _flat_masters(self) -> list[Tensor]:
        """This rank's parts of the masters, flat."""
        params = [param for group in self.param_groups for param in group["params"]]
        flats = [to_local(param.detach()).view(-1) for param in params]
        _params_by_flat.update(zip(flats, params, strict=True))
        return flats

    @property
    def bit16_groups(self) -> list[list[Tensor]]:
        """The model's own parameters, by group."""
        shown = {get_shard(param): param for param in self._sharded.module.parameters()}
        return [[shown[param] for param in group["params"]] for group in self.param_groups]

    @property
    def bit16_groups_flat(self) -> list[Tensor]:
        """Their values, flat."""
        return [self._flatten(group) for group in self.bit16_groups]

    @property
    def parallel_partitioned_bit16_groups(self) -> list[list[Tensor]]:
        """Those in equal parts, one for each rank."""
        return [list(flat.chunk(self._num_parts)) for flat in self.bit16_groups_flat]

    @property
    def _num_parts(self) -> int:
        return 1 if self._replicate_group is None else dist.get_world_size(self._replicate_group)

    def _flatten(self, values: Iterable[Tensor]) -> Tensor:
        """``values`` whole, end to end, and zeros up to where every rank's part of 16 bits is aligned; collective."""
        whole = [gather_whole(value.detach()).flatten() for value in values]
        flat = torch.cat(whole) if whole else torch.empty(0)
        return pad(flat, (0, -len(flat) % (self.nccl_start_alignment_factor * self._num_parts)))


class BF16_Optimizer(ZeROOptimizer):
    """bf16 at stage 0, and at stage 1 where gradients accumulate in fp32."""

    @property
    def fp32_groups_gradients_flat(self) -> list[Tensor]:
        """The reduced gradients of each group, whole and flat; zeros for parameters without one; collective."""
        groups = [group["params"] for group in self.param_groups]
        return [self._flatten(torch.zeros_like(p) if p.grad is None else p.grad for p in params) for params in groups]


class FP16_Optimizer(DeepSpeedOptimizer):
    """fp16 at stage 0."""

    @property
    def fp32_groups_flat(self) -> list[Tensor]:
        """The masters, flat."""
        return [param.detach().view(-1) for group in self.param_groups for param in group["params"]]


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Stages 1 and 2."""

    single_partition_of_fp32_groups = ZeROOptimizer._flat_masters


class ParameterOffload:
    """DeepSpeed's hooks on a model at stage 3, for programs that take them off to generate and put them on again (TRL).

    A forward pass within ``GatheredParameters`` gathers nothing and is right as it is: then there are none, and to
    remove one changes nothing at any time.
    """

    def __init__(self, model: nn.Module) -> None:
        self.module = SimpleNamespace(named_parameters=model.named_parameters, ds_external_parameters=tuple)
        gathers = any(isinstance(param, DTensor) for param in model.parameters())
        units = [module for module in model.modules() if gathers and isinstance(module, FSDPModule)]
        self.forward_hooks = [RemovableHandle(OrderedDict()) for _ in units]
        self.backward_hooks: list[RemovableHandle] = []

    def _register_deepspeed_module(self, module: Any, count: Any = None) -> None:
        """Nothing to put on again."""


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """Stage 3."""

    @property
    def parameter_offload(self) -> ParameterOffload:
        """The model's hooks."""
        return ParameterOffload(self._sharded.module)

    fp32_partitioned_groups_flat = ZeROOptimizer._flat_masters

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The model's parameters by sub-group, in the order of :attr:`fp32_partitioned_groups_flat`: each is one."""
        return [[param] for group in self.bit16_groups for param in group]

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        """The same as :attr:`averaged_gradients`, by the number of the gradient in its group."""
        return {number: dict(enumerate(grads)) for number, grads in self.averaged_gradients.items()}


def show_class(optimizer: EngineOptimizer, config: Config) -> None:
    """Make it one of these classes; in fp32 at stage 0 one of the user's own, whose object DeepSpeed hands back."""
    stage = config.zero_optimization.stage
    sums_in_fp32 = config.bf16.enabled and config.data_types.grad_accum_dtype == "fp32"
    if stage == 1 and sums_in_fp32 and config.zero_optimization.offload_optimizer.device == "none":
        shown = BF16_Optimizer
    elif stage:
        shown = DeepSpeedZeroOptimizer_Stage3 if stage == 3 else DeepSpeedZeroOptimizer
    elif config.fp16.enabled or config.bf16.enabled:
        shown = FP16_Optimizer if config.fp16.enabled else BF16_Optimizer
    else:
        inner = type(optimizer.inner)
        shown = type(inner.__name__, (EngineOptimizer, inner), {"__doc__": inner.__doc__})
    optimizer.__class__ = shown
