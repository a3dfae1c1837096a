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
stops growing at ``max_loss_scale``, 2**64 unless a config says otherwise (a model whose gradients are all zero would
drive it to infinity, and infinity times zero is NaN), and the error at the floor says what to do.
"""

from collections.abc import Mapping

from thalweg.config.schema.training import FP16

_FACTOR = 2.0


class LossScaleFloorError(RuntimeError):
    """The gradients overflow although the loss scale is already at ``min_loss_scale``."""


class LossScaler:
    """The loss scale of one engine, by the rules of the config's ``fp16`` section.

    ``scale`` is a float; ``update`` moves the machine by one step.  A positive ``loss_scale`` fixes the scale; a
    section that is not enabled gives a constant scale of 1.
    """

    def __init__(self, section: FP16 | None = None) -> None:
        self.section = section = section or FP16(enabled=True)
        static_scale = section.loss_scale if section.enabled else 1.0
        self.dynamic = not static_scale  # whether overflows move the scale
        self.scale = static_scale or 2.0**section.initial_scale_power
        self._iteration = 0
        self._last_overflow = -1
        self._remaining_hysteresis = section.hysteresis

    def update(self, found_inf: bool) -> None:
        """Take the verdict on the step just finished: True means its gradients held inf or NaN (step
        skipped).

        Raises :class:`LossScaleFloorError` when a dynamic scale would have to fall below ``min_loss_scale``;
        the state is then unchanged.
        """
        if self.dynamic and found_inf:
            if self._remaining_hysteresis > 1:
                self._remaining_hysteresis -= 1
            elif self.scale <= self.section.min_loss_scale:
                raise LossScaleFloorError(
                    f"the fp16 gradients overflow at a loss scale of {self.scale:g}, which is "
                    "fp16.min_loss_scale: the model itself produces inf or NaN. Train in bf16 "
                    '("bf16": {"enabled": true}), or lower the learning rate, set gradient_clipping and look for '
                    "a loss that is not finite in fp32 too; a smaller fp16.min_loss_scale helps only if the "
                    "gradients are huge but finite"
                )
            else:
                self.scale = max(self.scale / _FACTOR, self.section.min_loss_scale)
            self._last_overflow = self._iteration
        elif self.dynamic:
            if self.section.consecutive_hysteresis:
                self._remaining_hysteresis = self.section.hysteresis
            stable = self._iteration - self._last_overflow - 1
            if stable > 0 and stable % self.section.loss_scale_window == 0:
                self._remaining_hysteresis = self.section.hysteresis
                self.scale = max(self.scale, min(self.scale * _FACTOR, self.section.max_loss_scale))
        self._iteration += 1

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
        self._remaining_hysteresis = min(int(state["allowance"]), self.section.hysteresis)
        if self.dynamic:
            self.scale = max(float(state["scale"]), self.section.min_loss_scale)
