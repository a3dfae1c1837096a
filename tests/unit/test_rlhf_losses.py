"""Losses of RLHF against references written here as loops over numbers, values and gradients.

Each reference has a control: the same loop with one thing wrong must not agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thalweg.rlhf import losses

ROWS, LENGTH, VOCABULARY, GROUP = 4, 7, 11, 2
# (first, last + 1) of each row's response among the LENGTH - 1 columns; one row has none.
SPANS = [(1, 5), (2, 6), (3, 4), (0, 0)]
INF = float("inf")


def _mask() -> Tensor:
    mask = torch.zeros(ROWS, LENGTH - 1, dtype=torch.bool)
    for row, (first, last) in enumerate(SPANS):
        mask[row, first:last] = True
    return mask


def _inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    table = (ROWS, LENGTH - 1)
    logprobs = -normal(*table).abs()
    return {
        "logits": normal(ROWS, LENGTH, VOCABULARY),
        "logprobs": logprobs, "old": logprobs + 0.4 * normal(*table), "ref": logprobs + 0.4 * normal(*table),
        "advantages": normal(*table), "values": normal(*table), "old_values": normal(*table),
        "returns": normal(*table), "rewards": normal(*table),
        "a": normal(ROWS), "b": normal(ROWS), "c": normal(ROWS), "d": normal(ROWS), "scores": 3 * normal(ROWS),
    }  # fmt: skip


IDS = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
POSITIONS = [(row, t) for row, (first, last) in enumerate(SPANS) for t in range(first, last)]


def _log_sigmoid(x: Tensor) -> Tensor:
    return -torch.log(1 + torch.exp(-x))


def _ref_logprob(x: dict[str, Tensor], row: int, t: int, shift: int = 1) -> Tensor:
    exps = [torch.exp(x["logits"][row, t, v]) for v in range(VOCABULARY)]
    return torch.log(exps[int(IDS[row, t + shift])] / sum(exps[1:], exps[0]))


def _ref_sft(x: dict[str, Tensor], shift: int = 1) -> Tensor:
    return -sum((_ref_logprob(x, row, t, shift) for row, t in POSITIONS), torch.zeros(())) / len(POSITIONS)


def _ref_entropy(x: dict[str, Tensor], sign: float = 1.0) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for row, t in POSITIONS:
        exps = [torch.exp(x["logits"][row, t, v]) for v in range(VOCABULARY)]
        norm = sum(exps[1:], exps[0])
        for e in exps:
            total = total - sign * e / norm * torch.log(e / norm)
    return total / len(POSITIONS)


def _ref_policy(x: dict[str, Tensor], clip: float = 0.2) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for row, t in POSITIONS:
        ratio = torch.exp(x["logprobs"][row, t] - x["old"][row, t])
        bounded = torch.clip(ratio, 1 - clip, 1 + clip)
        total = total - torch.minimum(ratio * x["advantages"][row, t], bounded * x["advantages"][row, t])
    return total / len(POSITIONS)


def _ref_value(x: dict[str, Tensor], clip: float = 0.3) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for row, t in POSITIONS:
        value, old, target = x["values"][row, t], x["old_values"][row, t], x["returns"][row, t]
        near = old + torch.clip(value - old, -clip, clip)
        total = total + torch.maximum((value - target) ** 2, (near - target) ** 2) / 2
    return total / len(POSITIONS)


def _ref_dpo(x: dict[str, Tensor], smoothing: float = 0.1) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for row in range(ROWS):
        margin = 0.3 * ((x["a"][row] - x["b"][row]) - (x["c"][row] - x["d"][row]))
        total = total - (1 - smoothing) * _log_sigmoid(margin) - smoothing * _log_sigmoid(-margin)
    return total / ROWS


def _ref_pairwise(x: dict[str, Tensor], sign: float = 1.0) -> Tensor:
    return sum((-_log_sigmoid(sign * (x["a"][i] - x["b"][i])) for i in range(ROWS)), torch.zeros(())) / ROWS


def _ref_kl(x: dict[str, Tensor], one: float = 1.0) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for row, t in POSITIONS:
        log_ratio = x["ref"][row, t] - x["logprobs"][row, t]
        total = total + torch.exp(log_ratio) - one * log_ratio - 1
    return total / len(POSITIONS)


def _ours_mean(values: Tensor) -> Tensor:
    return losses.masked_mean(values, _mask())


Loss = Callable[[dict[str, Tensor]], Tensor]
CASES: dict[str, tuple[Loss, Callable[..., Tensor], Any, list[str]]] = {
    "sft": (lambda x: losses.sft_loss(x["logits"], IDS, _mask()), _ref_sft, 0, ["logits"]),
    "entropy": (lambda x: _ours_mean(losses.token_entropy(x["logits"][:, :-1])), _ref_entropy, -1.0, ["logits"]),
    "policy": (
        lambda x: losses.policy_loss(x["logprobs"], x["old"], x["advantages"], _mask(), clip_range=0.2)[0],
        _ref_policy, 0.4, ["logprobs"],
    ),
    "value": (
        lambda x: losses.value_loss(x["values"], x["old_values"], x["returns"], _mask(), clip_range=0.3),
        _ref_value, 3.0, ["values"],
    ),
    "dpo": (
        lambda x: losses.dpo_loss(x["a"], x["b"], x["c"], x["d"], beta=0.3, label_smoothing=0.1),
        _ref_dpo, 0.0, ["a", "b"],
    ),
    "pairwise": (lambda x: losses.pairwise_loss(x["a"], x["b"]), _ref_pairwise, -1.0, ["a", "b"]),
    "kl": (lambda x: _ours_mean(losses.kl_estimate(x["logprobs"], x["ref"])), _ref_kl, 0.9, ["logprobs"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_loss_and_its_gradients_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    ours, reference, wrong, wanted = CASES[name]
    results = []
    for fn, kind in ((ours, dtype), (reference, torch.float64), (lambda x: reference(x, wrong), torch.float64)):
        x = _inputs(torch.float64)
        x = {key: value.to(kind).requires_grad_(key in wanted) for key, value in x.items()}
        loss = fn(x)
        loss.backward()
        results.append([loss.detach().double(), *(x[key].grad.double() for key in wanted)])  # type: ignore[union-attr]
    got, want, control = results
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert all((a - b).abs().max() < tolerance for a, b in zip(got, want, strict=True))
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(got, control, strict=True))
    assert all(torch.isfinite(x).all() for x in got)


def _ref_gae(x: dict[str, Tensor], gamma: float, lam: float) -> list[list[float]]:
    """By the sum over later steps of equation 16, not by its recursion."""
    table = [[0.0] * (LENGTH - 1) for _ in range(ROWS)]
    for row, (first, last) in enumerate(SPANS):
        for t in range(first, last):
            for k in range(t, last):
                following = float(x["values"][row, k + 1]) if k + 1 < last else 0.0
                delta = float(x["rewards"][row, k]) + gamma * following - float(x["values"][row, k])
                table[row][t] += (gamma * lam) ** (k - t) * delta
    return table


def test_gae_is_the_sum_over_later_steps() -> None:
    x = _inputs(torch.float64)
    advantages, returns = losses.gae(x["rewards"], x["values"], _mask(), gamma=0.97, lam=0.9)
    want = torch.tensor(_ref_gae(x, 0.97, 0.9), dtype=torch.float64)
    assert (advantages - want).abs().max() < 1e-12
    assert (returns - (want + x["values"] * _mask())).abs().max() < 1e-12
    assert (advantages - torch.tensor(_ref_gae(x, 0.97, 0.8))).abs().max() > 1e-3


def test_rewards_are_penalised_at_each_token_and_scored_at_the_last() -> None:
    x = _inputs(torch.float64)

    def reference(clip: float) -> Tensor:
        want = torch.zeros(ROWS, LENGTH - 1, dtype=torch.float64)
        for row, (first, last) in enumerate(SPANS):
            for t in range(first, last):
                want[row, t] = -0.1 * (x["logprobs"][row, t] - x["ref"][row, t])
            if last > first:
                want[row, last - 1] += min(max(float(x["scores"][row]), -clip), clip)
        return want

    got = losses.kl_penalized_rewards(x["scores"], x["logprobs"], x["ref"], _mask(), kl_coef=0.1, clip=1.5)
    assert (got - reference(1.5)).abs().max() < 1e-12
    assert (got - reference(INF)).abs().max() > 1e-3


@pytest.mark.parametrize("scale", [True, False])
def test_advantages_of_a_group(scale: bool) -> None:
    rewards = torch.tensor([1.0, 0.0, 3.0, 3.0], dtype=torch.float64)
    want = []
    for group in ([1.0, 0.0], [3.0, 3.0]):
        mean = sum(group) / GROUP
        deviation = math.sqrt(sum((r - mean) ** 2 for r in group) / (GROUP - 1)) if scale else 1 - 1e-4
        want += [(r - mean) / (deviation + 1e-4) for r in group]
    got = losses.group_advantages(rewards, GROUP, scale=scale)
    assert (got - torch.tensor(want, dtype=torch.float64)).abs().max() < 1e-12
    assert losses.group_advantages(rewards, 4, scale=scale).tolist() != got.tolist()
    with pytest.raises(ValueError, match="4 rewards are no whole number of groups of 3"):
        losses.group_advantages(rewards, 3)


def test_a_score_is_the_value_at_the_last_token() -> None:
    values = torch.arange(12.0).view(3, 4)
    attention = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    assert losses.end_scores(values, attention).tolist() == [1.0, 7.0, 8.0]


def test_whitened_values_have_mean_0_and_variance_1_over_the_mask() -> None:
    x, mask = _inputs(torch.float64)["values"] * 5 + 3, _mask()
    white = losses.whiten(x, mask)
    assert abs(white[mask].mean()) < 1e-7 and abs(white[mask].var() - 1) < 1e-7
    assert not white[~mask].any()
    alone = torch.zeros_like(mask)
    alone[0, 1] = True
    assert not losses.whiten(x, alone).any()


class _Dtypes(TorchDispatchMode):
    """The dtypes that operators have made."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found |= {leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        return result


