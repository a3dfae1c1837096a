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

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten

from thalweg.comm import Ledger
from thalweg.nn.deferred import LossTiling
from thalweg.nn.tiled_loss import tile_rows
from thalweg.nn.tiling import tile_model
from thalweg.optim import build_optimizer
from thalweg.plan.attention import FusedAttention
from thalweg.plan.batch import Batch, Field
from thalweg.plan.putaway import EventSaver
from thalweg.plan.setting import Setting
from thalweg.plan.stage import Stage, Unit, UnitSize
from thalweg.plan.tape import Event, Tape
from thalweg.plan.teams import split_layers, split_sequences
from thalweg.remat import apply_activation_checkpointing
from thalweg.utils.dtypes import parse_dtype
from thalweg.zero.homes import Slot
from thalweg.zero.offload import choose_paged
from thalweg.zero.units import find_units, with_stragglers

MICROS_TRACED = 3  # of a window: its first, middle and last micro-batches differ, two middle ones do not


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
    paged: frozenset[str]
    state_dtypes: list[torch.dtype]
    flops: int
    moved_bytes: int
    num_calls: int
    sent: Ledger
    away_bytes: int = 0
    put_away_bytes: int = 0


def rehearse(
    model: nn.Module, batch: Batch | None, setting: Setting, seconds: float | None = None
) -> Rehearsal:
    """Run one window of ``model`` (on meta; it is changed) without computing anything.

    Without a ``batch`` only what does not depend on one: no activations.  ``seconds``: of processor time that
    the model may take for it.

    Raises:
        ValueError: the model cannot run on shapes alone, as its control flow reads values, or takes longer.
    """
    sent = Ledger()
    split_layers(model, setting.tensor, sent)
    slots, frozen = (
        slots_of(model, setting),
        frozenset(name for name, p in model.named_parameters() if not p.requires_grad),
    )
    tape = Tape()
    tape.deadline = None if seconds is None else time.thread_time() + seconds
    tape.kernels = setting.linear_kernels if setting.on_cpu else "torch"
    blocks = find_units(model, setting.units)
    split_sequences(model, setting.sequence, list(blocks.values()), sent)
    together = setting.placement == "wire" or setting.offload.pages
    units = blocks if together else with_stragglers(model, blocks)
    saver = EventSaver(tape) if setting.inputs_on == "nvme" or _leave_device(setting) else None
    apply_activation_checkpointing(model, list(blocks.values()), setting.remat, saver)
    tiling = _tile(model, setting)
    stage = Stage(tape, setting)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        loose, buffers = _fill_with_fakes(model, slots, setting)
        sizes = _wrap(model, units, slots, stage)
        if tiling is not None:
            tiling.settle()
        del fake
        with _autocast(setting), _attention(setting):
            if batch is None:
                _reduce_all(stage)
            else:
                with _errors_of_the_model(model, batch):
                    _run_window(model, batch, stage)
        window = tape.take()
        first, later, state = _updates(model, slots, setting, tape)
    return Rehearsal(
        window, first, later, slots, sizes, stage.reductions, loose, buffers, frozen, stage.paged, state,
        tape.flops, tape.moved_bytes, tape.calls,
        sent, saver.most_away if saver else 0, saver.put_away if saver else 0,
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
        slots[name] = Slot(
            name, parameter.shape, master, compute, setting.num_shards, parameter.requires_grad
        )
    return slots


def shard_bytes(slot: Slot) -> int:
    """Bytes of one rank's padded shard, in the master dtype."""
    return prod(slot.padded_shape) * slot.master.itemsize


def in_memory(slots: dict[str, Slot], model: nn.Module, setting: Setting) -> dict[str, Slot]:
    """Those of ``slots`` that are not read from a disk when they are used."""
    if not setting.offload.pages:
        return slots
    units = find_units(model, setting.units)
    members: dict[str, list[Slot]] = {}
    for name, slot in slots.items():
        members.setdefault(_owner(name, setting.fp32_modules, units), []).append(slot)
    paged = choose_paged(members, setting.offload, setting.fp32_modules)
    gone = {slot.name for unit in paged for slot in members[unit]}
    return {name: slot for name, slot in slots.items() if name not in gone}


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
    model: nn.Module, units: dict[str, nn.Module], slots: dict[str, Slot], stage: Stage
) -> list[UnitSize]:
    """Hang the units' hooks on the model; the root's unit comes first."""
    by_unit: dict[str, list[tuple[str, nn.Parameter]]] = {
        name: [] for name in ("", *stage.setting.fp32_modules, *units)
    }
    for name, parameter in model.named_parameters():
        owner = _owner(name, stage.setting.fp32_modules, units)
        if name in slots:
            by_unit[owner].append((name, parameter))
    by_unit = {name: members for name, members in by_unit.items() if members}
    if stage.setting.offload.pages:
        laid_out = {name: [slots[key] for key, _ in members] for name, members in by_unit.items()}
        paged = choose_paged(laid_out, stage.setting.offload, stage.setting.fp32_modules)
        stage.paged = frozenset(paged)
    for unit_name, members in by_unit.items():
        size = _unit_size(unit_name, [slots[name] for name, _ in members], stage.setting)
        size.names, size.trains = [name for name, _ in members], any(p.requires_grad for _, p in members)
        unit = Unit(stage, size, [p for _, p in members])
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
        reduce_bytes=sum(slot.padded_numel * reduce.itemsize for slot in slots if slot.trains),
        sharded_grad_bytes=sum(
            slot.padded_numel // shards * master.itemsize for slot in slots if slot.trains
        ),
    )


