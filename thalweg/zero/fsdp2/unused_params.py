"""Units whose parameters do not all have a gradient on every rank: layers that call some experts only.

FSDP2 reduces those of a unit's parameters that have a gradient on this rank, as one buffer.  Where
ranks chose different experts their buffers would hold different parameters, and sums of different
things, silently so where the sizes match.  Here ranks first say which parameters have one; whoever
lacks one that another has adds zeros.  A parameter that none has keeps no gradient, as in a plain run,
so that the optimizer leaves it alone.  The price is one all-reduce of a byte a parameter a unit.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from thalweg.parallel_dims import control_group
from thalweg.zero.fsdp2.private_api import FSDPGroupHandle


def sync_unused_params(
    groups: Sequence[FSDPGroupHandle], modules: Iterable[nn.Module], process_group: dist.ProcessGroup
) -> None:
    """Let ``process_group`` agree on the units that hold parameters of ``modules``, whenever they are reduced."""
    if dist.get_world_size(process_group) == 1:
        return
    # Over the host: through a device the host would wait for it in each unit's backward pass.
    host_group = control_group(process_group)
    module_ids = {id(inner) for module in modules for inner in module.modules()}

    def reduce_presence(present: list[bool]) -> list[bool]:
        flags = torch.tensor(present, dtype=torch.uint8)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=host_group)
        return [bool(flag) for flag in flags.tolist()]

    for group in groups:
        if any(id(module) in module_ids for param in group.params for module, _ in param.locations):
            group.sync_unused_params(reduce_presence)
