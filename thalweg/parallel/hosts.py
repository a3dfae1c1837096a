"""Whether the ranks that split each layer are on one host, and what it costs if they are not.

A tensor group adds up one activation four times a block and step (Megatron-LM): the densest
traffic there is.  The mesh makes neighbours of its ranks, which a launcher puts on one host; where
the ranks of a host are no multiple of the group's size, some group lies on two.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from thalweg.comm.route import Route
from thalweg.utils.log import get_logger

_log = get_logger(__name__)


def note_groups_across_hosts(
    group: dist.ProcessGroup, everyone: dist.ProcessGroup, num_blocks: int, width: int, device: torch.device
) -> int:
    """The most hosts that any tensor group lies on; rank 0 warns above one, with the traffic; collective.

    ``width``: elements of an activation a token; ``num_blocks``: blocks that are split.
    """
    most = torch.tensor([Route.find(group, device).num_hosts], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=everyone)
    hosts, size = int(most), dist.get_world_size(group)
    if hosts > 1 and dist.get_rank(everyone) == 0:
        _log.warning("%s", across_hosts(hosts, size, num_blocks, width))
    return hosts


def across_hosts(hosts: int, size: int, num_blocks: int, width: int) -> str:
    """The warning: bytes by the ring form of an all-reduce, 2(n-1)/n of it from each rank."""
    sent = 4 * num_blocks * width * 4 * 2 * (size - 1) / size
    return (
        f"tensor_parallel.autotp_size = {size}: a group of ranks that split each layer lies on {hosts} "
        "hosts, so "
        f"each rank sends {sent / 1024:.1f} KiB a token and step (fp32, {num_blocks} blocks) over the "
        "network; "
        f"ranks a host in multiples of {size}, or a size that divides them, keep it inside"
    )