def _tile(model: nn.Module, setting: Setting) -> LossTiling | None:
    section = setting.tiling
    if not setting.on_cpu and section.loss_tokens is None:  # the fakes say that they are on a CPU
        size = getattr(getattr(model, "config", None), "vocab_size", None)
        if isinstance(size, int) and size > 0:
            section = section.model_copy(update={"loss_tokens": tile_rows(1 << 40, size, "cuda")})
    return tile_model(model, section)


def _leave_device(setting: Setting) -> bool:
    """Whether inputs of checkpointed units go from a GPU to the host."""
    return setting.inputs_on == "cpu" and not setting.on_cpu


def _autocast(setting: Setting) -> AbstractContextManager[Any]:
    if setting.autocast is None:
        return nullcontext()
    return torch.autocast("cpu", dtype=parse_dtype(setting.autocast))


def _attention(setting: Setting) -> AbstractContextManager[Any]:
    """A GPU's, where blocks keep what it saves: what runs again in the backward pass is outside of modes."""
    return FusedAttention() if not setting.on_cpu and setting.remat.policy == "none" else nullcontext()


def _run_window(model: nn.Module, batch: Batch, stage: Stage) -> None:
    tape, setting = stage.tape, stage.setting
    model.train()
    args, kwargs = batch.build()
    tape.know([*model.parameters(), *model.buffers()])
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    tape.wide = vocabulary if isinstance(vocabulary, int) and vocabulary > 1 else None
    count = min(setting.accumulation, MICROS_TRACED)
    with tape:
        for index in range(count):
            stage.begin(index == count - 1)
            tape.mark("forward")
            loss = loss_of(model(*args, **kwargs))
            tape.mark("backward")
            if setting.accumulation > 1:
                loss = loss / setting.accumulation
            loss.backward()
            del loss
            tape.mark("end of backward")
            stage.finish_backward()


@contextmanager
def _errors_of_the_model(model: nn.Module, batch: Batch) -> Iterator[None]:
    """Whatever a model makes of inputs without values is an error that names them."""
    try:
        yield
    except Exception as error:
        given = {**{str(index): one for index, one in enumerate(batch.args)}, **batch.kwargs}
        inputs = ", ".join(
            f"{key} {list(one.shape)} {str(one.dtype).removeprefix('torch.')}"
            for key, one in given.items()
            if isinstance(one, Field)
        )
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(
            f"{type(model).__name__} does not run on shapes alone with {inputs} ({why}): give batch=, one "
            "micro-batch of tensors as it takes them; what looks at values to decide cannot be planned"
        ) from error


def _reduce_all(stage: Stage) -> None:
    for name in ("forward", "backward", *(f"last {u.size.name}" for u in stage.units if u.size.trains)):
        stage.tape.mark(name)


def loss_of(output: Any) -> Tensor:
    """The loss of what a model returns, or a number that stands for it."""
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
) -> tuple[list[Event], list[Event], list[torch.dtype]]:
    """Events of the first update, which makes the optimizer's state, and of a later one; dtypes of state."""
    if setting.optimizer is None:
        return [], [], []
    trained = [slots[name] for name, p in model.named_parameters() if p.requires_grad and name in slots]
    shards = []
    for slot in trained:
        shape = slot.padded_shape
        shard = nn.Parameter(torch.empty(shape, dtype=slot.master))
        shard.grad = torch.empty(shape, dtype=slot.master)
        shards.append(shard)
    tape.know(shards)
    tape.know([shard.grad for shard in shards if shard.grad is not None])
    with tape, tape.labelled("update"), torch.no_grad():  # some make their state at once
        optimizer = build_optimizer(setting.optimizer, shards, setting.optimizer_params)
    born = tape.take()
    recorded = []
    for _ in range(2):
        with tape, tape.labelled("update"), torch.no_grad():
            tape.mark("update")
            optimizer.step()
        recorded.append(tape.take())
    tape.take()
    recorded[0][:0] = born
    kept = {number for number, _, _ in recorded[0] if number > 0} - {-n for n, _, _ in recorded[0] if n < 0}
    first = [(n, size, "optimizer" if n in kept else label) for n, size, label in recorded[0]]
    return first, recorded[1], _state_dtypes(optimizer)


def _state_dtypes(optimizer: torch.optim.Optimizer) -> list[torch.dtype]:
    """Dtypes of the state that has an element for each of the parameter's."""
    for parameter, state in optimizer.state.items():
        values = (value for value in state.values() if isinstance(value, Tensor))
        return [v.dtype for v in values if v.ndim and v.shape == parameter.shape]
    return []
