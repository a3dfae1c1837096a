"""The exchange of Ulysses: own tokens of all heads against all tokens of own heads.

Heads are dealt out like tensor ranks' (:mod:`thalweg.parallel.tensor.heads`) and shares of tokens may differ, so
counts differ by rank; one all-to-all carries q, k and v together, another the result back
(Jacobs et al. 2023).
"""

import torch
from torch import Tensor

from thalweg.parallel.comm_group import ParallelGroup, all_to_all


def tokens_to_heads(
    tensors: list[Tensor], heads_by_rank: list[list[list[int]]], token_counts: list[int], ulysses_group: ParallelGroup
) -> list[Tensor]:
    """Tensors (B, H, own T, D) -> (B, own H, T, D), in one exchange.

    ``heads_by_rank[i][rank]``: the heads of tensor i that a rank gets; ``token_counts``: tokens by rank.
    """
    send_tensors: list[list[Tensor]] = [[] for _ in range(ulysses_group.size)]
    for tensor, by_rank in zip(tensors, heads_by_rank, strict=True):
        for rank, local_heads in enumerate(by_rank):
            send_tensors[rank].append(_take_heads(tensor, local_heads).reshape(-1))
    batch = tensors[0].shape[0]
    own_heads = [len(by_rank[ulysses_group.rank]) for by_rank in heads_by_rank]
    shapes = [(heads, tensor.shape[3]) for heads, tensor in zip(own_heads, tensors, strict=True)]
    recv_shapes = [[(batch, heads, size, width) for heads, width in shapes] for size in token_counts]
    received = _all_to_all(send_tensors, recv_shapes, ulysses_group)
    return [torch.cat([from_rank[i] for from_rank in received], 2) for i in range(len(tensors))]


def _take_heads(tensor: Tensor, heads: list[int]) -> Tensor:
    """Heads of (B, H, T, D) by number; a list as an index would be copied to an accelerator, and waited for."""
    if heads == list(range(heads[0], heads[0] + len(heads))):
        return tensor.narrow(1, heads[0], len(heads))
    return torch.stack([tensor.select(1, head) for head in heads], 1)


def heads_to_tokens(y: Tensor, head_counts: list[int], token_counts: list[int], ulysses_group: ParallelGroup) -> Tensor:
    """(B, own H, T, D) -> (B, H, own T, D); ``head_counts``: number of heads by rank."""
    send_tensors = [[part.reshape(-1)] for part in y.split(token_counts, 2)]
    num_tokens = token_counts[ulysses_group.rank]
    recv_shapes = [[(y.shape[0], count, num_tokens, y.shape[3])] for count in head_counts]
    return torch.cat([received[0] for received in _all_to_all(send_tensors, recv_shapes, ulysses_group)], 1)


def _all_to_all(
    send_tensors: list[list[Tensor]], recv_shapes: list[list[tuple[int, ...]]], ulysses_group: ParallelGroup
) -> list[list[Tensor]]:
    """Send ``send_tensors[rank]`` (flat) to each rank; returns what each sent here, in ``recv_shapes[rank]``."""
    sent = torch.cat([piece for pieces in send_tensors for piece in pieces])
    send_counts = [sum(piece.numel() for piece in pieces) for pieces in send_tensors]
    lengths = [[torch.Size(shape).numel() for shape in own] for own in recv_shapes]
    received = all_to_all(sent, send_counts, [sum(own) for own in lengths], ulysses_group, "attention")
    flat_pieces = iter(received.split([length for own in lengths for length in own]))
    return [[next(flat_pieces).view(shape) for shape in own] for own in recv_shapes]
