"""A training step in which nothing is computed: the events of one window on one rank.

The model is run on fake tensors, forward and backward, once for each kind of micro-batch
of a window, with what the engine would add: FSDP2's units, their gathers, the reduction
of a unit's gradients as soon as its backward is done, recomputation by the very policy
that the engine applies, and the very optimizer.  What the engine keeps from step to step
(shards, unsharded buffers, reduction slots) is no event here; ``memory/replay.py`` adds it.

Labels of events: ``activations`` (what operators make), ``gradients`` (unsharded ones),
``gathered`` (parameters), ``buffers`` (communication), ``optimizer`` (state that stays),
``update`` (temporaries of the optimizer), ``logits`` (results as wide as the vocabulary).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge

from thalweg.activation_checkpointing import apply_activation_checkpointing
from thalweg.comm import CommsLog
from thalweg.nn.losses.lazy_logits import LossTiling
from thalweg.nn.losses.tiled_cross_entropy import tile_rows
from thalweg.nn.tiled_mlp import apply_tiling
from thalweg.optim.build import build_optimizer
from thalweg.plan.inputs.input_spec import InputSpec, TensorSpec
from thalweg.plan.spec.run_spec import RunSpec
from thalweg.plan.trace.alloc_recorder import AllocationRecorder, OffloadRecorder, TraceEvent
from thalweg.plan.trace.fake_groups import apply_fake_sp, apply_fake_tp
from thalweg.plan.trace.fsdp_events import FsdpEventSource, FsdpUnitEvents, UnitInfo
from thalweg.plan.trace.gpu_kernels import GpuKernelMode
from thalweg.utils.dtypes import parse_dtype
from thalweg.utils.trees import first_positive_int, get_loss, iter_tensors
from thalweg.zero.policy import ZeroPolicy
from thalweg.zero.shard import make_param_specs
from thalweg.zero.storage.base import ParamSpec
from thalweg.zero.storage.nvme import select_paged_units
from thalweg.zero.units import find_units, with_large_leaves

MAX_TRACED_MICRO_BATCHES = 3  # of a window: its first, middle and last micro-batches differ, two middle ones do not


@dataclass
class StepTrace:
    """What one window does: events of its micro-batches, of the first update and of later ones."""

    window_events: list[TraceEvent]
    first_update_events: list[TraceEvent]
    later_update_events: list[TraceEvent]
    param_specs: dict[str, ParamSpec]
    units: list[UnitInfo]
    whole_bytes: int  # of parameters without a shape, and of buffers: every rank has all of them
    paged_units: frozenset[str]
    state_dtypes: list[torch.dtype]
    flops: int
    accessed_bytes: int
    num_ops: int
    comm_ledger: CommsLog
    peak_offloaded_bytes: int = 0
    offloaded_bytes: int = 0


def trace_step(
    model: nn.Module, input_spec: InputSpec | None, run_spec: RunSpec, cpu_budget_s: float | None = None
) -> StepTrace:
    """Run one window of ``model`` (on meta; it is changed) without computing anything.

    Without an ``input_spec`` only what does not depend on one: no activations.  ``cpu_budget_s``: seconds of
    processor time that the model may take for it.

    Raises:
        ValueError: the model cannot run on shapes alone, as its control flow reads values, or takes longer.
    """
    ledger = CommsLog()
    apply_fake_tp(model, run_spec.tp_size, ledger, run_spec.tp_partition)
    param_specs = build_param_specs(model, run_spec)
    recorder = AllocationRecorder()
    recorder.cpu_deadline = None if cpu_budget_s is None else time.thread_time() + cpu_budget_s
    recorder.linear_kernels = run_spec.linear_kernels if run_spec.on_cpu else "torch"
    blocks = find_units(model, run_spec.unit_policy)
    apply_fake_sp(model, run_spec.sp_size, list(blocks.values()), ledger)
    stragglers_in_root = run_spec.storage_kind == "wire" or run_spec.zero.offload_param.device == "nvme"
    units = blocks if stragglers_in_root else with_large_leaves(model, blocks)
    to_host = run_spec.activation_offload == "cpu" and not run_spec.on_cpu  # from a GPU
    offloads = run_spec.activation_offload == "nvme" or to_host
    offload_recorder = OffloadRecorder(recorder) if offloads else None
    apply_activation_checkpointing(model, list(blocks.values()), run_spec.activation_checkpointing, offload_recorder)
    tiling = _apply_tiling(model, run_spec)
    source = FsdpEventSource(recorder, run_spec)
    with FakeTensorMode(allow_non_fake_inputs=True):
        whole_bytes = _replace_with_fakes(model, param_specs, run_spec)
        sizes = _install_unit_hooks(model, units, param_specs, source)
        if tiling is not None:
            tiling.trust_current_hooks()
        dtype = None if run_spec.autocast_dtype is None else parse_dtype(run_spec.autocast_dtype)
        autocast = nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)
        with autocast, nullcontext() if run_spec.on_cpu else GpuKernelMode():
            if input_spec is None:  # reductions alone
                names = [f"last {unit.name}" for unit in sizes if unit.is_trainable]
                for name in ("forward", "backward", *names):
                    recorder.record_mark(name)
            else:
                with _explain_model_errors(model, input_spec):
                    _run_window(model, input_spec, source)
        window_events = recorder.pop_events()
        first, later, state = _trace_updates(param_specs, run_spec, recorder)
    return StepTrace(
        window_events=window_events,
        first_update_events=first,
        later_update_events=later,
        param_specs=param_specs,
        units=sizes,
        whole_bytes=whole_bytes,
        paged_units=source.paged_units,
        state_dtypes=state,
        flops=recorder.flops,
        accessed_bytes=recorder.accessed_bytes,
        num_ops=recorder.num_ops,
        comm_ledger=ledger,
        peak_offloaded_bytes=offload_recorder.peak_offloaded_bytes if offload_recorder else 0,
        offloaded_bytes=offload_recorder.offloaded_bytes if offload_recorder else 0,
    )


def drop_untraced_choices(run_spec: RunSpec) -> RunSpec:
    """``run_spec`` with one value for each choice that a trace cannot tell apart, so that it is a key of traces.

    Stages 1 and 2 differ in which backward passes of a window reduce gradients; a window of one micro-batch has one.
    """
    if run_spec.policy.stage != 2 or run_spec.accumulation_steps > 1:
        return run_spec
    return replace(run_spec, policy=ZeroPolicy(1), zero=run_spec.zero.model_copy(update={"stage": 1}))


def build_param_specs(model: nn.Module, run_spec: RunSpec) -> dict[str, ParamSpec]:
    """Shape and dtypes of every parameter's shard, by name (as ``zero.shard`` lays them out)."""
    named_params = dict(model.named_parameters())
    return make_param_specs(named_params, run_spec.precision, run_spec.fp32_modules, run_spec.num_shards)


