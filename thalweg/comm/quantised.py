"""Collectives in few bits: ZeRO++'s qwZ and qgZ (Wang et al. 2023, arXiv 2306.10209).

*Weights* (qwZ): each rank encodes its shard once, the codes are gathered, and every rank,
the sender too, computes with what it decodes, so all hold the same bits.

*Gradients* (qgZ): a ring would encode and decode at every hop and let the errors pile up;
instead rows go straight to their owners, who decode and add in fp32.  Over two levels it
is done twice, first inside the host, then the hosts' partial sums between hosts:

    rows of all ranks --inside the host--> partial sums --between hosts--> shard

Where the ranks of a host share memory the first level needs no codes and is exact
(:mod:`.hierarchical`); where it goes over links it takes 8 bits, as those links are not
the narrow place and half of the paper's error is made there.  Between hosts it is 4 bits.

*Error feedback* (LoCo, Xie et al. 2024, arXiv 2407.04480): what rounding took from a row is
averaged over the steps and added to the next one, so that it is late and not lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.comm.codec import BLOCK, Codec, Packing
from thalweg.comm.ledger import Call, Ledger
from thalweg.comm.plain import PlainAllGather, Swap, gather_flat, swap_rows
from thalweg.comm.reducer import Reducer
from thalweg.comm.route import Route

# The packing of a shard of so many elements in such a dtype, or None to send it as it is.
PackingOf = Callable[[int, torch.dtype], Packing | None]

WEIGHTS = Codec(8)
GRADIENTS = Codec(4)
GRADIENTS_IN_HOST = Codec(8)


def one_piece(codec: Codec) -> PackingOf:
    """Encode any buffer of 16 or 32-bit floats as one run of blocks."""

    def packing_of(numel: int, dtype: torch.dtype) -> Packing | None:
        encodable = dtype in (torch.float32, torch.bfloat16, torch.float16)
        return Packing(((numel, True),), codec, dtype) if encodable else None

    return packing_of


class Feedback:
    """The error that a sender still owes: an exponential average, kept in bf16, begun anew now and then."""

    def __init__(self, beta: float, reset_every: int) -> None:
        self._beta, self._reset_every = beta, reset_every
        self._owed: Tensor | None = None
        self._num_calls = 0

    def begin_anew(self) -> None:
        """Forget what is owed."""
        self._owed = None

    def compensate(self, rows: Tensor, unit: float) -> Tensor:
        """``rows`` in fp32 with what is owed; ``unit`` is the loss scale, which errors are kept without."""
        self._num_calls += 1
        stale = self._owed is None or self._owed.shape != rows.shape or self._num_calls > self._reset_every
        if stale:
            self._owed, self._num_calls = torch.zeros_like(rows, dtype=torch.bfloat16), 1
            return rows.float()
        assert self._owed is not None
        return self._owed.float().mul_(unit).add_(rows)

    def note(self, wanted: Tensor, sent: Tensor, unit: float) -> None:
        """Remember the difference between the rows as they should be and as they were sent."""
        assert self._owed is not None
        error = torch.sub(wanted, sent).mul_((1.0 - self._beta) / unit)
        error.add_(self._owed, alpha=self._beta)
        self._owed.copy_(error.nan_to_num_(0.0, 0.0, 0.0))


class QuantisedSwap(Swap):
    """:class:`~thalweg.comm.plain.Swap` with rows in few bits."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        route: Route,
        packing_of: PackingOf,
        feedback: Feedback | None = None,
        unit: Callable[[], float] = lambda: 1.0,
    ) -> None:
        super().__init__(group, route)
        self._packing_of, self._feedback, self._unit = packing_of, feedback, unit

    def begin_anew(self) -> None:
        """Be as in a new process."""
        if self._feedback is not None:
            self._feedback.begin_anew()

    def sum(self, rows: Tensor, out: Tensor, scale: float, call: Call, wire: torch.dtype) -> None:
        """Encode, all-to-all, decode, add in fp32."""
        packing = self._packing_of(rows.shape[1], wire)
        if packing is None:
            super().sum(rows, out, scale, call, wire)
            return
        if self._feedback is not None:
            rows = self._feedback.compensate(rows, self._unit())
        payload = torch.empty(len(rows), packing.num_bytes, dtype=torch.uint8, device=rows.device)
        for row, part in zip(rows.unbind(0), payload.unbind(0), strict=True):
            packing.pack(row, part)
        if self._feedback is not None:
            sent = torch.empty_like(rows)
            for row, part in zip(sent.unbind(0), payload.unbind(0), strict=True):
                packing.unpack(part, row)
            self._feedback.note(rows, sent, self._unit())
        received = swap_rows(payload, self.group)
        call.moved(*self.route.all_to_all(packing.num_bytes))
        total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        for index, part in enumerate(received.unbind(0)):
            packing.unpack(part, total, add=index > 0)
        torch.mul(total, scale, out=total)
        if total is not out:
            out.copy_(total)


