"""One rank of a job over pipeline, data and tensor axes, on one processor.

As in :mod:`.simulated_rank` the ranks are a process group that moves nothing; the model is cut by the very code
that a job runs, first over tensor ranks, then into stages, then sharded over the data ranks.  So a layout of
a thousand ranks is tried in seconds: does it divide, what does each rank hold, what does it send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.dist.simulated_rank import fake_process_group
from thalweg.config import load, resolve
from thalweg.parallel.comm_group import ParallelGroup
from thalweg.parallel.pipeline.split_model import SplitModelStages, find_blocks, partition_blocks
from thalweg.parallel.tensor.tensor_parallel import apply_tensor_parallel
from thalweg.parallel_dims import DATA_AXIS
from thalweg.zero.options import build_shard_options, get_model_size
from thalweg.zero.shard import ShardedModel, shard_model
from thalweg.zero.tp_layout import TensorParallelLayout


@dataclass(frozen=True)
class MeshShape:
    """Ranks along the axes, the pipeline outermost and the tensor axis innermost."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """Ranks of the job."""
        return self.pipeline * self.data * self.tensor

    def rank_at(self, pp_rank: int, dp_rank: int = 0, tp_rank: int = 0) -> int:
        """The rank at these coordinates."""
        return (pp_rank * self.data + dp_rank) * self.tensor + tp_rank


@dataclass
class MeshRankReport:
    """What one rank has: shapes of its pieces by parameter, bytes held, bytes sent a step by axis (ring
    form)."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    held_bytes: dict[str, int] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)


def simulate_mesh_rank(
    model: nn.Module,
    config: Any,
    batch: Mapping[str, Tensor],
    mesh_shape: MeshShape,
    pp_rank: int,
    dp_rank: int = 0,
    tp_rank: int = 0,
) -> MeshRankReport:
    """Cut ``model`` in place to one rank of ``grid``, and take a step of as many micro-batches as the config
    accumulates, each like ``batch``.

    Raises:
        ValueError: the model does not divide so, or this process is part of a job already.
    """
    if dist.is_initialized():
        raise ValueError("a simulation needs a process of its own: this one is part of a job")
    resolved = resolve(load(config), world_size=mesh_shape.data, model=get_model_size(model))
    block_layout = find_blocks(model, batch)
    stage_bounds = partition_blocks(model, block_layout, mesh_shape.pipeline)
    with fake_process_group(mesh_shape.size, mesh_shape.rank_at(pp_rank, dp_rank, tp_rank)):
        shape = (mesh_shape.pipeline, mesh_shape.data, mesh_shape.tensor)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", DATA_AXIS, "tp"))
        tp_group, states = _apply_tp(model, mesh, mesh_shape, pp_rank) if mesh_shape.tensor > 1 else (None, None)
        staged = SplitModelStages(model, block_layout, stage_bounds, [pp_rank])
        options = build_shard_options(model, resolved)
        sharded = shard_model(model, mesh[DATA_AXIS], options, torch.device("cpu"), states)
        if tp_group is not None:
            tp_group.ledger = sharded.ledger
        pipeline_bytes = _run_window(
            staged, sharded, batch, pp_rank, mesh_shape, int(resolved.gradient_accumulation_steps)
        )
        report = _build_report(model, sharded)
        report.sent_bytes["pipeline"] = pipeline_bytes
        sharded.close()
    return report


def _apply_tp(
    model: nn.Module, mesh: DeviceMesh, mesh_shape: MeshShape, pp_rank: int
) -> tuple[ParallelGroup, TensorParallelLayout]:
    tp_group = ParallelGroup(mesh["tp"].get_group())
    first = mesh_shape.rank_at(pp_rank)
    ranks = (
        torch.arange(first, first + mesh_shape.data * mesh_shape.tensor)
        .view(mesh_shape.data, mesh_shape.tensor)
        .T.contiguous()
    )
    groups = [mesh["tp"].get_group(), mesh[DATA_AXIS].get_group()]
    tp_dp_mesh = DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("tp", DATA_AXIS))
    world = dist.group.WORLD
    assert world is not None
    # Nobody answers, so the cut model's outputs mean nothing and cannot be compared.
    return tp_group, apply_tensor_parallel(model, tp_group, tp_dp_mesh, world, check=False)


def _run_window(
    staged: SplitModelStages,
    sharded: ShardedModel,
    batch: Mapping[str, Tensor],
    pp_rank: int,
    mesh_shape: MeshShape,
    num_micro_batches: int,
) -> int:
    """Forward and backward of a window; returns the bytes that go to neighbouring stages."""
    hidden_shape = _get_hidden_shape(staged.module, batch)
    sent = 0
    for index in range(num_micro_batches):
        sharded.set_backward_flags(last=index == num_micro_batches - 1)
        incoming = torch.zeros(hidden_shape, requires_grad=True) if pp_rank else None
        value = staged.run(pp_rank, incoming, batch)
        if pp_rank + 1 < mesh_shape.pipeline:
            sent += value.nbytes
            value.backward(torch.zeros_like(value))
        else:
            value.backward()
        if incoming is not None:
            assert incoming.grad is not None
            sent += incoming.grad.nbytes
    sharded.finalize_grads()
    return sent


def _get_hidden_shape(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[int, ...]:
    tokens = next(iter(batch.values()))
    hidden = get_model_size(model).hidden_size
    if hidden is None:
        raise ValueError(f"{type(model).__name__} has no config.hidden_size: stages cannot be simulated apart")
    return (*tokens.shape, hidden)


def _build_report(model: nn.Module, sharded: ShardedModel) -> MeshRankReport:
    report, held_bytes = MeshRankReport(), Counter[str]()
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        report.shapes[name] = tuple(local.shape)
        held_bytes["parameters"] += local.nbytes
        if parameter.grad is not None:
            grad = parameter.grad
            held_bytes["gradients"] += (grad.to_local() if isinstance(grad, DTensor) else grad).nbytes
    sent_bytes = Counter[str]()
    for entry in sharded.ledger.entries():
        sent_bytes["tensor" if entry.transport == "tensor" else "data"] += entry.sent_bytes
    report.held_bytes, report.sent_bytes = dict(held_bytes), dict(sent_bytes)
    return report
