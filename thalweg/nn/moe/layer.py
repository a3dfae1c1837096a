"""Mixture of experts: a gate picks, for each token, which of many feed-forward networks work on it.

The picture, for N tokens of width D and E experts:

    gate      x (N, D) -> logits (N, E) -> k experts a token, their weights, two losses
    sort      the N x k choices by expert, those over an expert's capacity dropped
    experts   each works on its run of rows; known shapes by one grouped matrix product
    combine   rows back to their tokens, weighted and added up

Experts are one stack of parameters, (E, ...) each, so expert e is row e whatever holds it: a
checkpoint knows experts by their global number, and an expert without tokens still has its
(zero) gradient.  With a team (:mod:`thalweg.parallel.expert.expert_parallel`) a rank has some rows of the
stack, and the sorted choices travel to their experts and back by two all-to-alls.

GShard (Lepikhin et al. 2020), Switch Transformer (Fedus et al. 2021), DeepSpeed-MoE (Rajbhandari et al.
2022: residual and random token selection), ST-MoE (Zoph et al. 2022: z-loss).
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.nn.moe.experts import Experts
from thalweg.ops.grouped_mm import count_groups, sort_by_expert
from thalweg.parallel.expert.expert_parallel import AllToAllDispatcher, ExpertShardSpec
from thalweg.parallel.shard_spec import contiguous_spec


@dataclass(frozen=True)
class Routing:
    """Choices of N tokens: ``experts`` and ``weights`` are (N, k); a dropped choice has weight 0."""

    experts: Tensor
    weights: Tensor
    in_capacity: Tensor
    all_in_capacity: bool  # whether that is all
    counts: Tensor  # (E,) choices of each expert, dropped ones included
    balance_loss: Tensor  # 0-dim, 1 where all experts are chosen alike
    z_loss: Tensor  # 0-dim, mean squared log of the partition function


@dataclass(frozen=True)
class GatePolicy:
    """How tokens choose: see :class:`MoE` for the fields.

    ``drop_policy``: whose choices an expert keeps when it has not room for all: "choice" first choices before second
    ones, each in the tokens' order or by chance; "probs" the most probable; "position" the first tokens'.  As in
    DeepSpeed the default is the first for one or two experts a token and the second for more.
    """

    k: int = 1
    capacity_factor: float = 1.0
    eval_capacity_factor: float = 1.0
    min_capacity: int = 4
    noisy_gate_policy: str | None = None
    drop_tokens: bool = True
    use_rts: bool = True
    sample_second_expert: bool = True
    drop_policy: str | None = None

    def capacity(self, num_tokens: int, num_experts: int, training: bool) -> int | None:
        """Choices that an expert takes, or None for all."""
        if not self.drop_tokens:
            return None
        factor = self.capacity_factor if training else self.eval_capacity_factor
        return max(math.ceil(self.k * num_tokens / num_experts * factor), self.min_capacity)


def route(
    logits: Tensor,
    policy: GatePolicy,
    training: bool = True,
    used_token: Tensor | None = None,
    bias: Tensor | None = None,
) -> Routing:
    """Choose experts by ``logits`` (N, E), or by their softmax plus ``bias`` (E,), which leaves weights and losses
    alone; ``used_token`` (N,) is false for tokens to leave out."""
    num_tokens, num_experts = logits.shape
    logits = logits.float()
    gates = logits.softmax(-1)
    by_choice = logits if bias is None else (gates.detach() + bias).clamp(min=1e-9).log()
    if training and policy.noisy_gate_policy == "RSample" and policy.k == 1:
        by_choice = by_choice + _gumbel_like(logits)
    experts = by_choice.topk(1 if policy.k == 2 else policy.k, dim=-1).indices
    if policy.k == 2:
        others = by_choice + _gumbel_like(logits) if training and policy.sample_second_expert else by_choice
        second = others.scatter(1, experts, -math.inf).argmax(-1, keepdim=True)
        experts = torch.cat([experts, second], 1)
    used = torch.ones_like(experts, dtype=torch.bool)
    if used_token is not None:
        used = used_token.reshape(-1, 1).bool().expand_as(experts)
    capacity = policy.capacity(num_tokens, num_experts, training)
    all_in_capacity = capacity is None and used_token is None
    in_capacity = used if capacity is None else _within_capacity(experts, used, capacity, gates, policy, training)
    weights = gates.gather(1, experts) * in_capacity
    if policy.k > 1:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
    dispatch_mask = F.one_hot(experts, num_experts) * used[..., None]
    dispatched = dispatch_mask[:, 0] if policy.k <= 2 else dispatch_mask.sum(1) / policy.k
    balance_loss = (gates.mean(0) * dispatched.float().mean(0)).sum() * num_experts
    z_loss = logits.logsumexp(-1).square().mean()
    return Routing(experts, weights, in_capacity, all_in_capacity, dispatch_mask.sum((0, 1)), balance_loss, z_loss)


def _gumbel_like(logits: Tensor) -> Tensor:
    return -torch.empty_like(logits).exponential_().log()


def _within_capacity(
    experts: Tensor, used: Tensor, capacity: int, gates: Tensor, policy: GatePolicy, training: bool
) -> Tensor:
    """Which choices (N, k) are used, and an expert has room for, by the policy."""
    (num_tokens, k), num_experts = experts.shape, gates.shape[1]
    drop_policy = policy.drop_policy or ("choice" if k <= 2 else "probs")
    order = torch.arange(num_tokens * k, device=experts.device)
    if drop_policy == "probs":
        order = gates.gather(1, experts).T.reshape(-1).argsort(descending=True, stable=True)
    elif drop_policy == "position":
        order = order.view(k, num_tokens).T.reshape(-1)
    elif policy.use_rts and training and k == 1:
        order = torch.randperm(num_tokens, device=experts.device)
    flat = experts.T.reshape(-1)  # all first choices, then all second ones
    flat = torch.where(used.T.reshape(-1), flat, num_experts)
    by_expert = order[flat[order].argsort(stable=True)]
    counts = count_groups(flat, num_experts)
    starts = counts.cumsum(0) - counts
    position = torch.empty_like(order)
    position[by_expert] = torch.arange(len(order), device=order.device) - starts[flat[by_expert]]
    return used & (position < capacity).view(k, num_tokens).T


class MoE(nn.Module):
    """A layer of experts in DeepSpeed's signature; returns ``(output, l_aux, exp_counts)``.

    Args:
        hidden_size: D.  ``expert``: the module to copy, (..., D) -> (..., D).  ``num_experts``: E.
        ep_size: ranks that the experts are spread over; ``thalweg.initialize`` does it.
        k: experts a token.  ``capacity_factor``, ``eval_capacity_factor``, ``min_capacity``: an expert
            takes ``k * N / E * factor`` choices of this rank's N tokens, the rest is dropped.
        use_residual: a dense copy of the expert beside, mixed by a learned coefficient (PR-MoE).
        noisy_gate_policy: None, "RSample" (k = 1: Gumbel noise on the choice) or "Jitter" (on the input).
        drop_tokens: False takes every choice.  ``use_rts``: what is dropped at k = 1 is left to chance.
        top2_2nd_expert_sampling: the second of two experts is sampled.
        shared_expert: a module that works on every token besides.  ``z_loss_coef``: added to ``l_aux``
            times the z-loss.

    ``l_aux`` is the balance loss (1 where balanced), unweighted; ``exp_counts`` (E,) int64.
    """

    _dispatcher: AllToAllDispatcher | None = None
    _is_one_unit = True  # to ZeRO: it reads weights of modules in it without calling them

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
        *,
        shared_expert: nn.Module | None = None,
        z_loss_coef: float = 0.0,
    ) -> None:
        super().__init__()
        if num_experts % ep_size:
            raise ValueError(f"num_experts = {num_experts} must be a multiple of ep_size = {ep_size}")
        if not 1 <= k <= num_experts:
            raise ValueError(f"k = {k} must be from 1 to num_experts = {num_experts}")
        if noisy_gate_policy not in (None, "None", "RSample", "Jitter"):
            raise ValueError(f'noisy_gate_policy is {noisy_gate_policy!r}; it is None, "RSample" or "Jitter"')
        if enable_expert_tensor_parallelism:
            raise ValueError("enable_expert_tensor_parallelism is not built; leave it false")
        self.num_experts, self.ep_size = num_experts, ep_size
        self.policy = GatePolicy(
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            None if noisy_gate_policy == "None" else noisy_gate_policy,
            drop_tokens,
            use_rts,
            top2_2nd_expert_sampling,
        )
        self.z_loss_coef = z_loss_coef
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = Experts(expert, self.num_local_experts)
        self.residual = copy.deepcopy(expert) if use_residual else None
        self.coefficient = nn.Linear(hidden_size, 2) if use_residual else None
        self.shared = shared_expert
        self.e_score_correction_bias: Tensor | None
        self.register_buffer("e_score_correction_bias", None)  # expert_parallel.load_balance_coeff makes one

    @property
    def num_local_experts(self) -> int:
        """Experts that this rank builds: all, of which :func:`shard_experts` leaves it its own."""
        return self.num_experts

    def attach_dispatcher(self, dispatcher: AllToAllDispatcher) -> None:
        """Let the experts of a team of ranks work together; each has its rows of the stack by now."""
        self._dispatcher = dispatcher

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """``hidden_states`` (..., D) -> output (..., D), ``l_aux`` (0-dim), ``exp_counts`` (E,)."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        gate_input = x.float()  # in 16 bits one token in a hundred would go elsewhere
        if self.training and self.policy.noisy_gate_policy == "Jitter":
            gate_input = gate_input * torch.empty_like(gate_input).uniform_(1 - 1e-2, 1 + 1e-2)
        logits = F.linear(gate_input, self.gate.weight.float())
        routing = route(logits, self.policy, self.training, used_token, self.e_score_correction_bias)
        y = self._run_experts(x, routing).view(hidden_states.shape)
        if self.shared is not None:
            y = y + self.shared(hidden_states)
        if self.residual is not None and self.coefficient is not None:
            mix = self.coefficient(hidden_states).softmax(-1)
            y = y * mix[..., :1] + self.residual(hidden_states) * mix[..., 1:]
        return y, routing.balance_loss + self.z_loss_coef * routing.z_loss, routing.counts

    def _run_experts(self, x: Tensor, routing: Routing) -> Tensor:
        kept = None if routing.all_in_capacity else routing.in_capacity
        permutation = sort_by_expert(routing.experts, self.num_experts, kept)
        rows, groups = permutation.permute(x), permutation.groups
        if self._dispatcher is None:
            results = self.experts(rows, groups)
        else:
            rows, groups, combine = self._dispatcher.dispatch(rows, groups)
            results = combine(self.experts(rows, groups, self._dispatcher.local_weight))
        return permutation.combine(results, routing.weights.to(results.dtype)).to(x.dtype)

    def shard_specs(self, num_ranks: int) -> Iterator[ExpertShardSpec]:
        """The experts' parameters and how ``num_ranks`` divide them."""
        spec = contiguous_spec(0, self.num_experts, num_ranks)
        for path, module in self.experts.stack.named_modules(prefix="experts.stack"):
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    yield ExpertShardSpec(f"{path}.{key}", module, key, spec)
