"""A job of many ranks on one processor: the real sharding over a process group that moves nothing.

torch's fake process group answers every collective at once and leaves its buffers as they
are.  Over it the model is sharded by the very code that a job runs, as one rank of
``world_size``, and takes one step; the values are meaningless, the shapes of the shards
and the bytes in the ledger are those of that rank.  It holds what one such rank holds, so
a model has to fit here, not on every rank.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from thalweg.config import load, resolve
from thalweg.parallel_dims import DATA_AXIS
from thalweg.zero.options import build_shard_options, get_model_size
from thalweg.zero.shard import shard_model
from thalweg.zero.whole_parameter import named_shards


@dataclass
class SimulatedRank:
    """What one rank holds and sends in a step: shapes by parameter, bytes by collective (ring form)."""

    shard_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    traffic: dict[str, int] = field(default_factory=dict)
    num_calls: int = 0


def simulate_rank(
    model: nn.Module, config: Any, batch: dict[str, Tensor], world_size: int, rank: int = 0
) -> SimulatedRank:
    """Shard ``model`` in place as ``rank`` of ``world_size`` single-rank hosts; run one window's passes.

    Raises:
        ValueError: this process is part of a job already, or the config is wrong.
    """
    if dist.is_initialized():
        raise ValueError("a simulation needs a process of its own: this one is part of a job")
    resolved = resolve(load(config), world_size=world_size, model=get_model_size(model))
    with fake_process_group(world_size, rank):
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=(DATA_AXIS,))
        sharded = shard_model(model, mesh, build_shard_options(model, resolved), torch.device("cpu"))
        steps = int(resolved.gradient_accumulation_steps)
        for index in range(steps):
            sharded.set_backward_flags(last=index == steps - 1)
            output = model(**batch)
            loss = output if isinstance(output, Tensor) else output.loss
            loss.backward()
        sharded.finalize_grads()
        sharded.publish_params()
        report = SimulatedRank()
        for name, parameter in named_shards(model):
            if isinstance(parameter, DTensor):
                report.shard_shapes[name] = tuple(parameter.to_local().shape)
        kinds = ("all_gather", "reduce_scatter", "all_reduce")
        totals = {kind: sharded.ledger.total(kind) for kind in kinds}
        report.traffic = {kind: entry.sent_bytes for kind, entry in totals.items() if entry.num_calls}
        report.num_calls = sum(entry.num_calls for entry in totals.values())
        sharded.close()
    return report


@contextmanager
def fake_process_group(world_size: int, rank: int) -> Iterator[None]:
    """A process group of ``world_size`` ranks without peers, and no shared memory to look for them in."""
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    previous = os.environ.get("THALWEG_SHARED_MEMORY")
    os.environ["THALWEG_SHARED_MEMORY"] = "0"
    dist.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        if previous is None:
            del os.environ["THALWEG_SHARED_MEMORY"]
        else:
            os.environ["THALWEG_SHARED_MEMORY"] = previous
