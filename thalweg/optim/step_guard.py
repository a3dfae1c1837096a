"""What a run does about a step whose gradients are not finite, or far larger than those before it (``health``).

The verdict hangs on the global norm of the gradients alone, which is the same on every rank, and so is what follows:

    the norm is                        and the config says      then
    not finite                         non_finite: skip         nothing is updated; the step counts as skipped
                                       rewind                   the same, and the run goes back to a checkpoint
                                       stop                     the same, and TrainingDivergedError
    over 10 times the median of        spike: ignore, warn      the update is made
    the last 100 steps (from the 20th) skip, rewind, stop       as above

A run that goes back takes the data that come next, not those again (Chowdhery et al., PaLM, 2022, section 5.1: spikes
did not come back when the batches around them were passed over).  Without a new checkpoint it goes back three times to
the last one and three times to the one before, and then stops.

A gradient that overflows under a dynamic loss scale is none of this: the scale falls, until it is at its least.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

from thalweg.config.schema.training import Health
from thalweg.optim.accumulation import StepResult
from thalweg.utils.log import get_logger

_log = get_logger("optim")
_WINDOW, _MIN_NORMS, _FACTOR = 100, 20, 10.0


class TrainingDivergedError(RuntimeError):
    """A step's gradients are not finite or a spike, and the config says to stop; the same on all ranks."""


class StepGuard:
    """The rules of ``health`` for one engine; ``scales_loss``: overflows move a loss scale."""

    def __init__(self, health: Health, *, scales_loss: bool = False) -> None:
        self._non_finite = "skip" if scales_loss else health.non_finite
        self._spike = health.spike
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        # Set by ``settle``: why the run is to end, and why it is to go back to a checkpoint.
        self.stop_reason = self.rewind_reason = ""

    @property
    def judges_updates(self) -> bool:
        """Whether an update is made only after the host has read its norm."""
        return self._spike in ("skip", "rewind", "stop")

    @property
    def explains(self) -> bool:
        """Whether somebody will want to know which gradients were not finite."""
        return self._non_finite != "skip"

    def rejects(self, result: StepResult) -> bool:
        """Whether the update of this step is not to be made although its gradient is finite."""
        return self.judges_updates and not result.overflowed and self._ratio(result.grad_norm) > _FACTOR

    def settle(self, result: StepResult) -> None:
        """Take what became of a step."""
        if result.overflowed:
            policy, what = self._non_finite, "health.non_finite: the gradients are not finite"
        elif self._spike != "ignore":
            ratio = self._ratio(result.grad_norm)
            policy = self._spike if ratio > _FACTOR else "ignore"
            what = f"health.spike: the gradient's norm, {result.grad_norm:.3g}, is {ratio:.0f} times the median before"
            self._norms.append(result.grad_norm)
        else:
            return
        message = f"step {result.step}: {what}"
        if policy == "stop":
            self.stop_reason = (
                f"{message}. Nothing was updated: the parameters are those from before the step and can be saved. "
                "Look at the batch and the loss of each rank, lower the learning rate or set gradient_clipping"
            )
        elif policy == "rewind":
            self.rewind_reason = message
        elif policy == "warn" or (policy == "skip" and not result.overflowed):
            _log.warning("%s%s", message, "; it was skipped" if policy == "skip" else "")

    def raise_if_stopped(self) -> None:
        """Raise what the last step ended with.

        Raises:
            TrainingDivergedError: see the module.
        """
        reason, self.stop_reason = self.stop_reason, ""
        if reason:
            raise TrainingDivergedError(reason)

    def _ratio(self, norm: float) -> float:
        """``norm`` over the median of those before; 0 where those are too few."""
        if len(self._norms) < _MIN_NORMS:
            return 0.0
        median = statistics.median(self._norms)
        return norm / median if median > 0 else 0.0

    def state_dict(self) -> list[float]:
        """The norms that the next one is held against."""
        return list(self._norms)

    def load_state_dict(self, norms: Iterable[float]) -> None:
        """Go on from :meth:`state_dict`."""
        self._norms = deque((norm for norm in norms if math.isfinite(norm)), _WINDOW)
        self.stop_reason = self.rewind_reason = ""
