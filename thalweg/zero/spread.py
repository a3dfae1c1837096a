"""Parameters that stay out of ZeRO's units: their gradients.

Scalars, which FSDP2 cannot shard, and what is spread over ranks before sharding (a stack of
experts): a DTensor on a mesh of two axes, rows along the first, copies along the second.
Its gradient is complete on each copy for the tokens that came there, so at the end of a
window the copies are added up and divided as ZeRO divides the rest.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def is_spread(parameter: Tensor) -> bool:
    """Whether a parameter of a model that is not sharded yet lies on ranks of its own."""
    return isinstance(parameter, DTensor)


class SpreadGradients:
    """The gradients of ``parameters``, averaged once each, however often :meth:`reduce` is called."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._done: dict[int, tuple[Tensor, Tensor]] = {}  # gradient object, what it was after the reduction

    @torch.no_grad()
    def reduce(self, divisor: float) -> None:
        """Add up what has come since the last call over the copies and divide it; collective."""
        for index, parameter in enumerate(self.parameters):
            assert isinstance(parameter, DTensor)
            grad = parameter.grad
            old, before = self._done.pop(index, (None, None))
            known = before if grad is not None and old is grad else None
            if grad is None:
                grad = torch.zeros_like(parameter)
            assert isinstance(grad, DTensor)
            local = grad._local_tensor
            new = local.clone() if known is None else local - known
            mesh = parameter.device_mesh
            if mesh.size(1) > 1:
                dist.all_reduce(new, group=mesh.get_group(1))
            new.div_(divisor)
            local.copy_(new if known is None else known + new)
            parameter.grad = grad
            self._done[index] = (grad, local.clone())


def reduce_scalars(parameters: list[nn.Parameter], divisor: float, group: dist.ProcessGroup) -> None:
    """Add up the gradients of whole 0-dim parameters over ``group`` and divide them; collective."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    present = [torch.zeros(()) if p.grad is None else p.grad.float() for p in trained]
    flat = torch.stack([grad.reshape(()) for grad in present])
    if dist.get_world_size(group) > 1:
        dist.all_reduce(flat, group=group)
    for parameter, value in zip(trained, (flat / divisor).unbind(), strict=True):
        if parameter.grad is not None:
            parameter.grad.copy_(value)