def test_whitening_fp32_needs_no_fp64_and_is_as_exact() -> None:
    """MPS has no fp64; a mean that is large beside the deviation is what fp32 rounds."""
    x, mask = _inputs(torch.float64)["values"].float() * 0.01 + 1000, _mask()
    with _Dtypes() as dtypes:
        white = losses.whiten(x, mask)
    assert torch.float32 in dtypes.found and torch.float64 not in dtypes.found
    chosen = x[mask].double()
    want = (chosen - chosen.mean()) / (chosen.var() + 1e-8).sqrt()
    assert (white[mask] - want).abs().max() < 1e-6
    plain = (x[mask] - x[mask].mean()) / (x[mask].var() + 1e-8).sqrt()  # the control: fp32 without its second pass
    assert (plain - want).abs().max() > 1e-5


def test_padding_may_hold_anything() -> None:
    x = _inputs(torch.float64)
    x["logprobs"][~_mask()] = -INF
    x["logprobs"].requires_grad_()
    loss, _ = losses.policy_loss(x["logprobs"], x["old"], x["advantages"], _mask(), clip_range=0.2)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(x["logprobs"].grad).all()  # type: ignore[arg-type]


def test_the_kl_coefficient_follows_its_target() -> None:
    fixed, adaptive = losses.KLController(0.1), losses.KLController(0.1, target=6.0, horizon=1000)
    for controller in (fixed, adaptive):
        controller.update(60.0, 100)
    assert fixed.coef == 0.1
    assert adaptive.coef == pytest.approx(0.1 * (1 + 0.2 * 100 / 1000))  # the error is cut to 0.2
    adaptive.update(5.4, 100)
    assert adaptive.coef == pytest.approx(0.1 * 1.02 * (1 - 0.1 * 0.1))


