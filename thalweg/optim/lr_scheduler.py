"""The five learning-rate schedules of a ``ds_config.json``: pure functions of the number of updates.

Each schedule is ``lrs(n)`` (and, for OneCycle, ``momenta(n)``), where ``n`` is ``last_batch_iteration``:

    n = -1   set when the schedule is built: the rates that the FIRST update uses
    n = 0    set by the first ``step()``, after the first update: the second update's rates
    n = k    set by ``step()`` number k + 1: the rates of update k + 2

so the rates exist before the first update, and ``step()`` comes once after each update that really happened
(a skipped one does not count), on all ranks alike. Keys, defaults and formulas are DeepSpeed's
(``deepspeed/runtime/lr_schedules.py`` of 0.19.8), the flat first two updates of the warm-ups included
(``log(1) = 0``). The two families of papers behind them: Smith, 2018 (arXiv:1803.09820) for LRRangeTest and
OneCycle, and the log/linear warm-ups of large-batch training.

On purpose different: lists with one entry per parameter group are taken wherever a rate or a momentum is;
``warmup_max_lr`` left out means each group's own rate; OneCycle leaves ``betas[1]`` alone and cycles
``momentum`` where an optimiser has no ``betas``; ``load_state_dict`` also puts the rates back into the optimiser. A
group that joins later, by ``add_param_group``, keeps the rate that it came with, as with torch's schedulers.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from thalweg.utils.log import get_logger

_log = get_logger(__name__)
Rates = float | Sequence[float]


def set_group_lr(group: dict[str, Any], lr: float) -> None:
    """Set a group's learning rate; one that is a tensor stays that tensor, which a captured update reads."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


class LRScheduler:
    """Base: keeps ``last_batch_iteration`` and writes ``lrs``/``momenta`` of it into the parameter groups."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] = []
        self._set_rates()

    def lrs(self, n: int) -> list[float]:
        """Return the learning rate of each parameter group at iteration ``n`` >= -1."""
        raise NotImplementedError

    def momenta(self, n: int) -> list[float] | None:
        """Return the momentum of each parameter group at iteration ``n``; None leaves the momentum alone."""
        return None

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one update, or jump to ``last_batch_iteration``, and set the groups' rates."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._set_rates()

    def get_lr(self) -> list[float]:
        """Return the rates at the present iteration, one for each parameter group."""
        rates = self.lrs(self.last_batch_iteration)
        return rates + [float(group["lr"]) for group in self.optimizer.param_groups[len(rates) :]]

    def get_mom(self) -> list[Any] | None:
        """Return each group's momentum at the present iteration, its ``betas`` where it has some; None where the
        schedule leaves them alone."""
        momenta = self.momenta(self.last_batch_iteration)
        return None if momenta is None else self._with_betas(momenta)

    def _with_betas(self, momenta: list[float]) -> list[Any]:
        groups = self.optimizer.param_groups
        return [
            (value, group["betas"][1]) if "betas" in group else value
            for value, group in zip(momenta, groups, strict=False)  # groups may have been added
        ]

    def get_last_lr(self) -> list[float]:
        """Return the rates that are in the optimiser's groups, i.e. those of the next update."""
        return list(self._last_lr)

    def state_dict(self) -> dict[str, int]:
        """Return the state as JSON-ready scalars."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict()`` and set the groups' rates accordingly."""
        if "last_batch_iteration" not in state:
            raise ValueError("the schedule's saved state lacks 'last_batch_iteration'")
        self.last_batch_iteration = int(state["last_batch_iteration"])
        self._set_rates()

    def _set_rates(self) -> None:
        groups = self.optimizer.param_groups
        self._last_lr = self.get_lr()
        for group, lr in zip(groups, self._last_lr, strict=True):
            set_group_lr(group, lr)
        momenta = self.momenta(self.last_batch_iteration)
        if momenta is not None:
            for group, momentum in zip(groups, momenta, strict=False):
                if "betas" in group:
                    group["betas"] = (momentum, group["betas"][1])
                elif "momentum" in group:
                    group["momentum"] = momentum


def _per_group(optimizer: torch.optim.Optimizer, value: Rates, key: str, *, upper: float = math.inf) -> list[float]:
    """Return ``value`` once for each parameter group, checked to be finite numbers in [0, below)."""
    count = len(optimizer.param_groups)
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value] * count
    if len(values) != count:
        raise ValueError(f"{key} has {len(values)} entries, the optimiser has {count} parameter groups")
    return [_check_float(item, key, low=0.0, upper=upper) for item in values]


