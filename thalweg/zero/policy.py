"""What distinguishes the ZeRO stages, and which dtype holds what: two small records.

One implementation runs every stage; a stage is only this policy (Rajbhandari et al.
2020, "ZeRO").  The window is the span between two optimizer steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ZeroPolicy:
    """When parameters are gathered and gradients reduced, by ZeRO stage (0 to 3)."""

    stage: int

    @property
    def shards_states(self) -> bool:
        """Whether optimizer state (with it the master parameter) is sharded."""
        return self.stage >= 1

    @property
    def reduces_each_backward(self) -> bool:
        """Whether gradients are reduced in each backward, not only in the window's last."""
        return self.stage >= 2

    @property
    def frees_parameters(self) -> bool:
        """Whether gathered parameters are freed after each use, not only at the window's end."""
        return self.stage >= 3


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training run, the same at every stage.

    ``compute``: parameters as the forward and backward pass see them, and activations;
    ``master``: the sharded parameter that the optimizer updates, its gradient and state;
    ``reduce``: gradients on their way between ranks (sums are kept in ``master``);
    ``buffer``: floating-point buffers, or None to leave them as the model made them.
    """

    compute: torch.dtype = torch.float32
    master: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    buffer: torch.dtype | None = None

    def master_of(self, dtype: torch.dtype, requires_grad: bool) -> torch.dtype:
        """The dtype in which a parameter given as ``dtype`` is kept."""
        trained = requires_grad and dtype.is_floating_point
        return self.master if trained else dtype

    def compute_of(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter given as ``dtype`` enters the computation."""
        return self.compute if dtype.is_floating_point and dtype.itemsize >= 2 else dtype
