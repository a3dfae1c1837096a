"""The exchange of Ulysses: own tokens of all heads against all tokens of own heads.

Heads are dealt out like tensor ranks' (:mod:`.heads`) and shares of tokens may differ, so counts
differ by rank; one all-to-all carries q, k and v together, another the result back
(Jacobs et al. 2023).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thalweg.parallel.team import Team


def to_heads(
    tensors: list[Tensor], heads: list[list[list[int]]], sizes: list[int], team: Team
) -> list[Tensor]:
    """Tensors (B, H, own T, D) -> (B, own H, T, D), in one exchange.

    ``heads[i][rank]``: the heads of tensor i that a rank gets; ``sizes``: tokens by rank.
    """
    parts: list[list[Tensor]] = [[] for _ in range(team.size)]
    for tensor, by_rank in zip(tensors, heads, strict=True):
        for rank, own in enumerate(by_rank):
            parts[rank].append(tensor[:, own].reshape(-1))
    batch = tensors[0].shape[0]
    shapes = [
        [
            (batch, len(by_rank[team.rank]), size, t.shape[3])
            for t, by_rank in zip(tensors, heads, strict=True)
        ]
        for size in sizes
    ]
    received = _exchange(parts, shapes, team)
    return [torch.cat([from_rank[i] for from_rank in received], 2) for i in range(len(tensors))]


def to_tokens(y: Tensor, heads: list[int], sizes: list[int], team: Team) -> Tensor:
    """(B, own H, T, D) -> (B, H, own T, D); ``heads``: number of heads by rank."""
    parts = [[part.reshape(-1)] for part in y.split(sizes, 2)]
    own = sizes[team.rank]
    shapes = [[(y.shape[0], count, own, y.shape[3])] for count in heads]
    return torch.cat([received[0] for received in _exchange(parts, shapes, team)], 1)


def _exchange(
    parts: list[list[Tensor]], shapes: list[list[tuple[int, ...]]], team: Team
) -> list[list[Tensor]]:
    """Send ``parts[rank]`` (flat) to each rank; returns what each sent here, in ``shapes[rank]``."""
    sent = torch.cat([piece for pieces in parts for piece in pieces])
    send_counts = [sum(piece.numel() for piece in pieces) for pieces in parts]
    lengths = [[torch.Size(shape).numel() for shape in own] for own in shapes]
    counts = [sum(own) for own in lengths]
    received = _AllToAll.apply(sent, send_counts, counts, team)
    result = []
    for flat, own, sizes in zip(received.split(counts), shapes, lengths, strict=True):  # type: ignore[union-attr]
        result.append([piece.view(shape) for piece, shape in zip(flat.split(sizes), own, strict=True)])
    return result


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, sent: Tensor, send_counts: list[int], counts: list[int], team: Team
    ) -> Tensor:
        ctx.send_counts, ctx.counts, ctx.team = send_counts, counts, team
        return team.all_to_all(sent, send_counts, counts, "attention")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = ctx.team.all_to_all(grads[0].contiguous(), ctx.counts, ctx.send_counts, "attention")
        return back, None, None, None
