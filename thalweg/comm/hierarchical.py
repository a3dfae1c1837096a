"""Both levels at once: shared memory inside a host, the wire between hosts.

The picture: ``N = H x L`` ranks on ``H`` hosts with ``L`` ranks each.  Rank ``r`` is the
``l``-th of its host; the ranks of the same ``l`` on all hosts are its *peers*.  What
crosses the network crosses it once a host, not once a rank:

* reduce-scatter: the ranks of a host add up their gradients in the arena, rank ``l``
  for the shards of all ``l``-th ranks; these partial sums go to the peers, who add them;
* all-gather: a rank sends its shard to its peers and writes what they send into the
  host's one output buffer, from which all its ranks read;
* all-reduce: the first with ``L`` shards, then the sums are read from the arena.

A flat exchange sends ``(N - L)`` rows over the wire from each rank, this one ``H - 1``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.comm.arena import Arena, host_key
from thalweg.comm.ledger import Ledger
from thalweg.comm.plain import gather_flat
from thalweg.comm.reducer import MeshOfOneReducer, Reducer
from thalweg.comm.ring import Ring
from thalweg.comm.sums import sum_rows


@dataclass(frozen=True)
class Hosts:
    """Which ranks of a group share a host; ranks are those of the group."""

    ranks: tuple[tuple[int, ...], ...]
    local: dist.ProcessGroup
    peers: dist.ProcessGroup

    @property
    def num_hosts(self) -> int:
        """H."""
        return len(self.ranks)

    @property
    def num_local(self) -> int:
        """L, the same on every host."""
        return len(self.ranks[0])

    @classmethod
    def find(cls, group: dist.ProcessGroup) -> Hosts | None:
        """Ask every rank where it runs; None unless several hosts have equally many ranks, two or more.

        Collective over ``group``, which must hold every rank of the job.
        """
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        keys = torch.zeros(size, dtype=torch.int64)
        keys[rank] = host_key()
        dist.all_reduce(keys, group=group)
        hosts: dict[int, list[int]] = {}
        for index, value in enumerate(keys.tolist()):
            hosts.setdefault(value, []).append(index)
        sizes = {len(ranks) for ranks in hosts.values()}
        if len(hosts) < 2 or len(sizes) != 1 or sizes == {1}:
            return None
        ranks = tuple(tuple(found) for found in hosts.values())
        local = _own_group(ranks, rank, group)
        peers = _own_group(tuple(zip(*ranks, strict=True)), rank, group)
        return cls(ranks, local, peers)

    def shards_of_peers(self, rank: int) -> list[int]:
        """The ranks with this rank's place on each host, in host order."""
        place = next(host.index(rank) for host in self.ranks if rank in host)
        return [host[place] for host in self.ranks]


