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

from thalweg.comm.arena import Arena
from thalweg.comm.ledger import Call, Ledger
from thalweg.comm.plain import Swap, gather_flat, swap_rows
from thalweg.comm.quantised import PackingOf, gather_payloads
from thalweg.comm.reducer import MeshOfOneReducer, Reducer
from thalweg.comm.ring import Ring
from thalweg.comm.route import Route
from thalweg.comm.sums import sum_rows
from thalweg.mesh import group_of


@dataclass(frozen=True)
class Hosts:
    """Which ranks of a group share a host; ranks are those of the group."""

    ranks: tuple[tuple[int, ...], ...]
    local: dist.ProcessGroup
    peers: dist.ProcessGroup
    local_route: Route
    peers_route: Route

    @property
    def num_hosts(self) -> int:
        """H."""
        return len(self.ranks)

    @property
    def num_local(self) -> int:
        """L, the same on every host."""
        return len(self.ranks[0])

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The ranks by place: ``places[l][h]`` is the ``l``-th of host ``h``."""
        return tuple(zip(*self.ranks, strict=True))

    @classmethod
    def find(cls, group: dist.ProcessGroup, route: Route) -> Hosts | None:
        """The groups of both levels; None unless several hosts have equally many ranks, two or more.

        Collective over ``group``, of which ``route`` tells where its ranks are.
        """
        ranks = route.by_host()
        sizes = {len(found) for found in ranks}
        if len(ranks) < 2 or len(sizes) != 1 or sizes == {1}:
            return None
        local = next(found for found in ranks if route.rank in found)
        peers = next(found for found in zip(*ranks, strict=True) if route.rank in found)
        return cls(
            ranks, subgroup(local, group), subgroup(peers, group), route.narrow(local), route.narrow(peers)
        )

    def shards_of_peers(self, rank: int) -> list[int]:
        """The ranks with this rank's place on each host, in host order."""
        return list(next(place for place in self.places if rank in place))


