"""The FSDP2 units of a traced model: what FSDP2's hooks and the engine's do around each, as events.

A unit's parameters come before its forward and go after it, come again before its backward, and its
gradients are reduced behind that.  What comes and goes, and whether by a gather or by a read from disk, the
:class:`FsdpEventSource` knows; ``memory/replay.py`` says what it costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from thalweg.plan.spec.run_spec import RunSpec
from thalweg.plan.trace.alloc_recorder import AllocationRecorder


@dataclass
class UnitInfo:
    """One unit's parameters on one rank, in bytes."""

    name: str
    gather_bytes: int
    reduce_bytes: int
    sharded_grad_bytes: int
    is_trainable: bool
    param_names: list[str]


class PostBackwardFunction(torch.autograd.Function):
    """Identity that calls ``hook`` when the gradients of all its inputs are there (FSDP2 has the same)."""

    @staticmethod
    def forward(ctx: Any, hook: Callable[[], None], *inputs: Tensor) -> Any:  # type: ignore[override]
        ctx.hook = hook
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.hook()
        return None, *grads


class FsdpUnitEvents:
    """One unit of the fake model: gathers before use, reduces after its backward."""

    def __init__(self, source: FsdpEventSource, info: UnitInfo, params: list[nn.Parameter]) -> None:
        self.source, self.info, self.params = source, info, params
        self.gathered_ids: list[int] = []
        self.prefetched_id = self.num_forwards = 0
        self.is_paged_in = False
        self.accumulated_grads: dict[int, Tensor] = {}

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.source.recorder.record_mark(f"enter {self.info.name}")
        self.unshard(is_forward=True)
        flat, spec = tree_flatten((args, kwargs))
        cast_dtype = self.source.cast_dtype if self.info.name not in self.source.run_spec.fp32_modules else None
        for index, leaf in enumerate(flat):
            if cast_dtype is not None and isinstance(leaf, Tensor) and leaf.is_floating_point():
                flat[index] = leaf.to(cast_dtype)
        inputs = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if inputs and torch.is_grad_enabled():
            wrapped = PostBackwardFunction.apply(self.post_backward, *(flat[i] for i in inputs))
            for index, leaf in zip(inputs, wrapped, strict=True):
                flat[index] = leaf
        return tree_unflatten(flat, spec)

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.source.reshards_after_forward and self.info.name:
            self.reshard()
        if not self.info.name:
            self.source.keep_gather_output(0)
        self.num_forwards += 1
        needs_unshard = self.source.uses_collectives or self.is_paged
        for leaf in tree_flatten(output)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad and needs_unshard:
                leaf.register_hook(self.pre_backward)

    @property
    def is_paged(self) -> bool:
        return self.info.name in self.source.paged_units

    def pre_backward(self, grad: Tensor) -> None:
        self.unshard()
        # FSDP2 looks ahead once a forward pass.  The gradient of a second output (what an encoder gives beside the
        # logits) comes when the unit before has long been used: gathered again, it would stay until the pass ends.
        if self.num_forwards:
            self.num_forwards -= 1
            self.source.prefetch_previous(self)

    def unshard(self, is_forward: bool = False) -> None:
        source, recorder = self.source, self.source.recorder
        if self.is_paged_in or self.gathered_ids:
            return
        if self.is_paged:
            recorder.record_mark(f"open {self.info.name}")
            self.is_paged_in = True
        if not source.uses_collectives:
            return
        if source.run_spec.is_hierarchical:  # what is gathered lies in the host's shared memory
            recorder.record_mark(f"gather {self.info.name}")
            flat_id = 0
        else:
            flat_id = self.prefetched_id or recorder.record_alloc(self.info.gather_bytes, "gathered")
        self.prefetched_id = 0
        self.gathered_ids = [recorder.record_alloc(p.nbytes, "gathered") for p in self.params]
        if is_forward and source.run_spec.shard_topology.world_size > 1:
            source.keep_gather_output(flat_id)
        elif flat_id:
            recorder.record_free(flat_id)
        self.close_page()  # FSDP2 has its own copy now

    def prefetch(self) -> None:
        source = self.source
        if self.gathered_ids:
            return
        if self.is_paged and not self.is_paged_in:
            source.recorder.record_mark(f"prefetch {self.info.name}")
        elif source.uses_collectives and not source.run_spec.is_hierarchical and not self.prefetched_id:
            self.prefetched_id = source.recorder.record_alloc(self.info.gather_bytes, "gathered")

    def reshard(self) -> None:
        for storage_id in self.gathered_ids:
            self.source.recorder.record_free(storage_id)
        self.gathered_ids = []
        self.close_page()

    def close_page(self) -> None:
        if self.is_paged_in:
            self.source.recorder.record_mark(f"close {self.info.name}")
            self.is_paged_in = False

    def post_backward(self) -> None:
        source = self.source
        grads = {id(p): p.grad for p in self.params if p.grad is not None}
        for parameter in self.params:
            if parameter.grad is not None and id(parameter) in self.accumulated_grads:
                self.accumulated_grads[id(parameter)] += parameter.grad
                parameter.grad = None
        if not source.reduces_grads:
            source.recorder.record_mark(f"accumulated {self.info.name}")
            reduce = source.run_spec.precision.reduce_dtype
            for parameter in self.params:
                if parameter.grad is not None and parameter.grad.dtype != reduce:
                    self.accumulated_grads[id(parameter)], parameter.grad = parameter.grad.to(reduce), None
        elif grads or self.accumulated_grads:
            source.reduce_grads(self)
        if source.is_last_micro_batch or source.run_spec.policy.reshards_after_use:
            self.reshard()


