"""Context parallelism: attention over a sequence whose keys go round a ring of ranks.

The picture, on a ring of three (Liu et al. 2023, "Ring Attention"); each rank keeps its queries, and
the blocks of keys and values (kv) move one rank on after each step:

    step      rank 0    rank 1    rank 2
      0        kv 0      kv 1      kv 2        the own block
      1        kv 2      kv 0      kv 1
      2        kv 1      kv 2      kv 0

Every step attends to one block and merges the result by its log-sum-exp (``ops/attention/block.py``); the
next block travels meanwhile.  Nobody ever holds more than two blocks, whatever the number of
ranks, so a sequence n times as long takes n ranks and no more memory on each.

Backward goes round once more.  The gradient of a block of keys is a sum over all ranks: it sets out
one step behind its block, is added to on each rank and ends where the block lives, so it takes
n - 1 hops like the block; the owner's own part waits at home.  Each rank sends (n-1) kv forward,
(n-1) kv and (n-1) of their gradients (fp32) backward.

* **Balance.**  Shares are an early and a late chunk each (:mod:`.partition`).  Under a causal mask a block
  from an earlier rank is seen in its early half by all queries, one from a later rank as a whole by
  the late queries: half the rectangle in either case, on every rank at every step, without a mask.
* **Other masks** (documents, padding, windows) are asked for by position, chunk by chunk; chunks that
  nobody sees cost nothing.  No mask of the whole sequence is ever made.
* **Grouped heads.**  Keys travel once, not once for each query head.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.ops.attention.block import block_backward, block_forward
from thalweg.parallel.comm_group import ParallelGroup
from thalweg.parallel.sequence.partition import spans_to_index
from thalweg.parallel.shard_spec import Span

MaskFn = Callable[[Tensor, Tensor], Tensor]
"""From positions of queries (Tq,) and keys (Tk,) to what is attended: bool (B or 1, 1, Tq, Tk)."""

AttentionTile = tuple[slice, slice, bool, Tensor | None]
Visibility = list[tuple[bool, bool]]
"""Of each rectangle of a mask, in the order of :meth:`RingAttentionSpec.rectangles`: is any, is all of it attended."""

_LEDGER_NAME = "attention"
_KV_TAG, _GRAD_TAG = 0, 1  # tags: both may be on their way at once


@dataclass(frozen=True)
class RingAttentionSpec:
    """One attention on the ring: ``token_spans[rank]`` its tokens."""

    token_spans: tuple[tuple[Span, ...], ...]
    causal: bool
    mask_fn: MaskFn | None
    scale: float

    def num_tokens(self, rank: int) -> int:
        """Tokens of a rank."""
        return sum(stop - start for start, stop in self.token_spans[rank])

    def rectangles(
        self, query_rank: int, kv_rank: int, device: torch.device
    ) -> Iterator[tuple[slice, slice, Callable[[], Tensor]]]:
        """Rows and columns of each pair of chunks of two ranks, and what makes its mask."""
        assert self.mask_fn is not None
        row_spans, column_spans = self.token_spans[query_rank], self.token_spans[kv_rank]
        for row, rows in zip(row_spans, _local_slices(row_spans), strict=True):
            for column, columns in zip(column_spans, _local_slices(column_spans), strict=True):
                if row[0] < row[1] and column[0] < column[1]:
                    positions = spans_to_index([row], device), spans_to_index([column], device)
                    yield rows, columns, partial(self.mask_fn, *positions)

    def find_visible(self, query_rank: int, device: torch.device) -> list[Visibility]:
        """By rank of the keys; an accelerator is waited for once."""
        if self.mask_fn is None:
            return [[] for _ in self.token_spans]
        counts, flags = [], []
        for kv_rank in range(len(self.token_spans)):
            masks = (make_mask() for *_, make_mask in self.rectangles(query_rank, kv_rank, device))
            found = [torch.stack([mask.any(), mask.all()]) for mask in masks]
            counts.append(len(found))
            flags += found
        read = iter(torch.stack(flags).tolist() if flags else [])
        return [list(islice(read, count)) for count in counts]

    def tiles(
        self, query_rank: int, kv_rank: int, device: torch.device, visible: Visibility
    ) -> Iterator[AttentionTile]:
        """What rank ``query_rank`` computes with the keys of ``kv_rank``: rows, columns, whether causal, a mask.
        ``visible``: of these keys, by :meth:`find_visible`."""
        everything, row_slices = slice(None), _local_slices(self.token_spans[query_rank])
        if self.mask_fn is not None:
            rectangles = self.rectangles(query_rank, kv_rank, device)
            for (rows, columns, make_mask), (is_any, is_all) in zip(rectangles, visible, strict=True):
                if is_any:
                    yield rows, columns, False, None if is_all else make_mask()
        elif not self.causal or query_rank == kv_rank:
            yield everything, everything, self.causal, None
        elif kv_rank < query_rank:
            yield everything, _local_slices(self.token_spans[kv_rank])[0], False, None
        elif row_slices[1].start < row_slices[1].stop:  # the late queries
            yield row_slices[1], everything, False, None


def _local_slices(spans: tuple[Span, ...]) -> list[slice]:
    """Where a rank's spans lie among its tokens."""
    slices, before = [], 0
    for start, stop in spans:
        slices.append(slice(before, before + stop - start))
        before += stop - start
    return slices


