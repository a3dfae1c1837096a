"""The wire forms of the collectives that FSDP2 takes, for ranks on several hosts.

On gloo an all-to-all followed by a local sum moves as many bytes as a ring
reduce-scatter and runs three to four times as fast; the local sum is in rank order and
in fp32, as in shared memory, so both give the same bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from thalweg.comm.collectives.reducer import ReduceOptions, Reducer, ReplicatedReducer, sum_rows
from thalweg.comm.collectives.shared_memory import CollectiveOrder
from thalweg.comm.comms_logger import CollectiveCall, CommsLog
from thalweg.comm.topology import HostTopology


def all_gather_flat(output: Tensor, shard: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> Any:
    """All-gather of 1-D ``shard`` into 1-D ``output``, by the name that this torch gives it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, shard, group=group, async_op=async_op)


def reduce_scatter_flat(output: Tensor, rows: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False) -> Any:
    """Reduce-scatter of 1-D ``rows`` into 1-D ``output``, by the name that this torch gives it."""
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return reduce_scatter(output, rows, op=op, group=group, async_op=async_op)


def all_to_all_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send row ``i`` to rank ``i`` of the group; returns the rows received."""
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows.contiguous(), group=group)
    return received


def pad_to_length(tensor: Tensor, dim: int, length: int) -> Tensor:
    """``tensor`` with zeros behind it along ``dim``, up to ``length``."""
    missing = length - tensor.size(dim)
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, missing]) if missing else tensor


def _one_rank_per_host(group: dist.ProcessGroup) -> HostTopology:
    """Every rank on a host of its own, where nobody says otherwise."""
    return HostTopology(tuple(range(dist.get_world_size(group))), dist.get_rank(group))


class AllToAllReduce:
    """A reduce-scatter over one group: rows go to their ranks, what arrives is added up in rank order; an accelerator's
    library adds up by itself, where it may do so in the dtype of the sum."""

    def __init__(self, group: dist.ProcessGroup, topology: HostTopology | None = None) -> None:
        self.group, self.topology = group, topology or _one_rank_per_host(group)

    def reset_error_feedback(self) -> None:
        """Forget what earlier sums have left to be made up for."""

    def reduce_rows(
        self, rows: Tensor, out: Tensor, scale: float, call: CollectiveCall, wire_dtype: torch.dtype
    ) -> None:
        """Write ``scale`` times the sum of all ranks' rows for this rank into ``out``; sent as ``wire_dtype``."""
        if rows.device.type != "cpu" and rows.dtype == wire_dtype == out.dtype:
            reduce_scatter_flat(out, rows.reshape(-1), self.group, dist.ReduceOp.SUM)
            call.add_bytes(*self.topology.ring_bytes(out.nbytes))
            if scale != 1.0:
                out.mul_(scale)
            return
        received = all_to_all_rows(rows.to(wire_dtype), self.group)
        call.add_bytes(*self.topology.all_to_all_bytes(received[0].nbytes))
        sum_rows(received.unbind(0), out, scale)


class AllReduceSum:
    """A sum over one group that every rank of it gets, with the same bits."""

    def __init__(self, group: dist.ProcessGroup, topology: HostTopology | None = None) -> None:
        self.group, self.topology = group, topology or _one_rank_per_host(group)

    def __call__(self, tensor: Tensor, call: CollectiveCall, scale: float = 1.0) -> None:
        """Replace ``tensor`` (1-D) by ``scale`` times the sum: all-to-all, local sum, all-gather; gloo's fast parts.

        Each pass over a model's gradients costs what a tenth of a step does, so they travel from where they lie and
        come back there; the few that do not divide by the ranks go to all of them.
        """
        world_size, on_host = len(self.topology.host_ids), tensor.device.type == "cpu"
        length = tensor.numel() // world_size if on_host else -(-tensor.numel() // world_size)
        for sent in (self.topology.all_to_all_bytes, self.topology.ring_bytes):
            call.add_bytes(*sent(length * tensor.itemsize))
        if not on_host:
            dist.all_reduce(tensor, group=self.group)
            if scale != 1.0:
                tensor.mul_(scale)
            return
        body, tail = tensor[: length * world_size], tensor[length * world_size :]
        if length:
            received = all_to_all_rows(body.view(world_size, length), self.group)
            local_sum = torch.empty_like(received[0])
            sum_rows(received.unbind(0), local_sum, scale)
            all_gather_flat(body, local_sum, self.group)
        if tail.numel():
            call.add_bytes(*self.topology.ring_bytes(tail.nbytes))
            rows = tail.new_empty(world_size, tail.numel())
            all_gather_flat(rows.view(-1), tail, self.group)
            sum_rows(rows.unbind(0), tail, scale)


