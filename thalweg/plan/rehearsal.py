"""A training step in which nothing is computed: the events of one window on one rank.

The model is run on fake tensors, forward and backward, once for each kind of micro-batch
of a window, with what the engine would add: FSDP2's units, their gathers, the reduction
of a unit's gradients as soon as its backward is done, recomputation by the very policy
that the engine applies, and the very optimizer.  What the engine keeps from step to step
(shards, homes, slots) is no event here; ``memory.py`` adds it.

Labels of events: ``activations`` (what operators make), ``gradients`` (unsharded ones),
``gathered`` (parameters), ``buffers`` (communication), ``optimizer`` (state that stays),
``update`` (temporaries of the optimizer), ``logits`` (results as wide as the vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from thalweg.optim import build_optimizer
from thalweg.plan.batch import Batch
from thalweg.plan.setting import Setting
from thalweg.plan.tape import Event, Tape
from thalweg.remat import apply_activation_checkpointing
from thalweg.utils.dtypes import parse_dtype
from thalweg.zero.homes import Slot
from thalweg.zero.units import find_units, with_stragglers


@dataclass
class UnitSize:
    """One unit's parameters on one rank, in bytes."""

    name: str
    gather_bytes: int
    reduce_bytes: int
    sharded_grad_bytes: int
    trains: bool = True
    names: list[str] = field(default_factory=list)


@dataclass
class Rehearsal:
    """What one window does: events of its micro-batches, of the first update and of later ones."""

    window: list[Event]
    first_update: list[Event]
    later_update: list[Event]
    slots: dict[str, Slot]
    units: list[UnitSize]
    reductions: list[str]
    loose_bytes: int
    buffer_bytes: int
    frozen: frozenset[str]
    flops: int
    moved_bytes: int
    num_calls: int


class _AfterBackward(torch.autograd.Function):
    """Identity that calls ``hook`` when the gradients of all its inputs are there (FSDP2 has the same)."""

    @staticmethod
    def forward(ctx: Any, hook: Callable[[], None], *inputs: Tensor) -> Any:  # type: ignore[override]
        ctx.hook = hook
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.hook()
        return None, *grads


class _Unit:
    """One unit of the fake model: gathers before use, reduces after its backward."""

    def __init__(self, stage: _Stage, size: UnitSize, params: list[nn.Parameter]) -> None:
        self.stage, self.size, self.params = stage, size, params
        self.gathered: list[int] = []
        self.prefetched = 0
        self.kept: dict[int, Tensor] = {}

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.gather()
        flat, spec = tree_flatten((args, kwargs))
        low = self.stage.low_dtype if self.size.name not in self.stage.setting.fp32_modules else None
        for index, leaf in enumerate(flat):
            if low is not None and isinstance(leaf, Tensor) and leaf.is_floating_point():
                flat[index] = leaf.to(low)
        inputs = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if inputs and torch.is_grad_enabled():
            wrapped = _AfterBackward.apply(self.after_backward, *(flat[i] for i in inputs))
            for index, leaf in zip(inputs, wrapped, strict=True):
                flat[index] = leaf
        return tree_unflatten(flat, spec)

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.stage.frees and self.size.name:
            self.free()
        for leaf in tree_flatten(output)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad and self.stage.wire:
                leaf.register_hook(self.before_backward)
        return None

    def before_backward(self, grad: Tensor) -> None:
        self.gather()
        self.stage.prefetch_before(self)

    def gather(self) -> None:
        if not self.stage.wire or self.gathered:
            return
        tape = self.stage.tape
        flat = self.prefetched or tape.note(self.size.gather_bytes, "gathered")
        self.prefetched = 0
        self.gathered = [tape.note(p.nbytes, "gathered") for p in self.params]
        tape.drop(flat)

    def prefetch(self) -> None:
        if self.stage.wire and not self.gathered and not self.prefetched:
            self.prefetched = self.stage.tape.note(self.size.gather_bytes, "gathered")

    def free(self) -> None:
        for number in self.gathered:
            self.stage.tape.drop(number)
        self.gathered = []

    def after_backward(self) -> None:
        stage = self.stage
        grads = {id(p): p.grad for p in self.params if p.grad is not None}
        for parameter in self.params:
            if parameter.grad is not None and id(parameter) in self.kept:
                self.kept[id(parameter)] += parameter.grad
                parameter.grad = None
        if not stage.reduces:
            reduce = stage.setting.precision.reduce
            for parameter in self.params:
                if parameter.grad is not None and parameter.grad.dtype != reduce:
                    self.kept[id(parameter)], parameter.grad = parameter.grad.to(reduce), None
        elif grads or self.kept:
            stage.reduce(self)
        if stage.last or stage.setting.policy.frees_parameters:
            self.free()


