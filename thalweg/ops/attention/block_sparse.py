"""Attention in which each block of queries reads only the blocks of keys that a layout keeps.

The picture, tiles of two blocks of queries, causal:

    layout (N, N)      columns     what is hidden          one call for all tiles of a structure
    x . . . . .        0 1         diagonals               q_t (tiles, H, 2 blocks, D)
    x x . . . .
    x x x . . .        0 1 2 3     row 3 of 1, diagonals   k_t (tiles, H, columns, D), gathered
    x . x x . .
    x . . x x .        0 3 4 5     row 5 of 3, diagonals   alike: with the one before in one call
    x . . . x x

The phases: plan once per layout (tiles, the columns that each reads, what of them is hidden), then for each group
gather, attend with :mod:`.block`'s kernels, write back; the backward pass gathers again and adds up the gradients of
keys by block.  Invariants: no tensor of T x T is ever made, memory is linear in the blocks that are kept; hidden
elements exist only where a tile is not whole (a diagonal, rows of a tile that differ, a last block cut short).

Shapes: q (B, H, T, D), k and v (B, H / repeat, T, D).  Masks and biases are functions ``(b, h, q_idx, kv_idx)`` of
index tensors that broadcast, as FlexAttention's ``mask_mod``; FlexAttention itself does the work on an accelerator.
Source: Child et al. 2019 (sparse transformers), Zaheer et al. 2020 (BigBird's blocks), Dao et al. 2022, section 3.3.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from thalweg.ops.attention.block import block_backward, block_forward

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_MAX_TILE_TOKENS = 512
_GATHER_ROWS = 32  # gathering a key, and adding up its gradient, costs as much as attending to it from so many queries
_CHUNK_ELEMENTS = 1 << 19  # gathered elements of k at a time
_FLEX_BLOCK = 128
_FLEX_MIN_WIDTH = 16  # of a head: torch's compiled kernels take no narrower one


@dataclass(frozen=True)
class _TileGroup:
    """Tiles of one structure: ``tiles`` (n,), ``columns`` (n, c) blocks of keys that each reads.

    Where anything is hidden, ``kept`` (rows, c) says which blocks of queries read a column, and ``edge`` (c,) where
    tokens of it end: at the diagonal, if it is the place of the column in the tile; at the end of the sequence, if it
    is ``rows``; -1 for a column that is seen whole.
    """

    tiles: Tensor
    columns: Tensor
    kept: Tensor | None
    edge: Tensor | None


@dataclass(frozen=True)
class _HeadPlan:
    """The tiles of the heads that share a layout; ``heads``: their indices, None for all heads.

    ``num_rows``: blocks of queries of a tile; ``tail``: tokens of a last block that is cut short, else 0.
    """

    heads: Tensor | None
    num_rows: int
    num_tiles: int
    tail: int
    groups: tuple[_TileGroup, ...]


class BlockSparseAttention:
    """Self-attention under one block layout for sequences of one length.

    ``layout``: (H or 1, N, N), nonzero where the queries of a block see the keys of another; ``length``: T, at most
    N * block; a last block that is cut short needs no padding by the caller.
    """

    def __init__(self, layout: Tensor, block: int, length: int) -> None:
        assert layout.dim() == 3 and layout.shape[1] == layout.shape[2] == -(-length // block)
        shared = layout.shape[0] == 1 or layout.stride(0) == 0
        self.layout, self.block, self.length = (layout[:1] if shared else layout).bool(), block, length
        # By whether attention is causal, and the device.
        self._plan, self._coarse = cache(self._make_plan), cache(self._make_coarse)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        mask_mod: MaskMod | None = None,
        bias: MaskMod | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attend: q (B, H, T, D), k and v (B, H / repeat, T, D) -> (B, H, T, D) in q's dtype.

        ``causal``: query i sees keys up to i.  ``mask_mod``: true for what is attended; ``bias`` is added to the
        scaled scores and gets no gradient.  A query without keys gives 0.  Fewer queries than keys are the last ones.
        """
        assert k.shape[2] == self.length and len(self.layout) in (1, q.shape[1])
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        if q.shape[2] < self.length:
            # As generation with a cache has them.
            is_seen = self._visibility(self.layout.to(q.device), causal, mask_mod)
            sizes = len(q), q.shape[1], self.length, self.length
            b, h, q_idx, kv_idx = (torch.arange(n, device=q.device) for n in sizes)
            places = b[:, None, None, None], h[:, None, None], q_idx[-q.shape[2] :, None], kv_idx
            mask = is_seen(*places)
            if bias is not None:
                mask = torch.where(mask, bias(*places), -torch.inf)
            return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        if q.is_cuda and q.shape[3] >= _FLEX_MIN_WIDTH:
            return self.flex(_compiled_flex_attention(), q, k, v, causal, mask_mod, bias, scale)
        modifier = None if mask_mod is None and bias is None else _Modifier(mask_mod, bias, self.length)
        plans = self._plan(causal, q.device)
        if len(plans) == 1:
            return _BlockSparse.apply(q, k, v, plans[0], self.block, modifier, scale)
        repeat, outs, heads = q.shape[1] // k.shape[1], list[Tensor](), list[Tensor]()
        for plan in plans:
            assert plan.heads is not None
            own = q[:, plan.heads], k[:, plan.heads // repeat], v[:, plan.heads // repeat]
            outs.append(_BlockSparse.apply(*own, plan, self.block, modifier, scale))
            heads.append(plan.heads)
        return torch.cat(outs, 1)[:, torch.cat(heads).argsort()]

    def flex(
        self,
        flex_attention: Callable[..., Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        mask_mod: MaskMod | None,
        bias: MaskMod | None,
        scale: float,
    ) -> Tensor:
        """The same by FlexAttention, whose blocks are coarser: a mask of its own looks the layout up in them."""
        from torch.nn.attention.flex_attention import BlockMask

        size = math.lcm(self.block, _FLEX_BLOCK)
        layout, counts, columns = self._coarse(size // self.block, causal, q.device)
        is_seen = self._visibility(layout, causal, mask_mod)

        def add_bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            assert bias is not None
            return score + bias(b, h, q_idx, kv_idx)

        block_mask = BlockMask.from_kv_blocks(
            counts, columns, BLOCK_SIZE=size, mask_mod=is_seen, seq_lengths=(self.length, self.length)
        )
        options: dict[str, Any] = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
        return flex_attention(q, k, v, None if bias is None else add_bias, block_mask, **options)

    def _visibility(self, layout: Tensor, causal: bool, mask_mod: MaskMod | None) -> MaskMod:
        last_head, block = len(layout) - 1, self.block

        def is_seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            seen = layout[h.clamp(max=last_head), q_idx // block, kv_idx // block]
            if causal:
                seen = seen & (kv_idx <= q_idx)
            return seen if mask_mod is None else seen & mask_mod(b, h, q_idx, kv_idx)

        return is_seen

    @_disable_current_modes()
    def _make_coarse(self, factor: int, causal: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The layout; and of coarse rows, ``factor`` blocks each: how many coarse columns are read (1, H, n), and these
        first."""
        padded = F.pad(self.layout, (0, -self.layout.shape[1] % factor) * 2)
        coarse = padded.unflatten(2, (-1, factor)).any(3).unflatten(1, (-1, factor)).any(2)
        coarse = (coarse.tril() if causal else coarse)[None].int()
        columns = torch.argsort(coarse, dim=-1, descending=True, stable=True).int()
        return self.layout.to(device), coarse.sum(-1, dtype=torch.int32).to(device), columns.to(device)

    @_disable_current_modes()
    def _make_plan(self, causal: bool, device: torch.device) -> tuple[_HeadPlan, ...]:
        layout = self.layout.tril() if causal else self.layout
        heads_by_layout: list[list[int]] = []
        for head in range(len(layout)):  # heads of one layout are attended together
            same = next((one for one in heads_by_layout if torch.equal(layout[one[0]], layout[head])), None)
            heads_by_layout.append([head]) if same is None else same.append(head)
        return tuple(
            _plan_heads(
                layout[heads[0]].cpu(),
                None if len(heads_by_layout) == 1 else torch.tensor(heads, device=device),
                self.block,
                0 if causal else self.length % self.block,
                causal,
                device,
            )
            for heads in heads_by_layout
        )


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


# The plan


def _plan_heads(
    layout: Tensor, heads: Tensor | None, block: int, tail: int, causal: bool, device: torch.device
) -> _HeadPlan:
    """Group the tiles of ``layout`` (N, N) by structure."""
    num_blocks = len(layout)
    sizes = [1, *(size for size in (2, 4, 8, 16, 32) if size * block <= _MAX_TILE_TOKENS and size <= num_blocks)]
    rows = min(sizes, key=lambda size: _count_cost(layout, size, block))
    num_tiles = -(-num_blocks // rows)
    kept = F.pad(layout, (0, 0, 0, num_tiles * rows - num_blocks)).view(num_tiles, rows, num_blocks)
    tile, column = kept.any(1).nonzero(as_tuple=True)
    bits = kept[tile, :, column]
    # Columns of a tile that hide the same are alike: which rows read them, and where their edge is.
    place = column - tile * rows
    edge = torch.where((place >= 0) & (place < rows), place, -1) if causal else torch.full_like(place, -1)
    if tail:
        edge[column == num_blocks - 1] = rows
    code = (bits.long() << torch.arange(rows)).sum(1) * (rows + 2) + edge + 1
    order = code.argsort(stable=True)
    order = order[tile[order].argsort(stable=True)]
    tile, column, bits, edge, code = tile[order], column[order], bits[order], edge[order], code[order]
    counts = torch.bincount(tile, minlength=num_tiles)
    groups = []
    for count in counts.unique().tolist():
        if count == 0:
            continue
        members = (counts[tile] == count).nonzero()[:, 0].view(-1, count)
        structures, which = code[members].unique(dim=0, return_inverse=True)
        for number in range(len(structures)):
            own = members[which == number]
            own_bits, own_edge = bits[own[0]], edge[own[0]]
            is_whole = bool(own_bits.all()) and bool((own_edge < 0).all())
            groups.append(
                _TileGroup(
                    tile[own[:, 0]].to(device),
                    column[own].to(device),
                    None if is_whole else own_bits.T.to(device),
                    None if is_whole else own_edge.to(device),
                )
            )
    return _HeadPlan(heads, rows, num_tiles, tail, tuple(groups))


def _count_cost(layout: Tensor, rows: int, block: int) -> int:
    """Products of a query and a key if tiles are so high, gathering included: high tiles share keys, but read more."""
    padded = F.pad(layout, (0, 0, 0, -len(layout) % rows))
    columns = int(padded.view(-1, rows, layout.shape[1]).any(1).sum())
    return columns * block * (rows * block + _GATHER_ROWS)


# What is hidden


@dataclass(frozen=True)
class _Modifier:
    """The caller's mask and bias, read for tiles."""

    mask_mod: MaskMod | None
    bias: MaskMod | None
    length: int

    def tile_mask(self, batch: int, heads: Tensor, rows: Tensor, columns: Tensor, mask: Tensor | None) -> Tensor:
        """For ``rows`` (n, R) and ``columns`` (n, C), places in the sequence: (n, 1 or H, R, C), bool or additive.

        ``mask``: what the structure hides, as it comes from :func:`_structure_mask`.
        """
        last = self.length - 1
        b = torch.full((1, 1, 1, 1), batch, device=rows.device)
        h, q_idx, kv_idx = (
            heads[None, :, None, None],
            rows.clamp(max=last)[:, None, :, None],
            columns.clamp(max=last)[:, None, None, :],
        )
        shape = (*rows.shape[:1], 1, rows.shape[1], columns.shape[1])
        seen = torch.ones((), dtype=torch.bool, device=rows.device) if mask is None else mask
        if self.mask_mod is not None:
            seen = seen & self.mask_mod(b, h, q_idx, kv_idx)
        if self.bias is None:
            return seen.expand(torch.broadcast_shapes(seen.shape, shape))
        bias = self.bias(b, h, q_idx, kv_idx)
        return torch.where(seen, bias, -torch.inf).expand(torch.broadcast_shapes(bias.shape, seen.shape, shape))


def _structure_mask(group: _TileGroup, block: int, tail: int) -> Tensor | None:
    """(1, 1, R, C), true for what is seen; None where all is."""
    if group.kept is None or group.edge is None:
        return None
    rows, token = len(group.kept), torch.arange(block, device=group.edge.device)
    edge = group.edge[:, None]
    # The first query of the tile that sees a key.
    first = torch.where(edge < rows, edge * block + token, torch.where(token < tail, 0, rows * block)).flatten()
    query = torch.arange(rows * block, device=edge.device)[:, None]
    kept = group.kept.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return (kept & (first <= query))[None, None]


# The two passes


def _to_rows(x: Tensor, length: int) -> Tensor:
    """(B, H, T, D) -> (length, B * H, D): a view where B is 1 and x comes from (B, T, H, D); zeros at the end."""
    rows = x.permute(2, 0, 1, 3).reshape(x.shape[2], -1, x.shape[3])
    return rows if length == len(rows) else F.pad(rows, (0, 0, 0, 0, 0, length - len(rows)))


def _from_rows(rows: Tensor, like: Tensor) -> Tensor:
    batch, heads, length, width = like.shape
    return rows[:length].view(length, batch, heads, width).permute(1, 2, 0, 3)


@dataclass(frozen=True)
class _TileCall:
    """Some tiles of a group, or one sequence of the batch of them: what the kernels take."""

    q_heads: slice
    kv_heads: slice
    mask: Tensor | None


def _iter_parts(
    plan: _HeadPlan, shape: torch.Size, kv_heads: int, block: int, modifier: _Modifier | None
) -> Iterator[tuple[Tensor, Tensor, list[_TileCall]]]:
    """Chunks of tiles, bounded in memory, and the calls that each takes; ``shape``: (B, H, T, D) of the queries."""
    batch, heads, _, width = shape
    for group in plan.groups:
        num_columns = group.columns.shape[1]
        at_once = max(1, _CHUNK_ELEMENTS // (num_columns * block * batch * kv_heads * width))
        hidden = _structure_mask(group, block, plan.tail)
        for tiles, columns in zip(group.tiles.split(at_once), group.columns.split(at_once), strict=True):
            if modifier is None:
                yield tiles, columns, [_TileCall(slice(None), slice(None), hidden)]
                continue
            within = torch.arange(plan.num_rows * block, device=tiles.device)
            rows = tiles[:, None] * plan.num_rows * block + within
            keys = (columns[..., None] * block + within[:block]).flatten(1)
            names = torch.arange(heads, device=tiles.device) if plan.heads is None else plan.heads
            calls = []
            for b in range(batch):
                mask = modifier.tile_mask(b, names, rows, keys, hidden)
                own_kv = slice(b * kv_heads, (b + 1) * kv_heads)
                calls.append(_TileCall(slice(b * heads, (b + 1) * heads), own_kv, mask))
            yield tiles, columns, calls


class _Tiled:
    """q (or what is shaped like it) in tiles, k and v in blocks, of the heads of one plan."""

    def __init__(self, plan: _HeadPlan, block: int, num_blocks: int) -> None:
        self.plan, self.block, self.num_blocks = plan, block, num_blocks

    def tiles(self, x: Tensor) -> Tensor:
        """(tiles, R, B * H, D)"""
        rows = self.plan.num_rows * self.block
        return _to_rows(x, self.plan.num_tiles * rows).unflatten(0, (-1, rows))

    def blocks(self, x: Tensor) -> Tensor:
        """(N, block * B * H * D)"""
        return _to_rows(x, self.num_blocks * self.block).reshape(self.num_blocks, -1)

    def gather(self, blocks: Tensor, columns: Tensor, width: int) -> Tensor:
        """Of each tile its keys: (n, B * H, C, D)."""
        rows = blocks.index_select(0, columns.view(-1))
        return rows.view(len(columns), columns.shape[1] * self.block, -1, width).transpose(1, 2)


class _BlockSparse(torch.autograd.Function):
    """Attention of the heads of one plan."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _HeadPlan, block: int, modifier: _Modifier | None, scale: float
    ) -> Tensor:
        tiled, width = _Tiled(plan, block, -(-k.shape[2] // block)), q.shape[3]
        q_tiles, k_blocks, v_blocks = tiled.tiles(q), tiled.blocks(k), tiled.blocks(v)
        out_tiles = torch.zeros_like(q_tiles)
        lse = torch.full(
            (len(q_tiles), q_tiles.shape[2], q_tiles.shape[1]),
            -torch.inf,
            dtype=torch.promote_types(q.dtype, torch.float32),
            device=q.device,
        )
        for tiles, columns, parts in _iter_parts(plan, q.shape, k.shape[1], block, modifier):
            q_t = q_tiles[tiles].transpose(1, 2)
            k_t, v_t = tiled.gather(k_blocks, columns, width), tiled.gather(v_blocks, columns, width)
            for part in parts:
                some = q_t[:, part.q_heads], k_t[:, part.kv_heads], v_t[:, part.kv_heads]
                out_t, lse_t = block_forward(*some, causal=False, mask=part.mask, scale=scale)
                out_tiles[tiles, :, part.q_heads] = out_t.transpose(1, 2)
                lse[tiles, part.q_heads] = lse_t
        out = _from_rows(out_tiles.flatten(0, 1), q)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tiled, ctx.modifier, ctx.scale = tiled, modifier, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        tiled, width = ctx.tiled, q.shape[3]
        # Each key has gradients from many tiles: they add up in fp32.
        acc_dtype = torch.promote_types(k.dtype, torch.float32)
        q_tiles, out_tiles, grad_tiles = (tiled.tiles(x) for x in (q, out, grad))
        k_blocks, v_blocks = tiled.blocks(k), tiled.blocks(v)
        dq_tiles = torch.zeros_like(q_tiles)
        dk_blocks, dv_blocks = (torch.zeros_like(x, dtype=acc_dtype) for x in (k_blocks, v_blocks))
        for tiles, columns, parts in _iter_parts(tiled.plan, q.shape, k.shape[1], tiled.block, ctx.modifier):
            q_t, out_t, grad_t = (x[tiles].transpose(1, 2) for x in (q_tiles, out_tiles, grad_tiles))
            k_t, v_t = tiled.gather(k_blocks, columns, width), tiled.gather(v_blocks, columns, width)
            dk_t, dv_t = [], []
            for part in parts:
                heads, kv = part.q_heads, part.kv_heads
                some = grad_t[:, heads], q_t[:, heads], k_t[:, kv], v_t[:, kv], out_t[:, heads]
                dq_p, dk_p, dv_p = block_backward(
                    *some, lse[tiles, heads], causal=False, mask=part.mask, scale=ctx.scale
                )
                dq_tiles[tiles, :, heads] = dq_p.transpose(1, 2)
                dk_t.append(dk_p)
                dv_t.append(dv_p)
            for blocks, pieces in ((dk_blocks, dk_t), (dv_blocks, dv_t)):
                whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
                rows = whole.transpose(1, 2).reshape(columns.numel(), -1)
                blocks.index_add_(0, columns.view(-1), rows.to(acc_dtype))
        dk, dv = (
            _from_rows(blocks.view(tiled.num_blocks * tiled.block, -1, width), k).to(k.dtype)
            for blocks in (dk_blocks, dv_blocks)
        )
        return _from_rows(dq_tiles.flatten(0, 1), q), dk, dv, None, None, None, None