class SiteExchange:
    """What sites tell each other: ``sum_between`` adds up over this rank's peers, one at each site.

    ``within_site``: the ranks of this site, if all have the same numbers to tell.  Each then sends a part, and they
    gather among themselves what comes back.  Tensors may be anywhere; they travel on ``device``.
    """

    def __init__(
        self, sum_between: Any, within_site: dist.ProcessGroup | None, device: torch.device, ledger: CommsLog
    ) -> None:
        self._sum, self._within, self._device, self._ledger = sum_between, within_site, device, ledger
        self.num_sites = len(sum_between.topology.host_ids)
        self._num_parts = 1 if within_site is None else dist.get_world_size(within_site)
        self._part = 0 if within_site is None else dist.get_rank(within_site)

    def mean_(self, tensors: Sequence[Tensor], name: str, transport: str = "wire") -> None:
        """Replace ``tensors`` (of one dtype) by their means over sites, with the same bits everywhere; collective."""
        if not any(tensor.numel() for tensor in tensors):
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        part = self._own_parts(flat.unsqueeze(0))[0]
        with self._ledger.timed("all_reduce", name, transport, part.nbytes, self.num_sites) as call:
            self._sum(part, call)
            part.div_(self.num_sites)
        means = self._join(part, name)[: flat.numel()].split([tensor.numel() for tensor in tensors])
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean.view_as(tensor))

    def gather(self, flat: Tensor, name: str, transport: str = "wire") -> Tensor:
        """What all sites have in ``flat`` (1-D): (sites, numel), on ``flat``'s device; collective."""
        part_bytes = -(-flat.numel() // self._num_parts) * flat.element_size()
        with self._ledger.timed("all_gather", name, transport, self.num_sites * part_bytes, self.num_sites) as call:
            return self.send_rows(flat.unsqueeze(0), name, call).to(flat.device)

    def send_rows(self, rows: Tensor, name: str, call: CollectiveCall) -> Tensor:
        """Row ``i`` of ``rows`` goes to site ``i``, a single row to all; what all sites sent comes: (sites, length)."""
        topology, length, part = self._sum.topology, rows.shape[1], self._own_parts(rows)
        if len(rows) > 1:
            part = all_to_all_rows(part, self._sum.group)
            call.add_bytes(*topology.all_to_all_bytes(part[0].nbytes))
        else:
            call.add_bytes(*topology.ring_bytes(part.nbytes))
            own, part = part, part.new_empty(self.num_sites, part.shape[1])
            all_gather_flat(part.view(-1), own.view(-1), self._sum.group)
        if self._within is None:
            return part
        parts = self._join(part.view(-1), name).view(self._num_parts, self.num_sites, -1)
        return parts.transpose(0, 1).reshape(self.num_sites, -1)[:, :length].contiguous()

    def _own_parts(self, rows: Tensor) -> Tensor:
        """This rank's part of each row, where they travel."""
        padded = torch.nn.functional.pad(rows.to(self._device), (0, -rows.shape[1] % self._num_parts))
        return padded.view(len(rows), self._num_parts, -1)[:, self._part].contiguous()

    def _join(self, part: Tensor, name: str) -> Tensor:
        """The parts of this site's ranks, one after another."""
        if self._within is None or self._num_parts == 1:
            return part
        whole = part.new_empty(self._num_parts * part.numel())
        with self._ledger.timed("all_gather", name, "wire", whole.nbytes, self._num_parts) as call:
            call.add_bytes((self._num_parts - 1) * part.nbytes)
            all_gather_flat(whole, part, self._within)
        return whole


class _LoggedCollective:
    """A collective of torch's with the ledger.  On an accelerator its seconds are those of queueing it.

    ``order``: what compares it with the other ranks' before it begins.
    """

    lacking = ""  # see Reducer

    def __init__(
        self,
        name: str,
        ledger: CommsLog | None = None,
        topology: HostTopology | None = None,
        order: CollectiveOrder | None = None,
    ) -> None:
        self._name, self._ledger, self._topology, self._order = name, ledger or CommsLog(), topology, order

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @contextmanager
    def _logged(self, kind: str, full: Tensor, sent_bytes: int, group: dist.ProcessGroup) -> Iterator[None]:
        topology = self._topology
        if topology is None or len(topology.host_ids) != group.size():
            topology = _one_rank_per_host(group)
        if self._order is not None:
            self._order.begin(f"the {kind} of {self._name!r}{self.lacking}")
        with self._ledger.timed(kind, self._name, "wire", full.nbytes, group.size()) as call:
            call.add_bytes(*topology.ring_bytes(sent_bytes))
            try:
                yield
            except RuntimeError:
                if self._order is not None:
                    self._order.check()
                raise


class WireAllGather(_LoggedCollective):
    """``all_gather_into_tensor`` with the ledger."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with self._logged("all_gather", output_tensor, input_tensor.nbytes, group):
            return all_gather_flat(output_tensor, input_tensor, group, async_op)


class WireReduceScatter(_LoggedCollective):
    """``reduce_scatter_tensor`` with the ledger, for accelerators: FSDP2 says by ``op`` what is divided."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        with self._logged("reduce_scatter", input_tensor, output_tensor.nbytes, group):
            return reduce_scatter_flat(output_tensor, input_tensor, group, op, async_op)


class AllToAllReduceScatter(Reducer):
    """Reduce-scatter as an all-to-all and a local sum; ``all_to_all`` says how rows travel."""

    def __init__(self, all_to_all: AllToAllReduce, name: str, options: ReduceOptions | None = None) -> None:
        super().__init__(name, options)
        self._all_to_all = self._error_feedback = all_to_all

    def sum_shards(self, rows: Tensor, output: Tensor, scale: float, call: CollectiveCall) -> None:
        """Exchange all rows over the group of ``all_to_all``."""
        self._all_to_all.reduce_rows(rows, output, scale, call, rows.dtype)


class WireAllReduce(ReplicatedReducer):
    """Mean over ``group`` of one module's gradients."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        options: ReduceOptions | None = None,
        topology: HostTopology | None = None,
        order: CollectiveOrder | None = None,
    ) -> None:
        super().__init__(name, options)
        self._group, self._all_reduce_sum, self._order = group, AllReduceSum(group, topology), order

    def reduce(self, output: Tensor) -> None:
        """Replace ``output`` (1-D) by the mean over all ranks, now or later."""
        self.submit(lambda: self._reduce_mean(output))

    def _reduce_mean(self, output: Tensor) -> None:
        world_size = self._group.size()
        if self._order is not None:
            self._order.begin(f"the all_reduce of {self._name!r}{self.lacking}")
        with self._ledger.timed("all_reduce", self._name, "wire", output.nbytes, world_size) as call:
            scale = self.mean_scale(world_size)
            if world_size > 1:
                self._all_reduce_sum(output, call, scale)
            elif scale != 1.0:
                output.mul_(scale)