class _Stage:
    """What the units share: the tape, and what the backward pass at hand does."""

    def __init__(self, tape: Tape, setting: Setting) -> None:
        self.tape, self.setting = tape, setting
        self.wire = setting.placement == "wire"
        self.frees = self.wire and setting.policy.frees_parameters
        compute = setting.precision.compute
        self.low_dtype = compute if compute != torch.float32 else None
        self.units: list[_Unit] = []
        self.last = self.reduces = True
        self.reductions: list[str] = []
        self._held: int = 0

    def begin(self, last: bool) -> None:
        self.last, self.reduces = last, last or self.setting.policy.reduces_each_backward

    def prefetch_before(self, unit: _Unit) -> None:
        index = self.units.index(unit)
        if index > 0 and self.setting.policy.frees_parameters:
            self.units[index - 1].prefetch()

    def reduce(self, unit: _Unit) -> None:
        """FSDP2's reduction: copy the gradients in, free them, keep the input until the next one."""
        tape, ranks = self.tape, self.setting.ranks
        self.reductions.append(unit.size.name)
        self.release_input()
        if self.wire or ranks.world_size == 1:
            self._held = tape.note(unit.size.reduce_bytes, "buffers")
        unit.kept.clear()
        for parameter in unit.params:
            parameter.grad = None
        tape.mark(f"reduce {unit.size.name}")
        if self.wire and ranks.device == "cpu":  # what an all-to-all receives
            tape.drop(tape.note(unit.size.reduce_bytes, "buffers"))

    def release_input(self) -> None:
        """FSDP2 keeps a reduction's input until the next one."""
        if self._held:
            self.tape.drop(self._held)
            self._held = 0

    def finish_backward(self) -> None:
        for unit in self.units:
            unit.after_backward()
            if unit.prefetched:
                self.tape.drop(unit.prefetched)
                unit.prefetched = 0
        self.release_input()


def rehearse(model: nn.Module, batch: Batch, setting: Setting) -> Rehearsal:
    """Run one window of ``model`` (on meta; it is changed) without computing anything.

    Raises:
        ValueError: the model cannot run on shapes alone, as its control flow reads values.
    """
    slots, frozen = (
        slots_of(model, setting),
        frozenset(name for name, p in model.named_parameters() if not p.requires_grad),
    )
    blocks = find_units(model, setting.units)
    units = blocks if setting.placement == "wire" else with_stragglers(model, blocks)
    apply_activation_checkpointing(model, list(blocks.values()), setting.remat)
    tape = Tape()
    stage = _Stage(tape, setting)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        loose, buffers = _fill_with_fakes(model, slots, setting)
        sizes = _wrap(model, units, slots, stage)
        del fake
        with _autocast(setting):
            _run_window(model, batch, stage)
        window = tape.take()
        first, later = _updates(model, slots, setting, tape)
    return Rehearsal(
        window, first, later, slots, sizes, stage.reductions, loose, buffers, frozen,
        tape.flops, tape.moved_bytes, tape.calls,
    )  # fmt: skip


