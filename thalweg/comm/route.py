"""Where the ranks of a group are: what a collective costs inside a host and between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from thalweg.comm.arena import host_key

Sent = tuple[int, int]  # bytes that leave this rank: to ranks of its own host, to other hosts


@dataclass(frozen=True)
class Route:
    """A group as one of its ranks sees it; ``hosts[i]`` numbers the host of the group's rank ``i``."""

    hosts: tuple[int, ...]
    rank: int

    @classmethod
    def find(cls, group: dist.ProcessGroup, device: torch.device | None = None) -> Route:
        """Ask every rank of ``group`` where it runs; collective over it."""
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        keys = torch.zeros(size, dtype=torch.int64, device=device)
        keys[rank] = host_key()
        dist.all_reduce(keys, group=group)
        number: dict[int, int] = {}
        return cls(tuple(number.setdefault(key, len(number)) for key in keys.tolist()), rank)

    @property
    def num_hosts(self) -> int:
        """Hosts that hold at least one rank."""
        return len(set(self.hosts))

    def narrow(self, ranks: Sequence[int]) -> Route:
        """The route of a subgroup; ``ranks`` are this group's, with this rank among them."""
        return Route(tuple(self.hosts[rank] for rank in ranks), list(ranks).index(self.rank))

    def by_host(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host."""
        return tuple(
            tuple(rank for rank, host in enumerate(self.hosts) if host == wanted)
            for wanted in range(max(self.hosts) + 1)
            if wanted in self.hosts
        )

    def all_to_all(self, row_bytes: int) -> Sent:
        """A row of ``row_bytes`` goes to every other rank."""
        near = sum(host == self.hosts[self.rank] for host in self.hosts) - 1
        return near * row_bytes, (len(self.hosts) - 1 - near) * row_bytes

    def ring(self, row_bytes: int) -> Sent:
        """All-gather as gloo and NCCL's rings do it: all rows but one go to the next rank."""
        size = len(self.hosts)
        sent = (size - 1) * row_bytes
        near = self.hosts[(self.rank + 1) % size] == self.hosts[self.rank]
        return (sent, 0) if near else (0, sent)