def test_importance_weights_equal_a_loop_and_are_truncated() -> None:
    draw = torch.Generator().manual_seed(5)
    now, before = (torch.randn(3, 6, generator=draw) for _ in range(2))
    mask = torch.rand(3, 6, generator=draw) > 0.3
    advantages, old = torch.randn(3, 6, generator=draw), now - 0.1 * torch.randn(3, 6, generator=draw)
    weights = losses.importance_weights(now, before, mask, cap=1.5)
    total, count = 0.0, 0
    for row in range(3):
        for t in range(6):
            if not mask[row, t]:
                assert weights[row, t] == 1
                continue
            weight = min(float(torch.tensor(2.718281828459045) ** (now[row, t] - before[row, t])), 1.5)
            assert abs(float(weights[row, t]) - weight) < 1e-6
            ratio, advantage = float((now[row, t] - old[row, t]).exp()), float(advantages[row, t])
            total -= weight * min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            count += 1
    assert (weights == 1.5).any() and (weights < 1).any()
    loss, _ = losses.policy_loss(now, old, advantages, mask, clip_range=0.2, weights=weights)
    unweighted, _ = losses.policy_loss(now, old, advantages, mask, clip_range=0.2)
    assert abs(float(loss) - total / count) < 1e-6 < abs(float(unweighted) - total / count)
