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
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.comm.collectives import quantized
from thalweg.comm.collectives.reducer import ReduceOptions, ReplicatedReducer, sum_rows
from thalweg.comm.collectives.shared_memory import SharedMemoryArena, SharedMemoryReducer, SharedMemoryRing
from thalweg.comm.collectives.wire import AllReduceSum, AllToAllReduce, WireAllGather
from thalweg.comm.comms_logger import CollectiveCall, CommsLog
from thalweg.comm.topology import HostTopology
from thalweg.parallel_dims import new_subgroup


@dataclass(frozen=True)
class HostGroups:
    """Which ranks of a group share a host; ranks are those of the group."""

    ranks_by_host: tuple[tuple[int, ...], ...]
    intra_host_group: dist.ProcessGroup
    inter_host_group: dist.ProcessGroup
    intra_host_topology: HostTopology
    inter_host_topology: HostTopology
    peer_ranks: tuple[int, ...]  # those with this rank's local rank, in host order

    @property
    def num_hosts(self) -> int:
        """H."""
        return len(self.ranks_by_host)

    @property
    def num_local_ranks(self) -> int:
        """L, the same on every host."""
        return len(self.ranks_by_host[0])

    @property
    def ranks_by_local_rank(self) -> tuple[tuple[int, ...], ...]:
        """By local rank: ``ranks_by_local_rank[l][h]`` is the ``l``-th of host ``h``."""
        return tuple(zip(*self.ranks_by_host, strict=True))

    @classmethod
    def discover(cls, group: dist.ProcessGroup, topology: HostTopology) -> HostGroups | None:
        """The groups of both levels; None unless several hosts have equally many ranks, two or more.

        Collective over ``group``, of which ``topology`` tells where its ranks are.
        """
        ranks_by_host = topology.ranks_by_host()
        sizes = {len(found) for found in ranks_by_host}
        if len(ranks_by_host) < 2 or len(sizes) != 1 or sizes == {1}:
            return None
        local_ranks = next(found for found in ranks_by_host if topology.rank in found)
        peer_ranks = next(found for found in zip(*ranks_by_host, strict=True) if topology.rank in found)
        intra, inter = (make_subgroup(ranks, group, "hosts") for ranks in (local_ranks, peer_ranks))
        topologies = topology.for_subgroup(local_ranks), topology.for_subgroup(peer_ranks)
        return cls(ranks_by_host, intra, inter, *topologies, peer_ranks)


def make_subgroup(ranks: Sequence[int], group: dist.ProcessGroup, use: str | None) -> dist.ProcessGroup:
    """A process group of ``ranks`` (those of ``group``, which all make theirs at once) for ``use``."""
    return new_subgroup([dist.get_global_rank(group, rank) for rank in ranks], group, use=use)


class HierarchicalReduceScatter(SharedMemoryReducer):
    """Reduce-scatter of one module's gradients over both levels, in the form that FSDP2 takes."""

    transport = "both"

    def __init__(
        self,
        hosts: HostGroups,
        ring: SharedMemoryRing,
        all_to_all: AllToAllReduce,
        name: str,
        options: ReduceOptions | None = None,
    ) -> None:
        """``all_to_all``: how partial sums go between hosts."""
        super().__init__(ring, name, options)
        self._peer_ranks = hosts.peer_ranks
        self._all_to_all = self._error_feedback = all_to_all

    def sum_shards(self, rows: Tensor, output: Tensor, scale: float, call: CollectiveCall) -> None:
        """Add up in the arena for this rank and its peers, then over the peers.

        The wire carries the dtype that was asked for (or codes of it); sums are kept in the output's.
        """
        slots = self._ring.exchange_slots(self._name + self.lacking, rows.shape, rows.dtype)
        partial_sums = torch.empty(len(self._peer_ranks), rows.shape[1], dtype=output.dtype)
        for out, row in zip(partial_sums.unbind(0), self._peer_ranks, strict=True):
            sum_rows([slot[row] for slot in slots], out)
        self._ring.release_slots()
        call.add_bytes((len(slots) - 1) * len(self._peer_ranks) * rows[0].nbytes)
        self._all_to_all.reduce_rows(partial_sums, output, scale, call, rows.dtype)