def _own_group(parts: Sequence[Sequence[int]], rank: int, group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make a group of each part (every rank must make all of them); returns the one with ``rank``."""
    own = None
    for part in parts:
        made = dist.new_group([dist.get_global_rank(group, index) for index in part], backend="gloo")
        own = made if rank in part else own
    assert isinstance(own, dist.ProcessGroup)
    return own


class HierarchicalReduceScatter(Reducer):
    """Reduce-scatter of one module's gradients over both levels, in the form that FSDP2 takes."""

    def __init__(
        self,
        hosts: Hosts,
        ring: Ring,
        rank: int,
        name: str,
        ledger: Ledger | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(name, ledger, output_dtype)
        self._hosts, self._ring = hosts, ring
        self._rows = hosts.shards_of_peers(rank)

    def _new_input(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._ring.slot(size, dtype, f"the reduction of {self._name!r}")

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        world_size = group.size()
        scale = 1.0 / world_size if op == dist.ReduceOp.AVG else 1.0
        with self._ledger.timed(
            "reduce_scatter", self._name, "both", full_bytes=input_tensor.nbytes, world_size=world_size
        ):
            shape = (world_size, input_tensor.numel() // world_size)
            slots = self._ring.exchange(self._name, shape, input_tensor.dtype)
            partial = torch.empty(len(self._rows), shape[1], dtype=output_tensor.dtype)
            for out, row in zip(partial.unbind(0), self._rows, strict=True):
                sum_rows([slot[row] for slot in slots], out)
            self._ring.done()
            # The wire carries the dtype that was asked for; sums are kept in the output's.
            received = _swap(partial.to(input_tensor.dtype), self._hosts.peers)
            sum_rows(received.unbind(0), output_tensor, scale / self.divisor)
        return None


class HierarchicalAllGather:
    """All-gather of one module's parameters over both levels; one output buffer a host."""

    def __init__(self, hosts: Hosts, ring: Ring, rank: int, name: str, ledger: Ledger | None = None) -> None:
        self._hosts, self._name, self._ledger = hosts, name, ledger or Ledger()
        self._rows = hosts.shards_of_peers(rank)
        self._slots = ring

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2's hook; the output lies in the arena and belongs to the whole host."""
        return self._slots.common(size, dtype, f"the gather of {self._name!r}")

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        world_size = group.size()
        with self._ledger.timed(
            "all_gather", self._name, "both", full_bytes=output_tensor.nbytes, world_size=world_size
        ):
            numel = input_tensor.numel()
            received = torch.empty(len(self._rows) * numel, dtype=input_tensor.dtype)
            gather_flat(received, input_tensor.contiguous(), self._hosts.peers)
            rows = output_tensor.view(world_size, -1)
            for row, values in zip(self._rows, received.view(-1, numel), strict=True):
                rows[row].copy_(values)
            self._slots.publish_common(self._name)
        return None


class HierarchicalAllReduce(MeshOfOneReducer):
    """Mean of one module's gradients over both levels, for FSDP2 over a mesh of one rank."""

    def __init__(
        self,
        hosts: Hosts,
        ring: Ring,
        name: str,
        ledger: Ledger | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(name, ledger, output_dtype)
        self._hosts, self._ring = hosts, ring

    def reduce(self, output: Tensor) -> None:
        """Replace ``output`` (1-D) by the mean over all ranks."""
        hosts, ring = self._hosts, self._ring
        world_size, num_local = hosts.num_hosts * hosts.num_local, hosts.num_local
        with self._ledger.timed(
            "all_reduce", self._name, "both", full_bytes=output.nbytes, world_size=world_size
        ):
            numel = output.numel()
            length = -(-numel // (num_local * hosts.num_hosts)) * hosts.num_hosts
            slot = ring.slot((num_local, length), output.dtype, f"the reduction of {self._name!r}")
            slot.view(-1)[:numel].copy_(output)
            slot.view(-1)[numel:].zero_()
            slots = ring.exchange(self._name, (num_local, length), output.dtype)
            own = torch.empty(length, dtype=output.dtype)
            sum_rows([row[ring.arena.rank] for row in slots], own)
            ring.done()
            received = _swap(own.view(hosts.num_hosts, -1), hosts.peers)
            piece = torch.empty(length // hosts.num_hosts, dtype=output.dtype)
            sum_rows(received.unbind(0), piece, 1.0 / (world_size * self.divisor))
            gather_flat(own, piece, hosts.peers)
            ring.slot((length,), output.dtype, f"the reduction of {self._name!r}").copy_(own)
            parts = ring.exchange(f"{self._name}/parts", (length,), output.dtype)
            for index, part in enumerate(parts):
                piece = output[index * length : (index + 1) * length]
                piece.copy_(part[: piece.numel()])
            ring.done()


def _swap(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send row ``i`` to rank ``i`` of the group; returns the rows received."""
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows.contiguous(), group=group)
    return received


def local_arena(hosts: Hosts, num_bytes: int, timeout: float) -> Arena | None:
    """The arena of this rank's host, or None on every rank if any host could not make one."""
    arena = Arena.create(hosts.local, num_bytes, timeout=timeout)
    made = torch.tensor([0 if arena is None else 1])
    dist.all_reduce(made, op=dist.ReduceOp.MIN, group=hosts.peers)
    dist.all_reduce(made, op=dist.ReduceOp.MIN, group=hosts.local)
    return arena if int(made) else None
