"""Where the ranks of a group are: what a collective costs inside a host and between hosts."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from thalweg.utils.host import boot_id

LinkBytes = tuple[int, int]  # bytes that leave this rank: to ranks of its own host, to other hosts


def get_host_key() -> int:
    """A number (56 bits) that ranks have in common if they can share memory: one kernel, one process
    namespace.  ``THALWEG_HOST`` replaces it, to keep ranks of one machine apart."""
    host_name = os.environ.get("THALWEG_HOST")
    if host_name is None:
        host_name = f"{boot_id() or platform.node()} {_process_namespace()}"
    return int.from_bytes(hashlib.blake2b(host_name.encode(), digest_size=7).digest(), "little")


def _process_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


@dataclass(frozen=True)
class HostTopology:
    """A group as one of its ranks sees it; ``host_ids[i]`` numbers the host of the group's rank ``i``."""

    host_ids: tuple[int, ...]
    rank: int

    @classmethod
    def discover(cls, group: dist.ProcessGroup, device: torch.device | None = None) -> HostTopology:
        """Ask every rank of ``group`` where it runs; collective over it."""
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        keys = torch.zeros(size, dtype=torch.int64, device=device)
        keys[rank] = get_host_key()
        dist.all_reduce(keys, group=group)
        id_by_key: dict[int, int] = {}
        return cls(tuple(id_by_key.setdefault(key, len(id_by_key)) for key in keys.tolist()), rank)

    @property
    def num_hosts(self) -> int:
        """Hosts that hold at least one rank."""
        return len(set(self.host_ids))

    def for_subgroup(self, ranks: Sequence[int]) -> HostTopology:
        """The topology of a subgroup; ``ranks`` are this group's, with this rank among them."""
        return HostTopology(tuple(self.host_ids[rank] for rank in ranks), list(ranks).index(self.rank))

    def ranks_by_host(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host."""
        hosts = sorted(set(self.host_ids))
        return tuple(tuple(rank for rank, host in enumerate(self.host_ids) if host == host_id) for host_id in hosts)

    def all_to_all_bytes(self, row_bytes: int) -> LinkBytes:
        """A row of ``row_bytes`` goes to every other rank."""
        num_local_peers = sum(host == self.host_ids[self.rank] for host in self.host_ids) - 1
        return num_local_peers * row_bytes, (len(self.host_ids) - 1 - num_local_peers) * row_bytes

    def ring_bytes(self, row_bytes: int) -> LinkBytes:
        """All-gather as gloo and NCCL's rings do it: all rows but one go to the next rank."""
        size = len(self.host_ids)
        sent = (size - 1) * row_bytes
        next_is_local = self.host_ids[(self.rank + 1) % size] == self.host_ids[self.rank]
        return (sent, 0) if next_is_local else (0, sent)
