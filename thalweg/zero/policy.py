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
    def shards_optimizer_states(self) -> bool:
        """Whether optimizer state (with it the master parameter) is sharded."""
        return self.stage >= 1

    @property
    def reduces_each_backward(self) -> bool:
        """Whether gradients are reduced in each backward, not only in the window's last."""
        return self.stage >= 2

    @property
    def reshards_after_use(self) -> bool:
        """Whether gathered parameters are freed after each use, not only at the window's end."""
        return self.stage >= 3


@dataclass(frozen=True)
class CommPolicy:
    """What travels between ranks and how far: ZeRO++ (arXiv 2306.10209) and MiCS (arXiv 2205.00119).

    ``quantized_weights``: gathered in 8 bits (qwZ); ``quantized_frozen_weights``: only those that do not
    train; ``quantized_gradients``: reduced in 4 bits between hosts (qgZ), with error feedback of
    ``error_feedback = (decay, steps between resets)`` (LoCo).  ``hpz_group_size``: ranks of a host
    among which gathered parameters stay for the backward pass (hpZ), 1 for none.
    ``mics_group_size``: ranks among which states are sharded, groups being replicas of each other
    (MiCS), 0 for all; ``two_level_gather``: gathers in such a group cross each link once.
    """

    quantized_weights: bool = False
    quantized_frozen_weights: bool = False
    quantized_gradients: bool = False
    error_feedback: tuple[float, int] | None = None
    hpz_group_size: int = 1
    mics_group_size: int = 0
    two_level_gather: bool = False

    def quantizes(self, ndim: int, requires_grad: bool) -> bool:
        """Whether a parameter is gathered in few bits; norms and biases never are: few bytes, sensitive."""
        is_enabled = self.quantized_weights or (self.quantized_frozen_weights and not requires_grad)
        return is_enabled and ndim >= 2


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training run, the same at every stage.

    ``compute_dtype``: parameters as the forward and backward pass see them, and activations;
    ``master_dtype``: the sharded parameter that the optimizer updates, its gradient and state;
    ``reduce_dtype``: gradients on their way between ranks (sums are kept in ``master_dtype``);
    ``buffer_dtype``: floating-point buffers, or None to leave them as the model made them.
    """

    compute_dtype: torch.dtype = torch.float32
    master_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    buffer_dtype: torch.dtype | None = None

    def get_master_dtype(self, dtype: torch.dtype, requires_grad: bool) -> torch.dtype:
        """The dtype in which a parameter given as ``dtype`` is kept."""
        trained = requires_grad and dtype.is_floating_point
        return self.master_dtype if trained else dtype

    def get_compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter given as ``dtype`` enters the computation."""
        return self.compute_dtype if dtype.is_floating_point and dtype.itemsize >= 2 else dtype
