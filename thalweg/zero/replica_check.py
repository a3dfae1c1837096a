"""Whether ranks that hold the same parameters still do: a flipped bit, or a program's write, makes them drift apart.

Each rank hashes what it holds (``torch.hash_tensor``, which sees every single bit), 8 bytes a parameter are exchanged
within each group of ranks that should hold the same, and the ranks that differ are named.  Compared are whole
parameters (below stage 3), the copies of shards (MiCS) and what tensor parallelism does not split; there is nothing to
compare a shard with that one rank alone has.  A wrong gradient that was reduced is wrong everywhere, and not seen here.
"""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from thalweg.zero.shard import ShardedModel
from thalweg.zero.whole_parameter import get_shard


class ReplicasDifferError(RuntimeError):
    """Ranks hold other values of the same parameters; the same on all ranks."""


@torch.no_grad()
def check_replicas(sharded: ShardedModel, world_group: dist.ProcessGroup, when: str) -> None:
    """Compare the parameters that several ranks hold alike; ``when``: of what state; collective.

    Raises:
        ReplicasDifferError: they are not the same bits; on every rank of ``world_group``.
    """
    hashes: defaultdict[dist.ProcessGroup, dict[str, Tensor]] = defaultdict(dict)
    for name, param in sharded.module.named_parameters():
        shard, local = get_shard(param), param.to_local() if isinstance(param, DTensor) else param.detach()
        if local.is_complex() or local.itemsize == 1:  # of these torch hashes bytes alone
            local = local.view(torch.uint8)
        for axis, placement in enumerate(shard.placements if isinstance(shard, DTensor) and local.numel() else ()):
            if shard.device_mesh.size(axis) > 1 and (shard is not param or placement.is_replicate()):
                hashes[shard.device_mesh.get_group(axis)][name] = torch.hash_tensor(local)
    differ: list[str] = []
    for group, by_name in hashes.items():
        rows: list[Any] = [None] * group.size()
        own = torch.stack([value.to(sharded.device) for value in by_name.values()])
        dist.all_gather_object(rows, own.tolist(), group=group)
        for name, column in zip(by_name, zip(*rows, strict=True), strict=True):
            ranks_by_value = defaultdict(list)
            for rank, value in zip(dist.get_process_group_ranks(group), column, strict=True):
                ranks_by_value[value].append(rank)
            if len(ranks_by_value) > 1:
                differ.append(f"{name}, ranks {' and '.join(map(str, ranks_by_value.values()))}")
    everywhere: list[Any] = [None] * dist.get_world_size(world_group)
    dist.all_gather_object(everywhere, differ, group=world_group)
    if lines := sorted({line for one in everywhere for line in one}):
        more = f" and {len(lines) - 4} more" if len(lines) > 4 else ""
        raise ReplicasDifferError(
            f"{when}, ranks that should hold the same parameters do not: {'; '.join(lines[:4])}{more}. Memory, a "
            "processor or a link has failed, or a program wrote to them on one rank. Go on from the last checkpoint: "
            "replicas are compared before each is written"
        )