def shard_bytes(param_spec: ParamSpec) -> int:
    """Bytes of one rank's padded shard, in the master dtype."""
    return param_spec.shard_numel * param_spec.master_dtype.itemsize


def resident_params(param_specs: dict[str, ParamSpec], model: nn.Module, run_spec: RunSpec) -> dict[str, ParamSpec]:
    """Those of ``param_specs`` that are not read from a disk when they are used."""
    if run_spec.zero.offload_param.device != "nvme":
        return param_specs
    units = find_units(model, run_spec.unit_policy)
    members: dict[str, list[ParamSpec]] = {}
    for name, param_spec in param_specs.items():
        members.setdefault(_find_unit(name, run_spec.fp32_modules, units), []).append(param_spec)
    paged = select_paged_units(members, run_spec.zero.offload_param, run_spec.fp32_modules)
    paged_names = {param_spec.name for unit in paged for param_spec in members[unit]}
    return {name: param_spec for name, param_spec in param_specs.items() if name not in paged_names}


def _replace_with_fakes(model: nn.Module, param_specs: dict[str, ParamSpec], run_spec: RunSpec) -> int:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    fakes: dict[int, nn.Parameter] = {}
    whole_bytes = 0
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in fakes:
                param_spec = param_specs.get(names[id(parameter)])
                dtype = param_spec.compute_dtype if param_spec else parameter.dtype
                whole_bytes += 0 if param_spec else parameter.nbytes
                value = torch.empty(parameter.shape, dtype=dtype)
                fakes[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            module._parameters[key] = fakes[id(parameter)]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                cast = run_spec.precision.buffer_dtype if buffer.is_floating_point() else None
                module._buffers[key] = fake = torch.empty(buffer.shape, dtype=cast or buffer.dtype)
                whole_bytes += fake.nbytes
    return whole_bytes


def _install_unit_hooks(
    model: nn.Module, units: dict[str, nn.Module], param_specs: dict[str, ParamSpec], source: FsdpEventSource
) -> list[UnitInfo]:
    """Hang the units' hooks on the model; the root's unit comes first."""
    precision = source.run_spec.precision
    unit_names = ("", *source.run_spec.fp32_modules, *units)
    by_unit: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in unit_names}
    for name, parameter in model.named_parameters():
        unit_of_param = _find_unit(name, source.run_spec.fp32_modules, units)
        if name in param_specs:
            by_unit[unit_of_param].append((name, parameter))
    by_unit = {name: members for name, members in by_unit.items() if members}
    if source.run_spec.zero.offload_param.device == "nvme":
        specs_by_unit = {name: [param_specs[key] for key, _ in members] for name, members in by_unit.items()}
        paged = select_paged_units(specs_by_unit, source.run_spec.zero.offload_param, source.run_spec.fp32_modules)
        source.paged_units = frozenset(paged)
    for unit_name, members in by_unit.items():
        specs = [param_specs[name] for name, _ in members]
        trained = [spec for spec in specs if spec.requires_grad]
        info = UnitInfo(
            unit_name,
            gather_bytes=sum(spec.unsharded_bytes for spec in specs),
            reduce_bytes=sum(spec.padded_numel for spec in trained) * precision.reduce_dtype.itemsize,
            sharded_grad_bytes=sum(spec.shard_numel for spec in trained) * precision.master_dtype.itemsize,
            is_trainable=bool(trained),
            param_names=[name for name, _ in members],
        )
        unit = FsdpUnitEvents(source, info, [p for _, p in members])
        source.units.append(unit)
        module = model.get_submodule(unit_name)
        module.register_forward_pre_hook(unit.pre_forward, with_kwargs=True)
        module.register_forward_hook(unit.post_forward)
    return [unit.info for unit in source.units]


