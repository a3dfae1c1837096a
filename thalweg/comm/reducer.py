"""What all reductions of a module's gradients have in common: two allocations and a divisor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from thalweg.comm.buffer import Lender
from thalweg.comm.ledger import Ledger


class Reducer:
    """Base of the objects given to FSDP2's ``set_custom_reduce_scatter``.

    FSDP2 calls ``allocate`` twice a reduction: for the input, into which it writes the
    unsharded gradients, then for the output, which becomes the sharded gradient.  The output
    is in ``output_dtype`` if given: a low-precision sum is kept in the master's dtype, where
    FSDP2 would cast it next.  Averages are divided by ``divisor`` besides the number of ranks:
    the loss scale.
    """

    def __init__(self, name: str, ledger: Ledger | None, output_dtype: torch.dtype | None) -> None:
        self._name, self._ledger, self._output_dtype = name, ledger or Ledger(), output_dtype
        self._lender = Lender()
        self._has_input = False
        self.divisor = 1.0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2's hook: the input of a reduction, then its output."""
        self._has_input = not self._has_input
        if self._has_input:
            return self._new_input(size, dtype, device)
        wanted = self._output_dtype or dtype
        if device.type == "cpu":
            return self._lender.take(size, wanted)
        return torch.empty(*size, dtype=wanted, device=device)

    def _new_input(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class MeshOfOneReducer(Reducer, ABC):
    """Base of the all-reduces (means) for FSDP2 over a mesh of one rank.

    FSDP2 copies such gradients from input to output without a collective, then hands the
    output to the hook given to ``set_all_reduce_hook``: the subclass's ``reduce``.
    """

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise AssertionError("a mesh of one rank has no reduce-scatter")

    @abstractmethod
    def reduce(self, output: Tensor) -> None:
        """Replace ``output`` (1-D) by the mean over all ranks."""
