"""Loss scaling for fp16: a state machine with two inputs, "finite" and "not finite".

The loss is multiplied by ``scale`` so that small gradients survive fp16's narrow range. A step whose
gradients overflow is skipped and, once the ``hysteresis`` allowance is used up, halves the scale;
``loss_scale_window`` steps without an overflow double it (Micikevicius et al., 2018, section 3.2).

    scale       the factor in use now
    iteration   updates seen so far, skipped ones included
    overflowed  iteration of the last overflow, -1 before the first: growth is counted from there
    allowance   overflows still tolerated before the scale is halved, counting the one that halves it

Nothing here touches a tensor, a device or another rank: all ranks see the same verdict (``norms.py`` makes
sure of that), so all ranks hold the same state. Order of the rules and counts are DeepSpeed's
(``DynamicLossScaler``), so that a run moved over keeps its sequence of scales. Two differences: the scale
stops growing at 2**64 (a model whose gradients are all zero would otherwise drive it to infinity, and
infinity times zero is NaN), and the error at the floor says what to do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FACTOR = 2.0
_MAX_SCALE = 2.0**64


class LossScaleFloorError(RuntimeError):
    """The gradients overflow although the loss scale is already at ``min_loss_scale``."""


@dataclass(frozen=True)
class LossScalePolicy:
    """The ``fp16`` section's rules; ``static_scale`` > 0 fixes the scale, 0 makes it dynamic."""

    static_scale: float = 0.0
    initial_scale: float = 2.0**16
    growth_interval: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_scale: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.static_scale) and self.static_scale >= 0):
            raise ValueError(f"fp16.loss_scale must be 0 (dynamic) or a positive number, not {self.static_scale!r}")
        if not (math.isfinite(self.min_scale) and self.min_scale > 0):
            raise ValueError(f"fp16.min_loss_scale must be a positive number, not {self.min_scale!r}")
        if self.growth_interval < 1:
            raise ValueError(f"fp16.loss_scale_window must be at least 1 step, not {self.growth_interval!r}")
        if self.hysteresis < 1:
            raise ValueError(f"fp16.hysteresis must be at least 1 overflow, not {self.hysteresis!r}")
        if not self.static_scale and not (math.isfinite(self.initial_scale) and self.initial_scale >= self.min_scale):
            raise ValueError(
                f"fp16.initial_scale_power gives a first loss scale of {self.initial_scale:g}, below "
                f"fp16.min_loss_scale = {self.min_scale:g}: raise the one or lower the other"
            )


class LossScaler:
    """The loss scale of one engine. ``scale`` is a float; ``update`` moves the machine by one step."""

    def __init__(self, policy: LossScalePolicy | None = None) -> None:
        self.policy = policy or LossScalePolicy()
        self.dynamic = not self.policy.static_scale  # whether overflows move the scale
        self.scale = self.policy.static_scale or self.policy.initial_scale
        self._iteration = 0
        self._last_overflow = -1
        self._remaining_hysteresis = self.policy.hysteresis

    @classmethod
    def from_config(cls, section: Any) -> LossScaler:
        """Build from the ``fp16`` section: an object or a mapping with DeepSpeed's keys, missing ones at
        default.

        A section that is None or has ``enabled: false`` gives a constant scale of 1. Raises ``ValueError``
        for values that no run can use.
        """

        def read(key: str, default: Any) -> Any:
            value = section.get(key) if isinstance(section, Mapping) else getattr(section, key, None)
            return default if value is None else value

        if section is None or not read("enabled", False):
            return cls(LossScalePolicy(static_scale=1.0))
        return cls(
            LossScalePolicy(
                static_scale=float(read("loss_scale", 0.0)),
                initial_scale=2.0 ** float(read("initial_scale_power", 16)),
                growth_interval=int(read("loss_scale_window", 1000)),
                hysteresis=int(read("hysteresis", 2)),
                consecutive_hysteresis=bool(read("consecutive_hysteresis", False)),
                min_scale=float(read("min_loss_scale", 1.0)),
            )
        )

    def update(self, found_inf: bool) -> None:
        """Take the verdict on the step just finished: True means its gradients held inf or NaN (step
        skipped).

        Raises :class:`LossScaleFloorError` when a dynamic scale would have to fall below ``min_loss_scale``;
        the state is then unchanged.
        """
        if not self.dynamic:
            self._iteration += 1
            return
        if found_inf:
            self._shrink()
            self._last_overflow = self._iteration
        else:
            self._grow()
        self._iteration += 1

    def _shrink(self) -> None:
        if self._remaining_hysteresis > 1:
            self._remaining_hysteresis -= 1
        elif self.scale <= self.policy.min_scale:
            raise LossScaleFloorError(
                f"the fp16 gradients overflow at a loss scale of {self.scale:g}, which is "
                "fp16.min_loss_scale: the model itself produces inf or NaN. Train in bf16 "
                '("bf16": {"enabled": true}), or lower the learning rate, set gradient_clipping and look for '
                "a loss that is not finite in fp32 too; a smaller fp16.min_loss_scale helps only if the "
                "gradients are huge but finite"
            )
        else:
            self.scale = max(self.scale / _FACTOR, self.policy.min_scale)

    def _grow(self) -> None:
        if self.policy.consecutive_hysteresis:
            self._remaining_hysteresis = self.policy.hysteresis
        stable = self._iteration - self._last_overflow - 1
        if stable > 0 and stable % self.policy.growth_interval == 0:
            self._remaining_hysteresis = self.policy.hysteresis
            self.scale = max(self.scale, min(self.scale * _FACTOR, _MAX_SCALE))

    def state_dict(self) -> dict[str, float | int]:
        """Return the state as JSON-ready scalars."""
        return {
            "scale": self.scale,
            "iteration": self._iteration,
            "overflowed": self._last_overflow,
            "allowance": self._remaining_hysteresis,
        }

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Continue from ``state_dict()``. A static scale stays as configured."""
        missing = {"scale", "iteration", "overflowed", "allowance"} - set(state)
        if missing:
            raise ValueError(f"the loss scaler's saved state lacks {sorted(missing)}")
        self._iteration = int(state["iteration"])
        self._last_overflow = int(state["overflowed"])
        self._remaining_hysteresis = min(int(state["allowance"]), self.policy.hysteresis)
        if self.dynamic:
            self.scale = max(float(state["scale"]), self.policy.min_scale)