def _find_unit(name: str, fp32_modules: tuple[str, ...], units: dict[str, nn.Module]) -> str:
    return next((unit for unit in (*fp32_modules, *units) if name.startswith(f"{unit}.")), "")


def _apply_tiling(model: nn.Module, run_spec: RunSpec) -> LossTiling | None:
    section = run_spec.tiling
    size = first_positive_int(getattr(model, "config", None), "vocab_size")
    if size is not None and not run_spec.on_cpu and section.loss_tokens is None:  # the fakes say that they are on a CPU
        section = section.model_copy(update={"loss_tokens": tile_rows(1 << 40, size, "cuda")})
    return apply_tiling(model, section)


def _run_window(model: nn.Module, input_spec: InputSpec, source: FsdpEventSource) -> None:
    recorder, run_spec = source.recorder, source.run_spec
    model.train()
    args, kwargs = input_spec.make_empty()
    recorder.ignore([*model.parameters(), *model.buffers()])
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
    recorder.vocab_size = vocab_size if isinstance(vocab_size, int) and vocab_size > 1 else None
    num_micro_batches = min(run_spec.accumulation_steps, MAX_TRACED_MICRO_BATCHES)
    with recorder:
        for index in range(num_micro_batches):
            source.begin_micro_batch(index == num_micro_batches - 1)
            recorder.record_mark("forward")
            loss = scalar_loss(model(*args, **kwargs))
            recorder.record_mark("backward")
            if run_spec.accumulation_steps > 1:
                loss = loss / run_spec.accumulation_steps
            # Not loss.backward(), which a mode of functions handles and is off within: what runs again must see it too.
            torch.autograd.backward(get_gradient_edge(loss), torch.ones_like(loss))
            del loss
            recorder.record_mark("end of backward")
            source.finish_backward()


