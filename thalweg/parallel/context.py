"""Context parallelism: attention over a sequence whose keys go round a ring of ranks.

The picture, on a ring of three (Liu et al. 2023, "Ring Attention"); each rank keeps its queries, and
the blocks of keys and values (kv) move one rank on after each step:

    step      rank 0    rank 1    rank 2
      0        kv 0      kv 1      kv 2        the own block
      1        kv 2      kv 0      kv 1
      2        kv 1      kv 2      kv 0

Every step attends to one block and merges the result by its log-sum-exp (``ops/blockwise.py``); the
next block travels meanwhile.  Nobody ever holds more than two blocks, whatever the number of
ranks, so a sequence n times as long takes n ranks and no more memory on each.

Backward goes round once more.  The gradient of a block of keys is a sum over all ranks: it sets out
one step behind its block, is added to on each rank and ends where the block lives, so it takes
n - 1 hops like the block; the owner's own part waits at home.  Each rank sends (n-1) kv forward,
(n-1) kv and (n-1) of their gradients (fp32) backward.

* **Balance.**  Shares are an early and a late chunk each (:mod:`.shares`).  Under a causal mask a block
  from an earlier rank is seen in its early half by all queries, one from a later rank as a whole by
  the late queries: half the rectangle in either case, on every rank at every step, without a mask.
* **Other masks** (documents, padding, windows) are asked for by position, chunk by chunk; chunks that
  nobody sees cost nothing.  No mask of the whole sequence is ever made.
* **Grouped heads.**  Keys travel once, not once for each query head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.ops.blockwise import block_backward, block_forward
from thalweg.parallel.cuts import Span
from thalweg.parallel.shares import index_of
from thalweg.parallel.team import Team

Seen = Callable[[Tensor, Tensor], Tensor]
"""From positions of queries (Tq,) and keys (Tk,) to what is attended: bool (B or 1, 1, Tq, Tk)."""

Rectangle = tuple[slice, slice, bool, Tensor | None]
_NAME = "attention"
_KEYS, _GRADIENTS = 0, 1  # tags: both may be on their way at once


@dataclass(frozen=True)
class Layout:
    """One attention on the ring: ``spans[rank]`` its tokens; ``repeat`` query heads for each of the keys'."""

    spans: tuple[tuple[Span, ...], ...]
    causal: bool
    seen: Seen | None
    scale: float
    repeat: int

    def length(self, rank: int) -> int:
        """Tokens of a rank."""
        return sum(stop - start for start, stop in self.spans[rank])

    def rectangles(self, own: int, other: int, device: torch.device) -> Iterator[Rectangle]:
        """What rank ``own`` computes with the keys of ``other``: rows, columns, whether causal, a mask."""
        everything = slice(None)
        if self.seen is not None:
            yield from self._masked(own, other, self.seen, device)
        elif not self.causal:
            yield everything, everything, False, None
        elif own == other:
            yield everything, everything, True, None
        elif other < own:
            yield everything, _chunks(self.spans[other])[0], False, None
        else:
            late = _chunks(self.spans[own])[1]
            if late.start < late.stop:
                yield late, everything, False, None

    def _masked(self, own: int, other: int, seen: Seen, device: torch.device) -> Iterator[Rectangle]:
        for row, rows in zip(self.spans[own], _chunks(self.spans[own]), strict=True):
            for column, columns in zip(self.spans[other], _chunks(self.spans[other]), strict=True):
                if row[0] == row[1] or column[0] == column[1]:
                    continue
                mask = seen(index_of([row], device), index_of([column], device))
                if bool(mask.all()):
                    yield rows, columns, False, None
                elif bool(mask.any()):
                    yield rows, columns, False, mask


def _chunks(spans: tuple[Span, ...]) -> list[slice]:
    """Where a rank's spans lie among its tokens."""
    found, before = [], 0
    for start, stop in spans:
        found.append(slice(before, before + stop - start))
        before += stop - start
    return found