class QuantisedEverywhere:
    """A sum over one group that every rank gets with the same bits: codes up, finer codes down."""

    def __init__(self, group: dist.ProcessGroup, route: Route) -> None:
        self.group, self.route = group, route

    def __call__(self, tensor: Tensor, call: Call) -> None:
        """Replace ``tensor`` (1-D) by the sum over the group."""
        size = len(self.route.hosts)
        length = -(-tensor.numel() // (size * BLOCK)) * BLOCK
        rows = torch.zeros(size, length, dtype=torch.float32, device=tensor.device)
        rows.view(-1)[: tensor.numel()].copy_(tensor)
        own = torch.empty(length, dtype=torch.float32, device=tensor.device)
        QuantisedSwap(self.group, self.route, one_piece(GRADIENTS)).sum(rows, own, 1.0, call, torch.float32)
        down = Packing(((length, True),), WEIGHTS, torch.float32)
        payload = torch.empty(down.num_bytes, dtype=torch.uint8, device=tensor.device)
        down.pack(own, payload)
        for row, part in zip(rows, gather_payloads(payload, self.group, size), strict=True):
            down.unpack(part, row)
        call.moved(*self.route.ring(down.num_bytes))
        tensor.copy_(rows.view(-1)[: tensor.numel()])


def gather_payloads(payload: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
    """Every rank's ``payload`` as rows."""
    gathered = torch.empty(size * payload.numel(), dtype=torch.uint8, device=payload.device)
    gather_flat(gathered, payload, group)
    return gathered.view(size, -1)


class QuantisedAllGather(PlainAllGather):
    """All-gather over one group in few bits; a group of another size (hpZ's) gets whole values."""

    def __init__(
        self, name: str, ledger: Ledger | None, route: Route, packing_of: PackingOf, world_size: int
    ) -> None:
        super().__init__(name, ledger, route)
        self._packing_of, self._world_size = packing_of, world_size
        self._own_route = route

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        size = group.size()
        packing = self._packing_of(input_tensor.numel(), input_tensor.dtype)
        if packing is None or size != self._world_size:
            return super().__call__(output_tensor, input_tensor, group, async_op)
        with self._ledger.timed(
            "all_gather", self._name, "wire", full_bytes=output_tensor.nbytes, world_size=size
        ) as call:
            payload = torch.empty(packing.num_bytes, dtype=torch.uint8, device=input_tensor.device)
            packing.pack(input_tensor, payload)
            rows = output_tensor.view(size, -1)
            for row, part in zip(rows, gather_payloads(payload, group, size), strict=True):
                packing.unpack(part, row)
            call.moved(*self._own_route.ring(packing.num_bytes))
        return None


class TwoLevelReduceScatter(Reducer):
    """Reduce-scatter over links at both levels: inside each host, then the partial sums between hosts."""

    def __init__(
        self,
        inner: Swap,
        outer: Swap,
        places: Sequence[Sequence[int]],
        name: str,
        ledger: Ledger | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        """``places[l][h]`` is the rank that has place ``l`` on host ``h``."""
        super().__init__(name, ledger, output_dtype)
        self._inner, self.swap = inner, outer
        self._num_hosts = len(places[0])
        self._order = [rank for place in places for rank in place]

    def sum_shards(
        self, rows: Tensor, output: Tensor, group: dist.ProcessGroup, scale: float, call: Call
    ) -> None:
        """Twice a swap; rows are put in the order of places first."""
        numel = rows.shape[1]
        sorted_rows = rows[torch.tensor(self._order, device=rows.device)]
        parts = sorted_rows.view(len(rows) // self._num_hosts, self._num_hosts * numel)
        partial = torch.empty(self._num_hosts * numel, dtype=torch.float32, device=rows.device)
        self._inner.sum(parts, partial, 1.0, call, rows.dtype)
        self.swap.sum(partial.view(self._num_hosts, numel), output, scale, call, rows.dtype)


class TwoLevelAllGather:
    """All-gather over links at both levels (MiCS): shards between hosts once, then inside each host."""

    def __init__(
        self,
        inner: dist.ProcessGroup,
        outer: dist.ProcessGroup,
        routes: tuple[Route, Route],
        places: Sequence[Sequence[int]],
        name: str,
        ledger: Ledger | None = None,
        packing_of: PackingOf | None = None,
    ) -> None:
        self._inner, self._outer, self._routes = inner, outer, routes
        self._order = [rank for place in places for rank in place]
        self._name, self._ledger = name, ledger or Ledger()
        self._packing_of = packing_of or (lambda numel, dtype: None)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2's hook."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        size, numel = group.size(), input_tensor.numel()
        inner, outer = self._routes
        with self._ledger.timed(
            "all_gather", self._name, "wire", full_bytes=output_tensor.nbytes, world_size=size
        ) as call:
            packing = self._packing_of(numel, input_tensor.dtype)
            sent = input_tensor.contiguous().view(torch.uint8)
            if packing is not None:
                sent = torch.empty(packing.num_bytes, dtype=torch.uint8, device=input_tensor.device)
                packing.pack(input_tensor, sent)
            of_place = gather_payloads(sent, self._outer, len(outer.hosts))
            everything = gather_payloads(of_place.view(-1), self._inner, len(inner.hosts)).view(size, -1)
            call.moved(*outer.ring(sent.numel()))
            call.moved(*inner.ring(of_place.numel()))
            rows = output_tensor.view(size, numel)
            for rank, part in zip(self._order, everything, strict=True):
                if packing is None:
                    rows[rank].copy_(part.view(rows.dtype))
                else:
                    packing.unpack(part, rows[rank])
        return None
