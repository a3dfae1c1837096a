"""The wire forms of the collectives that FSDP2 takes, for ranks on several hosts.

On gloo an all-to-all followed by a local sum moves as many bytes as a ring
reduce-scatter and runs three to four times as fast; the local sum is in rank order and
in fp32, as in shared memory, so both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.comm.ledger import Call, Ledger
from thalweg.comm.reducer import MeshOfOneReducer, Reducer
from thalweg.comm.route import Route
from thalweg.comm.sums import sum_rows


def gather_flat(output: Tensor, own: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> Any:
    """All-gather of 1-D ``own`` into 1-D ``output``, by the name that this torch gives it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, own, group=group, async_op=async_op)


def swap_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send row ``i`` to rank ``i`` of the group; returns the rows received."""
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows.contiguous(), group=group)
    return received


def _apart(group: dist.ProcessGroup) -> Route:
    """Every rank on a host of its own, where nobody says otherwise."""
    return Route(tuple(range(dist.get_world_size(group))), dist.get_rank(group))


class Swap:
    """A reduce-scatter over one group: rows go to their ranks, what arrives is added up in rank order."""

    def __init__(self, group: dist.ProcessGroup, route: Route | None = None) -> None:
        self.group, self.route = group, route or _apart(group)

    def begin_anew(self) -> None:
        """Forget what earlier sums have left to be made up for."""

    def sum(self, rows: Tensor, out: Tensor, scale: float, call: Call, wire: torch.dtype) -> None:
        """Write ``scale`` times the sum of all ranks' ``rows[own rank]`` into ``out``; sent as ``wire``."""
        received = swap_rows(rows.to(wire), self.group)
        call.moved(*self.route.all_to_all(received[0].nbytes))
        sum_rows(received.unbind(0), out, scale)


class Everywhere:
    """A sum over one group that every rank of it gets, with the same bits."""

    def __init__(self, group: dist.ProcessGroup, route: Route | None = None) -> None:
        self.group, self.route = group, route or _apart(group)

    def __call__(self, tensor: Tensor, call: Call) -> None:
        """Replace ``tensor`` (1-D) by the sum: all-to-all, local sum, all-gather; gloo's fast parts."""
        size = len(self.route.hosts)
        length = -(-tensor.numel() // size)
        for sent in (self.route.all_to_all, self.route.ring):
            call.moved(*sent(length * tensor.itemsize))
        if tensor.device.type != "cpu":
            dist.all_reduce(tensor, group=self.group)
            return
        sent = tensor.new_zeros(size * length)
        sent[: tensor.numel()].copy_(tensor)
        received = swap_rows(sent.view(size, length), self.group)
        own = torch.empty_like(received[0])
        sum_rows(received.unbind(0), own)
        gather_flat(sent, own, self.group)
        tensor.copy_(sent[: tensor.numel()])


class PlainAllGather:
    """``all_gather_into_tensor`` with the ledger."""

    def __init__(self, name: str, ledger: Ledger | None = None, route: Route | None = None) -> None:
        self._name, self._ledger, self._route = name, ledger or Ledger(), route

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        route = self._route
        if route is None or len(route.hosts) != group.size():
            route = _apart(group)
        with self._ledger.timed(
            "all_gather", self._name, "wire", full_bytes=output_tensor.nbytes, world_size=group.size()
        ) as call:
            call.moved(*route.ring(input_tensor.nbytes))
            return gather_flat(output_tensor, input_tensor, group, async_op)


class AllToAllReduceScatter(Reducer):
    """Reduce-scatter as an all-to-all and a local sum; ``swap`` says how rows travel."""

    def __init__(
        self,
        name: str,
        ledger: Ledger | None = None,
        output_dtype: torch.dtype | None = None,
        swap: Swap | None = None,
    ) -> None:
        super().__init__(name, ledger, output_dtype)
        self.swap = swap

    def sum_shards(
        self, rows: Tensor, output: Tensor, group: dist.ProcessGroup, scale: float, call: Call
    ) -> None:
        """Exchange all rows over ``group``."""
        (self.swap or Swap(group)).sum(rows, output, scale, call, rows.dtype)


class PlainAllReduce(MeshOfOneReducer):
    """Mean over ``group`` of one module's gradients."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        ledger: Ledger | None = None,
        output_dtype: torch.dtype | None = None,
        route: Route | None = None,
    ) -> None:
        super().__init__(name, ledger, output_dtype)
        self._group, self._sum = group, Everywhere(group, route)

    def reduce(self, output: Tensor) -> None:
        """Replace ``output`` (1-D) by the mean over all ranks, now or later."""
        self.do(lambda: self._mean(output))

    def _mean(self, output: Tensor) -> None:
        world_size = self._group.size()
        with self._ledger.timed(
            "all_reduce", self._name, "wire", full_bytes=output.nbytes, world_size=world_size
        ) as call:
            if world_size > 1:
                self._sum(output, call)
            output.mul_(self.mean_scale(world_size))