def slots_of(model: nn.Module, setting: Setting) -> dict[str, Slot]:
    """Shape and dtypes of every parameter's shard, by name (as ``zero.shard`` lays them out)."""
    precision, slots = setting.precision, {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            continue
        master = precision.master_of(parameter.dtype, parameter.requires_grad)
        compute = precision.compute_of(master)
        if any(name == key or name.startswith(f"{key}.") for key in setting.fp32_modules):
            compute = master
        slots[name] = Slot(name, parameter.shape, master, compute, setting.num_shards)
    return slots


def shard_bytes(slot: Slot) -> int:
    """Bytes of one rank's padded shard, in the master dtype."""
    return prod(slot.padded_shape) * slot.master.itemsize


def _fill_with_fakes(model: nn.Module, slots: dict[str, Slot], setting: Setting) -> tuple[int, int]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    loose = buffers = 0
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                slot = slots.get(names[id(parameter)])
                dtype = slot.compute if slot else parameter.dtype
                loose += 0 if slot else parameter.nbytes
                value = torch.empty(parameter.shape, dtype=dtype)
                made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            module._parameters[key] = made[id(parameter)]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                cast = setting.precision.buffer if buffer.is_floating_point() else None
                module._buffers[key] = fake = torch.empty(buffer.shape, dtype=cast or buffer.dtype)
                buffers += fake.nbytes
    return loose, buffers


def _wrap(
    model: nn.Module, units: dict[str, nn.Module], slots: dict[str, Slot], stage: _Stage
) -> list[UnitSize]:
    """Hang the units' hooks on the model; the root's unit comes first."""
    by_unit: dict[str, list[tuple[str, nn.Parameter]]] = {
        name: [] for name in ("", *stage.setting.fp32_modules, *units)
    }
    for name, parameter in model.named_parameters():
        owner = _owner(name, stage.setting.fp32_modules, units)
        if name in slots:
            by_unit[owner].append((name, parameter))
    for unit_name, members in by_unit.items():
        if not members:
            continue
        size = _unit_size(unit_name, [slots[name] for name, _ in members], stage.setting)
        size.names, size.trains = [name for name, _ in members], any(p.requires_grad for _, p in members)
        unit = _Unit(stage, size, [p for _, p in members])
        stage.units.append(unit)
        module = model.get_submodule(unit_name)
        module.register_forward_pre_hook(unit.before_forward, with_kwargs=True)
        module.register_forward_hook(unit.after_forward)
    return [unit.size for unit in stage.units]


def _owner(name: str, fp32_modules: tuple[str, ...], units: dict[str, nn.Module]) -> str:
    for candidates in (fp32_modules, units):
        for unit in candidates:
            if name.startswith(f"{unit}."):
                return unit
    return ""


def _unit_size(name: str, slots: list[Slot], setting: Setting) -> UnitSize:
    reduce, master = setting.precision.reduce, setting.precision.master
    shards = setting.num_shards
    return UnitSize(
        name,
        gather_bytes=sum(slot.home_bytes for slot in slots),
        reduce_bytes=sum(slot.padded_numel * reduce.itemsize for slot in slots),
        sharded_grad_bytes=sum(slot.padded_numel // shards * master.itemsize for slot in slots),
    )


def _autocast(setting: Setting) -> AbstractContextManager[Any]:
    if setting.autocast is None:
        return nullcontext()
    return torch.autocast("cpu", dtype=parse_dtype(setting.autocast))


def _run_window(model: nn.Module, batch: Batch, stage: _Stage) -> None:
    tape, setting = stage.tape, stage.setting
    model.train()
    args, kwargs = batch.build()
    tape.know([*model.parameters(), *model.buffers()])
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    tape.wide = vocabulary if isinstance(vocabulary, int) and vocabulary > 1 else None
    # First, middle and last micro-batches differ; two middle ones do not.
    count = min(setting.accumulation, 3)
    with tape:
        for index in range(count):
            stage.begin(index == count - 1)
            tape.mark("forward")
            loss = _loss_of(model(*args, **kwargs))
            tape.mark("backward")
            if setting.accumulation > 1:
                loss = loss / setting.accumulation
            loss.backward()
            del loss
            tape.mark("end of backward")
            stage.finish_backward()


def _loss_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output if output.ndim == 0 else output.float().mean()
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple | list):
        loss = output[0]
    if not isinstance(loss, Tensor):
        loss = next(leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)).float().mean()
    return loss


def _updates(
    model: nn.Module, slots: dict[str, Slot], setting: Setting, tape: Tape
) -> tuple[list[Event], list[Event]]:
    """Events of the first update, which makes the optimizer's state, and of a later one."""
    if setting.optimizer is None:
        return [], []
    trained = [slots[name] for name, p in model.named_parameters() if p.requires_grad and name in slots]
    shards = []
    for slot in trained:
        shape = slot.padded_shape
        shard = nn.Parameter(torch.empty(shape, dtype=slot.master))
        shard.grad = torch.empty(shape, dtype=slot.master)
        shards.append(shard)
    tape.know(shards)
    tape.know([shard.grad for shard in shards if shard.grad is not None])
    optimizer = build_optimizer(setting.optimizer, shards, setting.optimizer_params)
    recorded = []
    for _ in range(2):
        with tape, tape.labelled("update"), torch.no_grad():
            tape.mark("update")
            optimizer.step()
        recorded.append(tape.take())
    tape.take()
    kept = {number for number, _, _ in recorded[0] if number > 0} - {-n for n, _, _ in recorded[0] if n < 0}
    first = [(n, size, "optimizer" if n in kept else label) for n, size, label in recorded[0]]
    return first, recorded[1]
