"""Whether the ranks that split each layer are on one host, and what it costs if they are not.

A tensor group adds up one activation four times a block and step (Megatron-LM): the densest
traffic there is.  The mesh makes neighbours of its ranks, which a launcher puts on one host; where
the ranks of a host are no multiple of the group's size, some group lies on two.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from thalweg.comm.topology import HostTopology
from thalweg.utils.log import get_logger

_log = get_logger(__name__)


def warn_cross_host_groups(
    group: dist.ProcessGroup, world_group: dist.ProcessGroup, num_blocks: int, hidden_size: int, device: torch.device
) -> int:
    """The most hosts that any tensor group lies on; rank 0 warns above one, with the traffic; collective.

    ``hidden_size``: elements of an activation a token; ``num_blocks``: blocks that are split.
    """
    max_hosts = torch.tensor([HostTopology.discover(group, device).num_hosts], device=device)
    dist.all_reduce(max_hosts, op=dist.ReduceOp.MAX, group=world_group)
    num_hosts, size = int(max_hosts), dist.get_world_size(group)
    if num_hosts > 1 and dist.get_rank(world_group) == 0:
        # By the ring form of an all-reduce: 2(n-1)/n of it from each rank.
        kib = 4 * num_blocks * hidden_size * 4 * 2 * (size - 1) / size / 1024
        _log.warning(
            f"tensor_parallel.autotp_size = {size}: a group of ranks that split each layer lies on {num_hosts} hosts, "
            f"so each rank sends {kib:.1f} KiB a token and step (fp32, {num_blocks} blocks) over the network; "
            f"ranks a host in multiples of {size}, or a size that divides them, keep it inside"
        )
    return num_hosts
