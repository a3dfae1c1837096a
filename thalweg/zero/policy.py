"""What distinguishes the ZeRO stages, and which dtype holds what: two small records.

One implementation runs every stage; a stage is only this policy (Rajbhandari et al.
2020, "ZeRO").  The window is the span between two optimizer steps.
"""

from dataclasses import dataclass

import torch

from thalweg.config.schema.zero import ZeroOptimization


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


def is_quantized(zero: ZeroOptimization, ndim: int, requires_grad: bool) -> bool:
    """Whether a parameter is gathered in few bits (qwZ, arXiv 2306.10209); norms and biases never are: few bytes,
    sensitive."""
    is_on = zero.zero_quantized_weights or (zero.zero_quantized_nontrainable_weights and not requires_grad)
    return is_on and ndim >= 2


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