@contextmanager
def _explain_model_errors(model: nn.Module, input_spec: InputSpec) -> Iterator[None]:
    """Whatever a model makes of inputs without values is an error that names them."""
    try:
        yield
    except Exception as error:
        specs_by_name = {**{str(index): one for index, one in enumerate(input_spec.args)}, **input_spec.kwargs}
        inputs = ", ".join(
            f"{key} {list(one.shape)} {str(one.dtype).removeprefix('torch.')}"
            for key, one in specs_by_name.items()
            if isinstance(one, TensorSpec)
        )
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(
            f"{type(model).__name__} cannot run under fake tensors with {inputs} ({why}): pass batch=, one "
            "micro-batch of tensors as the model takes them; a model that branches on values cannot be planned"
        ) from error


def scalar_loss(output: Any) -> Tensor:
    """The loss of what a model returns, or a number that stands for it."""
    try:
        loss = get_loss(output)
    except ValueError:
        loss = next(iter_tensors(output))
    return loss if loss.ndim == 0 else loss.float().mean()


def _trace_updates(
    param_specs: dict[str, ParamSpec], run_spec: RunSpec, recorder: AllocationRecorder
) -> tuple[list[TraceEvent], list[TraceEvent], list[torch.dtype]]:
    """Events of the first update, which makes the optimizer's state, and of a later one; dtypes of state."""
    if run_spec.optimizer is None:
        return [], [], []
    shards = []
    for param_spec in (spec for spec in param_specs.values() if spec.requires_grad):
        shape = param_spec.padded_shape
        shard = nn.Parameter(torch.empty(shape, dtype=param_spec.master_dtype))
        shard.grad = torch.empty(shape, dtype=param_spec.master_dtype)
        shards.append(shard)
    recorder.ignore(shards)
    recorder.ignore([shard.grad for shard in shards if shard.grad is not None])
    recorder.label = "update"
    with recorder, torch.no_grad():  # some make their state at once
        optimizer = build_optimizer(run_spec.optimizer, shards, run_spec.optimizer_params)
    creation_events = recorder.pop_events()
    recorded, site_state = [], []
    # Where sites began, and the outer momentum; or what compressed gradients have left out.
    copies = 2 if run_spec.outer_optimizer is not None else int(run_spec.gradient_compression is not None)
    for _ in range(2):
        with recorder, torch.no_grad():
            recorder.record_mark("update")
            optimizer.step()
            site_state = site_state or [torch.empty_like(shard, dtype=torch.float32) for shard in shards * copies]
        recorded.append(recorder.pop_events())
    recorded[0][:0] = creation_events
    persistent_ids = {number for number, _, _ in recorded[0] if number > 0} - {-n for n, _, _ in recorded[0] if n < 0}
    first = [(n, size, "optimizer" if n in persistent_ids else label) for n, size, label in recorded[0]]
    return first, recorded[1], _state_dtypes(optimizer)


def _state_dtypes(optimizer: torch.optim.Optimizer) -> list[torch.dtype]:
    """Dtypes of the state that has an element for each of the parameter's."""
    for parameter, state in optimizer.state.items():
        values = (value for value in state.values() if isinstance(value, Tensor))
        return [v.dtype for v in values if v.ndim and v.shape == parameter.shape]
    return []