def subgroup(ranks: Sequence[int], group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A process group of ``ranks`` (those of ``group``, which all make theirs at once)."""
    return group_of([dist.get_global_rank(group, rank) for rank in ranks], group)


class HierarchicalReduceScatter(Reducer):
    """Reduce-scatter of one module's gradients over both levels, in the form that FSDP2 takes."""

    carrier = "both"

    def __init__(
        self,
        hosts: Hosts,
        ring: Ring,
        rank: int,
        name: str,
        ledger: Ledger | None = None,
        output_dtype: torch.dtype | None = None,
        swap: Swap | None = None,
    ) -> None:
        """``swap``: how partial sums go between hosts; as they are, if not given."""
        super().__init__(name, ledger, output_dtype)
        self._ring = ring
        self._rows = hosts.shards_of_peers(rank)
        self.swap = swap or Swap(hosts.peers, hosts.peers_route)

    def _new_input(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._ring.slot(size, dtype, f"the reduction of {self._name!r}")

    def sum_shards(
        self, rows: Tensor, output: Tensor, group: dist.ProcessGroup, scale: float, call: Call
    ) -> None:
        """Add up in the arena for this rank and its peers, then over the peers.

        The wire carries the dtype that was asked for (or codes of it); sums are kept in the output's.
        """
        slots = self._ring.exchange(self._name, rows.shape, rows.dtype)
        partial = torch.empty(len(self._rows), rows.shape[1], dtype=output.dtype)
        for out, row in zip(partial.unbind(0), self._rows, strict=True):
            sum_rows([slot[row] for slot in slots], out)
        self._ring.done()
        call.moved((len(slots) - 1) * len(self._rows) * rows[0].nbytes)
        self.swap.sum(partial, output, scale, call, rows.dtype)


class HierarchicalAllGather:
    """All-gather of one module's parameters over both levels; one output buffer a host."""

    def __init__(
        self,
        hosts: Hosts,
        ring: Ring,
        rank: int,
        name: str,
        ledger: Ledger | None = None,
        packing_of: PackingOf | None = None,
    ) -> None:
        """``packing_of``: the codes in which shards go between hosts; as they are, if not given."""
        self._hosts, self._name, self._ledger = hosts, name, ledger or Ledger()
        self._rows = hosts.shards_of_peers(rank)
        self._slots = ring
        self._packing_of = packing_of or (lambda numel, dtype: None)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2's hook; the output lies in the arena and belongs to the whole host."""
        return self._slots.common(size, dtype, f"the gather of {self._name!r}")

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        world_size = group.size()
        with self._ledger.timed(
            "all_gather", self._name, "both", full_bytes=output_tensor.nbytes, world_size=world_size
        ) as call:
            rows = output_tensor.view(world_size, -1)
            self._between_hosts(input_tensor.contiguous(), [rows[rank] for rank in self._rows], call)
            self._slots.publish_common(self._name)
            call.moved((self._hosts.num_local - 1) * len(self._rows) * input_tensor.nbytes)
        return None

    def _between_hosts(self, own: Tensor, rows: list[Tensor], call: Call) -> None:
        """Fill ``rows``, one a host, with the peers' shards."""
        group, size = self._hosts.peers, self._hosts.num_hosts
        packing = self._packing_of(own.numel(), own.dtype)
        if packing is None:
            received = torch.empty(size * own.numel(), dtype=own.dtype)
            gather_flat(received, own, group)
            for row, values in zip(rows, received.view(size, -1), strict=True):
                row.copy_(values)
            call.moved(*self._hosts.peers_route.ring(own.nbytes))
            return
        payload = torch.empty(packing.num_bytes, dtype=torch.uint8)
        packing.pack(own, payload)
        for row, part in zip(rows, gather_payloads(payload, group, size), strict=True):
            packing.unpack(part, row)
        call.moved(*self._hosts.peers_route.ring(packing.num_bytes))


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
        ) as call:
            numel = output.numel()
            length = -(-numel // (num_local * hosts.num_hosts)) * hosts.num_hosts
            slot = ring.slot((num_local, length), output.dtype, f"the reduction of {self._name!r}")
            slot.view(-1)[:numel].copy_(output)
            slot.view(-1)[numel:].zero_()
            slots = ring.exchange(self._name, (num_local, length), output.dtype)
            own = torch.empty(length, dtype=output.dtype)
            sum_rows([row[ring.arena.rank] for row in slots], own)
            ring.done()
            received = swap_rows(own.view(hosts.num_hosts, -1), hosts.peers)
            piece = torch.empty(length // hosts.num_hosts, dtype=output.dtype)
            sum_rows(received.unbind(0), piece, self.mean_scale(world_size))
            gather_flat(own, piece, hosts.peers)
            for sent in (hosts.peers_route.all_to_all, hosts.peers_route.ring):
                call.moved(*sent(piece.nbytes))
            call.moved(2 * (num_local - 1) * length * output.itemsize)
            ring.slot((length,), output.dtype, f"the reduction of {self._name!r}").copy_(own)
            parts = ring.exchange(f"{self._name}/parts", (length,), output.dtype)
            for index, part in enumerate(parts):
                piece = output[index * length : (index + 1) * length]
                piece.copy_(part[: piece.numel()])
            ring.done()


def local_arena(hosts: Hosts, num_bytes: int, timeout: float) -> Arena | None:
    """The arena of this rank's host, or None on every rank if any host could not make one."""
    arena = Arena.create(hosts.local, num_bytes, timeout=timeout)
    made = torch.tensor([0 if arena is None else 1])
    dist.all_reduce(made, op=dist.ReduceOp.MIN, group=hosts.peers)
    dist.all_reduce(made, op=dist.ReduceOp.MIN, group=hosts.local)
    return arena if int(made) else None