def _check_float(value: Any, key: str, *, low: float = -math.inf, upper: float = math.inf) -> float:
    valid = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not valid or not low <= value < upper:
        limit = f" of at least {low:g}" if low > -math.inf else ""
        limit += f" and below {upper:g}" if upper < math.inf else ""
        raise ValueError(f"{key} must be a finite number{limit}, not {value!r}")
    return float(value)


def _check_int(value: Any, key: str, *, low: int) -> int:
    is_integer = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not is_integer or isinstance(value, bool) or value < low:
        raise ValueError(f"{key} must be a whole number of at least {low}, not {value!r}")
    return int(value)


def _current_lrs(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


class _Warmup:
    """The rise from 0 to 1 over ``steps`` iterations: ``log(n + 1) / log(steps)`` or ``n / steps``."""

    def __init__(self, steps: Any, warmup_type: Any) -> None:
        if warmup_type not in ("log", "linear"):
            _log.warning("warmup_type %r is neither 'log' nor 'linear': the warm-up is logarithmic", warmup_type)
            warmup_type = "log"
        self.steps = max(2, _check_int(steps, "warmup_num_steps", low=1))
        self.warmup_type = warmup_type

    def __call__(self, n: int) -> float:
        if self.warmup_type == "log":
            return math.log(n + 1) / math.log(self.steps)
        return n / self.steps


class WarmupLR(LRScheduler):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` (default: the group's own rate) in ``warmup_num_steps``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.warmup = _Warmup(warmup_num_steps, warmup_type)
        self.min_lrs = _per_group(optimizer, warmup_min_lr, "warmup_min_lr")
        peak = _current_lrs(optimizer) if warmup_max_lr is None else warmup_max_lr
        self.max_lrs = _per_group(optimizer, peak, "warmup_max_lr")
        super().__init__(optimizer, last_batch_iteration)

    def gamma(self, n: int) -> float:
        """Return how far between the two rates iteration ``n`` >= 0 is."""
        return self.warmup(n) if n < self.warmup.steps else self.gamma_after_warmup(n)

    def gamma_after_warmup(self, n: int) -> float:
        """Return ``gamma`` after the warm-up."""
        return 1.0

    def lrs(self, n: int) -> list[float]:
        """``min + (max - min) * gamma(n)``, and ``min`` at n = -1."""
        gamma = self.gamma(n) if n >= 0 else 0.0
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then a straight line back to ``warmup_min_lr`` at iteration ``total_num_steps``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _check_int(total_num_steps, "total_num_steps", low=1)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def gamma_after_warmup(self, n: int) -> float:
        """Return the share of the decay that is still to come."""
        return max(0.0, (self.total_num_steps - n) / max(1.0, self.total_num_steps - self.warmup.steps))


class WarmupCosineLR(LRScheduler):
    """Ratios of a group's own rate: up from ``warmup_min_ratio``, half a cosine to ``cos_min_ratio``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _check_int(total_num_steps, "total_num_steps", low=1)
        self.warmup = _Warmup(warmup_num_steps, warmup_type)
        self.warmup_type, self.warmup_num_steps = self.warmup.warmup_type, self.warmup.steps
        self.warmup_min_ratio = _check_float(warmup_min_ratio, "warmup_min_ratio", low=0.0)
        self.cos_min_ratio = _check_float(cos_min_ratio, "cos_min_ratio", low=0.0)
        self.base_lrs = _current_lrs(optimizer)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr_ratio(self) -> float:
        """Return the factor on the groups' own rates at the present iteration."""
        return self.ratio(self.last_batch_iteration)

    def ratio(self, n: int) -> float:
        """Return the factor on the groups' own rates; 0 at n = -1."""
        if n < 0:
            return 0.0
        if n < self.warmup.steps:
            return self.warmup_min_ratio + self.warmup(n) * (1.0 - self.warmup_min_ratio)
        progress = (n - self.warmup.steps + 1) / max(1, self.total_num_steps - self.warmup.steps)
        wave = (1 + math.cos(math.pi * min(1.0, progress))) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * wave)

    def lrs(self, n: int) -> list[float]:
        """``base * ratio(n)``."""
        return [base * self.ratio(n) for base in self.base_lrs]


class LRRangeTest(LRScheduler):
    """``min_lr * (1 + step_rate * (n + 1) / step_size)``: a ramp, or stairs, to where training breaks."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = _check_int(lr_range_test_step_size, "lr_range_test_step_size", low=1)
        self.step_rate = _check_float(lr_range_test_step_rate, "lr_range_test_step_rate", low=0.0)
        self.staircase = bool(lr_range_test_staircase)
        super().__init__(optimizer, last_batch_iteration)

    def lrs(self, n: int) -> list[float]:
        """Return the ramp; the first update runs at ``min_lr`` itself."""
        interval = (n + 1) / self.step_size
        factor = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [low * factor for low in self.min_lrs]


class OneCycle(LRScheduler):
    """One triangle of the rate with the momentum mirrored, then a decay of both (Smith, 2018, section 4).

    The first half takes ``cycle_first_step_size`` iterations, the second ``cycle_second_step_size`` (default:
    as the first); a stair count > 0 cuts that half into so many flat steps. After the cycle the rate is
    ``cycle_min_lr / (1 + decay_lr_rate * t)`` and the momentum ``cycle_max_mom * (1 + decay_mom_rate * t)``
    with ``t`` in units of ``decay_step_size`` iterations (0: both stay). The momentum is ``betas[0]``, or
    ``momentum`` of optimisers such as SGD; an optimiser with neither is cycled in its rate alone.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group(optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = _per_group(optimizer, cycle_max_lr, "cycle_max_lr")
        self.min_moms = _per_group(optimizer, cycle_min_mom, "cycle_min_mom", upper=1.0)
        self.max_moms = _per_group(optimizer, cycle_max_mom, "cycle_max_mom", upper=1.0)
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.first_half_steps = _check_int(cycle_first_step_size, "cycle_first_step_size", low=1)
        self.second_half_steps = _check_int(second, "cycle_second_step_size", low=0)
        self.first_stairs = _check_int(cycle_first_stair_count, "cycle_first_stair_count", low=0)
        self.second_stairs = _check_int(second_stairs, "cycle_second_stair_count", low=0)
        self.decay_step_size = _check_int(decay_step_size, "decay_step_size", low=0)
        self.decay_lr_rate = _check_float(decay_lr_rate, "decay_lr_rate", low=0.0)
        self.decay_mom_rate = _check_float(decay_mom_rate, "decay_mom_rate")
        groups = optimizer.param_groups
        self.cycle_momentum = bool(cycle_momentum) and all("betas" in g or "momentum" in g for g in groups)
        super().__init__(optimizer, last_batch_iteration)

    @property
    def step_ratio(self) -> float:
        """The share of the cycle that its first half is."""
        return self.first_half_steps / (self.first_half_steps + self.second_half_steps)

    def triangle_height(self, n: int) -> float:
        """Return the triangle's height, 0 at its feet and 1 at its peak, at iteration ``n`` of the cycle."""
        total = self.first_half_steps + self.second_half_steps
        position = (n + 1) % total
        rise, length, stairs = position, self.first_half_steps, self.first_stairs
        if position > self.first_half_steps:
            rise, length, stairs = total - position, self.second_half_steps, self.second_stairs
        return math.floor(rise * stairs / length) / stairs if stairs else rise / length

    def _decay(self, n: int, rate: float) -> float | None:
        """Return None inside the cycle, else the factor of the decay phase."""
        total = self.first_half_steps + self.second_half_steps
        if n < total:
            return None
        return 1.0 if self.decay_step_size == 0 else 1 + rate * (n - total + 1) / self.decay_step_size

    def lrs(self, n: int) -> list[float]:
        """Return ``min + (max - min) * height`` in the cycle, ``min / decay`` after it."""
        decay = self._decay(n, self.decay_lr_rate)
        if decay is not None:
            return [low / decay for low in self.min_lrs]
        height = self.triangle_height(n)
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def momenta(self, n: int) -> list[float] | None:
        """Return ``max - (max - min) * height`` in the cycle, ``max * decay`` after it; at n = -1
        ``cycle_min_mom``.

        DeepSpeed starts at the lower momentum and jumps to the upper one at the first ``step()``.
        """
        if not self.cycle_momentum:
            return None
        return list(self.min_moms) if n < 0 else self._momenta(n)

    def get_mom(self) -> list[Any] | None:
        """As of every schedule; before the first ``step()`` the momentum that it will set."""
        return self._with_betas(self._momenta(self.last_batch_iteration)) if self.cycle_momentum else None

    def _momenta(self, n: int) -> list[float]:
        decay = self._decay(n, self.decay_mom_rate)
        if decay is not None:
            return [high * decay for high in self.max_moms]
        height = self.triangle_height(n)
        return [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms, strict=True)]