class FsdpEventSource:
    """What the units share: the recorder, and what the backward pass at hand does.

    ``paged_units``: names of the units whose parameters come from a disk.
    """

    def __init__(self, recorder: AllocationRecorder, run_spec: RunSpec) -> None:
        self.recorder, self.run_spec = recorder, run_spec
        self.uses_collectives = run_spec.storage_kind == "wire"
        self.paged_units: frozenset[str] = frozenset()
        has_whole_params = not self.uses_collectives and run_spec.zero.offload_param.device != "nvme"
        self.reshards_after_forward = run_spec.policy.reshards_after_use and not has_whole_params
        compute = run_spec.precision.compute_dtype
        self.cast_dtype = compute if compute != torch.float32 else None
        self.units: list[FsdpUnitEvents] = []
        self.is_last_micro_batch = self.reduces_grads = True
        self._reduce_input_id = self._gather_output_id = 0

    def begin_micro_batch(self, is_last: bool) -> None:
        """One micro-batch, the last of its window or not."""
        self.is_last_micro_batch = is_last
        self.reduces_grads = is_last or self.run_spec.policy.reduces_each_backward

    def prefetch_previous(self, unit: FsdpUnitEvents) -> None:
        """FSDP2 gathers the unit whose backward pass is next while this one's is computed: the root's forward pass ends
        last, and before it the last unit's."""
        index = self.units.index(unit)
        if (index > 0 or not unit.info.name) and self.run_spec.policy.reshards_after_use:
            self.units[index - 1].prefetch()

    def keep_gather_output(self, storage_id: int) -> None:
        """In the forward pass FSDP2 keeps what a unit was gathered into until the next one has been copied out."""
        if self._gather_output_id:
            self.recorder.record_free(self._gather_output_id)
        self._gather_output_id = storage_id

    def reduce_grads(self, unit: FsdpUnitEvents) -> None:
        """FSDP2's reduction: copy the gradients in, free them, keep the input until the next one."""
        recorder, run_spec, info = self.recorder, self.run_spec, unit.info
        self.release_reduce_input()
        mark = f"{'last' if self.is_last_micro_batch else 'reduce'} {info.name}"
        if run_spec.reduces_in_place:
            recorder.record_mark(mark)
        elif run_spec.states_on_host or not (run_spec.uses_shared_memory or run_spec.grads_leave_early):
            self._reduce_input_id = recorder.record_alloc(info.reduce_bytes, "buffers")
        unit.accumulated_grads.clear()
        for parameter in unit.params:
            parameter.grad = None
        if not run_spec.reduces_in_place:
            recorder.record_mark(mark)
        if run_spec.on_cpu and run_spec.shard_topology.num_nodes > 1:  # partial sums to and from other hosts
            rows = info.reduce_bytes // run_spec.shard_topology.ranks_per_node
            for number in [recorder.record_alloc(rows, "buffers") for _ in range(2 if run_spec.is_hierarchical else 1)]:
                recorder.record_free(number)

    def release_reduce_input(self) -> None:
        """FSDP2 keeps a reduction's input until the next one."""
        if self._reduce_input_id:
            self.recorder.record_free(self._reduce_input_id)
            self._reduce_input_id = 0

    def finish_backward(self) -> None:
        """Reduce what no hook has, and put every unit to rest."""
        for unit in self.units:
            unit.post_backward()
            if unit.prefetched_id:
                self.recorder.record_free(unit.prefetched_id)
            unit.prefetched_id = unit.num_forwards = 0
        self.release_reduce_input()
