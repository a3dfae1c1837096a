"""The units of a model under rehearsal: what FSDP2's hooks and the engine's do around each, as events.

A unit's parameters come before its forward and go after it, come again before its backward, and its
gradients are reduced behind that.  What comes and goes, and whether by a gather or by a read from disk, the
:class:`Stage` knows; ``memory.py`` says what it costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from thalweg.plan.setting import Setting
from thalweg.plan.tape import Tape


@dataclass
class UnitSize:
    """One unit's parameters on one rank, in bytes."""

    name: str
    gather_bytes: int
    reduce_bytes: int
    sharded_grad_bytes: int
    trains: bool = True
    names: list[str] = field(default_factory=list)


class AfterBackward(torch.autograd.Function):
    """Identity that calls ``hook`` when the gradients of all its inputs are there (FSDP2 has the same)."""

    @staticmethod
    def forward(ctx: Any, hook: Callable[[], None], *inputs: Tensor) -> Any:  # type: ignore[override]
        ctx.hook = hook
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.hook()
        return None, *grads


class Unit:
    """One unit of the fake model: gathers before use, reduces after its backward."""

    def __init__(self, stage: Stage, size: UnitSize, params: list[nn.Parameter]) -> None:
        self.stage, self.size, self.params = stage, size, params
        self.gathered: list[int] = []
        self.prefetched = 0
        self.is_open = False
        self.kept: dict[int, Tensor] = {}

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.stage.tape.mark(f"enter {self.size.name}")
        self.gather()
        flat, spec = tree_flatten((args, kwargs))
        low = self.stage.low_dtype if self.size.name not in self.stage.setting.fp32_modules else None
        for index, leaf in enumerate(flat):
            if low is not None and isinstance(leaf, Tensor) and leaf.is_floating_point():
                flat[index] = leaf.to(low)
        inputs = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if inputs and torch.is_grad_enabled():
            wrapped = AfterBackward.apply(self.after_backward, *(flat[i] for i in inputs))
            for index, leaf in zip(inputs, wrapped, strict=True):
                flat[index] = leaf
        return tree_unflatten(flat, spec)

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.stage.frees and self.size.name:
            self.free()
        comes_again = self.stage.wire or self.is_paged
        for leaf in tree_flatten(output)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad and comes_again:
                leaf.register_hook(self.before_backward)
        return None

    @property
    def is_paged(self) -> bool:
        return self.size.name in self.stage.paged

    def before_backward(self, grad: Tensor) -> None:
        self.gather()
        self.stage.prefetch_before(self)

    def gather(self) -> None:
        stage, tape = self.stage, self.stage.tape
        if self.is_open or self.gathered:
            return
        if self.is_paged:
            tape.mark(f"open {self.size.name}")
            self.is_open = True
        if not stage.wire:
            return
        if stage.setting.both_levels:  # what is gathered lies in the host's arena
            tape.mark(f"gather {self.size.name}")
            flat = 0
        else:
            flat = self.prefetched or tape.note(self.size.gather_bytes, "gathered")
        self.prefetched = 0
        self.gathered = [tape.note(p.nbytes, "gathered") for p in self.params]
        if flat:
            tape.drop(flat)
        if self.is_paged:  # FSDP2 has its own copy now
            tape.mark(f"close {self.size.name}")
            self.is_open = False

    def prefetch(self) -> None:
        stage = self.stage
        if self.is_paged and not self.is_open and not self.gathered:
            stage.tape.mark(f"ahead {self.size.name}")
        elif stage.wire and not stage.setting.both_levels and not self.gathered and not self.prefetched:
            self.prefetched = stage.tape.note(self.size.gather_bytes, "gathered")

    def free(self) -> None:
        for number in self.gathered:
            self.stage.tape.drop(number)
        self.gathered = []
        if self.is_open:
            self.stage.tape.mark(f"close {self.size.name}")
            self.is_open = False

    def after_backward(self) -> None:
        stage = self.stage
        grads = {id(p): p.grad for p in self.params if p.grad is not None}
        for parameter in self.params:
            if parameter.grad is not None and id(parameter) in self.kept:
                self.kept[id(parameter)] += parameter.grad
                parameter.grad = None
        if not stage.reduces:
            stage.tape.mark(f"kept {self.size.name}")
            reduce = stage.setting.precision.reduce
            for parameter in self.params:
                if parameter.grad is not None and parameter.grad.dtype != reduce:
                    self.kept[id(parameter)], parameter.grad = parameter.grad.to(reduce), None
        elif grads or self.kept:
            stage.reduce(self)
        if stage.last or stage.setting.policy.frees_parameters:
            self.free()


class Stage:
    """What the units share: the tape, and what the backward pass at hand does.

    ``paged``: names of the units whose parameters come from a disk.
    """

    def __init__(self, tape: Tape, setting: Setting) -> None:
        self.tape, self.setting = tape, setting
        self.wire = setting.placement == "wire"
        self.paged: frozenset[str] = frozenset()
        self.frees = (self.wire or setting.offload.pages) and setting.policy.frees_parameters
        compute = setting.precision.compute
        self.low_dtype = compute if compute != torch.float32 else None
        self.units: list[Unit] = []
        self.last = self.reduces = True
        self.reductions: list[str] = []
        self._held: int = 0

    def begin(self, last: bool) -> None:
        """One micro-batch, the last of its window or not."""
        self.last, self.reduces = last, last or self.setting.policy.reduces_each_backward

    def prefetch_before(self, unit: Unit) -> None:
        """FSDP2 gathers the unit whose backward pass is next while this one's is computed."""
        index = self.units.index(unit)
        if index > 0 and self.setting.policy.frees_parameters:
            self.units[index - 1].prefetch()

    def reduce(self, unit: Unit) -> None:
        """FSDP2's reduction: copy the gradients in, free them, keep the input until the next one."""
        tape, setting, size = self.tape, self.setting, unit.size
        self.reductions.append(size.name)
        self.release_input()
        if not (setting.in_arena or setting.updates_early or setting.spills):
            self._held = tape.note(size.reduce_bytes, "buffers")
        unit.kept.clear()
        for parameter in unit.params:
            parameter.grad = None
        tape.mark(f"{'last' if self.last else 'reduce'} {size.name}")
        if setting.on_cpu and setting.span.num_nodes > 1:  # partial sums to and from other hosts
            rows = size.reduce_bytes // setting.span.per_node
            for number in [tape.note(rows, "buffers") for _ in range(2 if setting.both_levels else 1)]:
                tape.drop(number)

    def release_input(self) -> None:
        """FSDP2 keeps a reduction's input until the next one."""
        if self._held:
            self.tape.drop(self._held)
            self._held = 0

    def finish_backward(self) -> None:
        """Reduce what no hook has, and put every unit to rest."""
        for unit in self.units:
            unit.after_backward()
            if unit.prefetched:
                self.tape.drop(unit.prefetched)
                unit.prefetched = 0
        self.release_input()