class Ring:
    """This rank's place on a ring, and the two verbs that go round it; without a team, a ring of one."""

    def __init__(self, team: Team | None) -> None:
        self.team = team
        self.rank, self.size = (0, 1) if team is None else (team.rank, team.size)
        if team is not None:
            ranks = dist.get_process_group_ranks(team.group)
            self._next, self._previous = ranks[(team.rank + 1) % team.size], ranks[team.rank - 1]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Attention of own queries to everybody's keys.

        q (B, H, own T, D), k and v (B, H / repeat, own T, D) -> (B, H, own T, D of v).
        """
        return _RingAttention.apply(q, k, v, self, layout)  # type: ignore[return-value]

    def source(self, step: int) -> int:
        """Whose keys are here at a step."""
        return (self.rank - step) % self.size

    def hop(self, sent: Tensor, numel: int, tag: int) -> Callable[[], Tensor]:
        """Begin to send a flat tensor on and to receive ``numel`` elements; call to have them."""
        team = self.team
        assert team is not None
        received, group = sent.new_empty(numel), team.group
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, self._next, group, tag),
                dist.P2POp(dist.irecv, received, self._previous, group, tag),
            ]
        )

        def arrived() -> Tensor:
            with team.ledger.timed("send", _NAME, team.carrier, full_bytes=sent.nbytes, world_size=team.size):
                for work in works:
                    work.wait()
            return received

        return arrived


class _Block:
    """Keys and values of one rank, in one flat buffer (or gradients of them)."""

    def __init__(self, flat: Tensor, k: torch.Size, v: torch.Size) -> None:
        self.flat = flat
        self.k, self.v = (
            part.view(shape) for part, shape in zip(flat.split([k.numel(), v.numel()]), (k, v), strict=True)
        )


def _shapes(k: Tensor, v: Tensor, length: int) -> tuple[torch.Size, torch.Size]:
    """Of a block with another number of tokens."""
    one, two = list(k.shape), list(v.shape)
    one[2] = two[2] = length
    return torch.Size(one), torch.Size(two)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, layout: Layout
    ) -> Tensor:
        rank = ring.rank
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=wide, device=q.device)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
        block = _packed(k, v)
        with torch.autocast(q.device.type, enabled=False):
            for step in range(ring.size):
                source, arrived = ring.source(step), None
                if step + 1 < ring.size:
                    shapes = _shapes(k, v, layout.length(ring.source(step + 1)))
                    arrived = ring.hop(block.flat, shapes[0].numel() + shapes[1].numel(), _KEYS)
                for rows, columns, causal, mask in layout.rectangles(rank, source, q.device):
                    found = block_forward(
                        q[:, :, rows],
                        _repeated(block.k[:, :, columns], layout.repeat),
                        _repeated(block.v[:, :, columns], layout.repeat),
                        causal=causal,
                        mask=mask,
                        scale=layout.scale,
                    )
                    _merge(out[:, :, rows], lse[:, :, rows], *found)
                if arrived is not None:
                    block = _Block(arrived(), *shapes)
        y = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.ring, ctx.layout = ring, layout
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, lse = ctx.saved_tensors
        ring, layout = ctx.ring, ctx.layout
        grad = grads[0].contiguous()
        dq = torch.zeros_like(q, dtype=lse.dtype)
        block, own, incoming = _packed(k, v), None, None
        with torch.autocast(q.device.type, enabled=False):
            for step in range(ring.size):
                source, arrived = ring.source(step), None
                shapes = _shapes(k, v, layout.length(ring.source(step + 1)))
                numel = shapes[0].numel() + shapes[1].numel()
                if step + 1 < ring.size:
                    arrived = ring.hop(block.flat, numel, _KEYS)
                gradient = _Block(
                    torch.zeros(block.flat.numel(), dtype=lse.dtype, device=q.device),
                    block.k.shape,
                    block.v.shape,
                )
                for rectangle in layout.rectangles(ring.rank, source, q.device):
                    _add_gradients(dq, gradient, grad, q, block, y, lse, layout, rectangle)
                if step == 0:
                    own = gradient
                else:
                    if incoming is not None:
                        gradient.flat.add_(incoming())
                    incoming = ring.hop(gradient.flat, numel, _GRADIENTS)
                if arrived is not None:
                    block = _Block(arrived(), *shapes)
        assert own is not None
        if incoming is not None:
            own.flat.add_(incoming())
        return dq.to(q.dtype), own.k.to(k.dtype), own.v.to(v.dtype), None, None


def _packed(k: Tensor, v: Tensor) -> _Block:
    return _Block(torch.cat([k.reshape(-1), v.reshape(-1)]), k.shape, v.shape)


def _repeated(x: Tensor, repeat: int) -> Tensor:
    return x if repeat == 1 else x.repeat_interleave(repeat, 1)


def _summed_groups(x: Tensor, repeat: int) -> Tensor:
    return x if repeat == 1 else x.unflatten(1, (-1, repeat)).sum(2)


def _merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Take one block's result into what is known so far; views, changed in place."""
    total = torch.logaddexp(lse, new_lse)
    # a query that has seen nothing yet: exp(-inf - inf) = 0
    base = torch.where(total == -torch.inf, torch.inf, total)
    out.mul_(torch.exp(lse - base)[..., None]).add_(new_out * torch.exp(new_lse - base)[..., None])
    lse.copy_(total)


def _add_gradients(
    dq: Tensor,
    gradient: _Block,
    grad: Tensor,
    q: Tensor,
    block: _Block,
    y: Tensor,
    lse: Tensor,
    layout: Layout,
    rectangle: Rectangle,
) -> None:
    rows, columns, causal, mask = rectangle
    found = block_backward(
        grad[:, :, rows],
        q[:, :, rows],
        _repeated(block.k[:, :, columns], layout.repeat),
        _repeated(block.v[:, :, columns], layout.repeat),
        y[:, :, rows],
        lse[:, :, rows],
        causal=causal,
        mask=mask,
        scale=layout.scale,
    )
    dq[:, :, rows] += found[0]
    gradient.k[:, :, columns] += _summed_groups(found[1], layout.repeat)
    gradient.v[:, :, columns] += _summed_groups(found[2], layout.repeat)
