"""The engine's optimizer under the classes that DeepSpeed's has, and its rank's part of parameters and gradients.

A program asks by ``isinstance`` which kind it has; which one that is follows from the stage and the dtype.  DeepSpeed
concatenates the parameters of a group, Thalweg keeps each apart: where DeepSpeed has one flat tensor for a group there
is one for each of its parameters here, in the same order, over the same memory, so that what is written to it counts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from thalweg.config import Config
from thalweg.optim.step import EngineOptimizer
from thalweg.zero.whole_tensors import to_local


class DeepSpeedOptimizer(EngineOptimizer):
    """Any of them."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """One that shards, or keeps masters beside bf16."""

    @property
    def averaged_gradients(self) -> dict[int, list[Tensor]]:
        """For each group this rank's parts of its reduced gradients, flat; of parameters without one, nothing."""
        return {
            number: [to_local(grad).view(-1) for param in group["params"] if (grad := param.grad) is not None]
            for number, group in enumerate(self.param_groups)
        }

    def _flat_masters(self) -> list[Tensor]:
        params = (param for group in self.param_groups for param in group["params"])
        return [to_local(param.detach()).view(-1) for param in params]


class BF16_Optimizer(ZeROOptimizer):
    """bf16 at stage 0."""


class FP16_Optimizer(DeepSpeedOptimizer):
    """fp16 at stage 0."""

    @property
    def fp32_groups_flat(self) -> list[Tensor]:
        """The masters, flat."""
        return [param.detach().view(-1) for group in self.param_groups for param in group["params"]]


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Stages 1 and 2."""

    @property
    def single_partition_of_fp32_groups(self) -> list[Tensor]:
        """This rank's parts of the masters, flat."""
        return self._flat_masters()


class ParameterOffload:
    """DeepSpeed's hooks on a model at stage 3, for programs that take them off to generate and put them on again (TRL).

    There are none: a forward pass within ``GatheredParameters`` is right as it is.
    """

    def __init__(self, model: nn.Module) -> None:
        self.module = SimpleNamespace(named_parameters=model.named_parameters, ds_external_parameters=tuple)
        self.forward_hooks: list[RemovableHandle] = []
        self.backward_hooks: list[RemovableHandle] = []

    def _register_deepspeed_module(self, module: Any, count: Any = None) -> None:
        """Nothing to put on again."""


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """Stage 3."""

    @property
    def parameter_offload(self) -> ParameterOffload:
        """The model's hooks."""
        return ParameterOffload(self._sharded.module)

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """This rank's parts of the masters, flat."""
        return self._flat_masters()

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        """The same as :attr:`averaged_gradients`, by the number of the gradient in its group."""
        return {number: dict(enumerate(grads)) for number, grads in self.averaged_gradients.items()}


def show_class(optimizer: EngineOptimizer, config: Config) -> None:
    """Make it one of these classes; in fp32 at stage 0 one of the user's own, whose object DeepSpeed hands back."""
    stage = config.zero_optimization.stage
    if stage:
        shown = DeepSpeedZeroOptimizer_Stage3 if stage == 3 else DeepSpeedZeroOptimizer
    elif config.fp16.enabled or config.bf16.enabled:
        shown = FP16_Optimizer if config.fp16.enabled else BF16_Optimizer
    else:
        inner = type(optimizer.inner)
        shown = type(inner.__name__, (EngineOptimizer, inner), {"__doc__": inner.__doc__})
    optimizer.__class__ = shown
