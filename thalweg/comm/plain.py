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

from thalweg.comm.ledger import Ledger
from thalweg.comm.reducer import MeshOfOneReducer, Reducer
from thalweg.comm.sums import sum_rows


def gather_flat(output: Tensor, own: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> Any:
    """All-gather of 1-D ``own`` into 1-D ``output``, by the name that this torch gives it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, own, group=group, async_op=async_op)


class PlainAllGather:
    """``all_gather_into_tensor`` with the ledger."""

    def __init__(self, name: str, ledger: Ledger | None = None) -> None:
        self._name, self._ledger = name, ledger or Ledger()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with self._ledger.timed(
            "all_gather", self._name, "wire", full_bytes=output_tensor.nbytes, world_size=group.size()
        ):
            return gather_flat(output_tensor, input_tensor, group, async_op)


class AllToAllReduceScatter(Reducer):
    """Reduce-scatter as an all-to-all and a local sum."""

    def __init__(
        self, name: str, ledger: Ledger | None = None, output_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(name, ledger, output_dtype)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        world_size = group.size()
        with self._ledger.timed(
            "reduce_scatter", self._name, "wire", full_bytes=input_tensor.nbytes, world_size=world_size
        ):
            received = torch.empty_like(input_tensor)
            dist.all_to_all_single(received, input_tensor, group=group)
            scale = 1.0 / world_size if op == dist.ReduceOp.AVG else 1.0
            sum_rows(received.view(world_size, -1).unbind(0), output_tensor, scale / self.divisor)
        return None


class PlainAllReduce(MeshOfOneReducer):
    """Mean over ``group`` of one module's gradients."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        ledger: Ledger | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(name, ledger, output_dtype)
        self._group = group

    def reduce(self, output: Tensor) -> None:
        """Replace ``output`` (1-D) by the mean over all ranks."""
        world_size = self._group.size()
        with self._ledger.timed(
            "all_reduce", self._name, "wire", full_bytes=output.nbytes, world_size=world_size
        ):
            if world_size > 1:
                self._exchange(output, world_size)
            output.mul_(1.0 / (world_size * self.divisor))

    def _exchange(self, output: Tensor, world_size: int) -> None:
        """Sum as all-to-all, local sum, all-gather: rank order on every rank, gloo's fast parts."""
        if output.device.type != "cpu":
            dist.all_reduce(output, group=self._group)
            return
        padded = -(-output.numel() // world_size) * world_size
        sent = output.new_zeros(padded)
        sent[: output.numel()].copy_(output)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        rows = received.view(world_size, -1)
        own = torch.empty_like(rows[0])
        sum_rows(rows.unbind(0), own)
        gather_flat(sent, own, self._group)
        output.copy_(sent[: output.numel()])