class RingAttention:
    """This rank's place on a ring, and the two verbs that go round it; without a team, a ring of one."""

    def __init__(self, cp_group: ParallelGroup | None) -> None:
        self.cp_group = cp_group
        self.rank, self.size = (0, 1) if cp_group is None else (cp_group.rank, cp_group.size)
        if cp_group is not None:
            ranks = dist.get_process_group_ranks(cp_group.process_group)
            self._next_rank, self._previous_rank = ranks[(self.rank + 1) % self.size], ranks[self.rank - 1]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: RingAttentionSpec) -> Tensor:
        """Attention of own queries to everybody's keys.

        q (B, H, own T, D), k and v (B, H / repeat, own T, D) -> (B, H, own T, D of v).
        """
        return _RingAttentionFunction.apply(q, k, v, self, spec)  # type: ignore[return-value]

    def iter_kv(self, k: Tensor, v: Tensor, spec: RingAttentionSpec) -> Iterator[tuple[int, Tensor, int]]:
        """Each rank, this one first, and its keys and values (flat); the next, of that size, are on their way."""
        flat = torch.cat([k.reshape(-1), v.reshape(-1)])
        for step in range(self.size):
            next_numel = _numel_per_token(k, v) * spec.num_tokens((self.rank - step - 1) % self.size)
            wait_next = self.send_recv_next(flat, next_numel, _KV_TAG) if step + 1 < self.size else None
            yield (self.rank - step) % self.size, flat, next_numel
            if wait_next is not None:
                flat = wait_next()

    def send_recv_next(self, sent: Tensor, numel: int, tag: int) -> Callable[[], Tensor]:
        """Begin to send a flat tensor on and to receive ``numel`` elements; call to have them."""
        cp_group = self.cp_group
        assert cp_group is not None
        received, process_group = sent.new_empty(numel), cp_group.process_group
        send = dist.P2POp(dist.isend, sent, self._next_rank, process_group, tag)
        receive = dist.P2POp(dist.irecv, received, self._previous_rank, process_group, tag)
        works = dist.batch_isend_irecv([send, receive])

        def wait() -> Tensor:
            with cp_group.ledger.timed("send", _LEDGER_NAME, cp_group.axis, sent.nbytes, cp_group.size):
                for work in works:
                    work.wait()
            return received

        return wait


def _split_kv(flat: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values like ``k`` and ``v`` but for the number of tokens, one behind the other in ``flat``."""
    length = flat.numel() // _numel_per_token(k, v)
    shapes = [(*x.shape[:2], length, x.shape[3]) for x in (k, v)]
    first, second = flat.split([torch.Size(shape).numel() for shape in shapes])
    return first.view(shapes[0]), second.view(shapes[1])


def _numel_per_token(k: Tensor, v: Tensor) -> int:
    return k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3])


class _RingAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: RingAttention, spec: RingAttentionSpec
    ) -> Tensor:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=wide, device=q.device)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
        visible = spec.find_visible(ring.rank, q.device)
        with torch.autocast(q.device.type, enabled=False):
            for kv_rank, flat, _ in ring.iter_kv(k, v, spec):
                keys, values = _split_kv(flat, k, v)
                for rows, columns, causal, mask in spec.tiles(ring.rank, kv_rank, q.device, visible[kv_rank]):
                    kv = (x[:, :, columns] for x in (keys, values))
                    new = block_forward(q[:, :, rows], *kv, causal=causal, mask=mask, scale=spec.scale)
                    _merge_by_lse(out[:, :, rows], lse[:, :, rows], *new)
        y = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.ring, ctx.spec, ctx.visible = ring, spec, visible
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, lse = ctx.saved_tensors
        ring, spec = ctx.ring, ctx.spec
        grad = grads[0].contiguous()
        dq = torch.zeros_like(q, dtype=lse.dtype)
        local_grad = wait_grad = None
        with torch.autocast(q.device.type, enabled=False):
            for kv_rank, flat, next_numel in ring.iter_kv(k, v, spec):
                flat_grad = torch.zeros_like(flat, dtype=lse.dtype)
                keys, values = _split_kv(flat, k, v)
                key_grads, value_grads = _split_kv(flat_grad, k, v)
                for rows, columns, causal, mask in spec.tiles(ring.rank, kv_rank, q.device, ctx.visible[kv_rank]):
                    own_k, own_v = (x[:, :, columns] for x in (keys, values))
                    own_grad, own_q, own_y, own_lse = (x[:, :, rows] for x in (grad, q, y, lse))
                    options: dict[str, Any] = {"causal": causal, "mask": mask, "scale": spec.scale}
                    tile_grads = block_backward(own_grad, own_q, own_k, own_v, own_y, own_lse, **options)
                    dq[:, :, rows] += tile_grads[0]
                    key_grads[:, :, columns] += tile_grads[1]
                    value_grads[:, :, columns] += tile_grads[2]
                if local_grad is None:
                    local_grad = flat_grad
                else:
                    if wait_grad is not None:
                        flat_grad.add_(wait_grad())
                    wait_grad = ring.send_recv_next(flat_grad, next_numel, _GRAD_TAG)
        assert local_grad is not None
        if wait_grad is not None:
            local_grad.add_(wait_grad())
        dk, dv = _split_kv(local_grad, k, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _merge_by_lse(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Take one block's result into what is known so far; views, changed in place."""
    total = torch.logaddexp(lse, new_lse)
    # a query that has seen nothing yet: exp(-inf - inf) = 0
    base = torch.where(total == -torch.inf, torch.inf, total)
    out.mul_(torch.exp(lse - base)[..., None]).add_(new_out * torch.exp(new_lse - base)[..., None])
    lse.copy_(total)