class HierarchicalAllGather:
    """All-gather of one module's parameters over both levels; one output buffer a host."""

    def __init__(
        self,
        hosts: HostGroups,
        ring: SharedMemoryRing,
        name: str,
        ledger: CommsLog,
        payload_format_fn: quantized.PayloadFormatFn,
    ) -> None:
        """``payload_format_fn``: the codes in which shards go between hosts."""
        self._hosts, self._ring, self._name, self._ledger = hosts, ring, name, ledger
        self._payload_format_fn = payload_format_fn

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2's hook; the output lies in the arena and belongs to the whole host."""
        return self._ring.acquire_shared_output(size, dtype, f"the gather of {self._name!r}")

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        world_size, hosts = group.size(), self._hosts
        with self._ledger.timed("all_gather", self._name, "both", output_tensor.nbytes, world_size) as call:
            rows = output_tensor.view(world_size, -1)
            payload_format = self._payload_format_fn(input_tensor.numel(), input_tensor.dtype)
            peer_rows = [rows[rank] for rank in hosts.peer_ranks]
            num_bytes = quantized.all_gather_packed(input_tensor, payload_format, peer_rows, hosts.inter_host_group)
            call.add_bytes(*hosts.inter_host_topology.ring_bytes(num_bytes))
            self._ring.publish_shared_output(self._name)
            call.add_bytes((hosts.num_local_ranks - 1) * hosts.num_hosts * input_tensor.nbytes)
        return None


class TwoLevelAllGather(WireAllGather):
    """All-gather over links at both levels (MiCS): shards between hosts once, then inside each host."""

    def __init__(
        self, hosts: HostGroups, name: str, ledger: CommsLog, payload_format_fn: quantized.PayloadFormatFn
    ) -> None:
        super().__init__(name, ledger)
        self._hosts, self._payload_format_fn = hosts, payload_format_fn
        self._rank_order = list(chain.from_iterable(hosts.ranks_by_local_rank))

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        size, hosts = group.size(), self._hosts
        with self._ledger.timed("all_gather", self._name, "wire", output_tensor.nbytes, size) as call:
            payload_format = self._payload_format_fn(input_tensor.numel(), input_tensor.dtype)
            sent = quantized.pack_values(input_tensor, payload_format)
            peers = quantized.all_gather_payloads(sent, hosts.inter_host_group, hosts.num_hosts).view(-1)
            payloads = quantized.all_gather_payloads(peers, hosts.intra_host_group, hosts.num_local_ranks)
            call.add_bytes(*hosts.inter_host_topology.ring_bytes(sent.numel()))
            call.add_bytes(*hosts.intra_host_topology.ring_bytes(peers.numel()))
            rows = output_tensor.view(size, -1)
            for rank, payload in zip(self._rank_order, payloads.view(size, -1), strict=True):
                quantized.unpack_values(payload, payload_format, rows[rank])
        return None


class HierarchicalAllReduce(ReplicatedReducer):
    """Mean of one module's gradients over both levels, for FSDP2 over a mesh of one rank."""

    def __init__(
        self, hosts: HostGroups, ring: SharedMemoryRing, name: str, options: ReduceOptions | None = None
    ) -> None:
        super().__init__(name, options)
        self._hosts, self._ring = hosts, ring

    def reduce(self, output: Tensor) -> None:
        """Replace ``output`` (1-D) by the mean over all ranks."""
        hosts, ring, num_local_ranks = self._hosts, self._ring, self._hosts.num_local_ranks
        world_size = hosts.num_hosts * num_local_ranks
        with self._ledger.timed("all_reduce", self._name, "both", output.nbytes, world_size) as call:
            numel = output.numel()
            length = -(-numel // world_size) * hosts.num_hosts
            slot = ring.acquire_slot((num_local_ranks, length), output.dtype, f"the reduction of {self._name!r}")
            slot.view(-1)[:numel].copy_(output)
            slot.view(-1)[numel:].zero_()
            slots = ring.exchange_slots(self._name + self.lacking, (num_local_ranks, length), output.dtype)
            local_sum = torch.empty(length, dtype=output.dtype)
            sum_rows([row[ring.arena.rank] for row in slots], local_sum)
            ring.release_slots()
            sum_over_hosts = AllReduceSum(hosts.inter_host_group, hosts.inter_host_topology)
            sum_over_hosts(local_sum, call, self.mean_scale(world_size))
            call.add_bytes(2 * (num_local_ranks - 1) * length * output.itemsize)
            ring.acquire_slot((length,), output.dtype, f"the reduction of {self._name!r}").copy_(local_sum)
            rank_sums = ring.exchange_slots(f"{self._name}/parts", (length,), output.dtype)
            for index, rank_sum in enumerate(rank_sums):
                chunk = output[index * length : (index + 1) * length]
                chunk.copy_(rank_sum[: chunk.numel()])
            ring.release_slots()


def create_host_arena(hosts: HostGroups, num_bytes: int) -> SharedMemoryArena | None:
    """The arena of this rank's host, or None on every rank if any host could not make one."""
    arena = SharedMemoryArena.create(hosts.intra_host_group, num_bytes)
    all_created = torch.tensor([0 if arena is None else 1])
    dist.all_reduce(all_created, op=dist.ReduceOp.MIN, group=hosts.inter_host_group)
    dist.all_reduce(all_created, op=dist.ReduceOp.MIN, group=hosts.intra_host_group)
    return arena if int(all_created) else None
