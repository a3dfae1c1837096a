"""Parameters that stay out of ZeRO's units: their gradients.

Scalars, which FSDP2 cannot shard, and what is spread over ranks before sharding (a stack of
experts): a DTensor on a mesh with the axes "ep", rows along it, and "copies".
Its gradient is complete on each copy for the tokens that came there, so at the end of a
window the copies are added up and divided as ZeRO divides the rest.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_SMALL = 1 << 18  # bytes


def is_spread(parameter: Tensor) -> bool:
    """Whether a parameter of a model that is not sharded yet lies on ranks of its own."""
    return isinstance(parameter, DTensor)


class SpreadGradients:
    """The gradients of ``parameters``, averaged once each, however often :meth:`reduce` is called.

    A parameter that has a gradient on some rank of its mesh has one on all of them afterwards, and
    one that has none anywhere stays without, as in a plain run.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._done: dict[int, tuple[Tensor, Tensor]] = {}  # gradient object, what it was after the reduction

    @torch.no_grad()
    def reduce(self, divisor: float) -> None:
        """Add up what has come since the last call over the copies and divide it; collective."""
        by_mesh: dict[DeviceMesh, list[int]] = {}
        for index, parameter in enumerate(self.parameters):
            assert isinstance(parameter, DTensor)
            by_mesh.setdefault(parameter.device_mesh, []).append(index)
        for mesh, indices in by_mesh.items():
            self._reduce(mesh, self._wanted(mesh, indices), divisor)

    def _wanted(self, mesh: DeviceMesh, indices: list[int]) -> list[int]:
        present = [self.parameters[index].grad is not None for index in indices]
        flags = torch.tensor(present, dtype=torch.uint8, device=mesh.device_type)
        for axis in ("ep", "copies"):
            if _size(mesh, axis) > 1:
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
        return [index for index, flag in zip(indices, flags.tolist(), strict=True) if flag]

    def _reduce(self, mesh: DeviceMesh, indices: list[int], divisor: float) -> None:
        news, olds, locals_ = [], [], []
        for index in indices:
            parameter = self.parameters[index]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = parameter.grad
            assert isinstance(grad, DTensor)
            before, after = self._done.pop(index, (None, None))
            known = after if before is grad else None
            local = grad._local_tensor
            locals_.append(local)
            olds.append(known)
            news.append(local.clone() if known is None else local - known)
        if _size(mesh, "copies") > 1:
            _add_up(news, mesh.get_group("copies"))
        for index, local, known, new in zip(indices, locals_, olds, news, strict=True):
            new.div_(divisor)
            local.copy_(new if known is None else known + new)
            grad = self.parameters[index].grad
            assert grad is not None
            self._done[index] = (grad, local.clone())


def _size(mesh: DeviceMesh, axis: str) -> int:
    assert mesh.mesh_dim_names is not None
    return mesh.size(mesh.mesh_dim_names.index(axis))


def _add_up(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sum each over ``group``; small ones travel together."""
    small: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes > _SMALL:
            dist.all_reduce(tensor, group=group)
        elif tensor.numel():
            small.setdefault(tensor.dtype, []).append(tensor)
    for alike in small.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        dist.all_reduce(flat, group=group)
        for tensor, total in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
            tensor.copy_(total.view_as(tensor))


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
