"""The gates of ``deepspeed.moe.sharded_moe`` as functions of logits, over :func:`thalweg.nn.moe.layer.route`.

Each returns ``(l_aux, combine_weights, dispatch_mask, exp_counts)``: for S tokens and E experts with room for C choices
``combine_weights`` (S, E, C) has a choice's weight at its place in the expert's buffer.  With ``sparse_routes`` it is
``(l_aux, C, E, experts, places, weights, exp_counts)``, the three of them (k, S), the expert of a dropped choice -1.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single

from thalweg.compat.deepspeed import collectives as dist
from thalweg.nn.moe.layer import GatePolicy, Routing, route


def top1gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: Any = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> tuple[Any, ...]:
    """One expert a token; what is dropped is left to chance with ``use_rts``."""
    policy = GatePolicy(1, capacity_factor, capacity_factor, min_capacity, noisy_gate_policy, drop_tokens, use_rts)
    routing = route(logits, policy, used_token=used_token)
    return _to_buffers(routing, policy, logits, ep_group, sparse_routes)


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """Two experts a token, the second one sampled unless ``top2_2nd_expert_sampling`` is false."""
    options: dict[str, Any] = {"sample_second_expert": top2_2nd_expert_sampling}
    policy = GatePolicy(2, capacity_factor, capacity_factor, min_capacity, drop_tokens=drop_tokens, **options)
    return _to_buffers(route(logits, policy), policy, logits, ep_group, sparse_routes)


def topkgating(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    drop_policy: str = "probs",
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """``k`` experts a token; the least probable choices are dropped, or the last tokens' ("position").

    Raises:
        ValueError: another ``drop_policy``.
    """
    if drop_policy not in ("probs", "position"):
        raise ValueError(f'drop_policy is {drop_policy!r}; it is "probs" or "position"')
    options: dict[str, Any] = {"sample_second_expert": False, "drop_policy": drop_policy}
    policy = GatePolicy(k, capacity_factor, capacity_factor, min_capacity, drop_tokens=drop_tokens, **options)
    routing = route(logits, policy)
    if k == 1:  # here too weights add up to 1
        routing = replace(routing, weights=routing.in_capacity.float())
    _, *buffers = _to_buffers(routing, policy, logits, ep_group, sparse_routes, by_token=True)
    chosen = routing.counts.to(logits.dtype) / (len(logits) * k)
    return (logits.float().softmax(-1).mean(0) * chosen).sum() * logits.shape[1], *buffers


def _to_buffers(
    routing: Routing, policy: GatePolicy, logits: Tensor, ep_group: Any, sparse: bool, by_token: bool = False
) -> tuple[Any, ...]:
    """``routing`` as places in the experts' buffers, in the order of the tokens or of their first choices."""
    num_experts, kept = logits.shape[1], routing.in_capacity
    capacity = policy.capacity(*logits.shape, training=True)
    if capacity is None:  # the fullest expert's, on every rank of the group
        largest = routing.counts.max()
        if ep_group is not None and dist.get_world_size(ep_group) > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=ep_group)
        capacity = int(largest)
    taken = F.one_hot(routing.experts, num_experts) * kept[..., None]  # (S, k, E)
    ordered = taken if by_token else taken.transpose(0, 1)
    places = (ordered.reshape(-1, num_experts).cumsum(0).view(ordered.shape) - 1) * ordered
    places = (places if by_token else places.transpose(0, 1)).sum(-1)  # (S, k)
    if sparse:
        experts = torch.where(kept, routing.experts, -1)
        routes = (experts.T.int(), places.T.int(), routing.weights.T)
        return routing.balance_loss, torch.tensor(capacity), num_experts, *routes, routing.counts
    weights = routing.weights[..., None, None] * taken[..., None] * F.one_hot(places, capacity)[..., None, :]
    combine = weights.sum(1)
    return routing.balance_loss, combine, combine.bool(), routing.counts


class _AllToAll:
    """Equal parts of ``input`` to each rank of ``group``, for layers of a program's own; gradients go the way back.

    Thalweg's layer sends each expert its tokens and no empty places: its parts differ, and it does not call this.
    """

    @staticmethod
    def apply(group: Any, input: Tensor) -> Tensor:
        return all_to_all_single(torch.empty_like(input), input.contiguous(), group=group)


def _route_slots(experts: Tensor, places: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Where each choice of ``sparse_routes`` (k, S) lies in the experts' buffers laid end to end; a dropped one lies
    behind them."""
    return torch.where(experts < 0, num_experts * capacity, experts * capacity + places).long()


def _sparse_encode(tokens: Tensor, slots: Tensor, num_experts: int, capacity: int) -> Tensor:
    """The experts' buffers (E, C, M) of ``tokens`` (S, M)."""
    buffers = tokens.new_zeros(num_experts * capacity + 1, tokens.shape[1])
    buffers = buffers.index_copy(0, slots.flatten(), tokens.repeat(len(slots), 1))
    return buffers[:-1].view(num_experts, capacity, -1)


def _sparse_decode(buffers: Tensor, slots: Tensor, weights: Tensor, num_tokens: int) -> Tensor:
    """The tokens (S, M) as weighted sums over the rows of ``buffers`` (E * C, M) that they chose."""
    rows = F.pad(buffers, (0, 0, 0, 1))[slots.flatten()].view(-1, num_tokens, buffers.shape[1])
    return (rows * weights[..., None].to(rows.dtype)).sum(0)
