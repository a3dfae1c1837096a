"""Losses of fine-tuning and RLHF, each a function of tensors alone.

Shapes: B rows (sequences), T tokens, V tokens of the vocabulary.  What is about tokens is (B, T - 1), as
:mod:`.rollout` says; ``mask`` (B, T - 1) says which tokens count.  Half precision is widened to fp32.

A mean is over the tokens of the tensors at hand.  Where ranks and micro-batches hold parts of one batch, the engine
weighs each part by its tokens (``token_weighted_loss``, ``engine.backward(loss, num_items=n)``), so that none counts
more for being short.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.parallel.tensor.vocab_parallel import VocabParallelLogits, vocab_parallel_entropy


def chosen_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each of ``tokens`` (...) under its logits (..., V); those cut by vocabulary are (N, V)."""
    logits = _widen(logits)
    if temperature != 1.0:
        logits = logits / temperature
    if isinstance(logits, VocabParallelLogits):
        return -F.cross_entropy(logits, tokens.to(logits.device), reduction="none")
    chosen = logits.gather(-1, tokens[..., None].to(logits.device)).squeeze(-1)
    return chosen - logits.logsumexp(-1)


def refined_logprobs(
    logits: Tensor, tokens: Tensor, temperature: float, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """:func:`chosen_logprobs` of tokens (N,) under logits (N, V) that a head's product has rounded to 16 bits, without
    that rounding where it counts: at each token, and at all that are likelier than 1/64, by fp32 products of hidden
    (N, D) and weight (V, D).  Gradients are those of the logits as they are."""
    logits = _widen(logits) if temperature == 1.0 else _widen(logits) / temperature
    chosen, logsumexp = logits.gather(-1, tokens[:, None]).squeeze(-1), logits.logsumexp(-1)
    with torch.no_grad():
        likely = (logits > (logsumexp - math.log(64))[:, None]).nonzero().T
        places = torch.cat([torch.stack([torch.arange(len(tokens), device=tokens.device), tokens]), likely], 1)
        # A part at a time, as each product takes two rows of hidden size.
        exact = torch.cat([(hidden[r].float() * weight[t].float()).sum(-1) for r, t in places.split(4096, 1)])
        exact = exact if bias is None else exact + bias[places[1]]
        error, others = (exact / temperature - logits[*places]).split([len(tokens), likely.shape[1]])
        shares = (logits[*likely] - logsumexp[likely[0]]).exp() * others.expm1()
        log_of_sum = torch.zeros_like(logsumexp).index_add_(0, likely[0], shares).log1p()
    return chosen - logsumexp + (error - log_of_sum)


def token_logprobs(logits: Tensor, input_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each token but the first, (B, T - 1), under logits (B, T, V) of a causal model."""
    return chosen_logprobs(logits[:, :-1], input_ids[:, 1:], temperature)


def token_entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of what follows, (...), by logits (..., V); those cut by vocabulary give no gradients."""
    logits = _widen(logits)
    if isinstance(logits, VocabParallelLogits):
        return vocab_parallel_entropy(logits)
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the mask; 0 where nothing counts."""
    total = values.masked_fill(~mask, 0.0).sum()  # not a product: a padding's infinity times 0 would be NaN
    return total / mask.sum().clamp(min=1)


def whiten(values: Tensor, mask: Tensor, all_reduce: Callable[[Tensor], object] | None = None) -> Tensor:
    """Values with mean 0 and variance 1 over the mask, 0 elsewhere; a single one is only centred.

    ``all_reduce``: sums a tensor over the ranks, in place, where they hold parts of one batch.
    """

    def totals(*parts: Tensor) -> tuple[Tensor, ...]:
        x = torch.stack([part.masked_fill(~mask, 0.0).sum() for part in parts])
        if all_reduce is not None:
            all_reduce(x)
        return x.unbind()

    x = _widen(values)
    count, total = totals(torch.ones_like(x), x)
    count = count.clamp(min=1)
    centred = (x - total / count).masked_fill(~mask, 0.0)
    # The mean is rounded to fp32, as MPS has no fp64 and GPUs are slow at it: what is left of it comes off as well.
    rest, squares = totals(centred, centred.square())
    variance = (squares - rest.square() / count) / (count - 1).clamp(min=1)
    scale = torch.where(count > 1, torch.rsqrt(variance.clamp(min=0) + 1e-8), 1.0)
    return ((centred - rest / count) * scale).masked_fill(~mask, 0.0).to(values.dtype)


# Supervised


def sft_loss(logits: Tensor, input_ids: Tensor, mask: Tensor) -> Tensor:
    """Mean negative log-likelihood of the tokens that count: responses alone, or all but each document's first."""
    return -masked_mean(token_logprobs(logits, input_ids), mask)


# Preferences


def end_scores(values: Tensor, attention_mask: Tensor) -> Tensor:
    """A reward model's score of each row, (B,): its value (B, T) at the row's last token."""
    positions = torch.arange(values.shape[1], device=values.device)
    last = (attention_mask.to(values.device) * positions).amax(1)
    return _widen(values).gather(1, last[:, None]).squeeze(1)


def pairwise_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Bradley-Terry: -log sigmoid of the chosen answer's score (B,) above the rejected one's (Ouyang et al. 2022,
    equation 1), mean over pairs."""
    return -F.logsigmoid(_widen(chosen) - _widen(rejected)).mean()


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Direct preference optimisation (Rafailov et al. 2023, equation 7) of summed log-probabilities (B,), mean over
    pairs.

    ``label_smoothing``: how often a preference is the wrong way round (Mitchell 2023, conservative DPO).
    """
    margin = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
    return -((1 - label_smoothing) * F.logsigmoid(margin) + label_smoothing * F.logsigmoid(-margin)).mean()


# Policy gradients


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_range: float,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate (Schulman et al. 2017, equation 7), negated; and the part of the tokens it clipped.

    ``weights``: of tokens that a policy older than ``old_logprobs``'s has drawn, :func:`importance_weights`.
    """
    if weights is not None:
        advantages = advantages * weights
    ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0).exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    return masked_mean(torch.maximum(unclipped, clipped), mask), masked_mean((clipped > unclipped).to(ratio), mask)


@torch.no_grad()
def importance_weights(logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """Weights (B, T - 1) of tokens that an older policy drew: how much likelier each is by now, at most ``cap`` times
    (truncated importance sampling, Ionides 2008; decoupled from PPO's ratio as by Fu et al. 2025, equation 5)."""
    return (logprobs - behaviour_logprobs).masked_fill(~mask, 0.0).exp().clamp(max=cap)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip_range: float) -> Tensor:
    """Half the squared error, of the value or of one that moves at most ``clip_range`` from the old: the larger."""
    values = _widen(values)
    clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
    squared = torch.maximum((values - returns).square(), (clipped - returns).square())
    return 0.5 * masked_mean(squared, mask)


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, T - 1) by generalised advantage estimation (Schulman et al. 2016, equation 16).

    A row's masked tokens are one episode, whose value after its end is 0; outside of the mask both are 0.
    """
    values, rewards = (x.masked_fill(~mask, 0.0) for x in (_widen(values), rewards))
    advantages, following = torch.zeros_like(values), torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(following)
    for t in reversed(range(values.shape[1])):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        following = torch.where(here, delta + gamma * lam * following, following)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = torch.where(here, following, 0.0)
    return advantages, advantages + values


@torch.no_grad()
def group_advantages(rewards: Tensor, group_size: int, *, scale: bool = True) -> Tensor:
    """GRPO's advantages (B,) of groups of neighbouring rows (Shao et al. 2024, section 4.1.2): the reward above its
    group's mean, in its standard deviations, or without ``scale`` as it is (Liu et al. 2025, Dr. GRPO)."""
    if len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards are no whole number of groups of {group_size}")
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    if scale and group_size > 1:
        centred = centred / (groups.std(1, keepdim=True) + 1e-4)
    return centred.flatten()


# Kullback-Leibler divergence


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """An estimate of KL(actor || reference) at tokens that the actor drew: unbiased, never negative, low variance
    (Schulman 2020, k3), differentiable."""
    log_ratio = reference_logprobs - logprobs
    return log_ratio.exp() - 1 - log_ratio


@torch.no_grad()
def kl_penalized_rewards(
    scores: Tensor, logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, *, kl_coef: float, clip: float
) -> Tensor:
    """PPO's rewards (B, T - 1): at each token minus the log ratio times ``kl_coef``, at a row's last one its score (B,)
    too, cut to ``clip`` (Ziegler et al. 2019, equation 2)."""
    rewards = (-kl_coef * (logprobs - reference_logprobs)).masked_fill(~mask, 0.0)
    has_tokens = mask.any(1)
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).amax(1)
    rows = torch.arange(len(mask), device=mask.device)[has_tokens]
    rewards[rows, last[has_tokens]] += scores.to(rewards)[has_tokens].clamp(-clip, clip)
    return rewards


@dataclass
class KLController:
    """The coefficient of the KL penalty: ``coef`` for good, or with a ``target`` one that follows the measured KL
    within ``horizon`` sequences (Ziegler et al. 2019, section 2.2)."""

    coef: float
    target: float | None = None
    horizon: int = 10_000

    def update(self, kl: float, num_sequences: int) -> None:
        """Take note of a batch's mean KL of a sequence."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * num_sequences / self.horizon


def _widen(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
